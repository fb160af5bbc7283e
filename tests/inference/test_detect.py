"""`discern detect --html`: the page of the shipped model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from discern.cli.detect import detect as detect_command
from discern.data.tokenizer import TokenTexts, load_tokenizer
from discern.inference import detection as work
from discern.model_files.export import export
from discern.progress import Silent
from tests.small.run import make_run
from tests.small.tokenizers import KINDS, small_tokenizer

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "modern-cpu"
TEXT = "<script> was released in the United States."


def test_the_page_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(SHIPPED, text=[TEXT, ""], html=tmp_path / "page.html", threshold=0.3)
    assert re.search(r"page\.html: 2 texts, \d+ of \d+ tokens marked at threshold 0\.3 \(given\)", capsys.readouterr().out)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;</span>" in page
    assert page.count("(empty line)") == 1
    places, none = json.loads(re.findall(r'id="data">(.*?)</script>', page, flags=re.S)[0])
    tokens = load_tokenizer(SHIPPED).encode(TEXT, add_special_tokens=False).tokens
    assert len(places) == len(tokens)
    assert none == []
    for _, best in places:
        assert len(best) == 5
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    assert places[tokens.index("states")][1][0][0] == "states", "easy enough for a small generator"


def test_json_beside_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(SHIPPED, text=[TEXT], html=tmp_path / "page.html", json_output=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["html"] == str(tmp_path / "page.html")
    assert len(printed["tokens"]) == len(printed["replaced_probability"])


def test_a_discriminator_alone_has_a_page_without_proposals(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "alone", progress=Silent(), warn=pytest.fail)
    detect_command(tmp_path / "alone", text=[TEXT], html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "not part of the model" in page
    assert 'id="data">[null]</script>' in page


def test_the_same_texts_give_the_same_page(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        detect_command(SHIPPED, text=[TEXT], html=tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_what_has_no_room_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "MAX_TOKENS", 5)
    (tmp_path / "a.txt").write_text("The town.\nThe river.\nThe sea.\n\n")
    detect_command(SHIPPED, tmp_path / "a.txt", html=tmp_path / "page.html", out=tmp_path / "found.jsonl")
    assert "shows the first 1 texts; 3 more do not fit" in capsys.readouterr().err
    assert "3 more do not fit" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 4


def test_the_first_text_always_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "MAX_TOKENS", 1)
    (tmp_path / "a.txt").write_text("The town.\nThe river.\n")
    detect_command(SHIPPED, tmp_path / "a.txt", html=tmp_path / "page.html")
    assert "shows the first 1 texts; 1 more do not fit" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_shown_as_people_read_them(kind: str) -> None:
    tokenizer: Tokenizer = small_tokenizer(kind)
    texts = TokenTexts(tokenizer)
    named = [texts.shown(number) for number in tokenizer.encode("the chef", add_special_tokens=False).ids]
    # A blank that is a token of its own is shown as the tokenizer writes it.
    assert "".join(name.removeprefix("##").strip("Ġ▁") for name in named) == "thechef"
    assert all(texts.shown(number) for number in tokenizer.get_vocab().values())
