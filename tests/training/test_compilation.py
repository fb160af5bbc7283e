"""Compiling the networks: what is chosen, what a failing compiler leads to, and that the numbers stay."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Literal

import pytest
import torch

from discern.training.execution import choose_compilation, eager_evaluation

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("setting", "device", "steps", "enabled", "says"),
    [
        (False, CPU, 5000, False, "train.compile is false"),
        (True, CPU, 5, True, "compiled block by block"),
        ("auto", CPU, 5000, False, "on CUDA only"),
        ("auto", GPU, 50, False, "a run of 50 steps ends before"),
        ("auto", GPU, 5000, True, "compiled block by block"),
        ("auto", GPU, None, True, "compiled block by block"),
    ],
)
def test_what_is_compiled(
    setting: bool | Literal["auto"],
    device: torch.device,
    steps: int | None,
    enabled: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: lambda values: values)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(8))
    found = choose_compilation(setting, device, steps)
    assert found.enabled == enabled
    assert says in found.note


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\ndetails")

    monkeypatch.setattr(torch, "compile", broken)
    found = choose_compilation(True, CPU, None)
    assert not found.enabled
    assert found.note == "the networks are not compiled: torch.compile failed: RuntimeError: No working C++ compiler found"


def test_an_evaluation_is_not_traced_anew() -> None:
    traced: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda values: values * 2, backend=backend)
    with eager_evaluation(compiled=True):
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert not traced
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert traced


def test_compiled_blocks_give_the_same_numbers_and_are_not_traced_without_end() -> None:
    """Blocks of one kind share their graphs, and rows of further lengths need no new ones."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.compiled_blocks"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for name, (rows, graphs) in json.loads(done.stdout.splitlines()[-1]).items():
        for eager, compiled in rows:
            assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-5), name
        assert 0 < graphs[-1] == graphs[2] <= 12, (name, graphs)
