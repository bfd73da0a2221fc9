"""Whether this machine can run a program, decided from the manifest before anything is loaded."""

from __future__ import annotations

import re

from llama_artifacts.errors import CompatibilityError
from llama_artifacts.manifest import CAPABILITY, Program
from llama_runtime.machine import architecture, cpu_flags, minor, version

ONNXRUNTIME_PACKAGES = ("onnxruntime-gpu", "onnxruntime")


def check(program: Program, *, device: str, allow_native: bool) -> None:
    """Refuses a program that this machine cannot run.

    Args:
        program: from the manifest.
        device: `cpu`, `cuda` or `cuda:N`.
        allow_native: whether native code from the bundle may run.

    Raises:
        CompatibilityError: with the first reason.
    """
    reason = _reason(program, device, allow_native)
    if reason is not None:
        message, hint = reason
        raise CompatibilityError(message, where=program.file, hint=hint)


def fits(program: Program, *, device: str, allow_native: bool) -> bool:
    """Whether `check` would pass."""
    return _reason(program, device, allow_native) is None


def _reason(program: Program, device: str, allow_native: bool) -> tuple[str, str] | None:
    rebuild = f"build it for this machine: `llama-export build ... --format {program.format}`"
    target = program.target
    kind = device.partition(":")[0]
    if target.device != kind:
        hint = f"load it with --device {target.device}, or build it with --device {kind}"
        return f"made for {target.device}, asked for {device}", hint
    if program.format == "aoti" and not allow_native:
        return "native code, which --no-native refuses", "use --format pt2 or onnx"
    if program.format == "onnx":
        return _onnxruntime_reason(program.requires.get("onnxruntime", "0"))
    made, here = program.requires.get("torch", "unknown"), version("torch") or "none"
    if minor(here) != made:
        return f"made with torch {made}, this is {here}", f"install torch {made}.*, or {rebuild}"
    if target.machine is not None and target.machine != architecture():
        return f"made for {target.machine}, this machine is {architecture()}", rebuild
    lacking = sorted(set(target.cpu_flags) - cpu_flags())
    if lacking:
        return f"needs CPU features that this machine lacks: {', '.join(lacking)}", rebuild
    return _capability_reason(program, device, rebuild)


def _onnxruntime_reason(needed: str) -> tuple[str, str] | None:
    here = next(filter(None, map(version, ONNXRUNTIME_PACKAGES)), None)
    if here is None:
        return "onnxruntime is not installed", "pip install onnxruntime"
    if _numbers(here) < _numbers(needed):
        return f"needs onnxruntime {needed}, this is {here}", "pip install -U onnxruntime"
    return None


def _capability_reason(program: Program, device: str, rebuild: str) -> tuple[str, str] | None:
    exact, least = program.target.capability, program.requires.get(CAPABILITY)
    if exact is None and least is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return "made for CUDA, and no CUDA device is here", rebuild
    major, minor_ = torch.cuda.get_device_capability(device)
    here = f"{major}.{minor_}"
    if exact not in (None, here):
        return f"made for compute capability {exact}, this device has {here}", rebuild
    if least is not None and _numbers(here) < _numbers(least):
        message = f"needs compute capability {least} (FP8 products), this device has {here}"
        return message, "build it with --numerics exact"
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release.split("+")[0])[:2])
