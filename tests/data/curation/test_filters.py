"""Each rule of the filters on text at its limit, and the counts in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.data.curation.filters import Rules, filters
from discern.data.curation.filters.gopher import _in_repeated_ngrams, _in_top_ngram
from discern.data.dataset.build import BuildOptions
from discern.data.prepare import merge, prepare, prepare_part
from discern.data.stages import plan as planning
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError
from discern.progress import Silent
from discern.registry import Registry
from tests.data.small_text import made_up, plain, write_vocabulary

NUMBERS = [f"word{number}" for number in range(200)]
PROSE = [" ".join(["the", "people", "of", *NUMBERS[first : first + 12]]) + "." for first in range(0, 120, 12)]


def reason(name: str, document: list[str]) -> str | None:
    """The reason why a filter leaves out a document; None if it keeps all of it."""
    kept, dropped = Rules([name]).apply([document])
    assert len(kept) + sum(dropped.values()) == 1
    return next(iter(dropped), None)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("words:5", 5, None),
        ("words:5", 4, "words: fewer than 5 words"),
        ("words:2-5", 5, None),
        ("words:2-5", 6, "words: more than 5 words"),
    ],
)
def test_the_number_of_words(name: str, words: int, expected: str | None) -> None:
    assert reason(name, ["a " * (words - 1), "b"]) == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (PROSE, None),
        (PROSE[:3], "not 50 to 100,000 words"),
        ([line.replace("word", "w" * 12) for line in PROSE], "mean length of words"),
        ([line + " # # #" for line in PROSE], "hash signs and ellipses"),
        (["- " + line for line in PROSE], "begin with a bullet"),
        ([line + ".." for line in PROSE[:4]] + PROSE[4:], "end with an ellipsis"),
        ([line + " 1234 5678 9012 3456" for line in PROSE], "have a letter"),
        ([line.replace("the", "thy").replace("of", "off") for line in PROSE], "English stop words"),
    ],
)
def test_the_quality_rules_of_gopher(document: list[str], expected: str | None) -> None:
    found = reason("gopher-quality", document)
    assert found is None if expected is None else expected in str(found)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([f"{line} {line}x" for line in NUMBERS], None),
        ([f"{n} {n}x" for n in NUMBERS[:6]] + ["equal line"] * 5, "lines are repeated"),
        ([f"{n} {n}x" for n in NUMBERS[:8]] + ["a much longer line that is equal"] * 3, "characters are in repeated lines"),
        ([f"{n} good day" for n in NUMBERS], "in one 2-gram"),
        ([" ".join(NUMBERS[first : first + 40]) for first in range(0, 160, 20)], "in repeated 5-grams"),
    ],
)
def test_the_repetition_rules_of_gopher(document: list[str], expected: str | None) -> None:
    found = reason("gopher-repetition", document)
    assert found is None if expected is None else expected in str(found)


def test_characters_of_ngrams_by_hand() -> None:
    words = "a bb a bb c a bb".split()
    assert _in_top_ngram(words, 2) == 3 * 3
    assert _in_top_ngram("a b c".split(), 2) == 0
    assert _in_repeated_ngrams(words, 2) == 6  # the second and the third "a bb"
    assert _in_repeated_ngrams("x x x x".split(), 2) == 3  # the second and the third place: words 2 to 4


def test_the_rules_of_c4_keep_sentences() -> None:
    document = [
        "Home",
        "This is the first good sentence.",
        "Menu | Login",
        'And she said: "a second one!"',
        "A third one is here?",
    ]
    kept, dropped = Rules(["c4"]).apply([document])
    assert kept == [[document[1], document[3], document[4]]]
    assert not dropped
    assert reason("c4", document[:3]) == "c4: fewer than 3 sentences"
    assert reason("c4", [*document, "if (x) { y }"]) == "c4: a curly bracket, as in code"
    assert reason("c4", [*document, "Lorem Ipsum dolor."]) == "c4: filler text"
    assert Rules(["c4"]).apply([[*document, "Please enable Javascript in your browser."]])[0] == kept


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["wrods:5"], "unknown filter 'wrods'"),
        (["words=5"], "unknown filter 'words=5'"),
        (["words"], "needs a number of words"),
        (["words:x"], "needs a number of words"),
        (["c4:3"], "takes no argument"),
        (["c4", "c4"], "given twice"),
    ],
)
def test_filters_that_do_not_exist(names: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Rules(names)


def shouting(argument: str | None) -> object:
    """A filter of another package."""
    return lambda document: [line.lower() for line in document] if document[0] != "DROP" else f"told so by {argument}"


def test_a_filter_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Registry[object] = Registry("filter")
    own.register("shouting", "tests.data.test_filters:shouting")
    monkeypatch.setattr("discern.data.curation.filters.filters", own)
    kept, dropped = Rules(["shouting:me"]).apply([["HELLO"], ["DROP"]])
    assert kept == [["hello"]]
    assert dropped == {"shouting: told so by me": 1}
    assert "c4" in filters.names()


def test_a_data_set_counts_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / "text" / f"{number}.txt").write_text(plain([*made_up(10, seed=number), ["the cat"], ["a dog sees"]]))
    common = {
        "tokenizer": TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt")),
        "build": BuildOptions(workers=1, filters=("words:3", "words:4-40")),
        "progress": Silent(),
    }
    report = prepare([str(tmp_path / "text")], out=tmp_path / "whole", **common)  # type: ignore[arg-type]
    assert report.values()["filtered"] == {"words: fewer than 3 words": 2, "words: fewer than 4 words": 2}
    assert report.manifest.statistics.documents == 20
    assert report.manifest.configuration["filters"] == "words:3,words:4-40"
    prepare_part([str(tmp_path / "text")], part=0, parts=1, out=tmp_path / "parts", **common)  # type: ignore[arg-type]
    assert merge(tmp_path / "parts", workers=1, progress=Silent()).manifest == report.manifest
