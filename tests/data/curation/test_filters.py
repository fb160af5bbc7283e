"""Each rule of the filters on text at its limit, the filter by language on text of several, and the counts in the manifest."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from discern.data.curation import filters
from discern.data.curation.filters import Rules
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError
from discern.progress import Silent
from discern.registry import Registry
from tests.data.small_text import made_up, plain, write_vocabulary

LETTERS = [chr(0x4E00 + number) for number in range(70)]
NUMBERS = [f"word{number}" for number in range(200)]
PROSE = [" ".join(["the", "people", "of", *NUMBERS[first : first + 12]]) + "." for first in range(0, 120, 12)]
# 3 good sentences of 5
C4 = ["Home", "This is the first good sentence.", "Menu | Login", 'And she said: "a second one!"', "A third one is here?"]
SENTENCES = {
    "en": "The ferry to the island leaves twice a day, in the morning and in the late afternoon.",
    "de": "Die Fähre zur Insel fährt zweimal am Tag, morgens und am späten Nachmittag.",
    "ja": "島へのフェリーは一日に二回、朝と夕方に出ます。",
    "zh": "去岛上的渡轮每天有两班，早上一班，下午晚些时候一班。",
}
needs_language = pytest.mark.skipif(find_spec("py3langid") is None, reason="the extra 'language' is not installed")


def left_out(name: str, document: list[str]) -> str:
    """The reason why a filter leaves out a document; empty if it keeps it."""
    (result,), dropped = Rules([name]).apply([document])
    assert (result is None) == (dropped.total() == 1)
    return next(iter(dropped), "")


@pytest.mark.parametrize(
    ("name", "document", "expected"),
    [
        ("words:5", ["a a a a", "b"], ""),
        ("words:5", ["a a a", "b"], "words: fewer than 5 words"),
        ("words:2-5", ["a a a a a", "b"], "words: more than 5 words"),
        ("gopher-quality", PROSE, ""),
        ("gopher-quality", PROSE[:3], "not 50 to 100,000 words"),
        ("gopher-quality", [line.replace("word", "w" * 12) for line in PROSE], "mean length of words"),
        ("gopher-quality", [line + " # # #" for line in PROSE], "hash signs and ellipses"),
        ("gopher-quality", ["- " + line for line in PROSE], "begin with a bullet"),
        ("gopher-quality", [line + ".." for line in PROSE[:4]] + PROSE[4:], "end with an ellipsis"),
        ("gopher-quality", [line + " 1234 5678 9012 3456" for line in PROSE], "have a letter"),
        ("gopher-quality", [line.replace("the", "thy").replace("of", "off") for line in PROSE], "English stop words"),
        ("gopher-repetition", [f"{line} {line}x" for line in NUMBERS], ""),
        ("gopher-repetition", [f"{n} {n}x" for n in NUMBERS[:6]] + ["equal line"] * 5, "lines are repeated"),
        (
            "gopher-repetition",
            [f"{n} {n}x" for n in NUMBERS[:8]] + ["a much longer line that is equal"] * 3,
            "characters are in repeated lines",
        ),
        # Three times "a b" are 6 of 30 characters, or of 29.
        ("gopher-repetition", [" ".join([*LETTERS[:22], "a b", LETTERS[22], "a b", LETTERS[23], "a b"])], ""),
        (
            "gopher-repetition",
            [" ".join([*LETTERS[:22], "a b", LETTERS[23], "a b a b"])],
            "20% of the characters are in one 2-gram",
        ),
        # Four repeated 5-grams, which overlap, have 8 of 70 characters, or of 53.
        ("gopher-repetition", [" ".join(LETTERS[:62] + LETTERS[:8])], ""),
        ("gopher-repetition", [" ".join(LETTERS[:45] + LETTERS[:8])], "15% of the characters are in repeated 5-grams"),
        ("c4", C4[:3], "c4: fewer than 3 sentences"),
        ("c4", [*C4, "if (x) { y }"], "c4: a curly bracket, as in code"),
        ("c4", [*C4, "Lorem Ipsum dolor."], "c4: filler text"),
    ],
)
def test_the_reason(name: str, document: list[str], expected: str) -> None:
    found = left_out(name, document)
    assert expected in found if expected else not found


def test_c4_keeps_the_lines_that_are_sentences() -> None:
    kept, dropped = Rules(["c4"]).apply([[*C4, "Please enable Javascript in your browser."]])
    assert (kept, dropped) == ([[C4[1], C4[3], C4[4]]], {})


@needs_language
def test_languages() -> None:
    for code, sentence in SENTENCES.items():
        kept, _ = Rules([f"language:{code}"]).apply([[each] for each in SENTENCES.values()])
        assert [document for document in kept if document is not None] == [[sentence]]


@needs_language
@pytest.mark.parametrize(
    ("argument", "document", "expected"),
    [
        ("en+ja", [SENTENCES["de"]], "language: German instead of English or Japanese"),
        ("de+en", [SENTENCES["de"]], ""),
        ("en", ["qxzv 0x3fa9; wlkj_77 == {} -- zzqp(3432);" * 9], "language: no language instead of English"),
        ("en:0.1", ["The house is old."], ""),
        ("en:1", ["The house is old."], "language: confidence in English below 1"),
        ("de+en:0.95", [SENTENCES["de"], SENTENCES["en"]], ""),
        ("de:0.95", [SENTENCES["de"], SENTENCES["en"]], "language: confidence in German below 0.95"),
        ("de:0.9", [*[SENTENCES["de"]] * 40, *[SENTENCES["en"]] * 4000], ""),  # only the beginning is read
        ("zh-CN", [SENTENCES["zh"]], ""),
        ("nb", ["Fergen til øya går to ganger om dagen, om morgenen og sent på ettermiddagen."], ""),
    ],
)
def test_the_reason_of_the_language_filter(argument: str, document: list[str], expected: str) -> None:
    assert left_out(f"language:{argument}", document) == expected


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrods:5", "unknown filter 'wrods'"),
        ("words:x", "needs a number of words"),
        ("c4:3", "takes no argument"),
        ("language", "needs language codes"),
        ("language:de:1.5", "a confidence of at most 1"),
        ("language:de:0", "a confidence of at most 1"),
        pytest.param("language:german", "unknown language 'german'", marks=needs_language),
    ],
)
def test_filters_that_do_not_exist(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Rules([name])
    assert re.search(says, str(raised.value))
    assert raised.value.hint


def test_the_extra_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    filters._language_identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ConfigError, match=r"not installed\n.*discern-nlp\[language\]"):
        Rules(["language:de"])


def shouting(argument: str | None) -> object:
    """A filter of another package."""
    return lambda document: [line.lower() for line in document] if document[0] != "DROP" else f"told so by {argument}"


def test_a_filter_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Registry[object] = Registry("filter")
    own.register("shouting", f"{__name__}:shouting")
    monkeypatch.setattr(filters, "filters", own)
    assert Rules(["shouting:me"]).apply([["HELLO"], ["DROP"]]) == ([["hello"], None], {"shouting: told so by me": 1})


def test_a_data_set_counts_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(plain([*made_up(10), ["the cat"], ["a dog sees"]]))
    report = prepare(
        [str(tmp_path / "text.txt")],
        out=tmp_path / "data",
        tokenizer=TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt")),
        options=PrepareOptions(workers=1, filters=("words:3", "words:4-40")),
        progress=Silent(),
    )
    assert report.values()["filtered"] == {"words: fewer than 3 words": 1, "words: fewer than 4 words": 1}
    assert report.manifest.statistics.documents == 10
    assert report.manifest.configuration["filters"] == ("words:3", "words:4-40")
