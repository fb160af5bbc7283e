"""Documents to blocks: lengths, digests, what is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from discern.data.tokenizer import encoding as module, load_tokenizer
from discern.data.tokenizer.encoding import DocumentEncoder, token_dtype
from tests.data.small_text import made_up, write_vocabulary


@pytest.fixture
def encoder(tmp_path: Path) -> DocumentEncoder:
    return DocumentEncoder(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).to_str(), "none")


def test_a_block_by_hand(encoder: DocumentEncoder) -> None:
    block, kept, unknown = encoder.encode([["the cat.", "\u200b"], ["\u200b\u00ad"], ["a xy"]])
    assert block.sentence_lengths.tolist() == [3, 3]
    assert block.document_sentences.tolist() == [1, 1]
    assert block.document_lengths.tolist() == [3, 3]
    assert block.word_starts.tolist() == [True, True, True, True, True, False]
    assert block.tokens.dtype == np.uint16
    assert (kept.tolist(), unknown) == ([True, False, True], {})
    assert block.characters.tolist() == [8 + 1, 4]


def test_digests_tell_texts_apart(encoder: DocumentEncoder) -> None:
    digests = encoder.encode([["a", "b"], ["a b"], ["a", "b"], ["A", "b"]])[0].digests
    assert (digests[0] == digests[2]).all()
    assert len({digest.tobytes() for digest in digests}) == 3


def test_nothing_gives_an_empty_block(encoder: DocumentEncoder) -> None:
    for documents in ([], [["\u200b"]]):
        block = encoder.encode(documents)[0]
        assert (block.num_documents, len(block.tokens), len(block.document_lengths)) == (0, 0, 0)


def test_batches_make_no_difference(encoder: DocumentEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = made_up(50)
    whole = encoder.encode(documents)[0]
    monkeypatch.setattr(module, "BATCH_SENTENCES", 7)
    pieces = encoder.encode(documents)[0]
    for name in ("tokens", "word_starts", "sentence_lengths", "document_sentences", "digests"):
        np.testing.assert_array_equal(getattr(pieces, name), getattr(whole, name))


def test_blocks_select_documents(encoder: DocumentEncoder) -> None:
    documents = made_up(10)
    block = encoder.encode(documents)[0]
    chosen = np.array([True, False] * 5)
    expected = encoder.encode(documents[::2])[0]
    for name in ("tokens", "word_starts", "sentence_lengths", "document_sentences", "digests"):
        np.testing.assert_array_equal(getattr(block.select(chosen), name), getattr(expected, name))
    assert block.documents(2, 2).num_documents == 0


def test_the_type_of_ids(tmp_path: Path) -> None:
    assert (token_dtype(65535), token_dtype(65536)) == (np.uint16, np.uint32)
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    vocabulary.write_text(vocabulary.read_text() + "".join(f"w{number}\n" for number in range(70_000)))
    block = DocumentEncoder(load_tokenizer(vocabulary).to_str(), "none").encode([["w69999"]])[0]
    assert block.tokens[0] > 70_000
