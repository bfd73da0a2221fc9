"""How fast a bundle runs, beside other engines on the same weights and beside the machine's limits.

Every method (the bundle in one format, or a peer) runs in a process of its own (`worker`), which
`remote` starts and `rounds` calls in turn; `tokens` checks that they say the same.
"""
