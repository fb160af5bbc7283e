"""No verb writes over, into or around what it was given to read, whatever the paths look like."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from discern.api.verbs import prepare
from discern.cli.main import VERBS, application
from discern.cli.outputs import OUTPUTS, guarded, inputs_of
from discern.errors import ConfigError
from discern.model_files.export import export
from discern.progress import Silent
from discern.report.run_page import report
from discern.storage.output import check_output
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run


def verbs() -> Iterator[tuple[str, Any]]:
    for verb in VERBS:
        name = f"{verb}_" if iskeyword(verb) else verb
        entry = getattr(import_module(f"discern.cli.{name}"), name)
        if not isinstance(entry, typer.Typer):
            yield verb, entry


def discern(*arguments: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(application(), [str(each) for each in arguments])
    return found.exit_code, found.output


def contents(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, an export of it, a fine-tuned model and a data set."""
    folder = tmp_path_factory.mktemp("models")
    make_run(folder / "run")
    export(folder / "run", out=folder / "exported", all_networks=True, progress=Silent(), warn=str)
    make_finetuned(folder / "tuned", stars=SINGLE)
    (folder / "t.txt").write_text("The old town.\n")
    (folder / "t.csv").write_text("review\nThe old town.\n")
    prepare([folder / "t.txt"], out=folder / "data", tokenizer=folder / "run" / "tokenizer.json", heldout=0)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "report run --out run/run.json",
        "report run --out run/checkpoints/../config.toml",
        "report tuned --out tuned/results.json",
        "predict tuned t.csv --out tuned/seed-0/model.safetensors",
        "detect exported t.txt --out exported/model.safetensors",
        "detect exported t.txt --html exported/config.json",
        "detect exported t.txt --out linked/model.safetensors",
        "score exported t.txt --out exported/tokenizer.json",
        "rerank exported t.txt --out exported/README.md",
        "export run --out run",
        "export run --out run/export",
        "export tuned --out tuned/export",
        "export exported --out exported/again",
        "import exported --out exported/import",
        "finetune exported --train t.csv --out exported/tuned",
        "finetune exported --train t.csv --out .",
        "pretrain --preset tiny --data exported --out exported/run",
        "pretrain --preset tiny --init-from run --data t --out run/next",
        "adapt run --data t --out run/adapted",
        "predict tuned t.csv --out data/train-0.tokens",
        "detect exported t.txt --html data/token-counts.txt",
        "prepare t.txt --out tuned/data",
    ],
)
def test_what_a_verb_reads_is_never_written_over(command: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    (models / "linked").unlink(missing_ok=True)
    (models / "linked").symlink_to("exported")
    before = contents(models)
    code, said = discern(*command.split())
    assert code == 2, said
    assert "hint: " in said
    assert any(word in said for word in ("inside", "same file", "cannot replace itself", "holds")), said
    assert contents(models) == before


@pytest.mark.parametrize("kind", ["data", "run", "exported", "tuned"])
def test_no_file_of_a_result_is_an_output_of_another_verb(kind: str, models: Path) -> None:
    places = [path for path in (models / kind).rglob("*") if path.is_file()]
    assert len(places) > 4
    for out in [*places, *{path.with_name("new.jsonl") for path in places}]:
        with pytest.raises(ConfigError, match=rf"lies inside .*{kind}, which is"):
            check_output("--out", out, "found.jsonl", models / "t.csv")


def test_every_verb_is_guarded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model, given wherever a verb reads something, and an output inside of it: refused before anything is read."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("precious")
    pairs = [
        (verb, entry, out, name)
        for verb, entry in verbs()
        for out in OUTPUTS
        if out in inspect.signature(entry).parameters
        for name in inputs_of(entry)
    ]
    for verb, entry, out, name in pairs:
        with pytest.raises(SystemExit) as stopped:
            guarded(entry)(**{name: [model], out: model / "model.safetensors"})
        assert (stopped.value.code, "inside" in capsys.readouterr().err) == (2, True), (verb, out, name)
    assert len(pairs) > 20
    assert contents(tmp_path) == {"model/model.safetensors": b"precious"}


def test_every_option_that_writes_is_known() -> None:
    for verb, entry in verbs():
        for name, parameter in inspect.signature(entry, eval_str=True).parameters.items():
            info = parameter.annotation.__metadata__[0]
            if "Path" in str(parameter.annotation) and (info.help or "").startswith(("Write", "File to write", "New folder")):
                assert name in OUTPUTS, f"discern {verb}: {name} is written to, and not in discern.cli.outputs.OUTPUTS"


def test_the_report_of_a_run_may_lie_in_it(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "run", tmp_path / "run")
    run = tmp_path / "run"
    before = contents(run)
    for out in (None, run / "report.html"):
        assert report(run, out) == run / "report.html"
    assert contents(run) == before | {"report.html": (run / "report.html").read_bytes()}
    code, said = discern("report", run, "--out", run / "report.html")
    assert code == 0, said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_stays_a_device(models: Path, tmp_path: Path) -> None:
    if subprocess.run(["mknod", str(tmp_path / "null"), "c", "1", "3"], check=False).returncode:
        pytest.skip("this container makes no devices")
    for command in (("report", models / "run"), ("score", models / "exported", models / "t.txt")):
        code, said = discern(*command, "--out", tmp_path / "null")
        assert code == 0, said
        assert (tmp_path / "null").is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["null"]
