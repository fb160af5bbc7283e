"""Two processes against one, where phases, shared tables and rewards could go wrong between ranks."""

import json
from pathlib import Path

import pytest
import torch

from discern.training import checkpoint
from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import json
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from discern.training.loop import train
from discern.training.state import State
from discern.training.distributed import join_ranks
from tests.objectives.rtd_options import OPTIONS, build_option
from tests.training.test_loop import context

with join_ranks("cpu") as ranks:
    for parallel in sys.argv[3:]:
        for name in json.loads(sys.argv[2]):
            out = Path(sys.argv[1]) / parallel / name.replace(" ", "-")
            out = out if ranks.writes else out.with_name(out.name + "-other")
            run = context(out, build_option(OPTIONS[name]), max_steps=6, log_every_steps=1, parallel=parallel)
            object.__setattr__(run, "ranks", ranks)
            train(run, State())
"""
NAMES = ["tying gradient-disentangled", "algorithm two-stage", "algorithm adversarial", "sentence-contrastive"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with the runs of one and of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    run_ranks(1, program, str(folder / "1"), json.dumps(NAMES), "ddp")
    run_ranks(2, program, str(folder / "2"), json.dumps(NAMES), "ddp", "fsdp")
    return {processes: folder / str(processes) for processes in (1, 2)}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_equal_one(runs: dict[int, Path], parallel: str) -> None:
    found = runs[1] / "ddp", runs[2] / parallel
    for name in (name.replace(" ", "-") for name in NAMES):
        one, two = (checkpoint.load(out / name / "checkpoints" / "step-00000006").model for out in found)
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(
                tensor, two[key], rtol=0, atol=1e-5, msg=lambda text, key=key, name=name: f"{name} {key}: {text}"
            )
        first, second = (json.loads((out / name / "metrics.jsonl").read_text().splitlines()[0]) for out in found)
        same = [key for key in first if key.endswith("loss") or key in ("grad_norm", "generator_entropy")]
        assert {key: second[key] for key in same} == pytest.approx({key: first[key] for key in same}, rel=1e-5)
