"""The verb `discern prepare`: what `--language` decides, and what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from discern.cli.main import main
from discern.data import prepare as preparing
from tests.data.small_text import write_vocabulary


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of `discern prepare ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["discern", "prepare", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def chinese(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.tsv"
    path.write_text("label\ttext\n" + "".join(f"{n % 2}\t这家酒店的服务很好{n}\n" for n in range(60)), encoding="utf-8")
    return path


def test_chinese_is_one_word(
    chinese: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparing, "find_spec", lambda name: None)
    assert call(monkeypatch, chinese, "--out", tmp_path / "data", "--language", "zh", "--workers", 1) == 0
    said = capsys.readouterr()
    assert "pip install 'discern-nlp[zh]'" in said.err
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    settings = manifest["configuration"]
    assert (settings["language"], settings["train"], settings["vocab_size"]) == ("zh", "wordpiece", 21_128)
    assert (settings["segmenter"], settings["lowercase"]) == ("none", True)
    assert manifest["statistics"]["documents"] == 60
    vocabulary = json.loads((tmp_path / "data" / "tokenizer.json").read_text())["model"]["vocab"]
    assert {"酒", "店", "好"} <= vocabulary.keys()
    assert "label" not in vocabulary


def test_words_are_found_with_jieba(chinese: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jieba")
    assert call(monkeypatch, chinese, "--out", tmp_path / "data", "--language", "zh", "--workers", 1) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["configuration"]["segmenter"] == "jieba"
    assert manifest["statistics"]["words"] < manifest["statistics"]["tokens"]


def test_accents_that_a_tokenizer_removes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Ich möchte.\n\nEr mochte.\n", encoding="utf-8")
    for kind, size, noted in (("wordpiece", 60, True), ("bpe", 300, False)):
        asked = ("--out", tmp_path / kind, "--train-tokenizer", kind, "--vocab-size", size, "--lowercase", "--workers", 1)
        assert call(monkeypatch, tmp_path / "text.txt", *asked) == 0
        assert ("'möchte.' and 'mochte.' become one word; to keep accents: --keep" in capsys.readouterr().err) is noted


def test_a_check_names_what_is_unknown_to_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("a ☂ cat\n", encoding="utf-8")
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    assert call(monkeypatch, tmp_path / "text.txt", "--check", "--workers", 1, "--tokenizer", vocabulary) == 0
    said = capsys.readouterr().out
    assert "unknown are '☂' (U+2602): 100%" in said
    assert "no problems found" not in said


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_check_of_an_empty_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "text.txt").write_text(content)
    assert call(monkeypatch, tmp_path / "text.txt", "--check", "--workers", 1) == 1
    said = capsys.readouterr()
    assert "no problems found" not in said.out
    assert "error: `discern prepare` would stop: the input contains no text\n  hint: give files with text" in said.err


def test_the_overlap_with_evaluation_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Once more: a cat sat\non the mat, near the old house.\n\nAnother document.\n")
    (tmp_path / "dev.csv").write_text("id,sentence\n1,A cat sat on THE mat near the door\n2,a cat sat on the mat near\n3,no\n")
    asked = (tmp_path / "text.txt", "--check", "--against", tmp_path / "dev.csv", "--workers", 1)
    assert call(monkeypatch, *asked, "--against-field", "sentence", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["overlap"]
    assert (found["examples"], found["checked"], found["too_short"], found["overlapping"]) == (3, 1, 2, 0)
    (tmp_path / "dev.csv").write_text("id,sentence\n1,A cat sat on THE mat near the\n2,no\n")
    assert call(monkeypatch, *asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "dev.csv: 1 of 1 examples (100.00%); 1 of fewer than 8 words not checked" in said
    assert "line 2: '1 a cat sat on the mat near the'" not in said, "each field is a text of its own"
    assert f"line 2: 'a cat sat on the mat near the' in {tmp_path / 'text.txt'}, document 1 ('Once more: a cat sat" in said
    assert call(monkeypatch, tmp_path / "text.txt", "--check", "--against-field", "sentence") == 2
    assert "add --against FILE" in capsys.readouterr().err
    assert call(monkeypatch, *asked, "--against-field", "sentense") == 2
    assert "did you mean 'sentence'?" in capsys.readouterr().err
    assert call(monkeypatch, tmp_path / "text.txt", "--check", "--against", tmp_path / "absent.csv") == 1
    assert "absent.csv cannot be read" in capsys.readouterr().err


def test_an_output_folder_is_asked_for(
    chinese: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, chinese, "--train-tokenizer", "bpe") == 2
    assert "no output folder is given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument"),
        (["TEXT", "--near-duplicates", "0.2"], "expected a similarity from 0.5 to 1"),
        (["-", "--engine", "ray"], "--engine ray cannot read standard input"),
        (["TEXT", "--filter", "gopher"], "unknown filter 'gopher'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n")
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    given = [str(text) if each == "TEXT" else each for each in arguments]
    assert call(monkeypatch, *given, "--out", tmp_path / "data", "--tokenizer", vocabulary) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "vocab.txt"]


@pytest.mark.parametrize("tokenized", [True, False])
def test_a_check_counts_what_filters_leave_out(
    tmp_path: Path, tokenized: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("a red cat\n\na dog\n\na bird\n")
    more = ("--tokenizer", write_vocabulary(tmp_path / "vocab.txt")) if tokenized else ()
    asked = (tmp_path / "text.txt", "--check", "--workers", 1, *more)
    assert call(monkeypatch, *asked, "--filter", "gopher") == 2
    assert call(monkeypatch, *asked, "--filter", "words:3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["filtered"] == {"words: fewer than 3 words": 2}
    assert call(monkeypatch, *asked, "--filter", "words:4") == 1
    assert "the filters leave out every document" in capsys.readouterr().err
    chosen = more or ("--train-tokenizer", "wordpiece", "--vocab-size", 100)
    assert call(monkeypatch, asked[0], *chosen, "--filter", "words:4", "--out", tmp_path / "data") == 1
    assert "the filters leave out every document (words: fewer than 4 words: 3)" in capsys.readouterr().err
