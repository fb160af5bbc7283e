"""Confusion and calibration from the predictions of a seed and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import DataError
from discern.report.page import Page, render_page
from discern.report.predictions import Judged, confusion, read_judged, reliability


def prediction(identity: str, label: str, p: float) -> dict[str, Any]:
    return {"id": identity, "label": label, "probabilities": {label: p, "other": 1 - p}}


def write(folder: Path, *records: dict[str, Any]) -> None:
    (folder / "predictions-own.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def test_what_is_no_mistake_is_correct(tmp_path: Path) -> None:
    write(tmp_path, prediction("0", "good", 0.9), prediction("1", "good", 0.6), prediction("2", "bad", 0.7))
    found = read_judged(tmp_path, "own", [{"id": "1", "gold": "bad"}])
    assert found == [Judged("good", "good", 0.9), Judged("bad", "good", 0.6), Judged("bad", "bad", 0.7)]
    matrix = confusion("t", found)
    assert matrix is not None
    assert (matrix.labels, matrix.rows) == (["bad", "good"], [[1, 1], [0, 1]])
    assert matrix.cells(0) == [(1, "0.500", "right"), (1, "0.500", "wrong")]
    assert matrix.cells(1) == [(0, "0.000", ""), (1, "1.000", "right")]
    assert matrix.note.startswith("2 of 3 predictions are correct")


def test_calibration_by_hand() -> None:
    chart = reliability("t", [Judged("a", "a", 0.85), Judged("b", "a", 0.85), Judged("a", "a", 1.0), Judged("a", "a", 1.0)])
    assert chart is not None
    (line,) = chart.lines
    assert (list(line.steps), list(line.values)) == ([0.85, 1.0], [0.5, 1.0])
    assert line.label == "expected calibration error 0.175"  # (2 x 0.35 + 2 x 0) / 4


def test_other_tasks_repeated_ids_and_many_labels_have_no_pictures(tmp_path: Path) -> None:
    assert read_judged(tmp_path, "own", []) == []
    write(tmp_path, {"id": "0", "score": 2.5})
    assert read_judged(tmp_path, "own", []) == []
    write(tmp_path, prediction("0", "good", 0.9), prediction("0", "bad", 0.9))
    assert read_judged(tmp_path, "own", []) == []
    assert confusion("t", [Judged(str(n), str(n), 0.5) for n in range(21)]) is None
    assert confusion("t", []) is None
    assert reliability("t", []) is None
    (tmp_path / "predictions-own.jsonl").write_text("{")
    with pytest.raises(DataError, match="predictions-own"):
        read_judged(tmp_path, "own", [])


def test_other_line_breaks_in_a_label_break_no_line(tmp_path: Path) -> None:
    label = "so\u2028so\x85"
    records = [prediction("0", label, 0.9), prediction("1", "good", 0.6)]
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records)
    (tmp_path / "predictions-own.jsonl").write_text(text, encoding="utf-8")
    assert [each.predicted for each in read_judged(tmp_path, "own", [])] == [label, "good"]


def test_labels_are_escaped_and_each_cell_has_its_number() -> None:
    matrix = confusion("<i>", [Judged("<b>", "<b>", 0.9), Judged("<b>", "x", 0.9)])
    assert matrix is not None
    html = render_page(Page("t", [], [], confusions=[matrix]))
    assert "<b>" not in html.replace("<figcaption><b>", "")
    assert '<td class="wrong" style="--p:0.500">1</td>' in html
