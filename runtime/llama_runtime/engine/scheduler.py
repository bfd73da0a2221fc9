"""Which requests take part in the next call: first come, first served, within a token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llama_runtime.engine.blocks import PagePool
from llama_runtime.engine.request import Job, Status


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `end` of a job that one call computes."""

    job: Job
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the job's next token comes after it."""
        return self.end == len(self.job.tokens)


@dataclass(frozen=True)
class Plan:
    """One call: pieces of texts, and one token each of texts that go on. No job is in it twice."""

    prompts: tuple[Piece, ...] = ()
    steps: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them, in the order of the call's logits."""
        return self.prompts + self.steps


class Scheduler:
    """Holds the jobs that wait and run, and gives pages to those of the next call.

    A job that has one token to compute takes a step; more come in pieces. A step that finds no
    page sends the youngest running job back to wait: it lets go of its pages, and is computed
    again later, from whatever prefix is still known. The oldest is never sent back, and fits into
    the pool by itself, so every plan of a scheduler with work makes progress.

    Args:
        pool: the pages.
        max_rows: most jobs that run at the same time.
        token_budget: most tokens of a call, a step being one; but where a text could be begun or
            go on, a call has room for at least one token of it.
        max_piece: most tokens of pieces that a call takes.
        can_mix: whether one call computes pieces and steps; else they take turns.
    """

    def __init__(
        self, pool: PagePool, *, max_rows: int, token_budget: int, max_piece: int, can_mix: bool
    ) -> None:
        self.pool = pool
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self._max_rows = max_rows
        self._token_budget = token_budget
        self._max_piece = max_piece
        self._can_mix = can_mix
        self._is_turn_of_steps = False

    @property
    def first(self) -> Job | None:
        """The job that was added first of those that have not ended."""
        return next(iter((*self.running, *self.waiting)), None)

    def plan(self) -> Plan:
        """The next call; every piece has its pages. Empty when there is nothing to do."""
        steps: tuple[Piece, ...] = ()
        if self._can_mix or self._is_turn_of_steps:
            steps = self._steps()
        prompts: tuple[Piece, ...] = ()
        if self._can_mix or not steps:
            prompts = self._prompts(max(self._token_budget - len(steps), 1))
        if not steps and not prompts:
            steps = self._steps()  # it was the prompts' turn, and there are none
        self._is_turn_of_steps = not steps
        return Plan(prompts, steps)

    def computed(self, piece: Piece) -> None:
        """Tells that a piece of the plan is in its pages now."""
        job, page_size = piece.job, self.pool.page_size
        job.num_computed = piece.end
        first = 0 if job.prefix is None else job.prefix.num_pages
        for number in range(first, piece.end // page_size):
            tokens = job.tokens[number * page_size : (number + 1) * page_size]
            job.prefix = self.pool.publish(job.pages[number], job.prefix, tokens)

    def end(self, job: Job) -> None:
        """A job is done, or is not wanted any more."""
        self._leave(job)
        self.pool.release(job.pages)
        self._clear(job, Status.ENDED)

    def fail(self, job: Job) -> list[int]:
        """As `end`, where what the job wrote may be wrong; returns the pages that are free now."""
        self._leave(job)
        freed = self.pool.discard(job.pages)
        self._clear(job, Status.ENDED)
        return freed

    def _steps(self) -> tuple[Piece, ...]:
        jobs = [job for job in tuple(self.running) if self._can_step(job)]
        return tuple(Piece(job, job.num_computed, len(job.tokens)) for job in jobs)

    def _can_step(self, job: Job) -> bool:
        return job.status is Status.RUNNING and job.num_pending == 1 and self._has_page(job)

    def _has_page(self, job: Job) -> bool:
        """Gives the job a page for its next position if need be, at the cost of younger ones."""
        while job.num_computed == len(job.pages) * self.pool.page_size:
            if self.pool.num_available:
                job.pages += self.pool.take(1)
            elif self._send_back(self.running[-1]) is job:
                return False
        return True

    def _send_back(self, job: Job) -> Job:
        self.running.remove(job)
        self.pool.release(job.pages)
        self._clear(job, Status.WAITING)
        self.waiting.appendleft(job)
        self.num_preemptions += 1
        return job

    def _prompts(self, room: int) -> tuple[Piece, ...]:
        room = min(room, self._max_piece)
        pieces: list[Piece] = []
        for job in self.running:
            if room and job.num_pending > 1:
                room -= self._add_piece(pieces, job, room)
        while room and self.waiting and self._admit(self.waiting[0]):
            room -= self._add_piece(pieces, self.running[-1], room)
        return tuple(pieces)

    def _add_piece(self, pieces: list[Piece], job: Job, room: int) -> int:
        num_tokens = min(room, job.num_pending)
        pieces.append(Piece(job, job.num_computed, job.num_computed + num_tokens))
        return num_tokens

    def _admit(self, job: Job) -> bool:
        """Lets the first of those that wait run, if there are a row and pages for all it has.

        One page for each running job is left, so that it is not sent back at once.
        """
        if len(self.running) == self._max_rows:
            return False
        num_pages = -(-len(job.tokens) // self.pool.page_size)
        known = self.pool.known(job.tokens)
        to_take = self.pool.num_to_take(num_pages, known)
        if to_take + len(self.running) > self.pool.num_available:
            return False
        job.prefix = self.pool.hold(known)
        job.pages = known + self.pool.take(num_pages - len(known))
        job.num_computed = len(known) * self.pool.page_size
        if not job.was_admitted:
            job.was_admitted = True
            self.prompt_tokens += len(job.tokens)
            self.prefix_hit_tokens += job.num_computed
        job.status = Status.RUNNING
        self.waiting.popleft()
        self.running.append(job)
        return True

    def _leave(self, job: Job) -> None:
        (self.running if job.status is Status.RUNNING else self.waiting).remove(job)

    def _clear(self, job: Job, status: Status) -> None:
        job.pages, job.num_computed, job.prefix, job.status = [], 0, None, status
