"""`discern predict --append`: the table of the input with two more columns, every byte of the others as it was."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import discern
from discern.cli.main import main
from discern.data.tables import TableFormat, open_table
from discern.errors import ConfigError, DataError
from discern.inference.predict import predict
from discern.progress import Silent
from tests.small.finetuned import MULTI, NUMBER, SINGLE, SPANS, TAGS, make_finetuned

TEXTS = ["the chef", 'purple "elephants", ate', "hello"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("columns")
    for name, made in {"single": SINGLE, "multi": MULTI, "number": NUMBER, "tags": TAGS, "spans": SPANS}.items():
        make_finetuned(root / name, own=made)
    return root


def appended(model: Path, path: Path, content: bytes | None = None, *, to: str | None = None, **options: Any) -> bytes:
    if content is not None:
        path.write_bytes(content)
    out = path.with_name(to or f"new-{path.name}")
    predict(model, path, pytest.fail, Silent(), out=out, append=True, **options)
    return out.read_bytes()


@pytest.fixture(scope="module")
def labels(folders: Path) -> list[tuple[str, float]]:
    said = discern.load(folders / "single").predict(TEXTS)
    return [(each["label"], each["probability"]) for each in said]


def test_csv_keeps_every_byte(folders: Path, tmp_path: Path, labels: list[tuple[str, float]]) -> None:
    rows = [b'1 ,"the chef", x', b'2,"purple ""elephants"", ate","two\r\nlines"', b"3,hello,"]
    content = b"\xef\xbb\xbfid,review,more\r\n" + rows[0] + b"\r\n\r\n" + rows[1] + b"\n" + rows[2]
    new = appended(folders / "single", tmp_path / "a.csv", content)
    tails = [f",{label},{probability}".encode() for label, probability in labels]
    expected = b"\xef\xbb\xbfid,review,more,prediction,probability\r\n"
    expected += rows[0] + tails[0] + b"\r\n\r\n" + rows[1] + tails[1] + b"\n" + rows[2] + tails[2] + b"\n"
    assert new == expected
    assert [row.values["prediction"] for row in open_table(tmp_path / "new-a.csv").rows] == [label for label, _ in labels]


def test_other_delimiters_and_one_column(folders: Path, tmp_path: Path, labels: list[tuple[str, float]]) -> None:
    (label, probability), *_ = labels
    new = appended(folders / "single", tmp_path / "a.csv", b"sep=;\nid;review\n1;the chef\n")
    assert new == f"sep=;\nid;review;prediction;probability\n1;the chef;{label};{probability}\n".encode()
    new = appended(folders / "single", tmp_path / "b.csv", b"review\nthe chef, it cooked\n")
    (header, row) = csv.reader(new.decode().splitlines())
    assert header == ["review", "prediction", "probability"]
    assert row[0] == "the chef, it cooked"
    assert len(row) == 3
    new = appended(folders / "single", tmp_path / "c.csv", b'review\n"first\nsecond"\nplain\n')
    assert [fields[0] for fields in csv.reader(io.StringIO(new.decode(), newline=""))] == ["review", "first\nsecond", "plain"]


def test_tsv_and_json_lines(folders: Path, tmp_path: Path, labels: list[tuple[str, float]]) -> None:
    (label, probability), *_ = labels
    new = appended(folders / "single", tmp_path / "a.tsv", b'id\treview\r\n1\t the chef\r\n\n2\t"x')
    lines = new.split(b"\n")
    assert lines[0] == b"id\treview\tprediction\tprobability\r"
    assert lines[1] == f"1\t the chef\t{label}\t{probability}\r".encode()
    assert lines[2] == b""
    assert lines[3].startswith(b'2\t"x\t')
    new = appended(folders / "single", tmp_path / "b.tsv", b"sep=\t\nid\treview\n1\t the chef\n")
    assert new == f"sep=\t\nid\treview\tprediction\tprobability\n1\t the chef\t{label}\t{probability}\n".encode()
    content = b'{"review":  "the chef", "n": 1.50 }\n\n  {"review": "hello"}'
    new = appended(folders / "single", tmp_path / "a.jsonl", content)
    assert new.startswith(
        f'{{"review":  "the chef", "n": 1.50, "prediction": "{label}", "probability": {probability}}}\n\n'.encode()
    )
    assert [json.loads(line)["review"] for line in new.splitlines() if line] == ["the chef", "hello"]


def test_a_json_array_and_parquet(folders: Path, tmp_path: Path, labels: list[tuple[str, float]]) -> None:
    records = [{"review": text, "n": number} for number, text in enumerate(TEXTS)]
    expected = [
        {**record, "prediction": label, "probability": probability}
        for record, (label, probability) in zip(records, labels, strict=True)
    ]
    assert json.loads(appended(folders / "single", tmp_path / "a.json", json.dumps(records).encode())) == expected
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    appended(folders / "single", tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "new-a.parquet").to_pylist() == expected


def test_what_is_said_by_kind(folders: Path, tmp_path: Path) -> None:
    def read(model: str, content: str) -> dict[str, Any]:
        appended(folders / model, tmp_path / "k.csv", content.encode())
        (row,) = open_table(tmp_path / "new-k.csv").rows
        return dict(row.values)

    assert set(read("number", "n,text\n1,hello\n")) == {"n", "text", "prediction"}
    tags = read("tags", "n,words\n1,the purple elephants\n")
    assert len(tags["prediction"].split()) == len(tags["probability"].split()) == 3
    said = read("spans", "question,context\nwho ate?,purple elephants ate the meal\n")
    assert said["prediction"] in "purple elephants ate the meal"
    assert 0 < float(said["probability"]) <= 1
    (line,) = appended(folders / "multi", tmp_path / "m.jsonl", b'{"text": "hello"}\n').splitlines()
    found = json.loads(line)
    assert len(found["prediction"]) == len(found["probability"])


def test_names_that_are_taken(folders: Path, tmp_path: Path) -> None:
    new = appended(folders / "single", tmp_path / "a.csv", b"review,probability\nhello,0.3\n")
    assert new.startswith(b"review,probability,prediction_2,probability_2\nhello,0.3,")
    again = appended(folders / "single", tmp_path / "new-a.csv", to="third.csv")
    assert again.splitlines()[0].endswith(b",prediction_3,probability_3")
    with pytest.raises(DataError, match=r"b\.jsonl:2: this record has a 'prediction'"):
        appended(folders / "single", tmp_path / "b.jsonl", b'{"review": "x"}\n{"review": "y", "prediction": 1}\n')
    assert not (tmp_path / "new-b.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "out", "options", "says"),
    [
        ("a.csv", None, {}, "writes a table to a file"),
        ("a.csv", "b.jsonl", {}, "would be a csv file"),
        ("a.csv", "b.csv", {"logits": True}, "only the prediction and its probability"),
        ("a.txt", "b.txt", {}, "is not a table"),
        ("-", "b.csv", {}, "standard input"),
    ],
)
def test_what_cannot_be_appended_to(
    folders: Path, tmp_path: Path, name: str, out: str | None, options: dict[str, Any], says: str
) -> None:
    (tmp_path / name).write_text("review\nhello\n")
    path = Path("-") if name == "-" else tmp_path / name
    with pytest.raises(ConfigError, match=says):
        predict(folders / "single", path, print, Silent(), out=out and tmp_path / out, append=True, **options)


def test_the_name_that_is_suggested_is_accepted(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"review\nhello\n"))
    with pytest.raises(ConfigError, match="would be a csv file") as caught:
        predict(folders / "single", tmp_path / "a.csv.gz", print, Silent(), out=tmp_path / "b.jsonl", append=True)
    assert caught.value.hint == f"name it {tmp_path / 'b.csv'}"


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl"])
def test_a_file_that_changes_meanwhile(folders: Path, tmp_path: Path, format: TableFormat) -> None:
    from discern.inference.prediction_columns import write_appended

    path = tmp_path / f"a.{format}"
    path.write_text(
        '{"review": "x"}\n{"review": "y"}\n' if format == "jsonl" else f"id{',' if format == 'csv' else chr(9)}review\n"
    )
    prediction = {"label": "good", "probabilities": {"good": 1.0}}
    for number in (1, 5):
        with (tmp_path / "out").open("w") as file, pytest.raises(DataError, match="changed while it was read"):
            write_appended(open_table(path), [[prediction] * number], "single", file, pytest.fail)


def test_the_verb(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("review\nhello\nthe chef\n")
    files = [str(tmp_path / "a.csv"), "--out", str(tmp_path / "b.csv")]
    monkeypatch.setattr(sys, "argv", ["discern", "predict", str(folders / "single"), *files, "--append", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    assert (tmp_path / "b.csv").read_text().startswith("review,prediction,probability\n")
