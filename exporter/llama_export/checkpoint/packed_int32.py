"""Integer weights that GPTQ, AWQ and compressed-tensors pack into int32, in this project's layout.

A value is (q - zero) * scale with unsigned codes q, of `bits` bits each. Nothing is rounded again:
symmetric codes lose half of their range and keep their scales; of others the minimum of a group is
-zero * scale, which float32 holds exactly, since scales have at most 11 significant bits.

Shape letters: V out, H in, G groups of a row, P codes in an int32. Codes lie from the lowest bits
up, but for AWQ's, of whose eight the columns 0, 2, 4, 6, 1, 3, 5, 7 lie so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.layout import MIN, ORDER, SCALE
from llama_export.checkpoint.packed import CODES, GROUPS, SCALES, SHAPE, ZEROS, Packed
from llama_export.model.integers import OFFSET, pack

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight columns lies in AWQ's int32."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""Int32 whose codes of so many bits are all 1."""


class PackedWeight:
    """One weight [V, H], from the tensors that the checkpoint stores.

    Args:
        packed: what they are.
        parts: the tensors, by part.
        where: the checkpoint.

    Methods raise CheckpointError where a tensor's values are not what the scheme says.
    """

    def __init__(self, packed: Packed, parts: Mapping[str, Tensor], *, where: object) -> None:
        self._packed, self._parts, self._where = packed, parts, where
        self._scheme = packed.scheme

    def read(self, kind: str) -> Tensor:
        """A tensor of the layout: `weight`, `weight_scale`, `weight_min` or `weight_order`."""
        kinds = {".weight": self.weight, SCALE: self.scale, MIN: self.minimum, ORDER: self.order}
        return kinds[f".{kind}"]()

    def weight(self) -> Tensor:
        """Codes, int8 [V, H] or uint8 [V, H/2], columns in the order of `order`."""
        scheme, parts = self._scheme, self._parts
        self._check_shape()
        codes = _fields(parts[CODES], scheme.bits)
        if scheme.form == "gptq":
            wide = codes.permute(1, 0, 2).flatten(1)
        elif scheme.form == "awq":
            wide = codes[..., _AWQ_PLACES].flatten(1).T
        else:
            wide = codes.flatten(1)
        if self._packed.is_ordered:
            wide = wide[:, self.order()]
        else:
            self._check_adjacent(wide.shape[1])
        if scheme.bits == 8:
            return (wide ^ 0x80).view(torch.int8)  # q - 128
        return pack(wide.short() - OFFSET)

    def scale(self) -> Tensor:
        """Scales [V, G]: as stored where zeros are half of the range, else float32."""
        scale = self._scales()
        if not self._scheme.is_symmetric:
            return scale.float()
        zeros = self._zeros()
        half = 1 << (self._scheme.bits - 1)
        if zeros is not None and bool((zeros != half).any()):
            message = f"expected symmetric codes, whose zeros are all {half}"
            raise self._error(ZEROS, f"{message}, got {int(zeros[zeros != half][0])}")
        return scale

    def minimum(self) -> Tensor:
        """What is added to code times scale, float32 [V, G]."""
        zeros = self._zeros()
        assert zeros is not None
        lowest = 128 if self._scheme.bits == 8 else 0  # what a code of 0 is stored as, negated
        return (lowest - zeros).float() * self._scales().float()

    def order(self) -> Tensor:
        """The input feature of each stored column, int32 [H]: group after group.

        Features of a group keep their order.
        """
        groups, num_groups = self._parts[GROUPS], self._scales().shape[1]
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            bad = groups[(groups < 0) | (groups >= num_groups)][0]
            message = f"expected groups from 0 to {num_groups - 1}, got {int(bad)}"
            raise self._error(GROUPS, message)
        sizes = torch.bincount(groups.long(), minlength=num_groups)
        size = len(groups) // num_groups
        if bool((sizes != size).any()):
            odd = int((sizes != size).nonzero()[0])
            message = f"expected {size} columns in each group, got {int(sizes[odd])} in group {odd}"
            raise self._error(GROUPS, message)
        return groups.argsort(stable=True).int()

    def _scales(self) -> Tensor:
        """As stored, [V, G]."""
        scales = self._parts[SCALES]
        return scales if self._scheme.form == "pack-quantized" else scales.T

    def _zeros(self) -> Tensor | None:
        """Int32 [V, G]; None where the form stores none of symmetric codes."""
        scheme, stored = self._scheme, self._parts.get(ZEROS)
        if stored is None:
            return None
        if scheme.form == "pack-quantized":
            zeros = _fields(stored, scheme.bits).permute(0, 2, 1).flatten(0, 1)
            return zeros[: len(self._scales())].int()
        if scheme.zero_offset:
            self._check_borrows(stored)
            stored = stored + _ONES[scheme.bits]
        zeros = _fields(stored, scheme.bits)
        if scheme.form == "awq":
            zeros = zeros[..., _AWQ_PLACES]
        return zeros.flatten(1).T.int()

    def _check_borrows(self, stored: Tensor) -> None:
        """Refuses what readers take for different zeros: 1 less than 0, which is no code."""
        most = (1 << self._scheme.bits) - 1
        if not self._scheme.has_borrows and bool(
            (_fields(stored, self._scheme.bits) == most).any()
        ):
            message = f"holds zeros of -1 in format 'gptq', stored as {most}, which are ambiguous"
            raise self._error(ZEROS, message, hint="take or make a checkpoint of format 'gptq_v2'")

    def _check_adjacent(self, width: int) -> None:
        groups = self._parts.get(GROUPS)
        if groups is None or bool((groups == -1).all()):  # compressed-tensors' word for no order
            return
        size = self._scheme.group_size or width
        if not torch.equal(groups.long(), torch.arange(width) // size):
            message = f"expected groups of {size} adjacent columns, got an activation order"
            raise self._error(GROUPS, f"{message} that quantization_config does not tell of")

    def _check_shape(self) -> None:
        found = self._parts.get(SHAPE)
        if found is None:
            return
        codes = self._parts[CODES]
        expected = [len(codes), codes.shape[1] * 32 // self._scheme.bits]
        if found.tolist() != expected:
            raise self._error(SHAPE, f"expected {expected}, got {found.tolist()}")

    def _error(self, part: str, message: str, *, hint: str | None = None) -> CheckpointError:
        return CheckpointError(
            message, where=f"{self._where}#{self._packed.names[part]}", hint=hint
        )


def _fields(words: Tensor, bits: int) -> Tensor:
    """Codes of int32 [...], from the lowest bits up, uint8 [..., P]."""
    octets = words.contiguous()[..., None].view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
