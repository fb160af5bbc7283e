"""The help of every verb at every width: nothing is cut, and no word is broken."""

from __future__ import annotations

import re
import sys

import pytest

from discern.cli.main import VERBS, main

COMMANDS: list[list[str]] = [[], *([verb] for verb in VERBS), ["config", "show"], ["config", "check"], ["config", "diff"]]


def _help(arguments: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "argv", ["discern", *arguments, "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_nothing_is_cut(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {width: _help(arguments, width, monkeypatch, capsys) for width in (60, 120)}
    words = set(texts[120].split())
    for width, text in texts.items():
        assert "…" not in text
        # At another width a word that is broken is broken elsewhere.
        assert set(text.split()) == words
        assert max(map(len, text.splitlines())) <= width
    assert not any(word.endswith("-") for word in words - {"-"})


def test_the_list_of_verbs_gives_whole_sentences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    listed = " ".join(_help([], 80, monkeypatch, capsys).partition("Commands:")[2].split())
    for verb in VERBS:
        assert re.search(rf"\b{verb} [A-Z]", listed), verb
    assert not re.search(r"\w\.\.\.", listed)
