"""What the model card of a checkpoint's folder says of its licence."""

from __future__ import annotations

from pathlib import Path

MODEL_CARD = "README.md"
MAX_CARD_BYTES = 2**20
MAX_LICENSE_CHARS = 100


def read_license(folder: Path) -> str | None:
    """The licence that the card's front matter names, such as `apache-2.0`.

    A card is prose that nothing depends on: where there is none, or one that cannot be read, the
    answer is None.
    """
    path = folder / MODEL_CARD
    if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
        return None
    import yaml
    from huggingface_hub import metadata_load

    try:
        card = metadata_load(path) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return None
    named = card.get("license_name") if card.get("license") == "other" else None
    return as_license(named or card.get("license"))


def as_license(value: object) -> str | None:
    """The name of a licence if that is what the value looks like."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        return None
    return value.strip() if len(value) <= MAX_LICENSE_CHARS else None
