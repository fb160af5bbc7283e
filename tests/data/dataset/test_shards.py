"""What is written is what is read, over any cut into shards."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from discern.data.dataset.manifest import Manifest
from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.errors import DataError
from discern.progress import Silent
from discern.storage.checksums import write_recorded
from discern.types import SpecialTokens
from tests.data.small_text import made_up, plain, write_vocabulary

DOCUMENTS = [document[: 1 + number % 4] for number, document in enumerate(made_up(60))]


def write_data(folder: Path, **options: Any) -> Manifest:
    """A data set of `DOCUMENTS`."""
    (folder.parent / "text").write_text(plain(DOCUMENTS))
    tokenizer = TokenizerChoice(write_vocabulary(folder.parent / "vocab.txt"))
    asked = {"tokenizer": tokenizer, "options": PrepareOptions(workers=1, **options)}
    return prepare([str(folder.parent / "text")], out=folder, progress=Silent(), **asked).manifest  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    folder = tmp_path_factory.mktemp("data") / "set"
    write_data(folder, heldout=0.2, shard_tokens=300)
    return TokenData.open(folder)


def expected_split(data: TokenData, name: str) -> tuple[list[list[int]], np.ndarray]:
    """Sentences and word starts of a split, found again from its documents."""
    encoder = DocumentEncoder(load_tokenizer(data.folder / "tokenizer.json").to_str(), "none")
    split = data.split(name)  # type: ignore[arg-type]
    starts = np.unique(np.concatenate([shard.first_token + shard.document_starts for shard in split.shards]))
    texts = {tuple(encoder.encode([document])[0].tokens.tolist()): document for document in DOCUMENTS}
    chosen = [texts[tuple(split.read(int(a), int(b)).tolist())] for a, b in pairwise(starts)]
    block = encoder.encode(chosen)[0]
    return np.split(block.tokens, np.cumsum(block.sentence_lengths)[:-1]), block.word_starts


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_a_split_reads_as_it_was_written(data: TokenData, name: str) -> None:
    split = data.split(name)  # type: ignore[arg-type]
    sentences, words = expected_split(data, name)
    whole = split.read(0, split.num_tokens)
    assert whole.dtype == np.int64
    assert whole.tolist() == np.concatenate(sentences).tolist()
    assert split.word_starts(0, split.num_tokens).tolist() == words.tolist()
    starts = np.concatenate([shard.first_token + shard.sentence_starts[:-1] for shard in split.shards])
    assert starts.tolist() == np.cumsum([0, *map(len, sentences[:-1])]).tolist()


def test_any_range_may_cross_shards(data: TokenData) -> None:
    split = data.split("train")
    assert len(split.shards) > 3
    whole, words = split.read(0, split.num_tokens), split.word_starts(0, split.num_tokens)
    draw = np.random.default_rng(0)
    for _ in range(200):
        start, stop = sorted(draw.integers(0, split.num_tokens + 1, 2).tolist())
        np.testing.assert_array_equal(split.read(start, stop), whole[start:stop])
        np.testing.assert_array_equal(split.word_starts(start, stop), words[start:stop])
    with pytest.raises(IndexError):
        split.read(0, split.num_tokens + 1)


def test_shards_hold_whole_documents_up_to_their_size(data: TokenData) -> None:
    for name in ("train", "heldout"):
        split = data.split(name)  # type: ignore[arg-type]
        for shard in split.shards:
            assert shard.document_starts[0] == shard.sentence_starts[0] == 0
            assert shard.document_starts[-1] == shard.sentence_starts[-1] == len(shard.tokens) <= 300
            assert set(shard.document_starts.tolist()) <= set(shard.sentence_starts.tolist())
    assert sum(split.num_documents for split in data.manifest.splits.values()) == len(DOCUMENTS)


def test_a_document_longer_than_a_shard_has_one_to_itself(tmp_path: Path) -> None:
    manifest = write_data(tmp_path / "set", heldout=0.0, shard_tokens=1)
    assert len(manifest.splits["train"].shards) == len(DOCUMENTS)
    data = TokenData.open(tmp_path / "set")
    assert data.split("heldout").num_tokens == 0
    assert data.split("heldout").read(0, 0).shape == (0,)


def test_the_header(data: TokenData) -> None:
    counts = data.token_counts()
    split = data.split("train")
    assert counts.tolist() == np.bincount(split.read(0, split.num_tokens), minlength=data.vocab_size).tolist()
    assert data.special_tokens == SpecialTokens(0, 1, 2, 3, 4)
    assert fingerprint(data.tokenizer()) == data.tokenizer_fingerprint
    assert data.manifest.statistics.documents == len(DOCUMENTS)
    assert data.manifest.dtype == "uint16"
    assert len(data.fingerprint) == 64


def test_shards_travel_to_other_processes_unread(data: TokenData) -> None:
    split = data.split("train")
    split.read(0, split.num_tokens)
    copy = pickle.loads(pickle.dumps(split))
    assert len(pickle.dumps(split.shards[0])) < 3000
    assert copy.read(5, 50).tolist() == split.read(5, 50).tolist()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing"),
        (lambda folder: write_recorded(folder, {"manifest.json": "{"}), "manifest.json is damaged: Expecting"),
        (lambda folder: edit_manifest(folder, format_version=99), "of this version of discern"),
        (lambda folder: edit_manifest(folder, dtype="int7"), "is damaged"),
        (lambda folder: (folder / "train-00000.tokens").unlink(), r"train-00000\.tokens is missing"),
        (lambda folder: (folder / "train-00000.words").write_bytes(b"x"), "has 1 bytes, but the manifest has"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    ],
)
def test_a_damaged_data_set(tmp_path: Path, damage: object, says: str) -> None:
    write_data(tmp_path / "set")
    damage(tmp_path / "set")  # type: ignore[operator]
    with pytest.raises(DataError, match=says) as error:
        TokenData.open(tmp_path / "set")
    assert error.value.hint


def test_a_data_set_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="set is not a data set: there is no such folder"):
        TokenData.open(tmp_path / "set")
    (tmp_path / "set").write_text("text")
    with pytest.raises(DataError, match="set is not a data set: it is a file"):
        TokenData.open(tmp_path / "set")


@pytest.mark.usefixtures("unverified")
def test_another_tokenizer_is_noticed(tmp_path: Path) -> None:
    write_data(tmp_path / "set")
    load_tokenizer(tmp_path / "vocab.txt", lowercase=False).save(str(tmp_path / "set" / "tokenizer.json"))
    with pytest.raises(DataError, match="but the shards were made with"):
        TokenData.open(tmp_path / "set").tokenizer()


def edit_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    write_recorded(folder, {"manifest.json": json.dumps(manifest | changes)})
