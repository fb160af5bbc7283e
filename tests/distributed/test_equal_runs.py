"""Runs of several processes against those of one: the same positions and uniforms, gradients, weights and memories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from discern.errors import CheckpointError
from discern.objectives import objectives
from discern.training import checkpoint
from tests.distributed.group import Leg, run_group

OPTIONS = ["tying gradient-disentangled", "algorithm two-stage", "algorithm adversarial", "sentence-contrastive"]
SHARDED = [
    "rtd+muon",
    "rtd+modernbert",
    "rtd+deberta",
    "rtd+stable-adamw",
    "electric+growing",
    "permutation-lm+growing",
    *OPTIONS,
]
NAMES = [*SHARDED, *(name for name in objectives.names() if name != "rtd")]
RUNS = {
    1: [(name, "ddp") for name in NAMES],
    2: [*((name, "ddp") for name in NAMES if name not in OPTIONS), *((name, "fsdp") for name in SHARDED)],
    4: [],
}
"""Runs of one and of two processes."""
CHAINS = [
    (1, [Leg("rtd+chain", "ddp", "whole", 6), Leg("rtd+chain", "ddp", "chain", 2), Leg("memory", "ddp", "memory", 4)]),
    (2, [Leg("rtd+chain", "fsdp", "chain", 4), Leg("memory", "ddp", "memory-chain", 2)]),
    (4, [Leg("rtd+chain", "fsdp", "chain", 5)]),
    (1, [Leg("rtd+chain", "ddp", "chain", 6), Leg("memory", "ddp", "memory-chain", 4)]),
]
"""Runs that go on with another number of processes, and the same of one process throughout."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each run, named after the number of processes, how they share the work, and the run."""
    folder = tmp_path_factory.mktemp("groups")
    for processes, legs in CHAINS:
        runs = RUNS[processes] if legs is not CHAINS[-1][1] else []
        run_group(processes, folder, [*(Leg(name, how, f"{processes}-{how}-{name}") for name, how in runs), *legs])
    return folder


def read(folder: Path) -> tuple[checkpoint.Contents, list[dict[str, float]]]:
    contents = checkpoint.load_newest(folder / "checkpoints", pytest.fail)
    assert contents is not None
    return contents, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal(one: checkpoint.Contents, other: checkpoint.Contents, tolerance: float = 1e-5) -> None:
    assert one.state["tokens"] == other.state["tokens"]
    for part in ("model", "average", "optimizer", "carry"):
        expected, actual = getattr(one, part), getattr(other, part)
        assert expected.keys() == actual.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close({key: actual[key]}, {key: tensor}, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("processes", "parallel", "name"),
    [(2, how, name) for name, how in RUNS[2]],
)
def test_several_processes_equal_one(out: Path, processes: int, parallel: str, name: str) -> None:
    (one, records), (other, others) = (read(out / folder) for folder in (f"1-ddp-{name}", f"{processes}-{parallel}-{name}"))
    assert_equal(one, other)
    losses = [key for key in records[0] if key.endswith("loss") or key in ("grad_norm", "generator_entropy")]
    assert {key: others[0][key] for key in losses} == pytest.approx({key: records[0][key] for key in losses}, rel=1e-5)
    assert [record["tokens"] for record in records] == [record["tokens"] for record in others]
    heldout = [key for key in records[-1] if "accuracy" in key or key.startswith("heldout")]
    assert heldout
    assert {key: others[-1][key] for key in heldout} == pytest.approx({key: records[-1][key] for key in heldout}, abs=2e-3)


@pytest.mark.parametrize(("whole", "chain", "tolerance"), [("whole", "chain", 1e-5), ("memory", "memory-chain", 1e-4)])
def test_a_run_goes_on_with_another_number_of_processes(out: Path, whole: str, chain: str, tolerance: float) -> None:
    (one, _), (other, _) = (read(out / folder) for folder in (whole, chain))
    assert_equal(one, other, tolerance)
    assert [*one.carry] == ([] if whole == "whole" else [f"memory.slot{slot}" for slot in range(8)])


def test_every_process_writes_its_part(out: Path) -> None:
    folder = out / "chain" / "checkpoints"
    written = {step: sorted(path.name for path in (folder / f"step-{step:08d}").iterdir()) for step in (2, 4, 5, 6)}
    tensors = ["average.safetensors", "checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert written[2] == written[6] == tensors
    for step, processes in ((4, 2), (5, 4)):
        parts = [f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in range(1, processes + 1)]
        assert written[step] == ["checksums.json", *parts, "state.json"]
    part, whole = load_file(folder / "step-00000004" / parts[0]), checkpoint.load(folder / "step-00000004")
    for kind, all_tensors in (("model", whole.model), ("optimizer", whole.optimizer)):
        divided = {f"{kind}/{name}": tensor for name, tensor in all_tensors.items() if tensor.ndim > 1}
        assert divided
        assert all(len(part[name]) == -(-len(tensor) // 2) for name, tensor in divided.items())


def test_a_missing_or_damaged_part_is_named(out: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(out / "chain" / "checkpoints" / "step-00000005", tmp_path / "step-00000005")
    part = copied / "shard-00002-model-00001-of-00001.safetensors"
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(CheckpointError, match=part.name):
        checkpoint.load(copied)
    part.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(CheckpointError, match=f"{part.name} is damaged"):
        checkpoint.load(copied)


@pytest.mark.slow
def test_compiled_networks_have_the_weights_of_eager_ones(tmp_path: Path) -> None:
    run_group(2, tmp_path, [Leg("rtd+muon", "fsdp", name, compiled=name == "compiled") for name in ("eager", "compiled")])
    eager, compiled = (read(tmp_path / name)[0] for name in ("eager", "compiled"))
    assert_equal(eager, compiled)
