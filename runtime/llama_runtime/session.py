"""One conversation: a set of states and the position up to which they are filled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llama_artifacts.errors import InputError, SessionError
from llama_artifacts.signature import TensorSpec, check_values
from llama_runtime import snapshot
from llama_runtime.entry import Entry
from llama_runtime.states import as_tensor, extremes, torch_dtype

if TYPE_CHECKING:
    from llama_runtime.loader import LoadedBundle

Tokens = Sequence[int] | Sequence[Sequence[int]]


class Session:
    """Feeds tokens and keeps count of positions.

    In a bundle of one row, tokens are a list of ids. In one of several rows, a list of ids is fed
    to every row, and a list of lists (equal in length) gives each row its own.

    A call that is refused for its arguments (InputError) changes nothing. A call that fails while
    a program runs may have written a part of its step: from then on every call raises
    SessionError until `reset`. Not safe for use from two threads at the same time.
    """

    def __init__(self, bundle: LoadedBundle) -> None:
        names = bundle.manifest.entries()
        self._prefill = bundle.entry("prefill") if "prefill" in names else None
        self._decode = bundle.entry("decode") if "decode" in names else None
        entry = self._decode or self._prefill
        if entry is None:
            raise SessionError(
                "a session needs the entry `decode` or `prefill`, this bundle has neither",
                where=bundle.folder,
                hint="build it with --entry prefill --entry decode",
            )
        if self._prefill and self._decode:
            _check_same_states(self._prefill, self._decode)
        self._bundle = bundle
        self._entry = entry
        self._tokens, self._pos = _inputs(entry)
        self._states = entry.new_states()
        self._rows = bundle.manifest.batch
        self._is_broken = False
        self.capacity = bundle.manifest.max_seq - 1
        if self._pos.values is not None:
            self.capacity = min(self.capacity, self._pos.values.max + 1)
        self.position = 0
        self._fed: list[torch.Tensor] = []

    @property
    def tokens(self) -> torch.Tensor:
        """The ids that were fed, int32 [Batch, position]."""
        empty = torch.zeros(self._rows, 0, dtype=torch.int32)
        return torch.cat([empty, *self._fed], 1)[:, : self.position]

    def prefill(self, tokens: Tokens) -> torch.Tensor:
        """Feeds any number of tokens, in chunks where they are many.

        Returns:
            Logits [Batch, V] after the last token, in the program's compute dtype.

        Raises:
            InputError: no token, an unknown one, or more than the positions that are left.
            SessionError: an earlier call failed; `reset` first.
        """
        logits = None
        for chunk in self.checked(tokens).split(self._chunk_len(), dim=1):
            logits = self._step(chunk.contiguous())
        assert logits is not None
        return logits

    def decode(self, token: int | Sequence[int]) -> torch.Tensor:
        """Feeds one token: an id for every row, or one id a row; otherwise as `prefill`."""
        ids = _as_lists(token)
        return self.prefill([[one] for one in ids] if isinstance(ids, (list, tuple)) else [ids])

    def checked(self, tokens: Tokens) -> torch.Tensor:
        """The tokens [Batch, S] that `prefill` would feed; raises what it would raise."""
        self._check_whole()
        rows = self._as_rows(tokens)
        num_tokens = rows.shape[1]
        if self.position + num_tokens > self.capacity:
            raise InputError(
                f"{num_tokens} tokens do not fit: {self.position} + {num_tokens} positions "
                f"are more than the capacity of {self.capacity}",
                where="tokens",
                hint="shorten the prompt, or build with a larger --max-seq",
            )
        check_values(self._tokens, *extremes(rows), {})
        return rows

    def reset(self) -> None:
        """Back to position 0, also after a failure. Old contents are never read again."""
        self.position = 0
        self._fed = []
        self._is_broken = False

    def rewind(self, position: int) -> None:
        """Back to an earlier position: what was fed from there on is forgotten.

        Raises:
            InputError: the session has not come so far.
            SessionError: an earlier call failed; `reset` first.
        """
        self._check_whole()
        if isinstance(position, bool) or not isinstance(position, int):
            raise InputError(f"expected a number, got {position!r:.60}", where="position")
        if not 0 <= position <= self.position:
            raise InputError(f"expected 0 to {self.position}, got {position}", where="position")
        self._fed = [self.tokens[:, :position]]
        self.position = position

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the states up to the position, and the tokens, to a file that `restore` reads.

        The file, safetensors, is written whole or not at all; one that is there is replaced.

        Raises:
            SessionError: nothing was fed yet, an earlier call failed, the file cannot be written,
                or several processes run the programs together.
        """
        self._check_whole()
        snapshot.check_alone(self._bundle.group, self._bundle.folder)
        if self.position == 0:
            raise SessionError("expected a session with tokens, got none", hint="feed some first")
        used = {name: t[:, :, : self.position].cpu() for name, t in self._states.items()}
        snapshot.write(Path(path), snapshot.Snapshot(self.tokens, used), self._digest())

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Goes on where a saved session was, whatever this one was fed, also after a failure.

        Any bundle over the same weights files takes it, in any format, on any device and with any
        capacity that is large enough; the same program then gives the same logits bit for bit. A
        file that is refused changes nothing.

        Raises:
            IntegrityError: the file is no snapshot, or a damaged one.
            CompatibilityError: it was saved with other weights, another dtype or batch, or is
                longer than the capacity.
            SessionError: several processes run the programs together.
        """
        snapshot.check_alone(self._bundle.group, self._bundle.folder)
        found = snapshot.read(
            Path(path),
            self._digest(),
            signature=self._entry.signature,
            tokens=self._tokens,
            capacity=self.capacity,
        )
        self._is_broken = True  # until all is there
        self.position = found.tokens.shape[1]
        self._fed = [found.tokens]
        for name, state in found.states.items():
            self._states[name][:, :, : self.position].copy_(state)
        self._is_broken = False

    def _digest(self) -> str:
        return snapshot.bundle_digest(self._bundle.manifest, self._entry.signature)

    def _check_whole(self) -> None:
        if self._is_broken:
            raise SessionError(
                "an earlier call failed in the middle of a step", hint="call reset()"
            )

    def _chunk_len(self) -> int:
        if self._prefill is None:
            return 1
        return next((dim.max for dim in self._prefill.signature.dims if dim.name == "S"), 1)

    def _step(self, rows: torch.Tensor) -> torch.Tensor:
        entry = self._decode if rows.shape[1] == 1 and self._decode else self._prefill
        assert entry is not None
        self._is_broken = True  # until the step is done, also after an interrupt
        pos = torch.tensor(self.position, dtype=torch_dtype(self._pos.dtype))
        logits = entry.run(self._states, {"tokens": rows, "pos": pos})[0]
        self._is_broken = False
        self.position += rows.shape[1]
        self._fed.append(rows)
        return logits

    def _as_rows(self, tokens: Tokens) -> torch.Tensor:
        rows = as_tensor("tokens", self._tokens.dtype, _as_lists(tokens))
        if rows.ndim == 1:
            rows = rows.expand(self._rows, -1)
        if rows.ndim != 2 or rows.shape[0] != self._rows or rows.shape[1] == 0:
            raise InputError(
                f"expected a list of ids, or {self._rows} such lists, none empty; "
                f"got shape {list(rows.shape)}",
                where="tokens",
            )
        return rows


def _inputs(entry: Entry) -> tuple[TensorSpec, TensorSpec]:
    specs = {spec.name: spec for spec in entry.signature.inputs}
    if specs.keys() != {"tokens", "pos"}:
        raise SessionError(
            f"expected `{entry.name}` with the inputs tokens and pos, got {', '.join(specs)}"
        )
    return specs["tokens"], specs["pos"]


def _as_lists(tokens: Any) -> Any:
    """Arrays and tensors of any integer dtype as lists; all else unchanged."""
    return tokens.tolist() if hasattr(tokens, "tolist") else tokens


def _check_same_states(first: Entry, second: Entry) -> None:
    if first.signature.states != second.signature.states:
        raise SessionError(
            f"`{first.name}` in {first.format} and `{second.name}` in {second.format} "
            "keep different states",
            hint="choose one format for both",
        )
