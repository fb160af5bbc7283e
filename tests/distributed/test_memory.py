"""Two processes that remember against one: the same weights, and every slot's memory in the checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_two_ranks import run_ranks

PROGRAM = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from discern.training import checkpoint
from discern.training.loop import train
from discern.training.state import State
from discern.training.distributed import join_ranks
from tests.training.test_memory import build, context

out, steps = Path(sys.argv[1]), int(sys.argv[2])
objective, state = build(0.0), State()
contents = checkpoint.load_newest(out / "checkpoints", print)
if contents is not None:
    checkpoint.load_model_tensors(objective, contents.model, "here")
    objective.load_carry_state(contents.carry)
    state = State(contents.step, contents.state["tokens"], 0.0, contents.state["updates"], dict(contents.optimizer))
with join_ranks("cpu") as ranks:
    run = context(out if ranks.writes else out / "other", objective, max_steps=steps)
    object.__setattr__(run, "ranks", ranks)
    train(run, state)
"""


def launch(folder: Path, out: str, processes: int, steps: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    run = folder / out
    run.mkdir(exist_ok=True)
    run_ranks(processes, program, str(run), str(steps))
    saved = run / "checkpoints" / f"step-{steps:08d}"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return load_file(saved / "model.safetensors") | load_file(saved / "carry.safetensors"), records


def test_two_processes_remember_what_one_does(tmp_path: Path) -> None:
    one, records_one = launch(tmp_path, "one", 1, 6)
    launch(tmp_path, "two", 2, 3)
    # And from there with one process, which finds the memory of all slots.
    two, records_two = launch(tmp_path, "two", 1, 6)
    # The journal of the second session begins at its first step.
    assert records_two[0]["step"] == 4
    assert records_one[3]["loss"] == pytest.approx(records_two[0]["loss"], rel=1e-5)
    assert one.keys() == two.keys()
    assert {name for name in one if "memory" in name} == {f"memory.slot{slot}" for slot in range(8)}
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5 if "memory" not in name else 1e-4)
