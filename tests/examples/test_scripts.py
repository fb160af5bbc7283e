"""The scripts under examples/ run as they stand, on the model that is shipped, and say what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "encode": "): The village lies on the left bank of the river.",
    "detect_and_fill": "instead:",
    "score": "likelier: the first",
    "finetune_and_predict": "person  0.99  The actor was born in 1931 and died in 1990.",
}


def test_every_script_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", SAYS)
def test_a_script_runs_and_says_what_it_promises(name: str) -> None:
    done = run_python(EXAMPLES / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
