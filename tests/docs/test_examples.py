"""The examples of every `--help`, run as they stand in a folder that has what they name; only what takes hours is made small."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from docs._sphinx.reference import verbs

from tests.docs.test_commands import SMALL
from tests.docs.world import Server, shell

# tests/demo runs the demo, and tests/model_files pushes.
EXAMPLES = [(verb.name, line) for verb in verbs() for line in verb.examples if verb.name != "demo" and "--push" not in line]
# What an example writes must not be there before.
WRITES = {
    "prepare": ["DATA"],
    "pretrain": ["RUN", "DECAYED"],
    "adapt": ["OUT", "OUT-data"],
    "finetune": ["OUT"],
    "compare": ["OUT"],
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("verb", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_runs(verb: str, line: str, world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(world, folder, symlinks=True)
    for name in WRITES.get(verb, []):
        # A folder that the example reads as well is kept.
        if f"--out {name}" in line:
            shutil.rmtree(folder / name, ignore_errors=True)
    for written, small in SMALL:
        line = re.sub(written, small, line)
    if verb in ("serve", "watch"):
        Server(folder, line).stop()
    else:
        shell(folder, line)
