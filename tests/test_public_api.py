"""What the three packages offer by name."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

PACKAGES = ("llama_artifacts", "llama_runtime", "llama_export")


def public_names() -> list[tuple[str, str]]:
    modules = {package: importlib.import_module(package) for package in PACKAGES}
    return [(p, name) for p, module in modules.items() for name in getattr(module, "__all__", ())]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_it_is(package: str) -> None:
    assert importlib.import_module(package).__doc__


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_listed_once_in_order(package: str) -> None:
    names = list(getattr(importlib.import_module(package), "__all__", ()))
    assert names == sorted(set(names))
    assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize(("package", "name"), public_names())
def test_every_public_name_is_documented(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    text = inspect.getdoc(value)
    assert text
    # A dataclass without a docstring gets its signature as one.
    assert not text.startswith(f"{name}(")
    if inspect.isclass(value):
        methods = inspect.getmembers(value, inspect.isfunction)
        own = [m for n, m in methods if not n.startswith("_") and n in vars(value)]
        assert [method.__qualname__ for method in own if not inspect.getdoc(method)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_is_not_there(package: str) -> None:
    with pytest.raises(AttributeError):
        _ = importlib.import_module(package).no_such_name


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_alone_is_light(package: str) -> None:
    heavy = "{'torch', 'onnx', 'onnxruntime', 'transformers', 'numpy', 'tokenizers', 'click'}"
    code = f"import sys, {package}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
