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
from discern.training.state import State
from discern.training.loop import train
from discern.training.distributed import join_ranks
from tests.training.test_loop import build
from tests.training.test_weight_precision import run_context

out, micro = Path(sys.argv[1]), int(sys.argv[2])
CASES = [
    ("bfloat16", "adamw", "ddp"), ("bfloat16-masters", "adamw", "ddp"), ("bfloat16", "muon", "ddp"),
    ("bfloat16-masters", "muon", "fsdp"),
]
with join_ranks("cpu") as ranks:
    for kind, rule, parallel in CASES:
        folder = out / f"{{kind}}-{{rule}}-{{parallel}}" if ranks.writes else out / "other"
        options = dict(max_steps=6, parallel=parallel, log_every_steps=1, micro_batch_size=micro, optimizer=dict(name=rule))
        run = run_context(folder, kind, build(0.0), **options)
        object.__setattr__(run, "ranks", ranks)
        state = State()
        train(run, state)
        tensors = model_tensors(run.objective) | state.optimizer
        digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()
        assert len(set(ranks.gather(digest))) == 1, f"the processes differ: {{kind}}, {{rule}}, {{parallel}}"
"""
CASES = ["bfloat16-adamw-ddp", "bfloat16-masters-adamw-ddp", "bfloat16-muon-ddp"]


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
    assert values(runs[1] / name, "loss") == pytest.approx(values(runs[2] / name, "loss"), rel=1e-6)


def test_divided_copies_follow_the_loss_curve_of_one_process(runs: dict[int, Path]) -> None:
    one, two = (runs[each] / "bfloat16-masters-muon-fsdp" for each in (1, 2))
    assert values(one, "loss")[0] == pytest.approx(values(two, "loss")[0], rel=1e-7)
    assert values(one, "grad_norm")[0] == pytest.approx(values(two, "grad_norm")[0], rel=1e-5)
    # Not closer: of a table that is used twice, FSDP adds up both gradients in bfloat16, and one process in float32.
    assert values(one, "loss") == pytest.approx(values(two, "loss"), rel=5e-4)
    moments = checkpoint.load(two / "checkpoints" / "step-00000006")
    assert all(tensor.dtype == torch.float32 for tensor in (*moments.model.values(), *moments.optimizer.values()))
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in moments.model.values() if tensor.ndim > 1)


def values(folder: Path, key: str) -> list[float]:
    """A figure of each of the six steps."""
    found = [float(json.loads(line)[key]) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(found) == 6
    return found
