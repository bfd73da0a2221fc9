"""The laws that a bundle must keep: `registry.py` declares them, one module each checks one.

A law drives programs with plans of calls (`spans.py`) over states that hold a large number before
use (`memory.py`), so that a read of what was never written shows. What the programs give is
compared with the eager float32 model over the whole sequence (`oracle.py`), or with what the same
programs give when they are called in another way.
"""
