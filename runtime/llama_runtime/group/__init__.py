"""One process leads, the others follow: together they run the programs of one bundle.

The leader (rank 0) calls entries as if it were alone. What it runs is announced to the followers
(`link`), which run it with it (`follower`); a process that is lost ends all of them (`watch`).
"""

from __future__ import annotations

from llama_runtime.group.follower import follow
from llama_runtime.group.leader import Leader, lead
from llama_runtime.group.link import Link

__all__ = ["Leader", "Link", "follow", "lead"]
