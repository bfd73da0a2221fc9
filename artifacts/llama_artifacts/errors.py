"""The errors that users of llama-export can meet.

Libraries raise them; only the command line prints them. Each one has a message (what is wrong), a
place (`where`: a file and, after `#`, a key path) and a hint (what to do next).
"""

from __future__ import annotations


class LlamaExportError(Exception):
    """Base of every known failure.

    Attributes:
        message: one line, "expected X, got Y" where that fits.
        where: the file, and after `#` the key path or tensor, that the message is about.
        hint: what to do next, or None.
    """

    def __init__(self, message: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        text = self.message if self.where is None else f"{self.where}: {self.message}"
        return " ".join(text.split())


class CheckpointError(LlamaExportError):
    """A model source cannot be read, is damaged, or needs maths that the model lacks."""


class TokenizerError(LlamaExportError):
    """A tokenizer or chat template is missing, unsupported, or contradicts the model."""


class BuildError(LlamaExportError):
    """A program could not be traced or lowered, or the bundle could not be written."""


class ManifestError(LlamaExportError):
    """A manifest or weights header breaks the format."""


class IntegrityError(LlamaExportError):
    """A file of the bundle is missing, has another size, or another digest than recorded."""


class CompatibilityError(LlamaExportError):
    """The bundle is sound, but this machine or toolchain cannot run what was asked of it."""


class InputError(LlamaExportError, ValueError):
    """An input of a call does not fit the declared signature."""


class SessionError(LlamaExportError):
    """A session is not in a state in which the call makes sense."""


class VerificationError(LlamaExportError):
    """A bundle's program does not compute what it must."""
