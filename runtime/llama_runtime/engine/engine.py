"""Continuous batching: every step is one call of a program for all requests that can go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from llama_artifacts.errors import InputError, LlamaExportError, SessionError
from llama_runtime.engine.blocks import PagePool
from llama_runtime.engine.programs import Programs
from llama_runtime.engine.request import (
    FinishReason,
    Job,
    Limits,
    Output,
    Request,
    Status,
    check_request,
    checked_int,
)
from llama_runtime.engine.scheduler import Plan, Scheduler
from llama_runtime.sampling import as_rows, choose_rows

if TYPE_CHECKING:
    from llama_runtime.loader import LoadedBundle

_Likeliest = tuple[tuple[int, float], ...]
_Choice = tuple[int | InputError, float | None, _Likeliest]


@dataclass(frozen=True)
class Stats:
    """Where an engine stands, and what it has done since it was made.

    Attributes:
        num_waiting: requests that have no row yet, or were sent back to wait.
        num_running: requests in the batch.
        pages_total: pages that texts can have.
        pages_used: those that texts have now.
        pages_cached: those that no text has, but whose beginning of a text is known.
        prefix_hit_tokens: prompt tokens that were not computed, since their pages were known.
        prompt_tokens: prompt tokens of requests that have begun.
        generated_tokens: tokens given.
        num_preemptions: how often a request was sent back to wait.
        num_steps: calls of a program.
        program_s: seconds in those calls; the rest of the time of `Engine.step` goes to planning,
            inputs and choosing tokens. Of a device that computes while its host goes on, only
            until a call is launched. No part of a comparison of two `Stats`.
    """

    num_waiting: int
    num_running: int
    pages_total: int
    pages_used: int
    pages_cached: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
    num_steps: int
    program_s: float = field(compare=False)


class Engine:
    """Runs requests over the pages of one pool; deterministic, first come, first served.

    A step reserves pages, runs one program and commits what came of it. A request whose logits or
    draw are refused fails alone. When the program or the choice of tokens raises, the requests of
    that call fail, with the cause in their outputs, and their pages are free again. When a step is
    interrupted (KeyboardInterrupt), nothing is lost: the next one does the same. Of the requests
    that have not ended, the one that was added first goes on by a token at least in every two
    steps; should it ever find no page, it fails, so that no step is without effect. Calls must not
    overlap.

    Args:
        bundle: with `prefill_paged` and `decode_paged`; `step_paged` is used where it is there,
            else prompts and steps take turns.
        rows: most requests in the batch; None: as many as the programs take.
        pages: pages of the pool; None: those that fill every row, but at most 2 GiB (and at least
            one whole text).
        token_budget: most tokens of a call; a longer prompt comes in pieces, beside the steps of
            other requests.
        has_prefix_cache: whether the beginning of a prompt that is still in the pool is used
            again.

    Raises:
        SessionError: the bundle lacks an entry, or its entries keep different states.
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        bundle: LoadedBundle,
        *,
        rows: int | None = None,
        pages: int | None = None,
        token_budget: int = 512,
        has_prefix_cache: bool = True,
    ) -> None:
        checked_int("token_budget", token_budget, 1, None)
        self._programs = Programs(bundle, rows, pages)
        self._pool = PagePool(
            self._programs.num_pages, self._programs.page_size, has_prefix_cache=has_prefix_cache
        )
        self._scheduler = Scheduler(
            self._pool,
            max_rows=self._programs.max_rows,
            token_budget=token_budget,
            max_piece=self._programs.max_piece,
            can_mix=self._programs.can_mix,
        )
        self._limits = Limits(
            vocab_size=self._programs.vocab_size,
            max_positions=self._programs.max_positions,
            page_size=self._pool.page_size,
            num_pages=self._pool.num_pages,
        )
        self._jobs: dict[str, Job] = {}
        self._outbox: list[Output] = []
        self._generated_tokens = 0
        self._num_steps = 0

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
            InputError: it could never run (empty, longer than the programs or the pool allow, a
                token that the model lacks, a field of another type), or its id is in use.
                Nothing has changed then.
        """
        check_request(request, self._limits)
        if request.id in self._jobs:
            raise InputError(f"`{request.id:.60}` is in use", where="id", hint="ids are distinct")
        job = self._jobs[request.id] = Job(request)
        self._scheduler.waiting.append(job)

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees its pages; its last output comes with the next step.

        Returns:
            Whether there was such a request that had not ended.
        """
        job = self._jobs.get(request_id)
        if job is None or job.status is Status.ENDED:
            return False
        self._end(job, "cancelled")
        return True

    def step(self) -> list[Output]:
        """Runs one program and returns what came of it; at most one token for each request.

        Outputs of requests that were cancelled since the last step come first. Without work
        nothing is run, and the list is empty.
        """
        plan = self._scheduler.plan()
        if plan.pieces:
            self._run(plan)
        elif (job := self._scheduler.first) is not None:
            self._fail([(job, _stuck(job, self._pool))])
        outputs, self._outbox = self._outbox, []
        for output in outputs:
            if output.finish_reason is not None:
                del self._jobs[output.request_id]
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether a further step would do or tell anything."""
        return bool(self._jobs)

    @property
    def stats(self) -> Stats:
        """Counts as of now."""
        return Stats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            pages_total=self._pool.num_pages,
            pages_used=self._pool.num_used,
            pages_cached=self._pool.num_cached,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            prompt_tokens=self._scheduler.prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            program_s=self._programs.seconds,
        )

    def _run(self, plan: Plan) -> None:
        self._num_steps += 1
        asked = [piece.job for piece in plan.pieces if piece.is_last]
        try:
            chosen = _choose(asked, self._programs.run(plan))
        except Exception as cause:  # engines of programs raise whatever they like
            error = _as_failure(cause)
            self._fail([(piece.job, error) for piece in plan.pieces])
        else:
            self._commit(plan, asked, chosen)

    def _commit(self, plan: Plan, asked: Sequence[Job], chosen: Sequence[_Choice]) -> None:
        """From here on jobs change; an interrupt until now left every one as it was."""
        for piece in plan.pieces:
            self._scheduler.computed(piece)
        failed = []
        for job, (token, logprob, top) in zip(asked, chosen, strict=True):
            if isinstance(token, InputError):
                failed.append((job, _as_failure(token)))
            else:
                self._give(job, token, logprob, top)
        self._fail(failed)

    def _give(self, job: Job, token: int, logprob: float | None, top: _Likeliest) -> None:
        if token in job.request.stop_tokens:
            self._end(job, "stop")
            return
        job.tokens.append(token)
        job.chooser.add(token)
        self._generated_tokens += 1
        is_full = len(job.tokens) > self._limits.max_positions
        reason: FinishReason | None = None
        if is_full or job.num_new == job.request.max_new:
            reason = "length"
            self._scheduler.end(job)
        self._outbox.append(Output(job.request.id, token, logprob, top, reason))

    def _end(self, job: Job, reason: FinishReason) -> None:
        self._scheduler.end(job)
        self._outbox.append(Output(job.request.id, finish_reason=reason))

    def _fail(self, failed: Sequence[tuple[Job, LlamaExportError]]) -> None:
        freed: list[int] = []
        for job, error in failed:
            freed += self._scheduler.fail(job)
            self._outbox.append(Output(job.request.id, finish_reason="error", error=error))
        if failed:
            self._programs.clean(freed)


def _choose(jobs: Sequence[Job], logits: torch.Tensor) -> list[_Choice]:
    """The next token of each job by its row of the logits; no job changes."""
    rows = as_rows(logits)
    tokens = choose_rows(rows, [job.chooser for job in jobs]) if jobs else []
    return [
        (token, *_log_probs(rows[row], job.request.num_logprobs, token))
        for row, (job, token) in enumerate(zip(jobs, tokens, strict=True))
    ]


def _log_probs(
    logits: torch.Tensor, num_top: int | None, token: int | InputError
) -> tuple[float | None, _Likeliest]:
    """Where they are asked for: the token's log-probability and the likeliest ones."""
    if num_top is None or isinstance(token, InputError):
        return None, ()
    log_probs = logits.log_softmax(-1)
    top = log_probs.topk(num_top)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return float(log_probs[token]), tuple(pairs)


def _stuck(job: Job, pool: PagePool) -> SessionError:
    """For a job that no other one keeps from running, and that still finds no page."""
    return SessionError(
        f"expected {-(-len(job.tokens) // pool.page_size)} pages that are free or will be, "
        f"got {pool.num_available} of {pool.num_pages}",
        hint="make a new engine: this one has lost pages, which is a fault of its own",
    )


def _as_failure(cause: Exception) -> LlamaExportError:
    if isinstance(cause, LlamaExportError) and not isinstance(cause, InputError):
        return cause
    error = SessionError(
        f"the step failed: {type(cause).__name__}: {cause}",
        hint="send the request again; if it fails again, verify the bundle",
    )
    error.__cause__ = cause
    return error
