"""A bundle as one self-contained HTML page.

`render` puts the page together; `graph` reads a program's graph as a tree of modules (`pt2_graph`,
`onnx_graph`) in which equal layers are one; `weights`, `states` and `timings` read the rest. What
moves on the page is in `assets`.
"""
