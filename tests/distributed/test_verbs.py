"""The other verbs that train, with weights divided between two processes, against one process; ranks with different files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.artifacts.run import CHECKPOINTS
from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.pretraining.evaluate import evaluate
from discern.progress import Silent
from discern.training import checkpoint
from tests.data.small_text import made_up, plain
from tests.distributed.test_two_ranks import run_ranks
from tests.small.run import make_run
from tests.small.task import small_request

START = """
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from discern.errors import ConfigError
from discern.pretraining.adapt import adapt
from discern.pretraining.bench import bench
from discern.progress import Silent
from tests.small.task import Finetuning, finetune, sweep

world, out, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ.get("RANK", "0"))
"""
TRAIN = """
divided = (f"train.parallel={sys.argv[3]}",)
found = {}
few = (*divided, "train.max_steps=6", "train.checkpoint_every_steps=3", "train.evaluate_every_steps=3")
speed = bench(preset="tiny", overrides=(*divided, "model.num_layers=1"), vocab_size=200, steps=2, seconds=0.0, progress=Silent())
found["bench"] = speed and speed["processes"]
found["adapt"] = adapt(world / "model", data=world / "data", out=out / "adapted", overrides=few, progress=Silent())
files = json.loads((world / "files.json").read_text())
request = Finetuning(
    str(world / "model"),
    out / "finetuned",
    # This head also reads the word table, which is divided as well.
    overrides=(*files, *few, "task.pooling=pair", "train.sequences_per_step=12", "finetune.dropout=0", "finetune.keep=best"),
    baselines=False,
)
found["finetune"] = finetune(request, Silent())["median"]
swept = replace(request, out=out / "swept", overrides=(*request.overrides, "train.max_steps=3"))
found["sweep"] = sweep(swept, ["learning_rate=1e-9,3e-3"], Silent())["best_folder"]
if rank == 0:
    (out / "found.json").write_text(json.dumps(found))
"""
DIFFER = """
import socket
os.chdir(world / str(rank))
out = out / "refused"
files = ("files.train=train.csv", "files.dev=dev.csv", "files.text=review", "files.label=stars")


def refused(request, say):
    try:
        say(request)
    except ConfigError as error:
        return error.message
    raise AssertionError("nothing was refused")


steps = ("train.max_steps=2", "train.sequences_per_step=12")
request = Finetuning(str(world / "model"), out / "finetuned", overrides=(*files, *steps), baselines=False)
said = refused(request, lambda request: finetune(request, Silent()))
assert said.startswith(f"process 1 on {socket.gethostname()} differs from process 0"), said
assert "examples of own (train): " in said and "(dev)" not in said, said
said = refused(request, lambda request: sweep(request, ["learning_rate=1e-4,3e-4"], Silent()))
assert "examples of own (train): " in said, said

request = replace(request, model=str(world / "model") if rank == 0 else str(world / "other"))
said = refused(request, lambda request: finetune(request, Silent()))
assert "model: " in said, said

def adapted(place):
    adapt(world / place, data=world / "data", out=out / "adapted", overrides=("train.max_steps=2",), progress=Silent())


said = refused("model" if rank == 0 else "another", adapted)
assert "model to start from: " in said, said
odd = replace(request, model=str(world / "model"), overrides=(*request.overrides, "train.sequences_per_step=9"))
said = refused(odd, lambda request: finetune(request, Silent()))
assert said == "train.sequences_per_step 9 cannot be divided evenly among 2 processes", said
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text in its tokens, files of a task, and other models."""
    folder = tmp_path_factory.mktemp("world")
    still = ("model.hidden_dropout=0", "model.attention_dropout=0")
    model = make_run(folder / "model", overrides=still)
    make_run(folder / "other", overrides=(*still, "model.feedforward_size=48"))
    shutil.copytree(folder / "model", folder / "another")
    moved = {name: tensor + 0.001 for name, tensor in checkpoint.model_tensors(model).items()}
    checkpoint.save(folder / "another" / CHECKPOINTS, checkpoint.Contents(moved, {}, {}, {"step": 21}), 2)
    files = [each for each in small_request(folder / "model", folder).overrides if each.startswith("files.")]
    (folder / "files.json").write_text(json.dumps(files))
    (folder / "text").write_text(plain(made_up(80)))
    tokenizer = TokenizerChoice(path=folder / "model" / "tokenizer.json")
    build = BuildOptions(heldout=0.1, workers=1)
    prepare([str(folder / "text")], out=folder / "data", tokenizer=tokenizer, build=build, progress=Silent())
    return folder


def start(world: Path, out: Path, processes: int, body: str, *arguments: str) -> None:
    out.mkdir()
    program = out / "program.py"
    program.write_text(START.format(root=str(Path(__file__).parents[2])) + body)
    run_ranks(processes, program, str(world), str(out), *arguments)


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process writes, and what two with divided weights write."""
    one, two = (tmp_path_factory.mktemp("trained") / name for name in ("one", "two"))
    start(world, one, 1, TRAIN, "ddp")
    for rank in range(2):
        (world / str(rank)).mkdir()
        small_request(world / "model", world / str(rank))
    with (world / "1" / "train.csv").open("a") as stream:
        stream.write("a line that only the second machine has,good\n")
    start(world, two, 2, TRAIN + DIFFER, "fsdp")
    return one, two


def found(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "found.json").read_text())
    return content


def test_divided_weights_are_adapted_as_whole_ones(trained: tuple[Path, Path], world: Path) -> None:
    one, two = trained
    weights = [checkpoint.load(out / "adapted" / "checkpoints" / "step-00000006").model for out in trained]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=1e-5)
    for when in ("before", "after"):
        assert found(two)["adapt"][when]["domain"] == pytest.approx(found(one)["adapt"][when]["domain"], rel=1e-3)
    metrics = [evaluate(out / "adapted", data=world / "data", progress=Silent(), warn=pytest.fail) for out in trained]
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-5)


def test_divided_weights_are_finetuned_as_whole_ones(trained: tuple[Path, Path]) -> None:
    for folder in ("finetuned", "swept/learning_rate=3e-3"):
        one, two = (load_file(out / folder / "seed-0" / "model.safetensors") for out in trained)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            # Adam divides by the root of squares that are near 0 for some weights, which magnifies the order of a sum.
            torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-4)
    first, second = map(found, trained)
    assert (first["finetune"], first["sweep"]) == (second["finetune"], second["sweep"])


def test_divided_weights_are_measured(trained: tuple[Path, Path]) -> None:
    assert [found(out)["bench"] for out in trained] == [1, 2]


def test_ranks_with_other_files_or_models_are_named_before_anything_is_written(trained: tuple[Path, Path]) -> None:
    assert (trained[1] / "found.json").exists()  # what follows it in the program, DIFFER, has not failed either
    assert not (trained[1] / "refused").exists()
