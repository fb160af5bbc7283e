"""The share of unknown tokens: how it is counted, and when and how it is reported."""

from __future__ import annotations

import pytest

from discern.data.tokenizer import special_ids
from discern.data.tokenizer.unknown import MORE_TOKENS, UnknownTokens, percent, report_unknown
from tests.interop.small_tokenizers import small_tokenizer


def _told(counter: UnknownTokens, of: str = "") -> tuple[list[str], list[str]]:
    notes: list[str] = []
    warnings: list[str] = []
    counter.report(notes.append, warnings.append, of)
    return notes, warnings


def test_the_frame_and_padding_are_not_counted() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    ids = special_ids(tokenizer)
    counter = UnknownTokens(tokenizer)
    counter.add_ids([ids["cls"], ids["unk"], 20, 21, 22, ids["sep"], ids["pad"]])
    assert (counter.unknown, counter.tokens) == (1, 4)
    counter.add_tokens(["the", "[UNK]", "[MASK]"])
    assert (counter.unknown, counter.tokens) == (2, 7)


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


@pytest.mark.parametrize(("fraction", "shown"), [(0, "0%"), (0.00001, "less than 0.01%"), (0.0024, "0.24%"), (0.412, "41.2%")])
def test_a_share_is_readable(fraction: float, shown: str) -> None:
    assert percent(fraction) == shown
