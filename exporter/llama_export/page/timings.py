"""The timings that a bundle carries, if it was timed."""

from __future__ import annotations

from dataclasses import dataclass

from llama_artifacts.bundle import Bundle, check_digest
from llama_artifacts.codec import decode
from llama_artifacts.errors import IntegrityError, ManifestError
from llama_artifacts.strict_json import parse_object

FILE_NAME = "bench.json"
MAX_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Timing:
    """One way to run the model.

    Attributes:
        method: what ran, such as `aoti, 2 threads`.
        ttft_ms: milliseconds to the first token.
        decode_tok_s: tokens per second after it.
        load_s: seconds until the first call could be made.
        peak_memory_bytes: most memory of the process.
        notes: anything else.
    """

    method: str
    ttft_ms: float | None = None
    decode_tok_s: float | None = None
    load_s: float | None = None
    peak_memory_bytes: int | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) and value is not None and value < 0:
                raise ValueError(f"expected `{name}` of at least 0, got {value}")


@dataclass(frozen=True)
class Timings:
    """All rows, in the order in which they were measured."""

    rows: tuple[Timing, ...]


def read_timings(bundle: Bundle) -> tuple[Timing, ...]:
    """The rows of `bench.json`; none where the bundle has no such file.

    Raises:
        IntegrityError: the file is damaged or too large.
        ManifestError: it breaks the format, with the key path.
    """
    file = bundle.manifest.files.get(FILE_NAME)
    if file is None:
        return ()
    path = bundle.path(FILE_NAME)
    if file.bytes > MAX_BYTES:
        message = f"expected at most {MAX_BYTES:,} bytes, got {file.bytes:,}"
        raise IntegrityError(message, where=path)
    check_digest(bundle, FILE_NAME)
    value = parse_object(path.read_bytes(), where=path, error=ManifestError)
    return decode(Timings, value, where=str(path)).rows
