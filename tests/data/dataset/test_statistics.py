"""Counts and quantiles against the whole list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from discern.data.dataset.build import QUANTILES, LengthHistogram, StatisticsCounter
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.errors import DataError
from tests.data.small_text import write_vocabulary


@pytest.mark.parametrize("largest", [10, 4000, 10_000_000])
def test_quantiles_are_exact_or_within_a_percent(largest: int) -> None:
    lengths = np.random.default_rng(0).integers(1, largest, 10_000)
    histogram = LengthHistogram()
    for part in np.split(lengths, 10):
        histogram.add(part)
    exact = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    found = histogram.quantiles()
    assert list(found) == [f"{level:g}" for level in QUANTILES]
    for length, expected in zip(found.values(), exact, strict=True):
        assert length == expected if expected < 4096 else abs(length / expected - 1) < 0.011
    assert found["1"] == lengths.max()


def test_no_lengths_no_quantiles() -> None:
    assert LengthHistogram().quantiles() == {}


def test_sums_by_hand(tmp_path: Path) -> None:
    encoder = DocumentEncoder(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).to_str(), "none")
    with StatisticsCounter(unknown_id=1) as counter:
        counter.add(encoder.encode([["the cat ü", "xyz"], ["a dog"], ["\u200b"]]))
        counter.add(encoder.encode([["a dog"], ["a dog"]]))
        found = counter.finish(bytes_read=99)
    assert (found.documents, found.sentences, found.tokens, found.words) == (4, 5, 12, 10)
    assert (found.unknown_tokens, found.empty_documents, found.duplicates) == (0, 1, 2)
    assert found.tokens_per_word == pytest.approx(1.2)
    assert found.document_lengths["1"] == 6
    assert found.sentence_lengths["0"] == 2
    assert found.bytes_read == 99


def test_unknown_tokens(tmp_path: Path) -> None:
    encoder = DocumentEncoder(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).to_str(), "none")
    with StatisticsCounter(unknown_id=1) as counter:
        counter.add(encoder.encode([["中 cat 文 dog"]]))
        assert counter.finish(0).unknown_fraction == 0.5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = DocumentEncoder(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).to_str(), "none")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: Path("/dev/full").open("wb"))  # noqa: SIM115
    with StatisticsCounter(unknown_id=1) as counter:
        counter.add(encoder.encode([["the cat"], ["a dog"]]))  # in the buffer
        with pytest.raises(DataError, match="cannot write a temporary file in"):
            counter.finish(bytes_read=1)
