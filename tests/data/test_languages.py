"""`--language`: the tokenizer that suits a language, and codes that there are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.data import prepare
from discern.data.languages import LANGUAGES, find_language
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError


def test_all_codes_of_iso_639_1_are_known() -> None:
    assert len(LANGUAGES) == 183
    assert all(len(code) == 2 and name for code, name in LANGUAGES.items())
    assert LANGUAGES["gd"] == "Gaelic"


@pytest.mark.parametrize(
    ("code", "kind", "size", "lowercase", "segmenter"),
    [
        ("zh-CN", "wordpiece", 21_128, True, "jieba"),
        ("EN_us", "wordpiece", 30_522, True, "none"),
        ("de", "wordpiece", 30_522, False, "none"),
        ("ko", "wordpiece", 30_522, False, "kiwipiepy"),
        ("ja", "unigram", 30_522, False, "fugashi"),
        ("th", "unigram", 30_522, False, "pythainlp"),
    ],
)
def test_a_language_decides_what_was_left_open(
    code: str, kind: str, size: int, lowercase: bool, segmenter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed, expected in ((True, segmenter), (False, "none")):
        monkeypatch.setattr(prepare, "find_spec", lambda name: name if installed else None)  # noqa: B023
        warnings: list[str] = []
        found, chosen, _ = prepare.in_language(code, TokenizerChoice(), None, warnings.append)
        assert (found.train, found.size, found.lowercase) == (kind, size, lowercase)
        found.check()
        assert chosen == expected
        assert len(warnings) == (segmenter != expected)


def test_what_was_asked_for_stays() -> None:
    given = TokenizerChoice(path=Path("vocab.txt"))
    assert given.in_language("zh") is given
    asked = TokenizerChoice(train="bpe", vocab_size=500, lowercase=False)
    assert asked.in_language("zh") == asked


@pytest.mark.parametrize(
    ("code", "hint"),
    [("chinese", "'zh' (Chinese)"), ("germn", "'de' (German)"), ("eng", "'en' (English)"), ("xx", "give an ISO 639-1 code")],
)
def test_an_unknown_language_is_refused_with_a_suggestion(code: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown language '{code}'") as error:
        find_language(code)
    assert hint in str(error.value.hint)
