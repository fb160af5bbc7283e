"""`discern predict`: a fine-tuned model applied to files of every kind, in order, whole or not at all."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from csv import DictWriter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import discern
from discern.data.tables import open_table
from discern.errors import ConfigError, DataError, NumericsError
from discern.inference import prediction as module
from discern.inference.prediction import predict
from discern.progress import Silent
from discern.tasks.supervised import outputs_of
from tests.small.finetuned import MULTI, NUMBER, PAIR, SINGLE, SPANS, TAGS, Made, make_finetuned

TEXTS = ["the chef", "purple elephants ate the meal, and guests cooked", "hello", "naive guests 3,141"]
CLASSES = Made("classification", SINGLE.labels.__class__(("0", "1")), ("accuracy",))
PAIRED = replace(CLASSES, labels=replace(CLASSES.labels, pairs=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of task."""
    root = tmp_path_factory.mktemp("finetuned")
    for name, made in {"single": SINGLE, "pair": PAIR, "multi": MULTI, "number": NUMBER, "tags": TAGS, "spans": SPANS}.items():
        make_finetuned(root / name, own=made)
    make_finetuned(root / "named", sst2=CLASSES)
    make_finetuned(root / "qqp", qqp=PAIRED)
    make_finetuned(root / "afqmc", afqmc=PAIRED)
    make_finetuned(root / "characters", **{"weibo-ner": replace(TAGS, layout=None)})
    make_finetuned(root / "several", seeds=2, first=SINGLE, second=NUMBER)
    return root


def said(model: Path, input: Path, **options: Any) -> list[dict[str, Any]]:
    """What is shown without an output file."""
    found: list[dict[str, Any]] = []
    done = predict(model, input, found.extend, Silent(), **options)
    assert done["rows"] == len(found)
    return found


def notes_of(model: Path, input: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What is shown, and the messages."""
    found, notes, listener = list[dict[str, Any]](), list[str](), Silent()
    listener.note = notes.append  # type: ignore[method-assign]
    predict(model, input, found.extend, listener)
    return found, notes


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def csv(path: Path, *rows: str) -> Path:
    return written(path, "".join(f"{row}\n" for row in rows))


def test_every_kind_of_file_gives_the_same(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = csv(tmp_path / "a.csv", "x,review", *(f'{number},"{text}"' for number, text in enumerate(TEXTS)))
    lines = csv(tmp_path / "a.jsonl", *(json.dumps({"review": text}) for text in TEXTS))
    array = written(tmp_path / "a.json", json.dumps([{"review": text} for text in TEXTS]))
    tabs = csv(tmp_path / "a.tsv", "review\tx", *(f"{text}\t1" for text in TEXTS))
    text = csv(tmp_path / "a.txt", *TEXTS, "")
    found = said(folders / "single", table)
    assert [record["row"] for record in found] == [0, 1, 2, 3]
    assert set(found[0]) == {"row", "label", "probabilities"}
    assert list(found[0]["probabilities"]) == ["bad", "good", "so-so"]
    for path in (lines, array, tabs, text):
        assert said(folders / "single", path) == found
    standard = io.TextIOWrapper(io.BytesIO(text.read_bytes()))
    monkeypatch.setattr(sys, "stdin", standard)
    assert said(folders / "single", Path("-")) == found


def test_named_tasks_of_clue_know_their_columns_and_pairs(folders: Path, tmp_path: Path) -> None:
    pairs = [("the chef", "a meal"), ("hello", "guests")]
    tuples = discern.load(folders / "afqmc").predict(pairs)
    table = csv(tmp_path / "a.csv", "nr,sentence2,sentence1", *(f"1,{second},{first}" for first, second in pairs))
    for path in (table, csv(tmp_path / "a.tsv", *("\t".join(each) for each in [("sentence1", "sentence2"), *pairs]))):
        found = [row["probabilities"]["1"] for row in said(folders / "afqmc", path)]
        assert found == pytest.approx([row["probabilities"]["1"] for row in tuples], abs=1e-5)
    with pytest.raises(ConfigError, match="pair"):
        discern.load(folders / "afqmc").predict(["the chef"])


@pytest.mark.parametrize(
    ("name", "content", "ids"),
    [
        ("a.csv", "id,review\n900,hello\n900,the chef\n,a meal\n", ["900", "900", None]),
        ("a.jsonl", '{"review": "hello", "id": 7}\n{"id": "\\ud800x", "review": "a"}\n{"review": "b"}\n', [7, "\ufffdx", None]),
    ],
)
def test_the_id_of_a_row_goes_through(folders: Path, tmp_path: Path, name: str, content: str, ids: list[Any]) -> None:
    out = tmp_path / "out.jsonl"
    predict(folders / "single", written(tmp_path / name, content), pytest.fail, Silent(), out=out)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["row"], each.get("id")) for each in found] == list(enumerate(ids))
    assert ["id" in each for each in found] == [each is not None for each in ids]


@pytest.mark.parametrize(("content", "line"), [("\n\nhello\n", 1), ("hello\n\n \nthe chef\n", 2)])
@pytest.mark.parametrize("model", ["single", "tags"])
def test_an_empty_line_is_refused_by_its_number(folders: Path, tmp_path: Path, model: str, content: str, line: int) -> None:
    with pytest.raises(DataError, match=rf"a\.txt:{line}: 'text' is empty"):
        said(folders / model, written(tmp_path / "a.txt", content), format="text")


def test_each_kind_of_prediction(folders: Path, tmp_path: Path) -> None:
    text = csv(tmp_path / "a.txt", *TEXTS)
    several = said(folders / "multi", text)[1]
    assert set(several) == {"row", "labels", "probabilities"}
    assert several["labels"] == [name for name, value in several["probabilities"].items() if value >= 0.5]
    number = said(folders / "number", text, logits=True)[1]
    assert number["score"] == pytest.approx(2.5 * number["logits"][0] + 3, abs=1e-4)
    question = csv(tmp_path / "q.jsonl", json.dumps({"question": "Who ate?", "context": "Purple elephants ate the meal."}))
    (answer,) = said(folders / "spans", question)
    assert answer["answer"] == answer["nbest"][0]["text"]
    start = answer["nbest"][0]["start"]
    assert "Purple elephants ate the meal."[start : start + len(answer["answer"])] == answer["answer"]


def test_tagging_takes_lines_of_words_columns_and_tables(folders: Path, tmp_path: Path) -> None:
    lines = said(folders / "tags", csv(tmp_path / "a.txt", "the chef cooked", "hello"))
    assert [record["words"] for record in lines] == [["the", "chef", "cooked"], ["hello"]]
    assert len(lines[0]["tags"]) == 3
    assert {"row", "words", "tags", "spans"} <= set(lines[0])
    columns = "the DT\nchef NN\ncooked VB\n\nhello UH\n"
    assert said(folders / "tags", written(tmp_path / "a.conll", columns)) == lines
    tagged = "the O\nchef B-X\ncooked B-Y\n\nhello O\n"
    assert said(folders / "tags", written(tmp_path / "b.txt", tagged)) == lines, "told by its tags"
    assert said(folders / "tags", written(tmp_path / "c.txt", "the\nchef\ncooked\n"), format="conll")[0] == lines[0]
    table = csv(tmp_path / "a.jsonl", '{"words": ["the", "chef", "cooked"]}', '{"words": "hello"}')
    assert said(folders / "tags", table) == lines
    numbered = written(tmp_path / "d.conll", "1 科\n2 技\n")
    for columns, words in (({}, ["1", "2"]), ({"words": "1"}, ["科", "技"])):
        assert said(folders / "characters", numbered, columns=columns)[0]["words"] == words
    universal = written(tmp_path / "d.conllu", "\n".join(f"{n}\t{word}" + "\t_" * 8 for n, word in ((1, "科"), (2, "技"))) + "\n")
    assert said(folders / "characters", universal)[0]["words"] == ["科", "技"]


@pytest.mark.parametrize(
    ("model", "content", "words", "other"),
    [
        ("tags", "the chef\nhello guests\n\n", [["the", "chef"], ["hello", "guests"]], "conll"),
        ("tags", "the O\n\nhello S-X\n", [["the"], ["hello"]], "text"),
        ("characters", "科 技\n全 方\n", [["科", "技"], ["全", "方"]], "conll"),
        ("characters", "科0\n技1\n\n全0\n", [["科", "技"], ["全"]], "text"),
        ("characters", "科0 O\n技1 B-ORG\n\n全0 O\n", [["科", "技"], ["全"]], "text"),
    ],
)
def test_no_word_of_a_text_is_taken_for_a_tag(
    folders: Path, tmp_path: Path, model: str, content: str, words: list[list[str]], other: str
) -> None:
    found, notes = notes_of(folders / model, written(tmp_path / "a.txt", content))
    assert [each["words"] for each in found] == words
    assert notes[0].startswith("a.txt: read ")
    assert notes[0].endswith(f"--format {other}")


def test_a_task_of_characters_takes_texts_of_a_table_apart(folders: Path, tmp_path: Path) -> None:
    for path in (csv(tmp_path / "a.csv", "text", "科技 好"), csv(tmp_path / "b.jsonl", '{"text": ["科", "技", "好"]}')):
        assert said(folders / "characters", path)[0]["words"] == ["科", "技", "好"]


def test_no_row_of_an_official_file_is_dropped(folders: Path, tmp_path: Path) -> None:
    rows = [f"film {number}\t{'?' if number in (3, 7) else 1}" for number in range(12)]
    found = said(folders / "named", csv(tmp_path / "a.tsv", "sentence\tlabel", *rows))
    assert [each["row"] for each in found] == list(range(12))
    rows[4] += "\tmore"
    with pytest.raises(DataError, match=r"a\.tsv:6: 3 "):
        said(folders / "named", csv(tmp_path / "a.tsv", "sentence\tlabel", *rows))


def test_named_tasks_take_their_own_format_and_tables(folders: Path, tmp_path: Path) -> None:
    official = csv(tmp_path / "test.tsv", "index\tsentence", *(f"{n}\t{text}" for n, text in enumerate(TEXTS)))
    found = said(folders / "named", official)
    assert said(folders / "named", csv(tmp_path / "a.txt", *TEXTS)) == found
    with pytest.raises(ConfigError, match=r"bad\.tsv: cannot recognize the column for --text; its columns: one, two"):
        said(folders / "qqp", csv(tmp_path / "bad.tsv", "one\ttwo", "a\tb"))
    with pytest.raises(ConfigError, match="cannot recognize the column for --pair"):
        said(folders / "qqp", csv(tmp_path / "a.txt", "one text"))


def test_a_column_that_is_missing(folders: Path, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "reviews,x", "hello,1")
    with pytest.raises(ConfigError, match="no column 'review'; its columns: reviews, x") as caught:
        said(folders / "single", path)
    assert caught.value.hint == "--text: did you mean 'reviews'?"
    assert len(said(folders / "single", path, columns={"text": "reviews"})) == 1
    with pytest.raises(ConfigError, match="--pair is given, but 'own' was fine-tuned on text"):
        said(folders / "single", path, columns={"pair": "x"})


def test_the_output_is_whole_or_not_there(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "made" / "out.jsonl"
    path = csv(tmp_path / "a.csv", "review", "the chef", "h\u00e9llo")
    done = predict(folders / "single", path, pytest.fail, Silent(), out=out)
    assert done["rows"] == 2
    before = out.read_bytes()
    assert [json.loads(line) for line in before.decode().splitlines()] == said(folders / "single", path)
    monkeypatch.setattr(module, "_BLOCK", 2)
    bad = csv(tmp_path / "bad.csv", "review", "one", "two", "three", '" "')
    with pytest.raises(DataError, match=r"bad\.csv:5: 'review' is empty"):
        predict(folders / "single", bad, pytest.fail, Silent(), out=out)
    assert out.read_bytes() == before
    assert [each.name for each in out.parent.iterdir()] == ["out.jsonl"]
    empty = csv(tmp_path / "empty.csv", "review")
    with pytest.raises(DataError, match="has no rows"):
        predict(folders / "single", empty, pytest.fail, Silent(), out=out)
    with pytest.raises(ConfigError, match="is the input"):
        predict(folders / "single", path, pytest.fail, Silent(), out=path)


def test_tasks_and_seeds_are_chosen(folders: Path, tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "review,text", "the chef,hello")
    best = said(folders / "several", path, task="first")
    assert best == said(folders / "several", path, task="first", seed=1)
    assert best != said(folders / "several", path, task="first", seed=0)
    assert "score" in said(folders / "several", path, task="second")[0]
    for options, message in (
        ({}, "was fine-tuned on several tasks: first, second"),
        ({"task": "frist"}, "not fine-tuned on 'frist'"),
        ({"task": "first", "seed": 7}, "has no seed 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            said(folders / "several", path, **options)


def test_what_is_cut_is_told(folders: Path, tmp_path: Path) -> None:
    assert notes_of(folders / "single", csv(tmp_path / "a.txt", "hello", "the chef " * 40))[1] == [
        "warning: rows 0 to 1: 1 of 2 texts were cut to 32 tokens"
    ]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_comes_through_a_pipe_is_read_once(folders: Path, tmp_path: Path) -> None:
    lines = [" ".join(TEXTS[: 1 + number % 4]) for number in range(23)]
    expected = said(folders / "tags", csv(tmp_path / "a.txt", *lines))
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("\n".join(lines) + "\n"), daemon=True)
    writer.start()
    assert said(folders / "tags", tmp_path / "pipe") == expected


def test_outputs_that_are_not_finite_are_no_predictions(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflowed(*arguments: Any, **options: Any) -> Any:
        outputs, loss = outputs_of(*arguments, **options)
        return [{name: array * np.inf for name, array in row.items()} for row in outputs], loss

    monkeypatch.setattr(module, "outputs_of", overflowed)
    with pytest.raises(NumericsError, match="the outputs of the network are not finite"):
        said(folders / "single", csv(tmp_path / "a.txt", *TEXTS))


# Predictions as further columns


def appended(model: Path, path: Path, content: str | None = None, **options: Any) -> str:
    if content is not None:
        path.write_text(content)
    out = path.with_name(f"new-{path.name}")
    predict(model, path, pytest.fail, Silent(), out=out, append=True, **options)
    return out.read_text()


@pytest.fixture(scope="module")
def labels(folders: Path) -> list[dict[str, Any]]:
    found = discern.load(folders / "single").predict(TEXTS)
    return [{"prediction": each["label"], "probability": each["probability"]} for each in found]


def test_text_tables_keep_their_values(folders: Path, tmp_path: Path, labels: list[dict[str, Any]]) -> None:
    rows = [{"id": f"{number}", "review": text, "more": 'x\ty two "lines",\n'} for number, text in enumerate(TEXTS)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = DictWriter(file, list(rows[0]), delimiter=";")
        writer.writeheader()
        writer.writerows(rows)
    appended(folders / "single", tmp_path / "a.csv")
    found = [dict(row.values) for row in open_table(tmp_path / "new-a.csv").rows]
    assert found == [row | {key: str(value) for key, value in label.items()} for row, label in zip(rows, labels, strict=True)]
    new = appended(folders / "single", tmp_path / "a.tsv", 'id\treview\r\n1\t the chef\n2\t"x\n')
    first = "\t".join(map(str, labels[0].values()))
    assert new.splitlines()[:2] == ["id\treview\tprediction\tprobability", f"1\t the chef\t{first}"]
    assert [row.values["review"] for row in open_table(tmp_path / "new-a.tsv").rows] == [" the chef", '"x']


def test_json_and_parquet_tables_keep_their_values(folders: Path, tmp_path: Path, labels: list[dict[str, Any]]) -> None:
    records = [{"review": text, "n": number} for number, text in enumerate(TEXTS)]
    expected = [record | label for record, label in zip(records, labels, strict=True)]
    assert json.loads(appended(folders / "single", tmp_path / "a.json", json.dumps(records))) == expected
    lines = appended(folders / "single", tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    assert [json.loads(line) for line in lines.splitlines()] == expected
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    predict(folders / "single", tmp_path / "a.parquet", pytest.fail, Silent(), out=tmp_path / "new.parquet", append=True)
    assert parquet.read_table(tmp_path / "new.parquet").to_pylist() == expected


def test_what_is_appended_by_kind(folders: Path, tmp_path: Path) -> None:
    def read(model: str, content: str) -> dict[str, Any]:
        appended(folders / model, tmp_path / "k.csv", content)
        (row,) = open_table(tmp_path / "new-k.csv").rows
        return dict(row.values)

    assert set(read("number", "n,text\n1,hello\n")) == {"n", "text", "prediction"}
    tags = read("tags", "n,words\n1,the purple elephants\n")
    assert len(tags["prediction"].split()) == len(tags["probability"].split()) == 3
    answer = read("spans", "question,context\nwho ate?,purple elephants ate the meal\n")
    assert answer["prediction"] in "purple elephants ate the meal"
    found = json.loads(appended(folders / "multi", tmp_path / "m.jsonl", '{"text": "hello"}\n'))
    assert len(found["prediction"]) == len(found["probability"])
    new = appended(folders / "single", tmp_path / "t.csv", "review,probability\nhello,0.3\n")
    assert new.startswith("review,probability,prediction_2,probability_2\nhello,0.3,"), "the usual names are taken"


@pytest.mark.parametrize(
    ("name", "out", "says"),
    [("a.csv", None, "writes a table"), ("a.csv", "b.jsonl", "would be a csv file"), ("a.txt", "b.txt", "is not a table")],
)
def test_what_cannot_be_appended_to(folders: Path, tmp_path: Path, name: str, out: str | None, says: str) -> None:
    (tmp_path / name).write_text("review\nhello\n")
    with pytest.raises(ConfigError, match=says):
        predict(folders / "single", tmp_path / name, print, Silent(), out=out and tmp_path / out, append=True)
