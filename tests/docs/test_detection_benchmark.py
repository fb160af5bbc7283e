"""The script that puts wrong words into real sentences, on a few of them."""

from __future__ import annotations

import random

import pytest
from benchmarks import detection as script

from discern.inference.detection import load_detector
from tests.docs.pages import ROOT

SENTENCE = "The people of the town went to their houses before the river rose again."


def test_sentences_are_found() -> None:
    text = f"<doc id=1>\nA title\n\n{SENTENCE} Too short. {SENTENCE}\n</doc>\n"
    assert list(script.sentences(text)) == [SENTENCE, SENTENCE]


def test_each_sentence_gets_one_wrong_word_of_each_kind() -> None:
    model = load_detector(ROOT / "examples" / "models" / "modern-cpu", pytest.fail, with_generator=True)
    found = list(script.spoiled([SENTENCE] * 6, model, random.Random(3)))
    assert found, "a sentence with 'their' and 'to' can be spoiled"
    for record in found:
        restored, moved = record["text"], 0
        assert sorted(span["kind"] for span in record["wrong"]) == ["generator", "hand", "random"]
        for span in record["wrong"]:
            start, end = span["start"] + moved, span["end"] + moved
            assert restored[start:end].lower() != span["original"].lower()
            restored = restored[:start] + span["original"] + restored[end:]
            moved += len(span["original"]) - (span["end"] - span["start"])
        assert restored == SENTENCE
        (by_hand,) = (span for span in record["wrong"] if span["kind"] == "hand")
        assert record["text"][by_hand["start"] : by_hand["end"]].lower() in script.confusions()[by_hand["original"].lower()]
    assert found == list(script.spoiled([SENTENCE] * 6, model, random.Random(3))), "the seed decides everything"


def test_confusions_go_both_ways() -> None:
    table = script.confusions()
    assert "effect" in table["affect"]
    assert "affect" in table["effect"]
    assert set(table["there"]) == {"their", "they're"}
    assert all(word not in others for word, others in table.items())
