"""Turns a Llama-family checkpoint into a bundle of ahead-of-time exported programs.

The library behind the command line:

from llama_export.build import build
from llama_export.recipe import Recipe
from llama_export.verify import verify

result = build(Recipe("smollm2-135m-instruct"))
verify(result.folder)
"""
