import pytest

from discern.objectives import objectives
from tests.golden.runs import load, machine, record


@pytest.mark.parametrize("name", objectives.names())
def test_the_losses_are_those_recorded(name: str) -> None:
    golden, got = load(name), record(name)
    assert len(golden["steps"]) == len(got) == 50
    if golden["machine"] == machine():
        assert got == golden["steps"], "the same machine type gave other numbers: what changed the numerics?"
    for step, (expected, found) in enumerate(zip(golden["steps"], got, strict=True), start=1):
        for key, value in expected.items():
            tolerance = 1e-3 if key == "grad_norm" else 1e-4
            assert found[key] == pytest.approx(value, rel=tolerance), (step, key)


@pytest.mark.parametrize("name", objectives.names())
def test_the_recorded_run_learns(name: str) -> None:
    steps = load(name)["steps"]
    assert sum(step["loss"] for step in steps[-5:]) < 0.99 * sum(step["loss"] for step in steps[:5])
