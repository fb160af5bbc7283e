"""Worker processes: order, errors, death, and that none is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import islice

import pytest

from discern.data.executors import WorkerPool, WorkerProcess
from discern.errors import DataError


def doubling(delay: float) -> Callable[[int], int]:
    """A service that doubles, the slower the smaller the number."""

    def double(number: int) -> int:
        time.sleep(delay / (number + 1))
        return 2 * number

    return double


def failing() -> Callable[[int], int]:
    def fail(number: int) -> int:
        if number == 3:
            raise DataError("three", hint="not three")
        if number == 4:
            os._exit(9)
        print("noise on standard output")
        return number

    return fail


def process_id() -> Callable[[int], int]:
    return lambda _: os.getpid()


def test_replies_keep_the_order() -> None:
    with WorkerPool(doubling, (0.05,), workers=3) as pool:
        assert list(pool.map(range(30))) == list(range(0, 60, 2))
        assert list(pool.map([])) == []


def test_a_service_that_raises_and_one_that_dies() -> None:
    with WorkerProcess(failing, (), threads=1) as process:
        assert process.ask(1) == 1
        with pytest.raises(DataError, match="three") as error:
            process.ask(3)
        assert error.value.hint == "not three"
        assert process.ask(2) == 2
        with pytest.raises(DataError, match=r"ended unexpectedly \(exit status 9\)"):
            process.ask(4)


def test_the_input_is_not_read_ahead_without_bound() -> None:
    taken = []
    with WorkerPool(doubling, (0.0,), workers=1) as pool:
        replies = pool.map(taken.append(number) or number for number in range(1000))  # type: ignore[func-returns-value]
        assert list(islice(replies, 5)) == [0, 2, 4, 6, 8]
        assert len(taken) < 10


def test_no_process_is_left() -> None:
    with WorkerPool(process_id, (), workers=2) as pool:
        found = set(pool.map(range(20)))
    for number in found:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_workers_see_one_thread() -> None:
    with WorkerProcess(environment, (), threads=1) as process:
        assert process.ask("RAYON_NUM_THREADS") == "1"


def environment() -> Callable[[str], str]:
    return lambda name: os.environ[name]
