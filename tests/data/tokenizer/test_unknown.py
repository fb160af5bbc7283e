"""The share of unknown tokens: how it is counted, and when and how it is reported."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from discern.data.tokenizer import SPECIAL_TOKENS, special_ids
from discern.data.tokenizer.tokens import MORE_TOKENS, UnknownTokens, causes_of_unknown, percent, report_unknown, unknown_warning
from tests.small.tokenizers import small_tokenizer


def _told(counter: UnknownTokens, of: str = "") -> tuple[list[str], list[str]]:
    notes: list[str] = []
    warnings: list[str] = []
    counter.report(notes.append, warnings.append, of)
    return notes, warnings


def _causes(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    return causes_of_unknown(tokenizer, [text], [tokenizer.encode(text, add_special_tokens=False)])


def test_the_frame_and_padding_are_not_counted() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    ids = special_ids(tokenizer)
    counter = UnknownTokens(tokenizer)
    counter.add_ids([ids["cls"], ids["unk"], 20, 21, 22, ids["sep"], ids["pad"]])
    assert (counter.unknown, counter.tokens) == (1, 4)
    counter.add_tokens(["the", "[UNK]", "[MASK]"])
    assert (counter.unknown, counter.tokens) == (2, 7)


def test_an_unknown_token_of_a_unigram_model_is_counted_although_it_is_named_by_its_text() -> None:
    tokenizer = small_tokenizer("unigram")
    counter = UnknownTokens(tokenizer)
    encoding = tokenizer.encode("the \u0e01\u0e02 cat", add_special_tokens=False)
    assert encoding.ids.count(special_ids(tokenizer)["unk"]) == 1
    assert "[UNK]" not in encoding.tokens
    counter.add_tokens(encoding.tokens)
    assert (counter.unknown, counter.tokens) == (1, len(encoding))


def test_a_low_share_is_a_note_and_a_high_one_a_warning_with_advice() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    counter = UnknownTokens(tokenizer)
    counter.add_tokens(["a"] * 95 + ["[UNK]"] * 5)
    assert _told(counter) == (["unknown tokens: 5 of 100 tokens (5.0%)"], [])
    counter.add_tokens(["[UNK]"])
    notes, (warning,) = _told(counter, "reviews")
    assert notes == []
    assert warning.startswith("reviews: 6 of 101 tokens (5.9%) are unknown to the vocabulary")
    assert "discern prepare TEXT --train-tokenizer" in warning


def test_nothing_is_said_of_no_text_and_advice_can_be_another() -> None:
    assert _told(UnknownTokens(small_tokenizer("wordpiece, lower-cased"))) == ([], [])
    warnings: list[str] = []
    report_unknown(1, 2, lambda _: None, warnings.append, advice=MORE_TOKENS)
    assert "--add-tokens" in warnings[0]


def test_a_low_share_of_one_cause_is_a_warning() -> None:
    assert unknown_warning(3, 1000) is None
    assert unknown_warning(3, 1000, causes={"a": 5, "b": 5}) is None
    assert "unknown are a: 50.0%, b: 50.0%;" in (unknown_warning(6, 1000, causes={"a": 5, "b": 5}) or "")
    assert "unknown are a: 90.0%, b: 10.0%;" in (unknown_warning(3, 1000, causes={"a": 9, "b": 1}) or "")
    assert unknown_warning(1, 1000, causes={"a": 1}) is None


def test_causes() -> None:
    """Of WordPiece, the character that a word lacks; of Unigram, also the mark with which every text begins."""
    assert _causes(small_tokenizer("wordpiece, lower-cased"), "the ☂a aa☃ " + "a" * 201) == {
        "'☂' (U+2602)": 1,
        "'☃' (U+2603)": 1,
        "words of more than 200 characters": 1,
    }
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS.values()] + [("今", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    assert _causes(tokenizer, "今今") == {"'▁' (U+2581)": 1}


@pytest.mark.parametrize(("fraction", "shown"), [(0, "0%"), (0.00001, "less than 0.01%"), (0.0024, "0.24%"), (0.412, "41.2%")])
def test_a_share_is_readable(fraction: float, shown: str) -> None:
    assert percent(fraction) == shown
