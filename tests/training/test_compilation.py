"""Compiling the networks: what is chosen and kept, what a failing compiler leads to, and that the numbers stay."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from discern.models.config import build_config
from discern.training import compilation
from discern.training.compilation import (
    Compilation,
    Mode,
    Workload,
    choose,
    compiler_problem,
    eager_evaluation,
    measure,
    shared_compilation,
)
from discern.training.distributed import Ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = build_config(encoder="bert", num_layers=2, hidden_size=16, embedding_size=16, num_heads=2, feedforward_size=32)
WORK = Workload(MODEL, 4, 12, "float32")


def timer(**times: float | Exception) -> Any:
    """A measurement with these results by mode."""

    def timed(workload: Workload, device: torch.device, mode: Mode) -> float:
        found = times[mode]
        if isinstance(found, Exception):
            raise found
        return found

    return timed


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The problem of the compiler; [None]: it works."""
    problem: list[str | None] = [None]
    monkeypatch.setattr(compilation, "compiler_problem", lambda _: problem[0])
    return problem


@pytest.mark.parametrize(
    ("times", "mode"),
    [
        ({"off": 10.0, "blocks": 6.0, "graphs": 7.0}, "blocks"),
        ({"off": 10.0, "blocks": 6.0, "graphs": 5.0}, "graphs"),
        ({"off": 10.0, "blocks": 9.8, "graphs": 12.0}, "off"),
        ({"off": 10.0, "blocks": RuntimeError("no Triton\nat all"), "graphs": 6.0}, "graphs"),
    ],
)
def test_the_fastest_mode_is_chosen_on_a_gpu(times: dict[str, Any], mode: str) -> None:
    found = choose("auto", GPU, WORK, {}, timer(**times))
    assert found.mode == mode
    assert found.milliseconds == {name: took for name, took in times.items() if isinstance(took, float)}
    assert "off 10.00 ms" in found.note
    assert found.record()["compile_milliseconds"]["off"] == 10.0


def test_a_compiler_that_fails_leaves_the_networks_as_they_are() -> None:
    failure = RuntimeError("Cannot find a working triton installation.\nMore")
    found = choose("auto", GPU, WORK, {}, timer(off=10.0, blocks=failure, graphs=failure))
    assert found.mode == "off"
    assert "torch.compile failed: RuntimeError: Cannot find a working triton installation." in found.note
    assert "More" not in found.note


def test_a_batch_that_does_not_fit_is_left_to_the_first_step() -> None:
    found = choose("auto", GPU, WORK, {}, timer(off=torch.OutOfMemoryError("CUDA out of memory")))
    assert (found.mode, found.milliseconds) == ("off", {})
    assert "not enough memory" in found.note


def test_nothing_is_measured_on_a_cpu_or_for_a_short_run() -> None:
    on_cpu = choose("auto", CPU, WORK, {}, timer())
    assert on_cpu.mode == "off"
    assert "on a GPU only" in on_cpu.note
    short = choose("auto", GPU, Workload(MODEL, 4, 12, "float32", steps=50), {}, timer())
    assert short.mode == "off"
    assert "a run of 50 steps ends before" in short.note


def test_a_resumed_run_keeps_its_mode(compiler: list[str | None]) -> None:
    record = {"device": "cuda", "compile": "graphs"}
    assert choose("auto", GPU, WORK, record, timer()).mode == "graphs"
    assert choose("auto", GPU, WORK, {"device": "cuda", "compile": "off"}, timer()).mode == "off"
    assert choose("auto", CPU, WORK, record, timer()).mode == "off"  # a record of another device says nothing
    compiler[0] = "torch.compile failed: no Triton"
    kept = choose("auto", GPU, WORK, record, timer())
    assert kept.mode == "off"
    assert "no Triton" in kept.note


def test_divided_weights_are_not_replayed_as_graphs(compiler: list[str | None]) -> None:
    divided = replace(WORK, divided=True)
    found = choose("auto", GPU, divided, {}, timer(off=10.0, blocks=6.0))
    assert (found.mode, set(found.milliseconds)) == ("blocks", {"off", "blocks"})
    # A run that began in one process goes on with divided weights.
    assert choose("auto", GPU, divided, {"device": "cuda", "compile": "graphs"}, timer()).mode == "blocks"


def test_true_compiles_without_measuring_unless_the_compiler_fails(compiler: list[str | None]) -> None:
    alone = Ranks(0, 1, CPU)
    assert shared_compilation(False, alone, WORK) == Compilation()
    assert shared_compilation(True, alone, WORK).mode == "networks"
    assert choose(True, GPU, WORK, {}).mode == "blocks"
    compiler[0] = "torch.compile failed: no compiler"
    assert "no compiler" in shared_compilation(True, alone, WORK).note


def test_an_evaluation_is_not_traced_anew() -> None:
    traced: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda values: values * 2, backend=backend)
    with eager_evaluation("blocks"):
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert not traced
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert traced


def test_a_pass_is_timed() -> None:
    before = torch.get_rng_state()
    assert 0 < measure(WORK, CPU, "off") < 60_000
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled_blocks_give_the_same_numbers_and_are_not_traced_without_end() -> None:
    """Blocks of one kind share their graphs, and rows of further lengths need no new ones."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.compiled_blocks"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows, graphs = json.loads(done.stdout.splitlines()[-1])
    for eager, compiled in rows:
        assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-5)
    assert 0 < graphs[-1] == graphs[2] <= 12


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\ndetails")

    monkeypatch.setattr(torch, "compile", broken)
    assert compiler_problem(CPU) == "torch.compile failed: RuntimeError: No working C++ compiler found"
