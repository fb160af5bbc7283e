"""Requests that arrive together are computed together; a wrong one fails alone; what nobody waits for is not computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.serve.batching import Batcher, BusyError
from discern.serve.limits import RateLimiter


def test_requests_that_wait_share_a_batch_in_order() -> None:
    blocks: list[list[int]] = []
    free = threading.Event()

    def work(items: Sequence[Any]) -> list[Any]:
        free.wait(10)
        blocks.append(list(items))
        return [item * 10 for item in items]

    async def main() -> list[list[Any]]:
        batcher = Batcher(100, 10**6)
        first = asyncio.ensure_future(batcher.run("a", work, [0], 1))
        await asyncio.sleep(0.05)  # it computes now
        others = [asyncio.ensure_future(batcher.run(key, work, [n, n], 1)) for n, key in ((1, "a"), (2, "b"), (3, "a"))]
        await asyncio.sleep(0.05)
        free.set()
        found = await asyncio.gather(first, *others)
        batcher.close(5)
        return found

    assert asyncio.run(main()) == [[0], [10, 10], [20, 20], [30, 30]]
    assert blocks == [[0], [1, 1, 3, 3], [2, 2]]


def test_a_wrong_request_fails_alone_and_a_cancelled_one_is_not_computed() -> None:
    seen: list[int] = []

    def work(items: Sequence[Any]) -> list[Any]:
        if -1 in items:
            raise ConfigError("no")
        seen.extend(items)
        return list(items)

    async def main() -> list[Any]:
        batcher = Batcher(100, 10**6)
        tasks = [asyncio.ensure_future(batcher.run("a", work, [n], 1)) for n in (1, -1, 2, 7)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        batcher.close(5)
        return found

    one, wrong, two, gone = asyncio.run(main())
    assert (one, two) == ([1], [2])
    assert isinstance(wrong, ConfigError)
    assert isinstance(gone, asyncio.CancelledError)
    assert 7 not in seen


def test_a_panic_of_the_tokenizer_fails_alone() -> None:
    class PanicException(BaseException):  # as the tokenizers library raises it
        pass

    def work(items: Sequence[Any]) -> list[Any]:
        if -1 in items:
            raise PanicException("backtrack limit")
        return list(items)

    async def main() -> list[Any]:
        batcher = Batcher(100, 10**6)
        found = await asyncio.gather(*(batcher.run("a", work, [n], 1) for n in (1, -1, 2)), return_exceptions=True)
        later = await asyncio.wait_for(batcher.run("a", work, [3], 1), 20)
        batcher.close(5)
        return [*found, later]

    one, wrong, two, later = asyncio.run(main())
    assert (one, two, later) == ([1], [2], [3])
    assert isinstance(wrong, DataError)


def test_too_many_are_refused() -> None:
    async def main() -> None:
        free = threading.Event()
        batcher = Batcher(2, 100)

        def work(items: Sequence[Any]) -> list[Any]:
            free.wait(10)
            return list(items)

        running = [asyncio.ensure_future(batcher.run("a", work, [0], 1))]
        await asyncio.sleep(0.05)
        running.append(asyncio.ensure_future(batcher.run("a", work, [1], 99)))
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await batcher.run("a", work, [2], 2)
        running.append(asyncio.ensure_future(batcher.run("a", work, [2], 1)))
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await batcher.run("a", work, [3], 0)
        free.set()
        await asyncio.gather(*running)
        batcher.close(5)

    asyncio.run(main())


def test_a_client_earns_requests_with_time() -> None:
    now = [0.0]
    limiter = RateLimiter(2.0, 2, lambda: now[0])
    assert [limiter.wait("a") for _ in range(3)] == [0, 0, 0.5]
    assert limiter.wait("b") == 0
    now[0] = 0.5
    assert limiter.wait("a") == 0
    assert limiter.wait("a") > 0
