"""The engine's thread, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from llama_runtime.engine import Output, Request
from llama_runtime.sampling import SamplingParams
from llama_runtime.server.errors import ApiError
from llama_runtime.server.worker import Call, Worker
from tests.runtime.server.fakes import FakeEngine
from tests.runtime.server.serving import wait_for

Test = Callable[[Worker], Awaitable[None]]


def request(id: str, *, num_prompt: int = 3) -> Request:
    return Request(id, (5,) * num_prompt, SamplingParams(), 100)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda request: [7, 8, 9], num_rows=2)


@contextlib.asynccontextmanager
async def started(engine: FakeEngine, max_open: int = 4) -> AsyncIterator[Worker]:
    worker = Worker(engine, max_open=max_open)  # type: ignore[arg-type]
    worker.start()
    try:
        yield worker
    finally:
        engine.release()
        await worker.close()
    assert not worker.is_alive


async def tokens(call: Call) -> list[int | None]:
    found: list[Output] = []
    while not found or found[-1].finish_reason is None:
        found.append(await asyncio.wait_for(call.next(), 10))
    if found[-1].error is not None:
        raise found[-1].error
    return [output.token for output in found]


async def idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(10):
        while engine.has_work:
            await asyncio.sleep(0.001)


def test_requests_run_side_by_side(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            calls = [await worker.submit([request(str(number))]) for number in range(4)]
            assert await asyncio.gather(*map(tokens, calls)) == [[7, 8, 9]] * 4
            async with asyncio.timeout(10):  # the worker tells once the step has ended
                while worker.stats.num_running:
                    await asyncio.sleep(0.001)

    asyncio.run(test())


def test_one_more_than_may_be_open_is_refused_and_room_comes_back(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            engine.hold()
            call = await worker.submit([request("a"), request("b"), request("c")])
            with pytest.raises(ApiError) as caught:
                await worker.submit([request("d"), request("e")])
            assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
            worker.cancel(call)
            engine.release()
            assert await tokens(await worker.submit([request("f")])) == [7, 8, 9]

    asyncio.run(test())


def test_a_refused_request_takes_its_siblings_along(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            with pytest.raises(ApiError, match="at most 300 tokens, got 301") as caught:
                await worker.submit([request("a"), request("b", num_prompt=301)])
            assert (caught.value.status, caught.value.param) == (400, "prompt")
            assert engine.cancelled == ["a"]
            await idle(engine)
            calls = [await worker.submit([request(str(number))]) for number in range(4)]
            assert await asyncio.gather(*map(tokens, calls)) == [[7, 8, 9]] * 4

    asyncio.run(test())


def test_a_cancelled_request_leaves_before_the_next_step(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            engine.hold()
            call = await worker.submit([request("a"), request("b")])
            worker.cancel(call, "a")
            engine.release(1)  # the step that had begun
            await asyncio.to_thread(wait_for, lambda: engine.cancelled == ["a"])
            assert engine.num_steps == 1
            engine.release()
            assert await tokens(call) == [7, 8, 9]
            await idle(engine)

    asyncio.run(test())


def test_whoever_gives_up_while_it_is_handed_over_leaves_nothing(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            engine.hold()
            await worker.submit([request("a")])
            async with asyncio.timeout(10):
                while not engine.is_waiting:
                    await asyncio.sleep(0.001)
            task = asyncio.ensure_future(worker.submit([request("b")]))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.release()
            await idle(engine)
            assert "b" in engine.cancelled
            await worker.submit([request(str(number)) for number in range(4)])

    asyncio.run(test())


def test_a_failed_step_fails_its_requests_and_the_next_ones_run(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            engine.hold()
            engine.fault = RuntimeError("the device is lost")
            call = await worker.submit([request("a")])
            engine.release()
            with pytest.raises(Exception, match="the step that computes this request failed"):
                await tokens(call)
            assert worker.fault == "RuntimeError: the device is lost"
            assert await tokens(await worker.submit([request("b")])) == [7, 8, 9]
            assert worker.fault is None
            assert engine.cancelled == ["a"]

    asyncio.run(test())


def test_at_the_end_open_requests_fail_and_new_ones_are_refused(engine: FakeEngine) -> None:
    async def test() -> None:
        async with started(engine) as worker:
            engine.hold()
            call = await worker.submit([request("a")])
            worker.refuse_new()
            with pytest.raises(ApiError) as caught:
                await worker.submit([request("b")])
            assert caught.value.status == 503
            worker.fail_all()
            with pytest.raises(Exception, match="shutting down"):
                await tokens(call)

    asyncio.run(test())
