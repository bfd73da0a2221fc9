"""Will it fit: what a program needs of memory, from its graph and its declaration alone.

Not to be confused with `llama_export.laws.memory`, where the laws keep sequences.
"""
