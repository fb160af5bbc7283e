"""The zip for the GLUE site."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.finetuning.submission import SUBMISSION_FILES, write_submission
from discern.tasks.glue import GLUE, read_glue
from tests.tasks.data_folder import data_folder


def test_every_file_is_there_with_all_its_rows(tmp_path: Path) -> None:
    wnli = ["1", "0"] * 73
    scores = [6.0, -1.0, 2.5, *[1.0] * 1376]
    written = write_submission(tmp_path / "made", {("wnli", "test"): wnli, ("stsb", "test"): scores})
    assert written.predicted == ("STS-B.tsv", "WNLI.tsv")
    assert len(written.filled) == 9
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["submission.zip"]
    with zipfile.ZipFile(written.path) as archive:
        assert set(archive.namelist()) == {
            *("CoLA.tsv", "SST-2.tsv", "MRPC.tsv", "STS-B.tsv", "QQP.tsv", "MNLI-m.tsv", "MNLI-mm.tsv"),
            *("QNLI.tsv", "RTE.tsv", "WNLI.tsv", "AX.tsv"),
        }
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    for file in SUBMISSION_FILES:
        lines = files[file.name]
        assert lines[0] == "index\tprediction"
        assert len(lines) == file.rows + 1
        assert lines[-1].startswith(f"{file.rows - 1}\t")
    assert files["WNLI.tsv"][1:3] == ["0\t1", "1\t0"]
    assert files["STS-B.tsv"][1:4] == ["0\t5.000", "1\t0.000", "2\t2.500"]
    assert files["AX.tsv"][1] == "0\tentailment"


def test_the_same_predictions_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = write_submission(tmp_path / "a", {}), write_submission(tmp_path / "a", {})
    again = write_submission(tmp_path / "b", {})
    assert one.path == two.path
    assert two.path.read_bytes() == again.path.read_bytes()


def test_wrong_predictions_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"RTE.tsv: 2 predictions, but the official test set of rte has 3,000 rows"):
        write_submission(tmp_path / "x", {("rte", "test"): ["entailment"] * 2})
    with pytest.raises(DataError, match=r"WNLI.tsv: prediction 0 is 'yes'"):
        write_submission(tmp_path / "x", {("wnli", "test"): ["yes"] * 146})
    with pytest.raises(DataError, match=r"STS-B.tsv: prediction 0 is nan"):
        write_submission(tmp_path / "x", {("stsb", "test"): [float("nan")] * 1379})
    with pytest.raises(ConfigError, match="did you mean 'rte test'"):
        write_submission(tmp_path / "x", {("rte", "tests"): []})
    assert not (tmp_path / "x").exists()


def test_rows_and_majorities_agree_with_the_files_at_hand() -> None:
    checked = 0
    for file in SUBMISSION_FILES:
        folder = data_folder("glue") / GLUE[file.task].folder
        names = GLUE[file.task].files[file.split]
        if any((folder / name).is_file() for name in names):
            assert len(read_glue(file.task, folder, file.split).examples) == file.rows
            checked += 1
    assert checked >= 5
