"""The official TSV files, with every quirk that they are known to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.examples import label_counts
from discern.tasks.glue import GLUE, glue_splits, read_glue, read_glue_file
from tests.tasks.data_folder import data_folder, write

MNLI = [
    *"index promptID pairID genre".split(),
    *"sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2".split(),
]


def tsv(*fields: str) -> str:
    return "\t".join(fields)


def test_cola_has_a_header_in_its_test_file_only(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", tsv("gj04", "1", "", "Birds sing."), tsv("gj04", "0", "*", "Sing birds the."))
    write(tmp_path / "test.tsv", tsv("index", "sentence"), tsv("0", "Fish swim."))
    train, test = read_glue("cola", tmp_path, "train"), read_glue("cola", tmp_path, "test")
    assert [(example.id, example.text, example.label) for example in train.examples] == [
        ("0", "Birds sing.", "1"),
        ("1", "Sing birds the.", "0"),
    ]
    assert [(example.text, example.label) for example in test.examples] == [("Fish swim.", None)]
    assert test.notes == ("test.tsv has no labels",)


def test_quotation_marks_and_a_byte_order_mark_are_no_syntax(tmp_path: Path) -> None:
    write(
        tmp_path / "train.tsv",
        "\ufeff" + tsv("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        tsv("1", "7", "8", '"It rained, he said.', 'He said it "rained.'),
        tsv("0", "9", "10", "It snowed.", 'It did not."'),
    )
    examples = read_glue("mrpc", tmp_path, "train").examples
    assert [(example.text, example.pair) for example in examples] == [
        ('"It rained, he said.', 'He said it "rained.'),
        ("It snowed.", 'It did not."'),
    ]
    assert [example.label for example in examples] == ["1", "0"]


def test_malformed_lines_are_counted_with_their_places(tmp_path: Path) -> None:
    header = tsv("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    path = write(
        tmp_path / "train.tsv",
        header,
        tsv("0", "1", "2", "Why?", "What for?", "1"),
        tsv("1", "3", "4", "Who", ""),
        tsv("5", "6", "", "How?", "When?", "yes"),
        tsv("2", "7", "8", "Where?", "", "0"),
    )
    reading = read_glue("qqp", tmp_path, "train")
    assert [(example.id, example.text) for example in reading.examples] == [("0", "Why?"), ("3", "Where?")]
    malformed, empty = reading.problems
    assert malformed.count == 2
    assert malformed.examples == (f"{path}:3 (5 columns instead of 6)", f"{path}:4 (label 'yes' is not one of 0, 1)")
    assert (empty.kind, empty.examples) == ("empty text, kept", (f"{path}:5",))


def test_without_labels_every_line_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", tsv("sentence", "label"), tsv("Nice.", "?"), tsv("Bad.", "0"), "")
    reading = read_glue_file("sst2", path, labeled=False)
    assert [(example.id, example.text) for example in reading.examples] == [("0", "Nice."), ("1", "Bad.")]
    assert {example.label for example in reading.examples} == {None}
    assert [problem.examples for problem in reading.problems] == [(f"{path}:4 (1 columns instead of 2)",)], "the blank line"
    write(path, tsv("sentence", "label"), tsv("Nice.", "?"), tsv("Bad.", "0", "more"))
    with pytest.raises(DataError, match=r"a\.tsv:3: 3 columns instead of 2"):
        read_glue_file("sst2", path, labeled=False)
    write(path, tsv("sentence1", "sentence2", "score"), tsv("A.", "B.", "9"))
    assert read_glue_file("stsb", path, labeled=False).examples[0].label is None


def test_mnli_has_12_16_and_10_columns_and_its_label_comes_last(tmp_path: Path) -> None:
    texts = ("0", *["-"] * 7, "It rains.", "It is wet.")
    write(tmp_path / "train.tsv", tsv(*MNLI, "label1", "gold_label"), tsv(*texts, "neutral", "entailment"))
    votes = ("neutral", "neutral", "entailment", "entailment", "entailment")
    labels = tuple(f"label{number}" for number in range(1, 6))
    write(tmp_path / "dev_matched.tsv", tsv(*MNLI, *labels, "gold_label"), tsv(*texts, *votes, "entailment"))
    write(tmp_path / "dev_mismatched.tsv", tsv(*MNLI, *labels, "gold_label"), tsv(*texts, *votes, "contradiction"))
    write(tmp_path / "test_matched.tsv", tsv(*MNLI), tsv(*texts))
    write(tmp_path / "diagnostic.tsv", tsv("index", "sentence1", "sentence2"), tsv("0", "It rains.", "It is wet."))
    found = {}
    for split in glue_splits("mnli", tmp_path):
        (example,) = read_glue("mnli", tmp_path, split).examples
        assert (example.text, example.pair) == ("It rains.", "It is wet.")
        found[split] = example.label
    assert found == {
        "train": "entailment",
        "dev": "entailment",
        "dev_mismatched": "contradiction",
        "test": None,
        "diagnostic": None,
    }


def test_the_diagnostic_set_may_lie_beside_mnli(tmp_path: Path) -> None:
    write(tmp_path / "MNLI" / "train.tsv", tsv(*MNLI, "label1", "gold_label"))
    write(
        tmp_path / "AX" / "AX.tsv",
        tsv("index", "sentence1", "sentence2"),
        tsv("0", "It rains.", "It is wet."),
    )
    assert len(read_glue("mnli", tmp_path / "MNLI", "diagnostic").examples) == 1


def test_stsb_scores_are_numbers_from_0_to_5(tmp_path: Path) -> None:
    header = tsv("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")
    row = ("0", "a", "b", "c", "d", "none", "none", "A cat.", "A dog.")
    write(tmp_path / "train.tsv", header, tsv(*row, "2.250"))
    assert [example.label for example in read_glue("stsb", tmp_path, "train").examples] == [2.25]
    for wrong in ("5.1", "nan", "-1"):
        write(tmp_path / "train.tsv", header, tsv(*row, "2.250"), tsv(*row, wrong))
        with pytest.raises(DataError, match=rf"train\.tsv:3: score {wrong}"):
            read_glue("stsb", tmp_path, "train")


def test_another_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", tsv("sentnce", "label"), tsv("Nice.", "1"))
    with pytest.raises(DataError, match="no column 'sentence'") as error:
        read_glue("sst2", tmp_path, "train")
    assert "did you mean 'sentnce'" in str(error.value)
    write(tmp_path / "train.tsv", tsv("sentence", "label"), *[tsv("Nice.", "2")] * 20)
    with pytest.raises(DataError, match="is not a file of sst2"):
        read_glue("sst2", tmp_path, "train")
    write(tmp_path / "train.tsv", tsv("sentence", "label"))
    with pytest.raises(DataError, match="no line below the header"):
        read_glue("sst2", tmp_path, "train")


def test_missing_things_are_named(tmp_path: Path) -> None:
    write(tmp_path / "RTE" / "train.tsv", "x")
    with pytest.raises(DataError, match=r"has no rte dev file: expected dev.tsv, found train.tsv"):
        read_glue("rte", tmp_path / "RTE", "dev")
    with pytest.raises(ConfigError, match="does not exist") as error:
        read_glue("rte", tmp_path / "RTF", "dev")
    assert "RTE" in str(error.value)
    with pytest.raises(ConfigError, match="did you mean 'sst2'"):
        read_glue("sst22", tmp_path, "dev")
    with pytest.raises(ConfigError, match="did you mean 'dev'"):
        read_glue("rte", tmp_path, "dve")


# Rows by split, as the README of the data folder gives them; complete sets as GLUE counts them.
COUNTS = {
    "cola": {"train": 8551, "dev": 1043, "test": 1063},
    "sst2": {"train": 67_349, "dev": 872},
    "mrpc": {"train": 3668, "dev": 408, "test": 1725},
    "stsb": {"train": 5749, "dev": 1500, "test": 1379},
    "rte": {"train": 2490, "dev": 277, "test": 3000},
    "wnli": {"train": 635, "dev": 71, "test": 146},
    "qnli": {"train": 10_475, "dev": 5463},
    "qqp": {"train": 8999, "dev": 1000},
    "mnli": {"train": 8999, "dev": 1000},
}


@pytest.mark.parametrize("name", COUNTS)
def test_real_files_have_the_known_numbers_of_rows(name: str) -> None:
    folder = data_folder("glue", GLUE[name].folder)
    counted = {}
    for split in glue_splits(name, folder):
        reading = read_glue(name, folder, split)
        counted[split] = len(reading.examples)
        assert not reading.problems
        assert all(example.text for example in reading.examples)
        assert (reading.examples[0].pair is None) == (len(GLUE[name].columns) == 1)
        labels = label_counts(reading.examples)
        if split in ("train", "dev") and not GLUE[name].is_regression:
            assert set(labels) == set(GLUE[name].labels)
    assert counted == COUNTS[name]


def test_a_table_of_four_columns_with_a_sentence_has_a_header(tmp_path: Path) -> None:
    write(tmp_path / "test.tsv", tsv("id", "sentence", "author", "year"), tsv("7", "Fish swim.", "x", "1999"))
    assert [example.text for example in read_glue("cola", tmp_path, "test").examples] == ["Fish swim."]
