"""Chinese classification from its own formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.clue import CHNSENTICORP_FILES, CLUE_FILES, read_chnsenticorp, read_clue
from discern.tasks.examples import label_counts
from discern.tasks.readers.files import split_file
from tests.tasks.data_folder import data_folder, write


def test_tnews_and_ocnli_by_their_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        '{"label": 104, "label_desc": "x", "sentence": "股市上涨", "keywords": "", "id": 7}',
    )
    (labeled,) = read_clue("tnews", path).examples
    assert (labeled.id, labeled.text, labeled.label) == ("7", "股市上涨", "104")
    (unlabeled,) = read_clue("tnews", write(tmp_path / "test.json", '{"sentence": "下雨"}')).examples
    assert unlabeled.label is None
    path = write(
        tmp_path / "b.json",
        '{"sentence1": "下雨了", "sentence2": "地湿", "label": "neutral"}',
        '{"sentence1": "下雨了", "sentence2": "地干", "label": "-"}',
    )
    reading = read_clue("ocnli", path)
    assert [(example.pair, example.label) for example in reading.examples] == [("地湿", "neutral")]
    assert reading.problems[0].count == 1


def test_labels_that_are_not_looked_at_take_no_row_away(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json", *(f'{{"sentence1": "下", "sentence2": "地", "label": "{each}"}}' for each in ("-", "maybe"))
    )
    assert [example.label for example in read_clue("ocnli", path, labeled=False).examples] == [None, None]
    path = write(tmp_path / "b.tsv", "label\ttext_a", "?\t很好")
    assert [example.label for example in read_chnsenticorp(path, labeled=False).examples] == [None]


def test_faults_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json:1: no text 'sentence'; its keys: text"):
        read_clue("tnews", write(tmp_path / "a.json", '{"text": "x"}'))
    with pytest.raises(DataError, match="label 'maybe' is not one of"):
        read_clue("ocnli", write(tmp_path / "a.json", '{"sentence1": "x", "sentence2": "y", "label": "maybe"}'))
    some = ('{"sentence": "x"}', '{"sentence": "y", "label": "1"}', '{"sentence": "z", "label": null}')
    with pytest.raises(DataError, match=r"a\.json:1: no 'label', which other rows of the file have"):
        read_clue("tnews", write(tmp_path / "a.json", *some))
    with pytest.raises(ConfigError, match="did you mean 'tnews'"):
        read_clue("tnew", tmp_path)
    with pytest.raises(DataError, match=r"a\.tsv:3 has 1 columns"):
        read_chnsenticorp(write(tmp_path / "a.tsv", "label\ttext_a", '1\t"很好', "坏"))


def test_chnsenticorp_takes_quotes_as_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "label\ttext_a", '1\t"很好', "0\t不好", "")
    path.write_text(path.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")  # blank lines at the end
    assert [(example.text, example.label) for example in read_chnsenticorp(path).examples] == [('"很好', "1"), ("不好", "0")]


@pytest.mark.parametrize(("split", "rows"), [("train", 9600), ("dev", 1200), ("test", 1200)])
def test_real_chnsenticorp(split: str, rows: int) -> None:
    reading = read_chnsenticorp(split_file(data_folder("zh", "chnsenticorp"), CHNSENTICORP_FILES[split], "ChnSentiCorp"))
    assert len(reading.examples) == rows
    assert set(label_counts(reading.examples)) == {"0", "1"}


@pytest.mark.parametrize(("split", "rows"), [("train", 1185), ("dev", 1098), ("test", 2010)])
def test_real_tnews(split: str, rows: int) -> None:
    reading = read_clue("tnews", split_file(data_folder("zh", "tnews"), CLUE_FILES[split], "TNEWS"))
    assert len(reading.examples) == rows
    assert len(label_counts(reading.examples)) == 15
