"""`discern embed`: the vectors of `encode`, whole files with their record, and stored vectors of another model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import discern
from discern.cli.main import main
from discern.errors import ConfigError, DataError
from discern.inference import embed_file, vector_files
from discern.inference.embed import unit_vectors
from discern.inference.embed_file import embed, input_texts
from discern.progress import Silent
from tests.small.run import make_run

TEXTS = ["the model reads", "x", "", "a file of tensors and the shape of it", "none"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    make_run(folder / "run")
    make_run(folder / "other", tokenizer="bpe")
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


def run(work: Path, source: Path | str = "texts.txt", model: str = "run", **options: Any) -> embed_file.Embedded:
    show = options.pop("show", lambda _: None)
    return embed(work / model, work / source, show, Silent(), warn=pytest.fail, device="cpu", **options)


def test_a_file_has_the_vectors_of_encode(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_file, "_BLOCK", 2)  # blocks change nothing
    expected = discern.load(work / "run", device="cpu").encode(TEXTS)
    for name in ("a.npy", "a.parquet", "a.jsonl"):
        done = run(work, out=tmp_path / name)
        assert (done.rows, done.size) == expected.shape
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["fingerprint"] == discern.load(work / "run").fingerprint
        assert (record["rows"], record["size"], record["pooling"]) == (5, 32, "mean")
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), expected, atol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    np.testing.assert_allclose([line["vector"] for line in lines], expected, atol=1e-6)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "a.parquet")
    assert parquet["text"].to_pylist() == TEXTS
    np.testing.assert_allclose(np.array(parquet["vector"].to_pylist()), expected, atol=1e-6)


def test_pooling_length_and_size(work: Path, tmp_path: Path) -> None:
    run(work, out=tmp_path / "a.npy", pooling="cls", normalize=True, size=8)
    found, first = np.load(tmp_path / "a.npy"), discern.load(work / "run").encode(TEXTS, pooling="first")[:, :8]
    np.testing.assert_allclose(found, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-6)
    with pytest.raises(ConfigError, match="99 components are asked for, and the vectors of this model have 32"):
        run(work, size=99)


def test_tables_and_json_lines(work: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,review\n1,one\n2,two\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(input_texts(tmp_path / "a.csv", "review")) == ["one", "two"]
    assert list(input_texts(tmp_path / "a.jsonl", None)) == ["one", "two"]
    (tmp_path / "b.jsonl").write_text('{"review": "one"}\n')
    with pytest.raises(DataError) as caught:
        list(input_texts(tmp_path / "b.jsonl", None))
    assert "--text NAME" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="its columns: id, review"):
        list(input_texts(tmp_path / "a.csv", "text"))


def test_a_failure_leaves_the_old_vectors(work: Path, tmp_path: Path) -> None:
    run(work, out=tmp_path / "a.npy")
    before = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"other": 1}\n')
    (tmp_path / "empty.txt").write_text("")
    for source, said in (("bad.jsonl", "no field 'text'"), ("empty.txt", "has no texts")):
        with pytest.raises(DataError, match=said):
            run(work, tmp_path / source, out=tmp_path / "a.npy")
        assert (tmp_path / "a.npy").read_bytes() == before
        assert (tmp_path / "a.npy.json").exists()
    with pytest.raises(ConfigError, match="names no vector format"):
        run(work, out=tmp_path / "a.bin")


def test_inputs_are_checked_before_the_model_is_loaded(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_file, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "empty.txt").write_text("")
    for source, said in (
        (tmp_path / "none.txt", "none.txt"),
        (tmp_path / "none.csv", "none.csv"),
        (tmp_path / "empty.txt", "no texts"),
    ):
        with pytest.raises(DataError, match=said):
            run(work, source, out=tmp_path / "a.npy")
    with pytest.raises(DataError, match="cannot be read"):
        run(work, search=tmp_path / "none.npy")
    assert not list(tmp_path.glob("a.npy*"))


def test_the_nearest_stored_vectors(work: Path, tmp_path: Path) -> None:
    run(work, out=tmp_path / "a.npy")
    shown: list[dict[str, Any]] = []
    run(work, search=tmp_path / "a.npy", top=2, show=shown.extend)
    assert [each["nearest"][0]["row"] for each in shown if each["text"]] == [0, 1, 3, 4]
    assert all(len(each["nearest"]) == 2 for each in shown)
    assert shown[0]["nearest"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    with pytest.raises(ConfigError, match="--top is for --search"):
        run(work, top=2)


def test_blocks_of_texts_and_of_stored_vectors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    queries, stored = (random.standard_normal((count, 4)).astype(np.float32) for count in (7, 23))
    cosines = unit_vectors(queries) @ unit_vectors(stored).T
    expected = np.argsort(-cosines, axis=1)[:, :5]
    monkeypatch.setattr(vector_files, "_ROWS", 4)
    monkeypatch.setattr(vector_files, "_QUERIES", 3)
    rows, found = vector_files.nearest(queries, stored, 5)
    assert rows.tolist() == expected.tolist()
    np.testing.assert_allclose(found, np.take_along_axis(cosines, expected, 1), atol=1e-6)
    assert vector_files.nearest(queries, stored[:2], 5)[0].shape == (7, 2)


def test_vectors_of_another_model_are_refused(work: Path, tmp_path: Path) -> None:
    run(work, out=tmp_path / "a.npy")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "other"}, "vectors of another model: its fingerprint is"),
        ({"pooling": "cls"}, "vectors of another pooling"),
        ({"size": 8}, "vectors of another size"),
    ]
    for options, said in cases:
        with pytest.raises(DataError, match=said):
            run(work, search=tmp_path / "a.npy", **options)
    (tmp_path / "a.npy.json").unlink()
    with pytest.raises(DataError, match="has no record of its model"):
        run(work, search=tmp_path / "a.npy")


def test_the_command(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for more, keys in (
        (["--out", tmp_path / "v.npy"], {"out"}),
        ([], {"vectors"}),
        (["--search", tmp_path / "v.npy"], {"results"}),
    ):
        line = ["discern", "embed", work / "run", work / "texts.txt", *more, "--json"]
        monkeypatch.setattr(sys, "argv", list(map(str, line)))
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        found = json.loads(capsys.readouterr().out)
        assert found["rows"] == 5
        assert keys <= set(found)
