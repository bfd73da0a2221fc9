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
        hint: what to do next; where the raiser knows nothing better, that of the kind.
    """

    default_hint: str | None = None

    def __init__(self, message: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        text = self.message if self.where is None else f"{self.where}: {self.message}"
        return " ".join(text.split())


class CheckpointError(LlamaExportError):
    """A model source cannot be read, is damaged, or needs maths that the model lacks."""

    default_hint = "compare the file with the published one, or choose another checkpoint"


class TokenizerError(LlamaExportError):
    """A tokenizer or chat template is missing, unsupported, or contradicts the model."""

    default_hint = "compare the tokenizer's files with the published ones"


class BuildError(LlamaExportError):
    """A program could not be traced or lowered, or the bundle could not be written."""

    default_hint = "`llama-export build --help` tells what can be chosen"


class ChoiceError(BuildError):
    """What was asked for cannot be had of this checkpoint: wrong usage, not a failure."""


class ManifestError(LlamaExportError):
    """A manifest or weights header breaks the format."""

    default_hint = "build the bundle again with this version of llama-export"


class IntegrityError(LlamaExportError):
    """A file of the bundle is missing, has another size, or another digest than recorded."""

    default_hint = "copy the bundle again, or build it again"


class SignatureError(LlamaExportError):
    """A bundle is not signed, is signed by someone else, or changed since it was signed."""

    default_hint = "get the bundle again from whoever signed it"


class CompatibilityError(LlamaExportError):
    """The bundle is sound, but this machine or toolchain cannot run what was asked of it."""

    default_hint = "build the bundle again for this machine"


class TransferError(LlamaExportError):
    """A bundle could not be put on the hub, or got from it."""

    default_hint = "check the network and the repository's name, and try again"


class InputError(LlamaExportError, ValueError):
    """An input of a call does not fit the declared signature."""

    default_hint = "`llama-export inspect` shows what each entry takes"


class SessionError(LlamaExportError):
    """A session is not in a state in which the call makes sense."""

    default_hint = "call reset(), or make a new session"


class GroupError(LlamaExportError):
    """The processes that run one program together have lost one of them, or never met."""

    default_hint = "start all of them again"


class VerificationError(LlamaExportError):
    """A bundle's program does not compute what it must."""

    default_hint = "build the bundle again; if it fails again, report it"
