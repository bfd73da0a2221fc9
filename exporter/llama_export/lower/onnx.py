"""Lowers to ONNX whose initializers are external data inside the bundle's weights file.

CPU kernels of ONNX Runtime compute in float32, so a program for the CPU takes weights of any dtype
behind a Cast and has float32 states.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants_ir

from llama_artifacts.dtypes import from_name
from llama_artifacts.manifest import Target
from llama_artifacts.signature import Signature
from llama_export.lower.backend import Lowered, Place
from llama_export.model.formulation import Formulation
from llama_export.trace import Job, trace, without_stack_traces

OPSET = 20
IR_VERSION = 9
MIN_ONNXRUNTIME = "1.17"
"""The first release that takes this IR version and opset."""
CONTRIB_ONNXRUNTIME = "1.20"
"""The first whose own operators compute what programs ask of them (see `llama_export.model.contrib`)."""
CONTRIB = "com.microsoft"
"""The domain of those operators."""
MAX_FOLDED = 32
"""Elements of a constant that the file holds; larger ones are computed when it is loaded."""


class OnnxBackend:
    """ONNX; see `Backend`."""

    def check(self, device: str, isa: str | None) -> None:
        pass

    def compute_dtype(self, dtype: str, place: Place) -> str:
        return "f32" if place.device == "cpu" else dtype

    def formulation(self, dtype: torch.dtype, place: Place, num_shards: int = 1) -> Formulation:
        assert num_shards == 1, "ONNX has no operators between processes"
        is_cpu = place.device == "cpu"
        return Formulation(
            dtype, reads_positions=is_cpu, has_contrib=is_cpu, numerics=place.numerics
        )

    def facts(self, job: Job, place: Place) -> dict[str, Any]:
        packages = ("onnx", "onnxscript", "onnx_ir")
        return {
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in packages},
            "extents": {name: list(astuple(place.extents[name])) for name in job.weights},
        }

    def lower(self, job: Job, place: Place) -> Lowered:
        program = trace(job, returns_states=True)
        with _quiet(), without_stack_traces():
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, optimize=False, verbose=False
            )
            assert exported is not None
            model = exported.model
            _name_interface(model, job.signature)
            _drop_values(model, job)
            _simplify(model)
            if place.device == "cpu":
                _divide(model)
        _point_at_weights(model, job, place)
        _clean(model)
        file = f"{job.stem}.onnx" if place.device == "cpu" else f"{job.stem}.cuda.onnx"
        ir.save(model, place.folder / file)
        target = Target("cpu" if place.device == "cpu" else "cuda")
        has_contrib = CONTRIB in model.graph.opset_imports
        needed = CONTRIB_ONNXRUNTIME if has_contrib else MIN_ONNXRUNTIME
        return Lowered(file, target, {"onnxruntime": needed}, tuple(job.weights))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # The exporter warns of operators of packages that this project does not use, the optimizer of
    # the weights that are hidden from it.
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _simplify(model: ir.Model) -> None:
    """Folds what is constant and merges what is computed twice; ONNX Runtime does the rest.

    The optimizer's rewrite rules are left out: they take three quarters of the build and gain
    nothing here.
    """
    common.InlinePass()(model)
    _drop_transposes(model)
    fold_constants_ir(model, output_size_limit=MAX_FOLDED)
    for step in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.NameFixPass(),
    ):
        step(model)


def _drop_transposes(model: ir.Model) -> None:
    """Takes out transposes that move no axis, which indexing leaves behind.

    Around a scatter they copy the state twice a call. One before a product is fused into it by ONNX
    Runtime up to 1.26 at least as if it moved the axes, and the product then fails.
    """
    for node in list(model.graph.all_nodes()):
        perm = node.attributes.get("perm") if node.op_type == "Transpose" else None
        if perm is None or list(perm.as_ints()) != sorted(perm.as_ints()):
            continue
        before, after = node.inputs[0], node.outputs[0]
        assert before is not None
        if after.is_graph_output():
            if before.producer() is None:  # an input cannot be an output
                continue
            name, after.name = after.name, None
            before.name, before.shape, before.type = name, after.shape, after.type
        ir.convenience.replace_all_uses_with(after, before, replace_graph_outputs=True)
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def _divide(model: ir.Model) -> None:
    """Makes a product with a reciprocal a division: ONNX Runtime knows norms by it, and fuses them."""
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Mul":
            continue
        factor = node.inputs[1]
        inverse = None if factor is None else factor.producer()
        if inverse is not None and inverse.op_type == "Reciprocal":
            node.op_type = "Div"
            node.replace_input_with(1, inverse.inputs[0])
    common.RemoveUnusedNodesPass()(model)


def _name_interface(model: ir.Model, signature: Signature) -> None:
    """Names as declared; a state is `state.<name>` going in and `state.<name>.next` coming out."""
    inputs = [spec.name for spec in signature.inputs]
    inputs += [f"state.{spec.name}" for spec in signature.states]
    outputs = [spec.name for spec in signature.outputs]
    outputs += [f"state.{spec.name}.next" for spec in signature.states]
    for values, names in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        assert len(values) == len(names), (len(values), len(names))
        for value, name in zip(values, names, strict=True):
            value.name = name
    _name_dims(model, signature)


def _name_dims(model: ir.Model, signature: Signature) -> None:
    states = [state.shape for state in signature.states]
    inputs = [spec.shape for spec in signature.inputs] + states
    outputs = [spec.shape for spec in signature.outputs] + states
    for values, shapes in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, shape in zip(values, shapes, strict=True):
            value.shape = ir.Shape(shape)


def _drop_values(model: ir.Model, job: Job) -> None:
    """Hides the weights from the optimizer, which would fold fake values into the graph."""
    for name, value in model.graph.initializers.items():
        if name in job.weights:
            value.const_value = None


def _point_at_weights(model: ir.Model, job: Job, place: Place) -> None:
    for name, value in model.graph.initializers.items():
        if name not in job.weights:
            continue
        info = job.weights[name]
        extent = place.extents[name]
        value.const_value = ir.ExternalTensor(
            extent.file,
            extent.start,
            extent.num_bytes,
            ir.DataType[from_name(info.dtype).onnx],
            shape=ir.Shape(info.shape),
            name=name,
            base_dir=place.folder,
        )


def _clean(model: ir.Model) -> None:
    """Takes out what differs from build to build or tells of the build machine."""
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
