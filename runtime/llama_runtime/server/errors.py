"""What the API answers when it cannot do what was asked, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_artifacts.errors import InputError, LlamaExportError, TokenizerError

INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """A refusal or failure with its HTTP status.

    Attributes:
        status: the HTTP status.
        message: one line for the person who sent the request.
        kind: OpenAI's `type`.
        param: the field of the body that is wrong, such as `messages[0].role`.
        code: OpenAI's `code`, for programs.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}


def api_error(error: LlamaExportError) -> ApiError:
    """A failure of the library as an answer: 400 where the request was at fault, else 500.

    Places are left out where they are files of the server, hints because they are for its command
    line.
    """
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=error.where)
    if isinstance(error, TokenizerError):
        return ApiError(400, error.message)
    return ApiError(500, error.message, kind=SERVER)


def closing_error() -> ApiError:
    """The server ends before the request can."""
    return ApiError(503, "the server is shutting down", kind=SERVER, code="shutting_down")


def queue_full_error() -> ApiError:
    """As many requests wait as may."""
    message = "the queue is full; try again later"
    headers = {"Retry-After": "1"}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
