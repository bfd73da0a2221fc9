"""Outputs of the engine as they come: a whole answer, or server-sent events.

Whoever goes away takes its requests along: both end them in the engine when the client is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama_artifacts.errors import LlamaExportError
from llama_runtime.server.errors import ApiError, api_error
from llama_runtime.server.jobs import Job
from llama_runtime.server.metrics import Metrics
from llama_runtime.server.replies import Reply, joined
from llama_runtime.server.text import Piece
from llama_runtime.server.worker import Call, Worker

T = TypeVar("T")
_DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def pieces(worker: Worker, call: Call, job: Job, metrics: Metrics) -> AsyncIterator[Piece]:
    """The pieces of a job's choices, in the order in which they come.

    Raises:
        ApiError: the engine failed at it.
    """
    choices = dict(zip(call.ids, job.choices, strict=True))
    timer = metrics.timer()
    while choices:
        output = await call.next()
        timer.see(output)
        choice = choices.get(output.request_id)
        if choice is None:  # a stop text ended it, while the engine was a step ahead
            continue
        try:
            piece = choice.push(output)
        except LlamaExportError as error:
            raise api_error(error) from error
        if choice.finish_reason is not None:
            worker.cancel(call, output.request_id)
            del choices[output.request_id]
        if piece is not None:
            yield piece


async def whole(parts: AsyncIterator[Piece], reply: Reply) -> dict[str, Any]:
    """The whole answer."""
    found: dict[int, list[Piece]] = {choice.index: [] for choice in reply.job.choices}
    async for piece in parts:
        found[piece.index].append(piece)
    return reply.whole([joined(each) for each in found.values()])


class EventStream(Response):
    """The answer as server-sent events, one a piece; after the last one `[DONE]`.

    A failure after the first event is an event with `error`, and the last one.
    """

    media_type = "text/event-stream"

    def __init__(
        self, parts: AsyncIterator[Piece], reply: Reply, *, at_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # not known
        self._parts = parts
        self._reply = reply
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError):
                await while_connected(receive, self._send(send))
        finally:
            self._at_end()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
            # Where many events wait, nothing else would let the loop see that the client is gone.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        for choice in self._reply.job.choices:
            first = self._reply.first(choice.index)
            if first is not None:
                yield _event(first)
        try:
            async for piece in self._parts:
                yield _event(self._reply.part(piece))
        except ApiError as error:
            yield _event(error.to_dict())
            return
        if self._reply.body.has_usage_chunk:
            yield _event(self._reply.counts())
        yield _DONE


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
