"""The verb `discern predict`: its streams and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from discern.cli.main import main
from tests.small.finetuned import SINGLE, make_finetuned


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_finetuned(tmp_path_factory.mktemp("predict") / "model", own=SINGLE)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    path.write_text("review,x\nthe chef,1\nhello,2\n")
    return path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of `discern predict ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["discern", "predict", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_lines_go_to_stdout_and_nothing_else_does(
    model: Path, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, model, table) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines] == [0, 1]
    assert "logits" not in lines[0]
    assert call(monkeypatch, model, table, "--logits", "--text", "x") == 0
    assert "logits" in json.loads(capsys.readouterr().out.splitlines()[0])


def test_json_without_a_file_holds_the_predictions(
    model: Path, table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, model, table) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert call(monkeypatch, model, table, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"rows", "seconds", "rows_per_second", "predictions"}
    assert found["predictions"] == lines


def test_json_sums_up_what_was_written(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert call(monkeypatch, model, table, "--out", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary) == {"rows", "seconds", "rows_per_second", "out"}
    assert (summary["rows"], summary["out"]) == (2, str(out))
    assert len(out.read_text().splitlines()) == 2
    assert call(monkeypatch, model, table, "--out", out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2 rows in ")


def test_wrong_questions_and_failures(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, model, table, "--text", "y") == 2
    assert call(monkeypatch, model, tmp_path / "nowhere.csv") == 1
    assert "nowhere.csv" in capsys.readouterr().err
    assert call(monkeypatch, tmp_path, table) == 1
    assert "discern finetune MODEL --out OUT" in capsys.readouterr().err
    assert call(monkeypatch, model, table, "--format", "docx") == 2
    assert call(monkeypatch, model, table, "--format", "conll") == 2
    assert "is for files to tag" in capsys.readouterr().err


def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") == 0
    assert "discern predict OUT new-reviews.csv" in capsys.readouterr().out
