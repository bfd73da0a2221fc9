"""Keeps the names of generated files, which hold hashes and folders of the build machine, out of programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._inductor import cpp_builder

_FLAGS = ("D__FILE__='\"program.cpp\"'", "Wno-builtin-macro-redefined")


@contextlib.contextmanager
def without_file_names() -> Iterator[None]:
    """C++ that Inductor compiles in the block says `program.cpp` wherever a message tells its place.

    Inductor has no setting for further flags of the compiler; those that depend on the operating
    system go into every command.
    """
    original = cpp_builder._get_os_related_cpp_cflags

    def flags(compiler: str) -> list[str]:
        return [*original(compiler), *_FLAGS]

    with mock.patch.object(cpp_builder, "_get_os_related_cpp_cflags", flags):
        yield
