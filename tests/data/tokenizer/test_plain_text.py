"""No text yields a special token, whatever it spells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from discern.data.tokenizer import load_tokenizer, special_ids
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.tokens import _separating, encode_texts
from tests.data.tokenizer.test_training import TEXT, tokenizer_of

HTML = "<s>old</s> price<mask>"


@pytest.fixture
def roberta(tmp_path: Path) -> Tokenizer:
    """A Unigram vocabulary with the names of XLM-RoBERTa, whose pieces include the special tokens."""
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    letters = ["▁", *"<>/soldpricemak", "▁price"]
    pieces = [*((name, 0.0) for name in names), *((letter, -3.0) for letter in dict.fromkeys(letters))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = '{"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}'
    (tmp_path / "tokenizer_config.json").write_text(named)
    return load_tokenizer(tmp_path)


def test_names_are_spelled_out(roberta: Tokenizer) -> None:
    special = set(special_ids(roberta).values())
    assert special & set(roberta.encode(HTML, add_special_tokens=False).ids)
    (encoding,) = encode_texts(roberta, [HTML])
    assert not special & set(encoding.ids)
    assert "".join(encoding.tokens) == "▁" + HTML.replace(" ", "▁")
    assert [HTML[start:end] for start, end in encoding.offsets][:4] == ["<", "<", "s", ">"]
    assert encode_texts(roberta, [HTML], ids_only=True)[0].ids == encoding.ids


WHOLE_WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "[": 5, "MASK]": 6, "SEP]": 7, "a": 8, "##MASK]": 9}


def whole_words(path: Path) -> Tokenizer:
    """WordPiece whose pre-tokenizer leaves `[MASK]` whole, so that it is a word of the vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(WHOLE_WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return load_tokenizer(path)


def declared_as_ordinary(path: Path) -> Tokenizer:
    """BERT's splitting, with special tokens that are added tokens, but not special ones."""
    tokenizer = Tokenizer(models.WordPiece(WHOLE_WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("[SEP]", "[MASK]")])
    tokenizer.save(str(path))
    return load_tokenizer(path)


@pytest.mark.parametrize("made", [whole_words, declared_as_ordinary])
def test_other_models_may_find_special_tokens_as_well(made: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer = made(tmp_path / "tokenizer.json")
    text = "a [MASK] [SEP]"
    assert set(tokenizer.encode(text, add_special_tokens=False).ids) & {3, 4}
    assert not set(encode_texts(tokenizer, [text])[0].ids) & {0, 2, 3, 4}
    block = DocumentEncoder(tokenizer.to_str(), "none").encode([[text]]).block
    assert not set(block.tokens.tolist()) & {0, 2, 3, 4}


def test_a_large_vocabulary_is_copied_once(roberta: Tokenizer) -> None:
    _separating.cache_clear()
    for _ in range(3):
        encode_texts(roberta, [HTML])
    assert _separating.cache_info().misses == 1


def test_other_texts_are_encoded_as_ever(roberta: Tokenizer) -> None:
    texts = ["old price", HTML, "", "<p>"]
    found = encode_texts(roberta, texts)
    for row in (0, 2, 3):
        expected = roberta.encode(texts[row], add_special_tokens=False)
        assert (found[row].ids, found[row].offsets) == (expected.ids, expected.offsets)


def test_data_sets_get_the_same_ids(roberta: Tokenizer) -> None:
    block = DocumentEncoder(roberta.to_str(), "none").encode([[HTML, "old"]]).block
    expected = [number for encoding in encode_texts(roberta, [HTML, "old"]) for number in encoding.ids]
    assert block.tokens.tolist() == expected


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_other_models_need_no_second_look(kind: str) -> None:
    tokenizer = tokenizer_of(kind)  # type: ignore[arg-type]
    texts = [*TEXT[:5], "a [MASK] b [SEP]"]
    assert [each.ids for each in encode_texts(tokenizer, texts)] == [
        each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
