"""Executors: order, errors, death, and that no process is left behind."""

from __future__ import annotations

import os
import time
from itertools import islice

import pytest

from discern.data.executors import ProcessExecutor, RayExecutor, ordered_map
from discern.errors import ConfigError, DataError


def doubled(number: int) -> int:
    """Twice the number, the slower the smaller it is."""
    time.sleep(0.05 / (number + 1))
    return 2 * number


def failing(number: int) -> int:
    if number == 3:
        raise DataError("three", hint="not three")
    if number == 4:
        os._exit(9)
    print("noise on standard output")
    return number


def environment(name: str) -> str:
    return os.environ[name]


def process_id(_: int) -> int:
    return os.getpid()


def test_results_keep_the_order_and_items_are_not_read_ahead_without_bound() -> None:
    taken = []
    with ProcessExecutor(3) as executor:
        results = ordered_map(executor, doubled, (taken.append(number) or number for number in range(100)), pending=6)  # type: ignore[func-returns-value]
        assert list(islice(results, 5)) == [0, 2, 4, 6, 8]
        assert len(taken) < 20
        assert list(results) == list(range(10, 200, 2))


def test_a_task_that_raises_and_one_that_dies() -> None:
    with ProcessExecutor(1) as executor:
        assert executor.submit(failing, 1).result() == 1
        with pytest.raises(DataError, match="three") as error:
            executor.submit(failing, 3).result()
        assert error.value.hint == "not three"
        assert executor.submit(environment, "RAYON_NUM_THREADS").result() == "1"
        with pytest.raises(DataError, match=r"ended unexpectedly \(exit status 9\)"):
            executor.submit(failing, 4).result()


def test_no_process_is_left() -> None:
    with ProcessExecutor(2) as executor:
        found = set(executor.map(process_id, range(20)))
    for number in found:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.executors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed") as raised:
        RayExecutor(1)
    assert "discern-nlp[ray]" in str(raised.value.hint)


def test_an_address_where_no_cluster_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(DataError, match="no Ray cluster answers at RAY_ADDRESS=127"):
        RayExecutor(1)
