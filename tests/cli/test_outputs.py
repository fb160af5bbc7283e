"""No verb writes over, into or around what it reads, whatever the paths look like."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

import pytest

import discern
from discern.api.verb import VERBS
from discern.errors import ConfigError
from discern.model_files.export import export
from discern.progress import Silent
from discern.storage.files import check_output
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run
from tests.support import run_discern

COMMANDS = [
    "report run --out run/run.json",
    "report run --out run/checkpoints/../config.toml",
    "report tuned --out tuned/results.json",
    "predict tuned t.csv --out tuned/seed-0/model.safetensors",
    "predict tuned t.csv --out data/train-0.tokens",
    "predict tuned t.csv --out t.csv",
    "detect exported t.txt --out exported/model.safetensors",
    "detect exported t.txt --out linked/model.safetensors",
    "detect exported t.txt --html exported/config.json",
    "detect exported t.txt --html data/token-counts.txt",
    "score exported t.txt --out exported/tokenizer.json",
    "embed exported t.txt --out exported/vectors.npy",
    "rerank exported t.txt --out exported/README.md",
    "export run --out run",
    "export run --out run/export",
    "export tuned --out tuned/export",
    "export exported --out exported/again",
    "import exported --out exported/import",
    "finetune exported --train t.csv --out exported/tuned",
    "finetune exported --train t.csv --out .",
    "finetune exported --train t.csv --out new --submission run/zip",
    "pretrain --preset tiny --data exported --out exported/run",
    "pretrain --preset tiny --init-from run --data t --out run/next",
    "adapt run --data t --out run/adapted",
    "prepare t.txt --out tuned/data",
    "compare c.toml --data data --out data/compared",
]


def contents(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, an export of it, a fine-tuned model and a data set."""
    folder = tmp_path_factory.mktemp("models")
    make_run(folder / "run")
    export(folder / "run", out=folder / "exported", all_networks=True, progress=Silent(), warn=str)
    make_finetuned(folder / "tuned", stars=SINGLE)
    (folder / "linked").symlink_to("exported")
    (folder / "t.txt").write_text("The old town.\n")
    (folder / "t.csv").write_text("review\nThe old town.\n")
    discern.prepare(folder / "t.txt", out=folder / "data", tokenizer=folder / "run" / "tokenizer.json", heldout=0)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_verb_reads_is_never_overwritten(command: str, models: Path) -> None:
    before = contents(models)
    done = run_discern(*command.split(), cwd=models)
    assert done.returncode in (1, 2), done
    positional, *options = command.split(" --")
    name, *inputs = positional.split()
    function = getattr(discern, VERBS[name].function.__name__)
    given = dict(option.replace("-", "_", option.partition(" ")[0].count("-")).split() for option in options)
    with chdir(models), pytest.raises(discern.DiscernError) as caught:
        function(*inputs, **given)
    for said in (done.stderr, str(caught.value)):
        assert any(reason in said for reason in ("inside", "cannot replace itself", "holds")), said
        assert "hint: " in said
    assert contents(models) == before


def test_every_option_that_names_an_output_is_among_these_commands() -> None:
    covered = {(command.split()[0], option.split()[0]) for command in COMMANDS for option in command.split(" --")}
    for name, verb in VERBS.items():
        for option in {"out", "html", "submission"} & set(verb.options):
            assert (name, option) in covered or name == "demo", "the demo reads nothing"


@pytest.mark.parametrize("kind", ["data", "run", "exported", "tuned"])
def test_no_file_of_a_folder_of_discern_is_the_output_of_another_verb(kind: str, models: Path) -> None:
    paths = [path for path in (models / kind).rglob("*") if path.is_file()]
    assert len(paths) > 4
    for out in [*paths, *{path.with_name("new.jsonl") for path in paths}]:
        with pytest.raises(ConfigError, match=rf"lies inside .*{kind}, which is"):
            check_output("--out", out, "found.jsonl", models / "t.csv")


def test_the_report_of_a_run_may_be_inside_it(models: Path, tmp_path: Path) -> None:
    run = shutil.copytree(models / "run", tmp_path / "run")
    before, page = contents(run), run / "report.html"
    assert discern.report(run)["out"] == page
    assert run_discern("report", run, "--out", page).returncode == 0
    assert contents(run) == before | {"report.html": page.read_bytes()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_remains_a_device(models: Path, tmp_path: Path) -> None:
    if subprocess.run(["mknod", str(tmp_path / "null"), "c", "1", "3"], check=False).returncode:
        pytest.skip("this container makes no devices")
    assert run_discern("report", models / "run", "--out", tmp_path / "null").returncode == 0
    assert (tmp_path / "null").is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["null"]
