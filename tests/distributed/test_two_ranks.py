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
import json
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

out, micro, starts = Path(sys.argv[1]), int(sys.argv[2]) or None, json.loads(sys.argv[3])
with join_ranks("cpu") as ranks:
    for mode, run_name in ((mode, run_name) for mode, names in starts.items() for run_name in names):
        parallel = dict(parallel=mode, shard_ranks=2 if mode == "hsdp" else None)
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
        folder = out / mode / (run_name if ranks.writes else "other")
        if optimizer == "growing":
            config = dict(masking="entropy") if "masking" in factory.Config.model_fields else dict()
            run = scheduled(folder, name, config=config, model=model, micro_batch_size=micro, **steps)
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
SHARDED = {
    "fsdp": ["rtd+muon", "rtd+modernbert", "rtd+growing", "rtd+stable-adamw", "electric", "permutation-lm", "mlm"],
    "hsdp": ["rtd"],
}
"""Some of the runs for each way to shard the weights: with two processes, and with four."""


def run_ranks(processes: int, program: Path, *arguments: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    line = [sys.executable, *launcher, str(program), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders by the number of processes, with a folder for each way to share the work."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).parents[2])))
    starts = {1: {"ddp": NAMES}, 2: {"ddp": NAMES, "fsdp": SHARDED["fsdp"]}, 4: {"hsdp": SHARDED["hsdp"]}}
    for processes, names in starts.items():
        run_ranks(processes, program, str(folder / str(processes)), "0" if processes == 1 else "2", json.dumps(names))
    return {processes: folder / str(processes) for processes in starts}


def read(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    contents = checkpoint.load(folder / "checkpoints" / "step-00000010")
    groups = {"model": contents.model, "average": contents.average, "optimizer": contents.optimizer, "carry": contents.carry}
    return {f"{group} {key}": tensor for group, tensors in groups.items() for key, tensor in tensors.items()}, records


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(runs: dict[int, Path], name: str) -> None:
    assert_equal(runs[1] / "ddp" / name, runs[2] / "ddp" / name)


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode, names in SHARDED.items() for name in names])
def test_sharded_weights_equal_those_of_one_process(runs: dict[int, Path], mode: str, name: str) -> None:
    sharded = runs[2 if mode == "fsdp" else 4] / mode / name
    assert_equal(runs[1] / "ddp" / name, sharded)
    assert not (sharded / "checkpoints" / "step-00000010" / "model.safetensors").exists()


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
