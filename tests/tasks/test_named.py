"""The named tasks, from files with every quirk that the published ones are known to have, and from the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.finetuning.plan import find_files, find_splits
from discern.tasks import tasks
from discern.tasks.base import Definition, Reading, label_counts
from tests.tasks.data_folder import data_folder, write

MNLI = [
    *"index promptID pairID genre".split(),
    *"sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2".split(),
]


def tsv(*fields: str) -> str:
    return "\t".join(fields)


def read(name: str, path: Path, split: str = "train", *, labeled: bool = True) -> Reading[Any]:
    definition: Definition[Any] = tasks.load(name)
    return definition.read(path, split, definition.family.Config(), labeled=labeled)


def test_cola_has_a_header_in_its_test_file_only(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", tsv("gj04", "1", "", "Birds sing."), tsv("gj04", "0", "*", "Sing birds the."))
    test = write(tmp_path / "test.tsv", tsv("index", "sentence"), tsv("0", "Fish swim."))
    other = write(tmp_path / "other.tsv", tsv("id", "sentence", "author", "year"), tsv("7", "Fish swim.", "x", "1999"))
    assert [(example.text, example.label) for example in read("cola", train).examples] == [
        ("Birds sing.", "1"),
        ("Sing birds the.", "0"),
    ]
    for path in (test, other):
        assert [(example.text, example.label) for example in read("cola", path).examples] == [("Fish swim.", None)]


def test_quotation_marks_and_a_byte_order_mark_are_no_syntax(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.tsv",
        "\ufeff" + tsv("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        tsv("1", "7", "8", '"It rained, he said.', '"He said it rained."'),
    )
    (example,) = read("mrpc", path).examples
    assert (example.text, example.pair, example.label) == ('"It rained, he said.', '"He said it rained."', "1")


def test_malformed_rows_are_counted_with_their_places(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.tsv",
        tsv("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        tsv("0", "1", "2", "Why?", "What for?", "1"),
        tsv("1", "3", "4", "Who", ""),
        tsv("5", "6", "", "How?", "When?", "yes"),
        tsv("2", "7", "8", "Where?", "", "0"),
    )
    reading = read("qqp", path)
    assert [(example.text, example.pair) for example in reading.examples] == [("Why?", "What for?"), ("Where?", "")]
    malformed, empty = reading.problems
    assert malformed.examples == (f"{path}:3 (5 fields instead of 6)", f"{path}:4 (label 'yes' is not one of 0, 1)")
    assert (empty.kind, empty.examples) == ("empty text, kept", (f"{path}:5",))


def test_rows_to_predict_are_all_read_whatever_their_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", tsv("sentence", "label"), tsv("Nice.", "?"), tsv("Bad.", "0"))
    assert [(example.text, example.label) for example in read("sst2", path, labeled=False).examples] == [
        ("Nice.", None),
        ("Bad.", None),
    ]
    write(path, tsv("sentence", "label"), tsv("Nice.", "?"), tsv("Bad.", "0", "more"))
    with pytest.raises(DataError, match=r"a\.tsv:3: 3 fields, but the header has 2"):
        read("sst2", path, labeled=False)
    path = write(tmp_path / "a.json", '{"sentence1": "下", "sentence2": "地", "label": "-"}')
    assert read("ocnli", path, labeled=False).examples[0].label is None


def test_the_columns_of_mnli_differ_between_its_files(tmp_path: Path) -> None:
    texts = ("0", *["-"] * 7, "It rains.", "It is wet.")
    votes = ("neutral", "neutral", "entailment", "entailment", "entailment")
    labels = tuple(f"label{number}" for number in range(1, 6))
    write(tmp_path / "MNLI" / "train.tsv", tsv(*MNLI, "label1", "gold_label"), tsv(*texts, "neutral", "entailment"))
    write(tmp_path / "MNLI" / "dev_matched.tsv", tsv(*MNLI, *labels, "gold_label"), tsv(*texts, *votes, "entailment"))
    write(tmp_path / "MNLI" / "dev_mismatched.tsv", tsv(*MNLI, *labels, "gold_label"), tsv(*texts, *votes, "contradiction"))
    write(tmp_path / "MNLI" / "test_matched.tsv", tsv(*MNLI), tsv(*texts))
    write(tmp_path / "AX" / "AX.tsv", tsv("index", "sentence1", "sentence2"), tsv("0", "It rains.", "It is wet."))
    found = {}
    for split, path in find_splits(tasks.load("mnli"), tmp_path / "MNLI").items():
        (example,) = read("mnli", path, split).examples
        assert (example.text, example.pair) == ("It rains.", "It is wet.")
        found[split] = example.label
    told = {"train": "entailment", "dev": "entailment", "dev_mismatched": "contradiction"}
    assert found == told | {"test": None, "diagnostic": None}


def test_stsb_has_scores_from_0_to_5(tmp_path: Path) -> None:
    header, row = tsv("index", "sentence1", "sentence2", "score"), ("0", "A cat.", "A dog.")
    path = write(tmp_path / "train.tsv", header, tsv(*row, "2.250"), tsv(*row, "5.1"), tsv(*row, "-1"))
    reading = read("stsb", path)
    assert [example.label for example in reading.examples] == [2.25]
    assert reading.problems[0].examples[0] == f"{path}:3 (score 5.1 is not between 0 and 5)"
    with pytest.raises(DataError, match=r"train\.tsv:3: 'score' is .*nan.*expected a finite number|is NaN"):
        read("stsb", write(path, header, tsv(*row, "2.250"), tsv(*row, "nan")))


def test_chinese_tasks_by_their_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"label": 104, "label_desc": "x", "sentence": "股市上涨", "keywords": "", "id": 7}')
    assert [(example.text, example.label) for example in read("tnews", path).examples] == [("股市上涨", "104")]
    assert read("tnews", write(tmp_path / "test.json", '{"sentence": "下雨"}')).examples[0].label is None
    path = write(
        tmp_path / "b.json",
        '{"sentence1": "下雨了", "sentence2": "地湿", "label": "neutral"}',
        '{"sentence1": "下雨了", "sentence2": "地干", "label": "-"}',
    )
    reading = read("ocnli", path)
    assert [(example.pair, example.label) for example in reading.examples] == [("地湿", "neutral")]
    assert reading.problems[0].count == 1
    path = write(tmp_path / "a.tsv", "label\ttext_a", '1\t"很好', "0\t不好", "", "")
    assert [(example.text, example.label) for example in read("chnsenticorp", path).examples] == [('"很好', "1"), ("不好", "0")]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("sst2", [tsv("sentnce", "label"), tsv("Nice.", "1")], "no column 'sentence'.*\n.*did you mean 'sentnce'"),
        ("sst2", [tsv("sentence", "label"), *[tsv("Nice.", "2")] * 20], r"no usable rows: malformed row, left out: 20"),
        ("sst2", [tsv("sentence", "label")], "a header but no rows"),
        ("tnews", ['{"text": "x"}'], "no column 'sentence'; its columns: text"),
        ("tnews", ['{"sentence": "x", "label": 1}', '{"sentence": "y"}'], r":2: no 'label'; it has: sentence"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        read(name, write(tmp_path / "train.tsv", *lines))


def test_missing_files_and_tasks_are_named(tmp_path: Path) -> None:
    write(tmp_path / "SST-2" / "dev.tsv", "x")
    with pytest.raises(DataError, match=r"has no training file of sst2; it contains dev\.tsv") as missing:
        find_files(tasks.load("sst2"), tmp_path / "SST-2")
    assert "published at gluebenchmark.com" in str(missing.value.hint)
    with pytest.raises(DataError, match="it contains SST-2") as folder:
        find_files(tasks.load("sst2"), tmp_path)
    assert folder.value.hint == f"--data {tmp_path / 'SST-2'}"
    with pytest.raises(ConfigError, match="does not exist") as typo:
        find_files(tasks.load("sst2"), tmp_path / "SST-3")
    assert "SST-2" in str(typo.value.hint)
    with pytest.raises(ConfigError, match="unknown task 'sst-2'") as unknown:
        tasks.load("sst-2")
    assert unknown.value.hint == "did you mean 'sst2'?"


# Rows by split, as the data sets state them; complete sets as GLUE counts them.
COUNTS = {
    "cola": ("glue/CoLA", {"train": 8551, "dev": 1043, "test": 1063}),
    "sst2": ("glue/SST-2", {"train": 67_349, "dev": 872}),
    "mrpc": ("glue/MRPC", {"train": 3668, "dev": 408, "test": 1725}),
    "stsb": ("glue/STS-B", {"train": 5749, "dev": 1500, "test": 1379}),
    "rte": ("glue/RTE", {"train": 2490, "dev": 277, "test": 3000}),
    "wnli": ("glue/WNLI", {"train": 635, "dev": 71, "test": 146}),
    "qnli": ("glue/QNLI", {"train": 10_475, "dev": 5463}),
    "qqp": ("glue/QQP", {"train": 8999, "dev": 1000}),
    "mnli": ("glue/MNLI", {"train": 8999, "dev": 1000}),
    "chnsenticorp": ("zh/chnsenticorp", {"train": 9600, "dev": 1200, "test": 1200}),
    "tnews": ("zh/tnews", {"train": 1185, "dev": 1098, "test": 2010}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_files_have_the_known_numbers_of_rows(name: str) -> None:
    folder, counts = COUNTS[name]
    definition = tasks.load(name)
    readings = {split: read(name, path, split) for split, path in find_splits(definition, data_folder(folder)).items()}
    assert {split: len(reading.examples) for split, reading in readings.items()} == counts
    for split, reading in readings.items():
        assert not reading.problems
        assert all(
            example.text and (example.pair is not None) == ("pair" in definition.layout.columns) for example in reading.examples
        )
        if split in ("train", "dev") and definition.layout.kind == "label" and definition.labels:
            assert set(label_counts(reading.examples)) == set(definition.labels)
