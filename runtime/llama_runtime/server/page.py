"""The page at `/`, one file that asks for nothing but this server's own API."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re


def _digests(text: str, element: str) -> str:
    """The digest by which the policy lets the page's own script or style run."""
    found = re.search(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    assert found is not None  # the page is part of this package
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _policy(text: str) -> str:
    return (
        f"default-src 'none'; script-src {_digests(text, 'script')};"
        f" style-src {_digests(text, 'style')}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_TEXT = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
CONTENT = _TEXT.encode()
HEADERS = {
    "Content-Security-Policy": _policy(_TEXT),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
