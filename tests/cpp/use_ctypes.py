"""Generates from a bundle through the C interface; in a process that has no torch of its own."""

from __future__ import annotations

import ctypes
import sys

PROMPT = (1, 10, 7)


class Options(ctypes.Structure):
    """`llama_options`."""

    _fields_ = (
        ("max_new", ctypes.c_int64),
        ("temperature", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("has_seed", ctypes.c_int),
    )


def main(library: str, bundle: str) -> None:
    llama = ctypes.CDLL(library)
    llama.llama_model_load.restype = ctypes.c_void_p
    llama.llama_session_new.restype = ctypes.c_void_p
    llama.llama_last_error.restype = ctypes.c_char_p
    llama.llama_default_options.restype = Options
    model = ctypes.c_void_p(llama.llama_model_load(bundle.encode(), 1))
    session = ctypes.c_void_p(llama.llama_session_new(model))
    options = llama.llama_default_options()
    options.max_new = 8
    tokens = []
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_void_p)(
        lambda token, _: tokens.append(token) or 1
    )
    ids = (ctypes.c_int32 * len(PROMPT))(*PROMPT)
    status = llama.llama_session_generate(
        session, ids, ctypes.c_size_t(len(PROMPT)), ctypes.byref(options), callback, None
    )
    assert status == 0, llama.llama_last_error()
    llama.llama_session_free(session)
    llama.llama_model_free(model)
    assert llama.llama_model_load(b"/nowhere at all", 1) is None
    sys.stdout.write(f"{' '.join(map(str, tokens))} {llama.llama_last_error().decode()}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
