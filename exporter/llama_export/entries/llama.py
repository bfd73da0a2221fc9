"""The entries of the Llama network; each name is a method of `llama_export.model.llama.Llama`."""

from __future__ import annotations

from llama_export.entries.registry import (
    COMPUTE_DTYPE,
    POOL_PAGES,
    EntrySpec,
    Range,
    Tensor,
    Values,
)

MAX_ROWS = 64
"""Rows that a call takes at most where neither `--batch` nor `--rows` says so."""

MAX_CHUNK = 512
"""Tokens of a row that one prefill call takes at most; longer prompts come in chunks."""

MAX_PACKED = 2048
"""Tokens that one packed call takes at most: each may see each other."""

MAX_LENGTH = 1 << 20
MAX_PAGED_ROWS = 1 << 12
MAX_PAGES = 1 << 16
MAX_POOL_PAGES = 1 << 18
MAX_WORD = (1 << 32) - 1

# Position MaxSeq - 1 is scratch, so the last that can be filled is MaxSeq - 2.
_LAST_POSITION = -2

_TOKEN = Values("V")
_POSITION = Values("MaxSeq")  # padding stands at the scratch position
_LOGITS = Tensor("logits", COMPUTE_DTYPE, ("Batch", "V"))

_B = Range("B", MAX_ROWS)
_S = Range("S", MAX_LENGTH, "MaxSeq", -1)
_CHUNK = Range("S", MAX_CHUNK, "MaxSeq", -1)
_M = Range("M", MAX_ROWS)
_P = Range("P", MAX_PACKED)
_ROWS = Range("Rows", MAX_PAGED_ROWS, "MaxRows")
_PAGES = Range("Pages", MAX_PAGES, "MaxPages")
_POOL = Range(POOL_PAGES, MAX_POOL_PAGES)

_PACKED = (
    Tensor("tokens", "i32", ("P",), _TOKEN),
    Tensor("positions", "i32", ("P",), _POSITION),
    Tensor("segments", "i32", ("P",)),
)
_TARGETS = Tensor("targets", "i64", ("P",), Values("V"))
_PROMPTS = (
    Tensor("tokens", "i32", ("P",), _TOKEN),
    Tensor("rows", "i32", ("P",), Values("Batch")),
    Tensor("positions", "i32", ("P",), _POSITION),
    Tensor("segments", "i32", ("P",)),
    Tensor("last", "i32", ("Batch",), Values("P")),
)
_IN_TABLE = Values("Pages", scale="PageSize")
_TABLE = Tensor("table", "i32", ("Rows", "Pages"), Values(POOL_PAGES))
_PAGED_PROMPTS = (
    Tensor("tokens", "i32", ("P",), _TOKEN),
    Tensor("positions", "i32", ("P",), _IN_TABLE),
    Tensor("rows", "i32", ("P",), Values("Rows")),
    Tensor("slots", "i32", ("P",), Values(POOL_PAGES, scale="PageSize")),
    Tensor("last", "i32", ("Rows",), Values("P")),
    _TABLE,
)
_TOKEN_BEFORE = Tensor("token", "i32", ("Batch", 1), _TOKEN)
# The last token that is fed stands at pos + Steps - 1.
_POS_OF_STEPS = Tensor("pos", "i32", (), Values("MaxSeq", less="Steps"))
_POS_OF_NEW = Tensor("pos", "i32", (), Values("MaxSeq", less="MaxNew"))
_KEY = Tensor("key", "i64", (2,), Values(MAX_WORD, 0))
_STEPS = Tensor("tokens", "i32", ("Batch", "Steps"))
# An idle row stands at position -1.
_PAGED_STEP = Values("Pages", scale="PageSize", min=-1)

ENTRIES = (
    EntrySpec(
        name="forward",
        summary="logits of every position of whole sequences, without a state",
        inputs=(Tensor("tokens", "i32", ("B", "S"), _TOKEN),),
        states=None,
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("B", "S", "V")),),
        dims=(_B, _S),
    ),
    EntrySpec(
        name="next_token",
        summary="logits after the last position of whole sequences, without a state",
        inputs=(Tensor("tokens", "i32", ("B", "S"), _TOKEN),),
        states=None,
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("B", "V")),),
        dims=(_B, _S),
    ),
    EntrySpec(
        name="decode",
        summary="one token of every row, all at position pos",
        inputs=(
            Tensor("tokens", "i32", ("Batch", 1), _TOKEN),
            Tensor("pos", "i32", (), Values("MaxSeq", _LAST_POSITION)),
        ),
        states="rows",
        outputs=(_LOGITS,),
    ),
    EntrySpec(
        name="prefill",
        summary="writes S tokens of every row at pos; logits after the last; decode goes on at pos+S",
        inputs=(
            Tensor("tokens", "i32", ("Batch", "S"), _TOKEN),
            Tensor("pos", "i32", (), Values("MaxSeq", _LAST_POSITION, span="S")),
        ),
        states="rows",
        outputs=(_LOGITS,),
        dims=(_CHUNK,),
    ),
    EntrySpec(
        name="decode_rows",
        summary="one token of every row, each at its own position; idle rows at MaxSeq-1",
        inputs=(
            Tensor("tokens", "i32", ("Batch", 1), _TOKEN),
            Tensor("positions", "i32", ("Batch",), _POSITION),
        ),
        states="rows",
        outputs=(_LOGITS,),
    ),
    EntrySpec(
        name="prefill_slots",
        summary="prompt m, of lengths[m] tokens, fills row slots[m] from position 0",
        inputs=(
            Tensor("tokens", "i32", ("M", "S"), _TOKEN),
            Tensor("slots", "i32", ("M",), Values("Batch")),
            Tensor("lengths", "i32", ("M",), Values("S", 0)),
        ),
        states="rows",
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("M", "V")),),
        dims=(_M, _CHUNK),
    ),
    EntrySpec(
        name="prefill_packed",
        summary="packed prompts, token p kept at rows[p], positions[p]; padding at MaxSeq-1",
        inputs=_PROMPTS,
        states="rows",
        outputs=(_LOGITS,),
        dims=(_P,),
    ),
    EntrySpec(
        name="step_packed",
        summary="prefill_packed and decode_rows in one call; the prompts' logits come first",
        inputs=(
            *_PROMPTS,
            Tensor("step_tokens", "i32", ("Batch", 1), _TOKEN),
            Tensor("step_positions", "i32", ("Batch",), _POSITION),
        ),
        states="rows",
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("2*Batch", "V")),),
        dims=(_P,),
    ),
    EntrySpec(
        name="decode_paged",
        summary="one token of every row over the pages of its table; idle rows at position -1",
        inputs=(
            Tensor("tokens", "i32", ("Rows", 1), _TOKEN),
            Tensor("positions", "i32", ("Rows",), _PAGED_STEP),
            _TABLE,
        ),
        states="pool",
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("Rows", "V")),),
        dims=(_ROWS, _PAGES, _POOL),
    ),
    EntrySpec(
        name="prefill_paged",
        summary="packed prompts, token p kept at pool slot slots[p]; padding at slots of page 0",
        inputs=_PAGED_PROMPTS,
        states="pool",
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("Rows", "V")),),
        dims=(_P, _ROWS, _PAGES, _POOL),
    ),
    EntrySpec(
        name="step_paged",
        summary="prefill_paged and decode_paged in one call; the prompts' logits come first",
        inputs=(
            *_PAGED_PROMPTS,
            Tensor("step_tokens", "i32", ("Rows", 1), _TOKEN),
            Tensor("step_positions", "i32", ("Rows",), _PAGED_STEP),
        ),
        states="pool",
        outputs=(Tensor("logits", COMPUTE_DTYPE, ("2*Rows", "V")),),
        dims=(_P, _ROWS, _PAGES, _POOL),
    ),
    EntrySpec(
        name="generate<Steps>",
        summary="Steps greedy tokens after token at pos, in one program",
        inputs=(_TOKEN_BEFORE, _POS_OF_STEPS),
        states="rows",
        outputs=(_STEPS,),
    ),
    EntrySpec(
        name="sample<Steps>",
        summary="Steps tokens drawn at a temperature; one key gives the same draws in every format",
        inputs=(_TOKEN_BEFORE, _POS_OF_STEPS, _KEY, Tensor("temperature", "f32", ())),
        states="rows",
        outputs=(_STEPS,),
    ),
    EntrySpec(
        name="generate_until<MaxNew>",
        summary="greedy tokens until every row has given eos, zeros after it, and their count",
        inputs=(_TOKEN_BEFORE, _POS_OF_NEW, Tensor("eos", "i32", (), _TOKEN)),
        states="rows",
        outputs=(
            Tensor("tokens", "i32", ("Batch", "MaxNew")),
            Tensor("count", "i32", ("Batch",)),
        ),
    ),
    EntrySpec(
        name="loss_packed",
        summary="sum of weights[p] times -log p(targets[p]) over packed sequences",
        inputs=(*_PACKED, _TARGETS, Tensor("weights", "f32", ("P",))),
        states=None,
        outputs=(Tensor("loss", "f32", ()),),
        dims=(_P,),
    ),
    EntrySpec(
        name="log_probs_packed",
        summary="log-probability of targets[p] after token p of packed sequences",
        inputs=(*_PACKED, _TARGETS),
        states=None,
        outputs=(Tensor("log_probs", "f32", ("P",)),),
        dims=(_P,),
    ),
    EntrySpec(
        name="hidden_packed",
        summary="the stream after the final norm of packed sequences",
        inputs=_PACKED,
        states=None,
        outputs=(Tensor("hidden", COMPUTE_DTYPE, ("P", "H")),),
        dims=(_P,),
    ),
)
