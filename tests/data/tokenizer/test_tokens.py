"""Tokens of texts: none that a text spells is special, they read as the text, and unknown ones are counted."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from discern.data.tokenizer import TokenTexts, prepared, special_ids
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.tokens import UnknownTokens, causes_of_unknown, encode_texts, unknown_warning
from discern.data.tokenizer.training import TokenizerKind, train_tokenizer
from tests.small.tokenizers import small_tokenizer

WHOLE_WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "[": 5, "MASK]": 6, "SEP]": 7, "a": 8, "##MASK]": 9}
HTML = "<s>old</s> price<mask>"


def pieces_of_unigram() -> Tokenizer:
    """A Unigram vocabulary with the names of XLM-RoBERTa, whose pieces include the special tokens."""
    letters = ["▁", *dict.fromkeys("<>/soldpricemak"), "▁price", "▁<s"]
    pieces = [(name, 0.0) for name in ("<pad>", "<unk>", "<s>", "</s>", "<mask>")] + [(letter, -3.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return prepared(tokenizer, "it")


def whole_words(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(WHOLE_WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = splitter
    return prepared(tokenizer, "it")


def declared_as_ordinary() -> Tokenizer:
    """BERT's splitting, with special tokens that are added tokens, but not special ones."""
    tokenizer = whole_words(pre_tokenizers.Whitespace())
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("[SEP]", "[MASK]")])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (pieces_of_unigram(), HTML),
        (whole_words(pre_tokenizers.WhitespaceSplit()), "a [MASK] [SEP]"),
        (declared_as_ordinary(), "a [MASK] [SEP]"),
    ],
)
def test_special_tokens_in_text_are_text(tokenizer: Tokenizer, text: str) -> None:
    special = {number for role, number in special_ids(tokenizer).items() if role != "unk"}
    assert special & set(tokenizer.encode(text, add_special_tokens=False).ids)
    others = ["a", "", "a <p>"]
    found = encode_texts(tokenizer, [text, *others])
    assert not special & set(found[0].ids)
    assert [each.ids for each in found[1:]] == [tokenizer.encode(each, add_special_tokens=False).ids for each in others]
    block = DocumentEncoder(tokenizer.to_str(), "none").encode([[text]])[0]
    assert block.tokens.tolist() == found[0].ids


def test_spelled_tokens_have_offsets() -> None:
    (encoding,) = encode_texts(pieces_of_unigram(), [HTML])
    assert "".join(encoding.tokens) == "▁" + HTML.replace(" ", "▁")
    assert [HTML[start:end] for start, end in encoding.offsets][:2] == ["<s", ">"]


SENTENCE = "the guards cooked naïve tea, and 12 guests mated."
TEXT = [
    "the chef cooked naïve meals, and 12 guests agreed.",
    "a guest cooks 34 meals.",
    "they were naïve, and the guests ate.",
] * 5


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_tokens_of_a_sentence_add_up_to_it(kind: TokenizerKind) -> None:
    tokenizer = train_tokenizer(kind, 320, False, TEXT)
    texts = TokenTexts(tokenizer)
    framed = tokenizer.encode(SENTENCE).ids
    ids = framed[1:-1]
    assert "".join(texts.row(framed)) == f" [CLS] {SENTENCE} [SEP]"
    added = list(map(texts.added, ids))
    assert "".join(added) == f" {SENTENCE}"
    assert any(not text.startswith(" ") and text.isalpha() for text in added), "no word has several tokens"
    for number, text in zip(ids, added, strict=True):
        is_inside = kind == "wordpiece" and tokenizer.id_to_token(number).startswith("##")
        assert text == " " or texts.shown(number) == ("##" if is_inside else "") + text.strip()


def test_parts_of_a_character_are_named_alone_and_read_together() -> None:
    tokenizer = train_tokenizer("bpe", 320, False, TEXT)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a € €", add_special_tokens=False).ids
    assert "".join(texts.row(ids)).replace("\ufffd", "") == "a € €"
    assert texts.added(ids[-1]) == "\ufffd"
    assert texts.shown(ids[-1]) == tokenizer.id_to_token(ids[-1])


def told(counter: UnknownTokens, of: str = "") -> tuple[list[str], list[str]]:
    notes: list[str] = []
    warnings: list[str] = []
    counter.report(notes.append, warnings.append, of)
    return notes, warnings


def test_unknown_tokens_are_counted_without_the_frame_and_padding() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    ids = special_ids(tokenizer)
    counter = UnknownTokens(tokenizer)
    counter.add_ids([ids["cls"], ids["unk"], 20, 21, 22, ids["sep"], ids["pad"]])
    assert (counter.unknown, counter.tokens) == (1, 4)
    counter.add_tokens(["the", "[UNK]", "[MASK]"])
    assert (counter.unknown, counter.tokens) == (2, 7)


def test_an_unknown_token_of_a_unigram_model_is_named_by_its_text() -> None:
    tokenizer = small_tokenizer("unigram")
    encoding = tokenizer.encode("the \u0e01\u0e02 cat", add_special_tokens=False)
    assert "[UNK]" not in encoding.tokens
    counter = UnknownTokens(tokenizer)
    counter.add_tokens(encoding.tokens)
    assert (counter.unknown, counter.tokens) == (1, len(encoding))


def test_a_low_share_is_a_note_and_a_high_one_a_warning_with_advice() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    assert told(UnknownTokens(tokenizer)) == ([], [])
    assert told(UnknownTokens(tokenizer, 100, 5)) == (["unknown tokens: 5 of 100 tokens (5%)"], [])
    _, (warning,) = told(UnknownTokens(tokenizer, 101, 6), "reviews")
    assert warning.startswith("reviews: 6 of 101 tokens (5.94%) are unknown to the vocabulary")
    assert "discern prepare TEXT --train-tokenizer" in warning


def test_a_low_share_of_one_cause_is_a_warning() -> None:
    several, one = {"a": 5, "b": 5}, {"a": 9, "b": 1}
    assert unknown_warning(3, 1000) is unknown_warning(3, 1000, several) is unknown_warning(1, 1000, one) is None
    assert "unknown are a: 50%, b: 50%;" in (unknown_warning(6, 1000, several) or "")
    assert "unknown are a: 90%, b: 10%;" in (unknown_warning(3, 1000, one) or "")


def test_causes() -> None:
    tokenizer, text = small_tokenizer("wordpiece, lower-cased"), "the ☂a aa☃ " + "a" * 201
    assert causes_of_unknown(tokenizer, [text]) == {
        "'☂' (U+2602)": 1,
        "'☃' (U+2603)": 1,
        "words of more than 200 characters": 1,
    }
