"""A bundle as a model repository of the Triton Inference Server.

`plan` decides which Triton models a bundle becomes, `config` writes the configuration of one, and
`repository` lays out the folder.
"""
