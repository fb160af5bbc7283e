"""Tokens as text: those of a sentence, one after the other, are the sentence again, whatever the vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from discern.data.tokenizer import TokenTexts, framing, prepared
from discern.data.tokenizer.training import TokenizerKind, train_tokenizer

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
    assert [texts.shown(number).removeprefix("##") for number in ids if texts.added(number) != " "] == [
        text.strip() for text in added if text != " "
    ]


def test_a_part_of_a_word_keeps_its_mark() -> None:
    tokenizer = train_tokenizer("wordpiece", 320, False, TEXT)
    texts = TokenTexts(tokenizer)
    inside = next(number for token, number in tokenizer.get_vocab().items() if token.startswith("##") and token[2:].isalpha())
    assert texts.shown(inside).startswith("##")
    assert texts.added(inside) == texts.shown(inside)[2:]


def test_parts_of_a_character_are_named_alone_and_read_together() -> None:
    tokenizer = train_tokenizer("bpe", 320, False, TEXT)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a € €", add_special_tokens=False).ids
    assert "".join(texts.row(ids)).replace("\ufffd", "") == "a € €"
    part = ids[-1]
    assert texts.added(part) == "\ufffd"
    assert texts.shown(part) == tokenizer.id_to_token(part)


def test_vocabularies_that_mark_the_ends_of_words() -> None:
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the</w>": 5, "mea": 6, "ls</w>": 7, "ate</w>": 8}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="[UNK]", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    tokenizer.add_special_tokens(list(words)[:5])
    tokenizer.post_processor = framing(tokenizer)
    texts = TokenTexts(tokenizer)
    assert "".join(texts.row([5, 6, 7, 8])) == "the meals ate"
    assert texts.added(8) == " ate"
    assert texts.shown(8) == "ate"


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_tokenizer_without_a_decoder_gets_one(kind: TokenizerKind) -> None:
    without = train_tokenizer(kind, 320, False, TEXT)
    without.decoder = None
    assert "".join(TokenTexts(prepared(without, "it")).row(without.encode(SENTENCE).ids)) == f" [CLS] {SENTENCE} [SEP]"
