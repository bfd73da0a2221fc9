"""An engine that says what it was told to say, a token a step, and can be held."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llama_artifacts.errors import InputError, LlamaExportError
from llama_runtime.engine import Output, Request, Stats

PAGE_SIZE, NUM_PAGES = 16, 64
Answer = Sequence[int | LlamaExportError | None]
"""Tokens; None is a stop token, an error a failure of the request."""


@dataclass
class _Job:
    request: Request
    answer: Answer
    num_done: int = 0

    @property
    def num_pages(self) -> int:
        return -(-(len(self.request.prompt) + self.num_done) // PAGE_SIZE)


@dataclass
class FakeEngine:
    """Follows the engine's contract; what a request's answer is, `answer` says."""

    answer: Callable[[Request], Answer]
    num_rows: int = 4
    fault: Exception | None = None
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._jobs: list[_Job] = []
        self._ended: list[Output] = []
        self._num_generated = 0
        self._steps_left = math.inf
        self._allowed = threading.Condition()
        self.is_waiting = False

    def hold(self) -> None:
        """Lets the next step wait until `release`."""
        self.release(0)

    def release(self, num_steps: float = math.inf) -> None:
        """Lets so many steps run from now on."""
        with self._allowed:
            self._steps_left = num_steps
            self._allowed.notify_all()

    def add(self, request: Request) -> None:
        if not request.prompt or len(request.prompt) > 300:
            raise InputError(
                f"expected at most 300 tokens, got {len(request.prompt)}", where="prompt"
            )
        self.requests.append(request)
        self._jobs.append(_Job(request, self.answer(request)))

    def cancel(self, request_id: str) -> bool:
        found = [job for job in self._jobs if job.request.id == request_id]
        for job in found:
            self.cancelled.append(request_id)
            self._end(job, Output(request_id, finish_reason="cancelled"))
        return bool(found)

    def step(self) -> list[Output]:
        with self._allowed:
            self.is_waiting = self._steps_left <= 0
            assert self._allowed.wait_for(lambda: self._steps_left > 0, 30)
            self._steps_left -= 1
            self.is_waiting = False
        self.num_steps += 1
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        for job in self._jobs[: self.num_rows]:
            self._step(job)
        outputs, self._ended = self._ended, []
        return outputs

    def _step(self, job: _Job) -> None:
        id, said = job.request.id, job.answer[job.num_done]
        job.num_done += 1
        if isinstance(said, LlamaExportError):
            self._end(job, Output(id, finish_reason="error", error=said))
        elif said is None:
            self._end(job, Output(id, finish_reason="stop"))
        else:
            self._num_generated += 1
            is_last = job.num_done in (job.request.max_new, len(job.answer))
            tops = ((said, -0.5), (said + 1, -1.5))[: job.request.num_logprobs or 0]
            logprob = None if job.request.num_logprobs is None else -0.5
            output = Output(id, said, logprob, tops, "length" if is_last else None)
            self._end(job, output) if is_last else self._ended.append(output)

    def _end(self, job: _Job, output: Output) -> None:
        self._jobs.remove(job)
        self._ended.append(output)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._ended)

    @property
    def stats(self) -> Stats:
        running = self._jobs[: self.num_rows]
        return Stats(
            num_waiting=len(self._jobs) - len(running),
            num_running=len(running),
            pages_total=NUM_PAGES,
            pages_used=sum(job.num_pages for job in running),
            pages_cached=0,
            prefix_hit_tokens=0,
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            generated_tokens=self._num_generated,
            num_preemptions=0,
            num_steps=self.num_steps,
            program_s=0.0,
        )
