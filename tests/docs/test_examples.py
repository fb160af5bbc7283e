"""The examples of every `--help`, run as they stand in a folder that has what they name; only what takes hours is made small."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from docs._sphinx.reference import verbs

from tests.docs.world import STEPS, Server, shell

# tests/demo runs the demo.
EXAMPLES = [(verb.name, line) for verb in verbs() for line in verb.examples if verb.name != "demo"]
SMALL = {
    "--preset electra-small --data DATA --out RUN --set train.max_hours=10": f"--preset tiny --data DATA --out RUN {STEPS}",
    "--preset electra-small --data DATA=0.7": f"--preset tiny {STEPS} --data DATA=0.7",
    "--set train.max_steps=20000": STEPS,
    "--set train.max_steps=2000": STEPS,
    "--set optimizer.decay_steps=2000": "--set optimizer.decay_steps=2",
    "--add-tokens 500": f"--add-tokens 2 {STEPS}",
    "--vocab-size 8000": "--vocab-size 200",
    "--seeds 3": "--seeds 2",
    "finetune MODEL": "finetune MODEL --set train.max_steps=2",
    "--preset electra-small --data DATA --task-data": f"--preset tiny {STEPS} --data DATA --task-data",
    "bench --preset electra-small": "bench --preset tiny --seconds 0",
    "--precision 0.9": "--precision 0.05",
    "--max-loss 0.01": "--max-loss 1",
    " --port 8080": "",
}
# What an example writes must not be there before.
WRITES = {
    "prepare": ["DATA"],
    "pretrain": ["RUN", "DECAYED"],
    "adapt": ["OUT", "OUT-data"],
    "finetune": ["OUT"],
    "compare": ["OUT"],
}
SERVERS = ("serve", "watch")

pytestmark = pytest.mark.slow


def served(folder: Path, line: str) -> None:
    """Start a server, and stop it when it has named its address."""
    Server(folder, line).stop()


@pytest.mark.parametrize(("verb", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_runs(verb: str, line: str, world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(world, folder, symlinks=True)
    for name in WRITES.get(verb, []):
        # A folder that the example reads as well is kept.
        if f"--out {name}" in line:
            shutil.rmtree(folder / name, ignore_errors=True)
    for written, small in SMALL.items():
        line = line.replace(written, small)
    (served if verb in SERVERS else shell)(folder, line)
