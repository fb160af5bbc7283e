"""The scripts under examples/ run as they stand, on the model that is shipped, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "encode": "): The village lies on the left bank of the river.",
    "detect_and_fill": "instead:",
    "score": "likelier: the first",
    "finetune_and_predict": "person  1.00  The actor was born in 1931 and died in 1990.",
}


def test_every_script_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_a_script_runs_and_says_what_it_promises(name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
