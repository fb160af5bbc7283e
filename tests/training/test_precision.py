"""The arithmetic of a run: what is measured, what it decides, and who goes by it. No real time is measured here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from discern.models.config import build_config
from discern.training import precision
from discern.training.distributed import Ranks
from discern.training.precision import Precision, resolve_precision, shared_precision

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
MODEL = build_config(hidden_size=4, feedforward_size=16, num_heads=2)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What a measurement gives on a processor with bfloat16; empty: it must not be asked for."""
    found: dict[str, float] = {}

    def measured(rows: int, inner: int, outer: int) -> dict[str, float]:
        assert found, "nothing was to be measured"
        return dict(found)

    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "measured", measured)
    return found


def test_the_faster_one_is_taken_where_it_wins_clearly(figures: dict[str, float]) -> None:
    for bfloat16, name in ((0.3, "bfloat16"), (0.95, "float32"), (1.4, "float32")):
        figures.update(float32=1.0, bfloat16=bfloat16)
        found = resolve_precision("auto", CPU, MODEL, 8)
        assert (found.name, found.record()) == (name, {"precision_milliseconds": figures})


def test_nothing_is_measured_where_nothing_is_open(figures: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "bfloat16"):
        assert resolve_precision(name, CPU, MODEL, 8) == shared_precision(name, ALONE, MODEL, 8) == Precision(name)
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    assert resolve_precision("auto", CPU, MODEL, 8) == Precision("float32")
    assert Precision("float32").record() == {}


def test_the_record_of_a_run_decides_where_it_goes_on(figures: dict[str, float]) -> None:
    known: dict[str, Any] = {"device": "cpu", "precision": "float32", "precision_milliseconds": {"float32": 1.0, "bfloat16": 3.0}}
    assert shared_precision("auto", ALONE, MODEL, 8, known) == Precision("float32", known["precision_milliseconds"])
    assert shared_precision("auto", ALONE, MODEL, 8, {"device": "cpu", "precision": "bfloat16"}) == Precision("bfloat16")
    figures.update(float32=1.0, bfloat16=0.5)
    assert shared_precision("auto", ALONE, MODEL, 8, known | {"device": "cuda"}).name == "bfloat16"
    assert shared_precision("auto", ALONE, MODEL, 8, {}).name == "bfloat16"


def test_all_ranks_go_by_what_the_first_finds(figures: dict[str, float]) -> None:
    said = Precision("bfloat16", {"float32": 1.0, "bfloat16": 0.5})

    class Second(Ranks):
        def gather(self, value: Any, *, waits: bool = False) -> list[Any]:
            assert value is None, "it measures nothing itself"
            return [said, value]

    assert shared_precision("auto", Second(1, 2, CPU), MODEL, 8) == said


def test_the_time_of_one_thread_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 takes half the time of its thread; by the clock on the wall it is slower, as other programs run meanwhile."""
    thread, wall, calls = [0.0], [0.0], list[str]()
    lasts = {"float32": iter([9.0, 0.004, 0.002, 0.008] + [0.04] * 20), "bfloat16": iter([9.0, 0.001, 0.003] + [0.02] * 20)}

    def run(rows: int, inner: int, outer: int, name: str) -> Callable[[], None]:
        def call() -> None:
            assert torch.get_num_threads() == 1
            calls.append(name)
            seconds = next(lasts[name])
            thread[0] += seconds
            wall[0] += seconds + (1.0 if name == "bfloat16" else 0.0)

        return call

    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "_pass", run)
    monkeypatch.setattr(time, "thread_time", lambda: thread[0])
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = resolve_precision("auto", CPU, MODEL, 7)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found == Precision("bfloat16", {"float32": 2.0, "bfloat16": 1.0}), (
        "the first pass, which chooses kernels, does not count"
    )
    assert calls == ["float32", "bfloat16"] * (len(calls) // 2)
    assert 0.2 <= thread[0] - 18 < 0.3


def test_what_is_measured_has_the_widths_of_the_network_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    measured = precision.measured
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "measured", lambda *shape: shapes.append(shape) or {"float32": 1.0, "bfloat16": 1.0})
    wide = build_config(hidden_size=1024, feedforward_size=4096, num_heads=16)
    for model, tokens, expected in ((wide, 10**6, (2048, 512, 1024)), (MODEL, 100, (100, 4, 16))):
        resolve_precision("auto", CPU, model, tokens)
        assert shapes.pop() == expected
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with torch.no_grad():
        assert measured(8, 4, 16).keys() == {"float32", "bfloat16"}
    assert torch.equal(torch.rand(1), expected)
