"""The commands of the README and of SKILL.md, run as they stand, on a small text."""

import random
import re
import shlex
from pathlib import Path

import pytest
from docs._sphinx.reference import verbs

from tests.docs.pages import PAGES
from tests.support import run_python

README = Path(__file__).parents[2] / "README.md"
CHINESE = README.with_name("README.zh.md")
SKILL = README.with_name("SKILL.md")
WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
# What makes the commands of hours a matter of seconds; everything else is run as written.
SMALL = {
    "--preset electra-small": "--preset tiny",
    "--preset modern-cpu --data": "--preset tiny --set train.max_steps=4 --data",
    "train.max_hours=10": "train.max_steps=4",
    "--vocab-size 16000": "--vocab-size 200",
    "--vocab-size 8192": "--vocab-size 200",
    "--precision 0.9": "--precision 0.05",
    "--seeds 3": "--seeds 2 --set train.max_steps=4",
}


def blocks(page: Path = README) -> list[str]:
    """The blocks of commands, in order; those of another language are left out."""
    written = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [body for language, body in written if not language]


def write_texts(folder: Path) -> None:
    """The files that the commands name."""
    rng = random.Random(0)
    (folder / "my-texts").mkdir()
    lines = [" ".join(rng.choices(WORDS, k=9)) + ("\n" if number % 5 == 4 else "") for number in range(600)]
    (folder / "my-texts" / "a.txt").write_text("\n".join(lines))
    rows = [f"{' '.join(rng.choices(WORDS, k=6))},{stars}" for stars in (1, 2, 3) * 20]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *rows]) + "\n")
    (folder / "new-reviews.csv").write_text("review\nthe old cat sat\na red bird flew\n")
    (folder / "texts.txt").write_text("the old cat sat\na red bird flew\n")


@pytest.mark.parametrize(("page", "count"), [(README, 8), (SKILL, 18)], ids=lambda value: getattr(value, "stem", None))
def test_the_commands_run(page: Path, count: int, tmp_path: Path) -> None:
    write_texts(tmp_path)
    commands = [line for block in blocks(page) for line in block.splitlines() if line.startswith("discern ")]
    assert len(commands) == count
    for line in commands:
        for written, small in SMALL.items():
            line = line.replace(written, small)
        done = run_python("-m", *shlex.split(line), cwd=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
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
    commands = [re.sub(r" +#.*", "", block) for block in blocks()]
    assert commands == [re.sub(r" +#.*", "", block) for block in blocks(CHINESE)]
