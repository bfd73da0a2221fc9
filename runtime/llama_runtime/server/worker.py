"""One thread runs the engine; the event loop hands it work and gets its outputs.

Nobody but this thread touches the engine. Everything else here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from llama_artifacts.errors import GroupError, LlamaExportError
from llama_runtime.engine import Engine, Output, Request, Stats
from llama_runtime.server.errors import api_error, closing_error, queue_full_error

_LOG = logging.getLogger(__name__)
_JOIN_SECONDS = 10.0


class Call:
    """The engine's requests of one HTTP request, and their outputs as they come."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.ids = tuple(request.id for request in requests)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    async def next(self) -> Output:
        """The next output of any of the requests."""
        return await self._outputs.get()

    def deliver(self, output: Output) -> None:
        """Appends an output."""
        self._outputs.put_nowait(output)


class Worker:
    """The engine's thread and the requests that are open in it.

    Attributes:
        max_open: requests that may run or wait at the same time.
        stats: the engine's figures after its last step.
        fault: why the last step gave nothing but failures; None once there is a token again.
    """

    def __init__(self, engine: Engine, *, max_open: int) -> None:
        self.max_open = max_open
        self.stats: Stats = engine.stats
        self.fault: str | None = None
        self._engine = engine
        self._open: dict[str, Call] = {}
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_closing = False
        self._has_raised = False  # the last step, of the engine's thread alone
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Starts the thread; called once, in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._is_closing

    async def submit(self, requests: Sequence[Request]) -> Call:
        """Hands requests to the engine, all or none; returns when it has them.

        Raises:
            ApiError: 503, the server ends; 429, too many are open; 400, the engine refuses one.
        """
        if not self.is_alive:
            raise closing_error()
        if len(self._open) + len(requests) > self.max_open:
            raise queue_full_error()
        call = Call(requests)
        self._open.update(dict.fromkeys(call.ids, call))
        admitted: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(partial(self._admit, requests, admitted))
        try:
            await admitted
        except LlamaExportError as error:
            self.cancel(call)
            raise api_error(error) from error
        except BaseException:
            self.cancel(call)
            raise
        return call

    def cancel(self, call: Call, id: str | None = None) -> None:
        """Ends one of the call's requests, or what is left of them; it has no further outputs.

        The engine gives its pages back before its next step.
        """
        for each in call.ids if id is None else (id,):
            if self._open.pop(each, None) is not None:
                self._commands.put(partial(self._engine.cancel, each))

    def refuse_new(self) -> None:
        """From now on requests are refused with 503."""
        self._is_closing = True

    def fail_all(self, message: str = "the server is shutting down") -> None:
        """Ends every open request with an error, which its client gets."""
        error = LlamaExportError(message)
        for id, call in list(self._open.items()):
            self.cancel(call, id)
            call.deliver(Output(id, None, None, (), "error", error))

    async def close(self) -> None:
        """Fails what is open and ends the thread."""
        self.refuse_new()
        self.fail_all()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            call = self._open.get(output.request_id)
            if call is None:  # cancelled since
                continue
            if output.finish_reason is not None:
                del self._open[output.request_id]
            call.deliver(output)

    # The engine's thread

    def _run(self) -> None:
        while True:
            try:
                if not self._take_commands():
                    return
                if self._engine.has_work:
                    outputs = self._engine.step()
                    self._note_faults(outputs)
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
                self.stats = self._engine.stats
            except Exception as cause:
                # A step that fails as a whole leaves no request that could go on; the server can.
                message = "the step that computes this request failed"
                if isinstance(cause, GroupError):  # whoever serves ends, and says why
                    message = str(cause)
                else:
                    _LOG.exception("a step of the engine failed")
                self.fault = f"{type(cause).__name__}: {cause}"
                self._has_raised = True
                self._loop.call_soon_threadsafe(self.fail_all, message)

    def _note_faults(self, outputs: Sequence[Output]) -> None:
        errors = [output.error for output in outputs if output.error is not None]
        if any(output.token is not None for output in outputs):
            self.fault = None
        elif errors:
            self.fault = errors[0].message

    def _take_commands(self) -> bool:
        """Does what was asked for, waiting for it where there is nothing else; false at the end."""
        # After a step that raised, the event loop's cancellations come first.
        is_waiting = not self._engine.has_work or self._has_raised
        self._has_raised = False
        while True:
            try:
                command = self._commands.get(block=is_waiting)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            is_waiting = False

    def _admit(self, requests: Sequence[Request], admitted: asyncio.Future[None]) -> None:
        added: list[str] = []
        error: Exception | None = None
        try:
            for request in requests:
                self._engine.add(request)
                added.append(request.id)
        except Exception as cause:  # the client gets it; the thread must live on
            error = cause
            for id in added:
                self._engine.cancel(id)
        self._loop.call_soon_threadsafe(_settle, admitted, error)


def _settle(admitted: asyncio.Future[None], error: Exception | None) -> None:
    if admitted.done():  # whoever waited is gone
        return
    if error is None:
        admitted.set_result(None)
    else:
        admitted.set_exception(error)
