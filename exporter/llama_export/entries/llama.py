"""The entries of the Llama network; each name is a method of `llama_export.model.llama.Llama`."""

from __future__ import annotations

from llama_export.entries.registry import COMPUTE_DTYPE, EntrySpec, Range, Tensor, Values

MAX_ROWS = 64
"""Rows that an entry without states takes at most."""

MAX_CHUNK = 512
"""Tokens of a row that one prefill call takes at most; longer prompts come in chunks."""

_TOKEN = Values("V", -1)
_LOGITS = Tensor("logits", COMPUTE_DTYPE, ("Batch", "V"))
# Position MaxSeq - 1 is scratch, so the last that can be filled is MaxSeq - 2.
_LAST = -2

ENTRIES = (
    EntrySpec(
        name="forward",
        summary="logits of every position of whole sequences, without a state",
        inputs=(Tensor("tokens", "i32", ("B", "S"), _TOKEN),),
        states=None,
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("B", "S", "V")),),
        dims=(Range("B", MAX_ROWS, fits_state=False), Range("S", 1 << 20)),
    ),
    EntrySpec(
        name="next_token",
        summary="logits after the last position of whole sequences, without a state",
        inputs=(Tensor("tokens", "i32", ("B", "S"), _TOKEN),),
        states=None,
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("B", "V")),),
        dims=(Range("B", MAX_ROWS, fits_state=False), Range("S", 1 << 20)),
    ),
    EntrySpec(
        name="prefill",
        summary="writes S tokens of every row at pos; logits after the last; decode goes on at pos+S",
        inputs=(
            Tensor("tokens", "i32", ("Batch", "S"), _TOKEN),
            Tensor("pos", "i32", (), Values("MaxSeq", _LAST, span="S")),
        ),
        states="rows",
        outputs=(_LOGITS,),
        dims=(Range("S", MAX_CHUNK),),
    ),
    EntrySpec(
        name="decode",
        summary="one token of every row, all at position pos",
        inputs=(
            Tensor("tokens", "i32", ("Batch", 1), _TOKEN),
            Tensor("pos", "i32", (), Values("MaxSeq", _LAST)),
        ),
        states="rows",
        outputs=(_LOGITS,),
    ),
    EntrySpec(
        name="decode_rows",
        summary="one token of every row, each at its own position; idle rows at MaxSeq-1",
        inputs=(
            Tensor("tokens", "i32", ("Batch", 1), _TOKEN),
            Tensor("positions", "i32", ("Batch",), Values("MaxSeq", -1)),
        ),
        states="rows",
        outputs=(_LOGITS,),
    ),
)
