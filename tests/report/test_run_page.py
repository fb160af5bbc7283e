"""`discern report` on runs made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from discern.cli.main import main
from discern.errors import ConfigError, DataError
from discern.inference.detection import Detection
from discern.report.run_page import report
from discern.storage.checksums import write_recorded
from tests.report.test_curves import MLM, RTD
from tests.report.test_page import assert_stands_alone, structure
from tests.small.run import make_run

FOUND = Detection("The <b>chef</b>", ["the", "chef"], [(0, 3), (7, 11)], [0.25, 0.75])


@pytest.mark.parametrize(
    ("overrides", "line", "shown"),
    [
        ([], RTD, ["replaced token detection", "Generator", "Discriminator AUC", "0.7000"]),
        (["train.max_hours=0.001"], RTD | {"seconds": 3.7}, [", when its time was used"]),
        (["objective.name=mlm"], MLM, ["masked language modeling", "Encoder", "Accuracy of word prediction"]),
    ],
)
def test_both_kinds_of_run(overrides: list[str], line: dict[str, float], shown: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=overrides, metrics=[line])
    path = report(tmp_path / "run", None, [FOUND])
    assert path == tmp_path / "run" / "report.html"
    html = path.read_text(encoding="utf-8")
    assert_stands_alone(html)
    structure(html)
    assert "<svg" in html
    for text in [*shown, "&lt;b&gt;", 'title="0.750">chef</span>', "1,611 documents", "[objective]"]:
        assert text in html, text
    assert "Precision setting" in html
    assert str(tmp_path) not in html
    again = report(tmp_path / "run", tmp_path / "again.html", [FOUND])
    assert again.read_bytes() == path.read_bytes()


def test_without_evaluation_it_says_so(tmp_path: Path) -> None:
    make_run(tmp_path / "run", metrics=[{"step": 1}])
    html = report(tmp_path / "run", None).read_text(encoding="utf-8")
    assert "There are no held-out metrics" in html
    assert "<svg" not in html
    assert "<table" not in html


def test_what_cannot_be_shown_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run"):
        report(tmp_path, None)
    make_run(tmp_path / "run", metrics=[])
    with pytest.raises(DataError, match="nothing to show yet"):
        report(tmp_path / "run", None)
    write_recorded(tmp_path / "run", {"metrics.jsonl": json.dumps(MLM) + '\n{"step": 2, "lo'})
    with pytest.raises(ConfigError, match="is a folder"):
        report(tmp_path / "run", tmp_path)
    with pytest.raises(DataError, match="cannot write"):
        report(tmp_path / "run", tmp_path / "none" / "page.html")
    assert report(tmp_path / "run", None).exists()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    out = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["discern", "report", str(tmp_path / "run"), "--out", str(out), "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "bytes": out.stat().st_size}
