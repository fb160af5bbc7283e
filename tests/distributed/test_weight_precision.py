"""Weights in bfloat16 on two processes: all round alike, and the run is that of one process with as many micro-batches."""

import json
from pathlib import Path

import pytest
import torch

from discern.training import checkpoint
from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import hashlib
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from discern.training.checkpoint import model_tensors
from discern.training.context import State
from discern.training.loop import train
from discern.training.parallel import join_ranks
from tests.training.test_loop import build
from tests.training.test_weight_precision import run_context

out, micro = Path(sys.argv[1]), int(sys.argv[2])
CASES = [("bfloat16", "adamw"), ("bfloat16-masters", "adamw"), ("bfloat16", "muon")]
with join_ranks("cpu") as ranks:
    for kind, rule in CASES:
        folder = out / f"{{kind}}-{{rule}}" if ranks.writes else out / "other"
        options = dict(max_steps=6, log_every_steps=1, micro_batch_size=micro, optimizer=dict(name=rule))
        run = run_context(folder, kind, build(0.0), **options)
        object.__setattr__(run, "ranks", ranks)
        state = State()
        train(run, state)
        tensors = model_tensors(run.objective) | state.optimizer
        digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()
        assert len(set(ranks.gather(digest))) == 1, f"the processes differ: {{kind}}, {{rule}}"
"""
CASES = ["bfloat16-adamw", "bfloat16-masters-adamw", "bfloat16-muon"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    made = {processes: folder / str(processes) for processes in (1, 2)}
    for processes, out in made.items():
        out.mkdir()
        run_ranks(processes, program, str(out), "4")
    return made


@pytest.mark.parametrize("name", CASES)
def test_two_processes_round_as_one_does(runs: dict[int, Path], name: str) -> None:
    one, two = (checkpoint.load(runs[each] / name / "checkpoints" / "step-00000006") for each in (1, 2))
    for key, tensor in one.model.items():
        assert torch.equal(tensor, two.model[key]), key
    losses = [
        [json.loads(line)["loss"] for line in (runs[each] / name / "metrics.jsonl").read_text().splitlines()] for each in (1, 2)
    ]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
