"""The commands of the README and of SKILL.md, run as they stand, on a small text."""

import re
from pathlib import Path

import pytest
from docs._sphinx.reference import verbs

from tests.docs.pages import PAGES, blocks
from tests.docs.test_commands import run_page, to_run
from tests.docs.world import ROOT, write_texts

SKILL = ROOT / "SKILL.md"


@pytest.mark.parametrize(("page", "count"), [("README", 8), ("SKILL", 18)])
def test_the_commands_run(page: str, count: int, tmp_path: Path) -> None:
    write_texts(tmp_path)
    assert [line.split()[0] for block in to_run(page) for line in block.splitlines()] == ["discern"] * count
    run_page(page, tmp_path)
    assert (tmp_path / "models" / "first" / "model.safetensors").is_file()
    assert (tmp_path / "models" / "stars" / "config.json").is_file()
    assert len((tmp_path / "predicted.jsonl").read_text().splitlines()) == 2


def test_the_skill_has_a_name_and_a_description() -> None:
    text = SKILL.read_text(encoding="utf-8")
    fields = re.fullmatch(r"---\nname: (\S+)\ndescription: >-\n((?:  .+\n)+)---\n.*", text, flags=re.S)
    assert fields
    assert fields[1] == "discern"
    assert len(fields[2]) <= 1024
    assert len(text.splitlines()) <= 120


def test_every_command_that_the_pages_name_exists() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    code = [block for text in texts for block in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.S)]
    named = {verb for block in code for verb in re.findall(r"(?:^|`)discern ([a-z]+)", block, flags=re.M)}
    assert len(named) > 15
    assert named <= {verb.name.partition(" ")[0] for verb in verbs()}


def test_the_chinese_page_shows_the_same_commands() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")]
    english, chinese = ([re.sub(r" +#.*", "", body) for language, body in blocks(text) if not language] for text in texts)
    assert english == chinese
