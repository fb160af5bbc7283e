"""Sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.data.dataset.writing import StatisticsCounter
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.encoding import DocumentEncoder
from tests.data.small_text import write_vocabulary


def test_sums_by_hand(tmp_path: Path) -> None:
    encoder = DocumentEncoder(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).to_str(), "none")
    counter = StatisticsCounter(unknown_id=1)
    for documents in ([["the cat ü", "中 xyz"], ["a dog"], ["\u200b"]], [["a dog"], ["a dog"]]):
        block, kept, unknown = encoder.encode(documents)
        counter.add(block, {"empty": int((~kept).sum()), "unknown": unknown, "filtered": unknown})
    found = counter.finish(bytes_read=99)
    assert (found.documents, found.sentences, found.tokens, found.words) == (4, 5, 13, 11)
    assert (found.unknown_tokens, found.empty_documents, found.duplicates) == (1, 1, 2)
    assert found.unknown_causes == counter.filtered == {"'中' (U+4E2D)": 1}
    assert found.tokens_per_word == pytest.approx(13 / 11)
    assert found.document_lengths == {"0": 2, "0.05": 2, "0.25": 2, "0.5": 2, "0.75": 2, "0.95": 7, "0.99": 7, "1": 7}
    assert (found.characters, found.bytes_read) == (29, 99)
