"""Tokens as text: those of a sentence, one after the other, are the sentence again, whatever the vocabulary."""

from __future__ import annotations

import pytest

from discern.data.tokenizer import added_text, shown
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
    ids = tokenizer.encode(SENTENCE, add_special_tokens=False).ids
    added = [added_text(tokenizer, number) for number in ids]
    assert "".join(added) == f" {SENTENCE}"
    assert [shown(tokenizer, number).removeprefix("##") for number in ids if added_text(tokenizer, number) != " "] == [
        text.strip() for text in added if text != " "
    ]
    assert any(not text.startswith(" ") and text.isalpha() for text in added), "no word has several tokens"


def test_a_part_of_a_word_keeps_its_mark_and_a_part_of_a_character_its_name() -> None:
    pieces = train_tokenizer("wordpiece", 320, False, TEXT)
    inside = next(number for token, number in pieces.get_vocab().items() if token.startswith("##") and token[2:].isalpha())
    assert shown(pieces, inside).startswith("##")
    assert added_text(pieces, inside) == shown(pieces, inside)[2:]
    words = train_tokenizer("bpe", 320, False, TEXT)
    first, second = words.encode("€", add_special_tokens=False).ids[:2]
    assert shown(words, second) == added_text(words, second) == words.id_to_token(second)
    assert first != second
