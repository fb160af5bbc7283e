"""The other verbs that train, with weights divided between two processes, against one process; and ranks that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.model_files.run import CHECKPOINTS
from discern.pretraining.evaluate import evaluate
from discern.progress import Silent
from discern.training import checkpoint
from discern.training.config import TrainConfig
from discern.training.distributed import Ranks, check_ranks
from tests.data.small_text import made_up, plain
from tests.processes import run_ranks
from tests.small.run import make_run
from tests.small.task import small_request

TRAIN = """
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from discern.errors import ConfigError, DataError
from discern.pretraining.adapt import adapt
from discern.pretraining.bench import bench
from discern.progress import Silent
from tests.small.task import Finetuning, finetune

world, out, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ.get("RANK", "0"))
os.chdir(world / "0")
divided = (f"train.parallel={sys.argv[3]}",)
results = {}
few = (*divided, "train.max_steps=4", "train.checkpoint_every_steps=2", "train.evaluate_every_steps=2")
speed = bench(preset="tiny", overrides=(*divided, "model.num_layers=1"), vocab_size=200, seconds=0.0, progress=Silent())
results["bench"] = speed and speed["processes"]
results["adapt"] = adapt(world / "model", data=world / "data", out=out / "adapted", overrides=few, progress=Silent())
files = ("files.train=train.csv", "files.dev=dev.csv", "files.text=review", "files.label=stars")
request = Finetuning(
    str(world / "model"),
    out / "finetuned",
    # This head also reads the word table, which is divided as well.
    overrides=(*files, *few, "task.pooling=pair", "train.sequences_per_step=12", "finetune.dropout=0", "finetune.keep=best"),
    baselines=False,
)
results["finetune"] = finetune(request, Silent())["median"]
sweep = ["learning_rate=1e-9,3e-3"]
swept = replace(request, out=out / "swept", overrides=(*request.overrides, "train.max_steps=2"), sweep=sweep)
results["sweep"] = finetune(swept, Silent())["best_folder"]
if rank == 0:
    (out / "results.json").write_text(json.dumps(results))
"""
DIFFER = """
import socket
from discern.training import distributed
from discern.training.config import TrainConfig
from discern.training.distributed import check_ranks, join_ranks

os.chdir(world / str(rank))
out = out / "refused"
first = f"process 1 on {socket.gethostname()} "


def refused(action, *parts, kind=ConfigError):
    try:
        action()
    except kind as error:
        assert all(part in error.message for part in parts), error.message
    else:
        raise AssertionError("nothing was refused")


request = replace(request, out=out)
refused(lambda: finetune(request, Silent()), first + "differs from process 0", "examples of own (train): ")
refused(lambda: finetune(replace(request, sweep=sweep), Silent()), "examples of own (train): ")
os.chdir(world / "0")
odd = replace(request, overrides=(*request.overrides, "train.sequences_per_step=9"))
refused(lambda: finetune(odd, Silent()), "train.sequences_per_step 9 cannot be divided evenly among 2 processes")
model = world / ("model" if rank == 0 else "another")
refused(lambda: finetune(replace(request, model=str(model)), Silent()), "model: ")
refused(lambda: adapt(model, data=world / "data", out=out, overrides=few, progress=Silent()), "model to start from: ")

with join_ranks("cpu") as ranks:
    check = lambda config=TrainConfig(), tokenizer="a": check_ranks(ranks, out / "not" / "there", config, tokenizer=tokenizer)
    check()
    refused(lambda: check(tokenizer="ab"[rank]), first, "tokenizer: a in process 0, b in process 1")
    refused(lambda: check(TrainConfig(max_steps=8 - rank)), first, "max_steps: 8 in process 0, 7 in process 1")

    # As if the folder of rank 1 were another one under the same name.
    distributed._PATIENCE = 0.2
    if rank == 1:
        os.listdir = lambda _: []
    refused(check, first, f"sees what process 0 writes to {out.parent}: yes in process 0, no in process 1")

    def full(self, **options):
        raise OSError(28, "No space left on device")

    if rank == 0:
        Path.touch = full
    refused(check, "No space left on device", kind=DataError)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and one with other weights, a text in its tokens, and files of a task that the second machine has changed."""
    folder = tmp_path_factory.mktemp("world")
    model = make_run(folder / "model", overrides=("model.hidden_dropout=0", "model.attention_dropout=0"))
    shutil.copytree(folder / "model", folder / "another")
    moved = {name: tensor + 0.001 for name, tensor in checkpoint.model_tensors(model).items()}
    checkpoint.save(folder / "another" / CHECKPOINTS, checkpoint.Contents(moved, {}, {}, {"step": 21}), 2)
    for rank in ("0", "1"):
        (folder / rank).mkdir()
        small_request(folder / "model", folder / rank)
    with (folder / "1" / "train.csv").open("a") as stream:
        stream.write("a line that only the second machine has,good\n")
    (folder / "text").write_text(plain(made_up(80)))
    tokenizer = TokenizerChoice(path=folder / "model" / "tokenizer.json")
    build = PrepareOptions(heldout=0.1, workers=1)
    prepare([str(folder / "text")], out=folder / "data", tokenizer=tokenizer, options=build, progress=Silent())
    return folder


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What one process writes, and what two with divided weights write."""
    folders = []
    for processes, body, parallel in ((1, TRAIN, "ddp"), (2, TRAIN + DIFFER, "fsdp")):
        folders.append(tmp_path_factory.mktemp(parallel))
        (folders[-1] / "program.py").write_text(body)
        run_ranks(processes, folders[-1] / "program.py", world, folders[-1], parallel)
    return folders


def results(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "results.json").read_text())
    return content


def assert_equal(tensors: list[dict[str, torch.Tensor]], tolerance: float) -> None:
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name], rtol=0, atol=tolerance)


def test_divided_weights_are_adapted_as_whole_ones(trained: list[Path], world: Path) -> None:
    assert_equal([checkpoint.load(out / "adapted" / "checkpoints" / "step-00000004").model for out in trained], 1e-5)
    one, two = (results(out)["adapt"] for out in trained)
    for when in ("before", "after"):
        assert two[when]["data"] == pytest.approx(one[when]["data"], rel=1e-3)
    metrics = [evaluate(out / "adapted", data=world / "data", progress=Silent(), warn=pytest.fail) for out in trained]
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-5)


def test_divided_weights_are_finetuned_swept_and_measured_as_whole_ones(trained: list[Path]) -> None:
    for folder in ("finetuned", "swept/learning_rate=3e-3"):
        # Adam divides by the root of squares that are near 0 for some weights, which magnifies the order of a sum.
        assert_equal([load_file(out / folder / "seed-0" / "model.safetensors") for out in trained], 1e-4)
    one, two = map(results, trained)
    assert (one["finetune"], one["sweep"]) == (two["finetune"], two["sweep"])
    assert (one["bench"], two["bench"]) == (1, 2)


def test_ranks_that_differ_are_named_before_anything_is_written(trained: list[Path], tmp_path: Path) -> None:
    assert not (trained[1] / "refused").exists()  # what DIFFER checks has not failed, or there would be no results
    check_ranks(Ranks(0, 1, torch.device("cpu")), tmp_path / "out", TrainConfig())
    assert list(tmp_path.iterdir()) == []
