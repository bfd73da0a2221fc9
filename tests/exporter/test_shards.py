"""What is cut for several processes, what is refused, and what a build of it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_artifacts import manifest as manifests
from llama_artifacts.errors import BuildError, ChoiceError
from llama_artifacts.manifest import Cut, Quantized
from llama_export.blueprint import draw
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import expected_tensors
from llama_export.checkpoint.source import TensorInfo
from llama_export.quantize import quantized_tensors
from llama_export.recipe import Recipe
from llama_export.rerun import choices
from llama_export.shards import cuts_of, part_of, shard
from llama_artifacts.bundle import open_bundle
from tests.exporter.configs import CONFIG
from tests.tiny import write_tiny
