"""Work of many requests on one thread: requests that arrive while the model computes are computed together."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from discern.data.tokenizer.loading import naming_panics
from discern.errors import DiscernError

Work = Callable[[Sequence[Any]], list[Any]]


class BusyError(Exception):
    """More requests are waiting than the server accepts."""


@dataclass
class _Job:
    """The items of one request.

    Attributes:
        key: requests with equal keys can share a batch.
        work: computes one result per item.
        cost: characters of the items.
    """

    key: Hashable
    work: Work
    items: Sequence[Any]
    cost: int
    future: asyncio.Future[list[Any]]


class Batcher:
    """Computes requests in the order of their arrival, those of the same kind together. Belongs to one event loop.

    Args:
        max_waiting: largest number of waiting requests.
        max_waiting_cost: largest sum of their costs.
        batch_items, batch_cost: size of a batch from which no further request joins it.
    """

    def __init__(self, max_waiting: int, max_waiting_cost: int, *, batch_items: int = 256, batch_cost: int = 50_000) -> None:
        self._max_waiting, self._max_waiting_cost = max_waiting, max_waiting_cost
        self._batch_items, self._batch_cost = batch_items, batch_cost
        self._waiting: list[_Job] = []
        self._computing = False
        self._tasks: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, list[_Job]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="discern-model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    async def run(self, key: Hashable, work: Work, items: Sequence[Any], cost: int) -> list[Any]:
        """The results of the items.

        If the caller is cancelled before its work has begun, the work is not done.

        Raises:
            BusyError: too many requests are waiting.
        """
        held = sum(job.cost for job in self._waiting)
        if len(self._waiting) >= self._max_waiting or (self._waiting and held + cost > self._max_waiting_cost):
            raise BusyError
        loop = asyncio.get_running_loop()
        job = _Job(key, work, items, cost, loop.create_future())
        self._waiting.append(job)
        # Not at once: requests whose bytes have arrived with those of this one come first, and join its batch.
        loop.call_soon(self._start, loop)
        return await job.future

    def close(self, seconds: float) -> None:
        """Stop the thread, and wait for at most so long for what it computes."""
        self._tasks.put(None)
        self._thread.join(seconds)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next batch to the thread, if it is free."""
        self._waiting = [job for job in self._waiting if not job.future.done()]
        if self._computing or not self._waiting:
            return
        batch: list[_Job] = []
        first, items, cost = self._waiting[0], 0, 0
        for job in self._waiting:
            full = items >= self._batch_items or cost + job.cost > self._batch_cost
            if job.key == first.key and not (batch and full):
                batch.append(job)
                items, cost = items + len(job.items), cost + job.cost
        taken = set(map(id, batch))
        self._waiting = [job for job in self._waiting if id(job) not in taken]
        self._computing = True
        self._tasks.put((loop, batch))

    def _compute(self) -> None:
        """The thread."""
        while (task := self._tasks.get()) is not None:
            loop, batch = task
            found = _results(batch)
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(self._finish, loop, batch, found)

    def _finish(self, loop: asyncio.AbstractEventLoop, batch: list[_Job], found: list[list[Any] | Exception]) -> None:
        self._computing = False
        for job, result in zip(batch, found, strict=True):
            if job.future.done():  # the client has gone
                continue
            if isinstance(result, Exception):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)
        self._start(loop)


def _results(batch: list[_Job]) -> list[list[Any] | Exception]:
    """The results of each job, or its error. If a batch fails, its jobs are computed one by one: only the guilty one fails."""
    try:
        with naming_panics("the model's tokenizer"):
            results = iter(batch[0].work([item for job in batch for item in job.items]))
        return [[next(results) for _ in job.items] for job in batch]
    except Exception as problem:
        if len(batch) == 1 or not isinstance(problem, DiscernError | ValueError):
            return [problem] * len(batch)
        return [_results([job])[0] for job in batch]
