"""Two processes against one: the same positions and uniforms, the same gradients, the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from discern.objectives import objectives
from discern.training import checkpoint

# All objectives after one another, as starting processes takes longer than training.
PROGRAM = """
import os
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from tests.training.test_loop import OPTIMIZERS, context
from tests.training.test_step_sizes import scheduled
from discern.objectives import objectives
from discern.training import checkpoint
from tests.support import MODELS, settings
from discern.training.loop import train
from discern.training.state import State
from discern.training.distributed import join_ranks

out, micro = Path(sys.argv[1]), int(sys.argv[2]) or None
parallel = dict(ddp=dict(), fsdp=dict(parallel="fsdp"), hsdp=dict(parallel="hsdp", shard_ranks=2))[sys.argv[3]]
with join_ranks("cpu") as ranks:
    for run_name in sys.argv[4:]:
        name, _, optimizer = run_name.partition("+")
        factory = objectives.load(name)
        model = dict(hidden_dropout=0.0, attention_dropout=0.0, **MODELS.get(name, dict()))
        given = factory.Config()
        if optimizer == "modernbert":
            model |= dict(encoder="modernbert", local_window=8)
            given = factory.Config(tying="gradient-disentangled")
        objective = factory(given, settings(**model))
        objective.initialize(0)
        options = OPTIMIZERS.get(optimizer, dict())
        steps = dict(max_steps=10, log_every_steps=1, evaluate_every_steps=5, **parallel)
        folder = out / (run_name if ranks.writes else "other")
        if optimizer == "growing":
            own = dict(masking="entropy") if "masking" in factory.Config.model_fields else dict()
            run = scheduled(folder, name, own=own, model=model, micro_batch_size=micro, **steps)
        else:
            run = context(folder, objective, micro_batch_size=micro, **steps, **options)
        object.__setattr__(run, "ranks", ranks)
        train(run, State())
# a thread of a group that lives on may abort the process at its end
threads = [Path("/proc/self/task", number, "comm").read_text().strip() for number in os.listdir("/proc/self/task")]
assert not [name for name in threads if "gloo" in name], threads
"""
GROWING = ["rtd+growing", "electric+growing", "permutation-lm+growing"]
NAMES = [*objectives.names(), *(f"{name}+muon" for name in objectives.names()), "rtd+stable-adamw", "rtd+modernbert", *GROWING]
"""Objectives, some with the optimizer of `OPTIMIZERS` after a plus; 'growing': with schedules and masking 'entropy';
'modernbert': on that encoder, with disentangled embeddings."""
DIVIDED = {
    "fsdp": (2, ["rtd+muon", "rtd+modernbert", "rtd+growing", "rtd+stable-adamw", "electric", "permutation-lm", "mlm"]),
    "hsdp": (4, ["rtd"]),
}
"""Number of processes, and some of the runs, for each way to divide the weights."""


def run_ranks(processes: int, program: Path, *arguments: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    line = [sys.executable, *launcher, str(program), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int | str, Path]:
    """Folders with a run of each objective, by the number of processes, or by how they divide the weights."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    made: dict[int | str, Path] = {}
    for processes, micro in ((1, 0), (2, 2)):
        made[processes] = folder / str(processes)
        made[processes].mkdir()
        run_ranks(processes, program, str(made[processes]), str(micro), "ddp", *NAMES)
    for name, (processes, names) in DIVIDED.items():
        made[name] = folder / name
        made[name].mkdir()
        run_ranks(processes, program, str(made[name]), "2", name, *names)
    return made


def read(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    contents = checkpoint.load(folder / "checkpoints" / "step-00000010")
    groups = {"model": contents.model, "average": contents.average, "optimizer": contents.optimizer, "carry": contents.carry}
    return {f"{group} {key}": tensor for group, tensors in groups.items() for key, tensor in tensors.items()}, records


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(runs: dict[int | str, Path], name: str) -> None:
    assert_equal(runs[1] / name, runs[2] / name)


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode, (_, names) in DIVIDED.items() for name in names])
def test_divided_weights_equal_those_of_one_process(runs: dict[int | str, Path], mode: str, name: str) -> None:
    assert_equal(runs[1] / name, runs[mode] / name)
    assert not (runs[mode] / name / "checkpoints" / "step-00000010" / "model.safetensors").exists()


def assert_equal(first: Path, second: Path) -> None:
    one, records_one = read(first)
    two, records_two = read(second)
    assert records_one[0]["grad_norm"] == pytest.approx(records_two[0]["grad_norm"], rel=1e-5)
    assert records_one[0]["loss"] == pytest.approx(records_two[0]["loss"], rel=1e-6)
    assert [r["tokens"] for r in records_one] == [r["tokens"] for r in records_two]
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, two[key], rtol=0, atol=1e-5)
    held = [key for key in records_one[-1] if "accuracy" in key or key.startswith("heldout")]
    assert held
    assert {key: records_two[-1][key] for key in held} == pytest.approx({key: records_one[-1][key] for key in held}, abs=2e-3)
