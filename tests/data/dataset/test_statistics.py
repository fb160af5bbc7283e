"""Counts and quantiles against the whole list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from discern.data.dataset.writing import QUANTILES, LengthCounter, StatisticsCounter
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.encoding import DocumentEncoder
from tests.data.small_text import write_vocabulary


def test_quantiles_are_exact() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 10_000)
    counter = LengthCounter()
    assert counter.quantiles() == {}
    for part in np.split(lengths, 10):
        counter.add(part)
    exact = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    assert counter.quantiles() == {f"{level:g}": length for level, length in zip(QUANTILES, exact, strict=True)}


def test_sums_by_hand(tmp_path: Path) -> None:
    encoder = DocumentEncoder(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).to_str(), "none")
    counter = StatisticsCounter(unknown_id=1)
    for documents in ([["the cat ü", "中 xyz"], ["a dog"], ["\u200b"]], [["a dog"], ["a dog"]]):
        block, kept, unknown = encoder.encode(documents)
        counter.add(block, int((~kept).sum()), unknown, unknown)
    found = counter.finish(bytes_read=99)
    assert (found.documents, found.sentences, found.tokens, found.words) == (4, 5, 13, 11)
    assert (found.unknown_tokens, found.empty_documents, found.duplicates) == (1, 1, 2)
    assert found.unknown_causes == counter.filtered == {"'中' (U+4E2D)": 1}
    assert found.tokens_per_word == pytest.approx(13 / 11)
    assert (found.document_lengths["1"], found.sentence_lengths["0"]) == (7, 2)
    assert (found.characters, found.bytes_read) == (29, 99)
