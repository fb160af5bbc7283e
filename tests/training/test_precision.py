"""Which precision a run has: what is measured, what it decides, and who goes by it. No real time is measured here."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from discern.models.config import build_config
from discern.training import execution
from discern.training.distributed import Ranks
from discern.training.execution import Precision, resolve_precision, shared_precision

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
MODEL = build_config(hidden_size=4, feedforward_size=16, num_heads=2)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What a measurement gives on a processor with bfloat16; empty: nothing may be measured."""
    milliseconds: dict[str, float] = {}

    def measured(rows: int, inner: int, outer: int) -> dict[str, float]:
        assert milliseconds, "nothing was to be measured"
        return dict(milliseconds)

    monkeypatch.setattr(execution, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(execution, "measured", measured)
    return milliseconds


@pytest.mark.parametrize(("bfloat16", "name"), [(0.3, "bfloat16"), (0.95, "float32"), (1.4, "float32")])
def test_the_faster_one_is_taken_where_it_wins_clearly(figures: dict[str, float], bfloat16: float, name: str) -> None:
    figures.update(float32=1.0, bfloat16=bfloat16)
    chosen = resolve_precision("auto", CPU, MODEL, 8)
    assert (chosen.name, chosen.record()) == (name, {"precision_milliseconds": figures})


@pytest.mark.usefixtures("figures")
def test_nothing_is_measured_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "bfloat16"):
        assert resolve_precision(name, CPU, MODEL, 8) == shared_precision(name, ALONE, MODEL, 8) == Precision(name)
    monkeypatch.setattr(execution, "cpu_has_bfloat16", lambda: False)
    assert resolve_precision("auto", CPU, MODEL, 8) == Precision("float32")


def test_the_record_of_a_run_decides_where_it_goes_on(figures: dict[str, float]) -> None:
    record: dict[str, Any] = {
        "device": "cpu",
        "precision": "float32",
        "precision_milliseconds": {"float32": 1.0, "bfloat16": 3.0},
    }
    assert shared_precision("auto", ALONE, MODEL, 8, record) == Precision("float32", record["precision_milliseconds"])
    figures.update(float32=1.0, bfloat16=0.5)
    assert shared_precision("auto", ALONE, MODEL, 8, record | {"device": "cuda"}).name == "bfloat16"


@pytest.mark.usefixtures("figures")
def test_all_ranks_go_by_what_the_first_measures() -> None:
    first = Precision("bfloat16", {"float32": 1.0, "bfloat16": 0.5})

    class Second(Ranks):
        def gather(self, value: Any, *, waits: bool = False) -> list[Any]:
            assert value is None, "it measures nothing itself"
            return [first, value]

    assert shared_precision("auto", Second(1, 2, CPU), MODEL, 8) == first


def test_the_fastest_pass_by_the_clock_of_one_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": iter([0.09, 0.004, 0.002, 0.008] + [0.04] * 20), "bfloat16": iter([0.09, 0.001] + [0.02] * 20)}
    clock, passes, threads = [0.0], list[str](), list[int]()

    def timed(name: str, device: torch.device) -> nullcontext[None]:
        passes.append(name)
        clock[0] += next(seconds[name])
        return nullcontext()

    monkeypatch.setattr(execution, "autocast", timed)
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    random = torch.get_rng_state()
    assert execution.measured(7, 4, 16) == {"float32": 2.0, "bfloat16": 1.0}
    assert torch.equal(torch.get_rng_state(), random)
    assert threads == [1, torch.get_num_threads()]
    assert passes == ["float32", "bfloat16"] * (len(passes) // 2)
    assert 0.5 <= clock[0] < 0.6
