"""Vectors of files: those of `encode`, whole files with their record, and search in stored vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import discern
from discern.errors import ConfigError, DataError
from discern.inference import windows
from discern.inference.embedding import embed, input_texts, nearest, unit_vectors
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


def run(work: Path, source: Path | str = "texts.txt", model: str = "run", **options: Any) -> dict[str, Any]:
    options = {"show": lambda _: None, "warn": lambda _: None, **options}
    return embed(work / model, work / source, progress=Silent(), device="cpu", **options)


def test_a_file_has_the_vectors_of_encode(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_TEXTS", 2)  # blocks change nothing
    expected = discern.load(work / "run", device="cpu").encode(TEXTS)
    for name in ("a.npy", "a.parquet", "a.jsonl"):
        done = run(work, out=tmp_path / name)
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record == {key: value for key, value in done.items() if key != "seconds"}
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
    assert [text.text for text in input_texts(tmp_path / "a.csv", "review")] == ["one", "two"]
    assert [text.text for text in input_texts(tmp_path / "a.jsonl", None)] == ["one", "two"]
    with pytest.raises(ConfigError, match="its columns: id, review"):
        list(input_texts(tmp_path / "a.csv", "text"))


def test_a_failure_leaves_the_old_vectors(work: Path, tmp_path: Path) -> None:
    run(work, out=tmp_path / "a.npy")
    before = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"other": 1}\n')
    with pytest.raises(DataError, match="no field 'text'"):
        run(work, tmp_path / "bad.jsonl", out=tmp_path / "a.npy")
    assert (tmp_path / "a.npy").read_bytes() == before
    with pytest.raises(ConfigError, match="names no vector format"):
        run(work, out=tmp_path / "a.bin")


def test_files_without_texts_or_vectors_are_named(work: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for source, said in (("none.csv", "none.csv"), ("empty.txt", "no texts")):
        with pytest.raises(DataError, match=said):
            run(work, tmp_path / source, out=tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"none\.npy does not exist"):
        run(work, search=tmp_path / "none.npy")
    assert not list(tmp_path.glob("a.npy*"))


@pytest.mark.parametrize("name", ["a.npy", "a.parquet", "a.jsonl"])
def test_a_search_finds_the_nearest_vectors_with_their_texts(work: Path, tmp_path: Path, name: str) -> None:
    run(work, out=tmp_path / name)
    shown: list[dict[str, Any]] = []
    run(work, search=tmp_path / name, top=2, show=shown.extend)
    best = [each["nearest"][0] for each in shown if each["text"]]
    assert [(each["row"], each["text"]) for each in best] == [(0, TEXTS[0]), (1, "x"), (3, TEXTS[3]), (4, "none")]
    assert all(len(each["nearest"]) == 2 for each in shown)
    assert best[0]["cosine"] == pytest.approx(1, abs=1e-5)


def test_the_vectors_of_an_untuned_model_come_with_a_sentence(work: Path) -> None:
    said: list[str] = []
    run(work, warn=said.append)
    (sentence,) = said
    assert sentence.startswith(f"{work / 'run'} was not fine-tuned for embeddings, so similarities of its vectors mean little")


def test_the_nearest_rows_are_those_of_all_cosines() -> None:
    random = np.random.default_rng(0)
    queries, stored = (random.standard_normal((count, 4)).astype(np.float32) for count in (7, 23))
    cosines = unit_vectors(queries) @ unit_vectors(stored).T
    texts = [f"text {row}" for row in range(23)]
    for best, expected in zip(nearest(queries, stored, texts, 5), cosines, strict=True):
        assert [each["row"] for each in best] == np.argsort(-expected)[:5].tolist()
        for each in best:
            assert (each["text"], each["cosine"]) == (texts[each["row"]], pytest.approx(expected[each["row"]], abs=1e-6))
    assert [len(best) for best in nearest(queries, stored[:2], texts, 5)] == [2] * 7


def test_vectors_of_another_model_are_refused(work: Path, tmp_path: Path) -> None:
    run(work, out=tmp_path / "a.npy")
    for options in ({"model": "other"}, {"pooling": "cls"}, {"size": 8}):
        with pytest.raises(DataError, match="vectors of another model, pooling or size than"):
            run(work, search=tmp_path / "a.npy", **options)


def test_files_beside_the_vectors_do_not_replace_the_input(work: Path, tmp_path: Path) -> None:
    source = tmp_path / "v.npy.jsonl"
    source.write_text('{"text": "the model", "id": 7}\n')
    with pytest.raises(ConfigError, match="cannot replace itself"):
        run(work, source, out=tmp_path / "v.npy")
    assert "7" in source.read_text()
