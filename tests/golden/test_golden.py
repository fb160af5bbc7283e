from __future__ import annotations

from collections.abc import Iterator

import pytest

from discern.objectives import objectives
from tests.golden.runs import load, machine, record
from tests.paths import on_path


@pytest.fixture(params=["kernels", "plain"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    for _ in on_path(request.param):
        yield request.param


@pytest.mark.parametrize("name", objectives.names())
def test_the_losses_are_those_recorded(name: str, path: str) -> None:
    golden, got = load(name, path), record(name)
    assert len(golden["steps"]) == len(got) == 50
    # The last bits of the kernels are the compiler's to decide.
    if path == "plain" and golden["machine"] == machine():
        assert got == golden["steps"], "the same machine type gave other numbers: what changed the numerics?"
    for step, (expected, found) in enumerate(zip(golden["steps"], got, strict=True), start=1):
        for key, value in expected.items():
            tolerance = 1e-3 if key == "grad_norm" else 1e-4
            assert found[key] == pytest.approx(value, rel=tolerance), (step, key)


@pytest.mark.parametrize("name", objectives.names())
@pytest.mark.parametrize("recorded", ["kernels", "plain"])
def test_the_recorded_run_learns(name: str, recorded: str) -> None:
    steps = load(name, recorded)["steps"]
    assert sum(step["loss"] for step in steps[-5:]) < 0.99 * sum(step["loss"] for step in steps[:5])
