"""The README's commands, run as they stand, on a small text."""

import random
import re
import shlex
from pathlib import Path

from docs._sphinx.reference import verbs

from tests.docs.pages import PAGES
from tests.support import run_python

README = Path(__file__).parents[2] / "README.md"
CHINESE = README.with_name("README.zh.md")
WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
# What makes the commands of hours a matter of seconds; everything else is run as written.
SMALL = {
    "--preset electra-small": "--preset tiny",
    "train.max_hours=10": "train.max_steps=4",
    "--vocab-size 16000": "--vocab-size 200",
    "--seeds 3": "--seeds 2 --set train.max_steps=4",
}


def blocks(page: Path = README) -> list[str]:
    """The blocks of commands, in order; those of another language are left out."""
    written = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [body for language, body in written if not language]


def run_block(command: str, lines: int, folder: Path) -> None:
    """Run the lines of the block with a command in a folder; every one must succeed."""
    commands = next(block for block in blocks() if command in block)
    assert commands.count("discern ") == lines
    for written, small in SMALL.items():
        commands = commands.replace(written, small)
    for line in commands.strip().splitlines():
        arguments = shlex.split(line)
        assert arguments[0] == "discern"
        done = run_python("-m", *arguments, cwd=folder)
        assert done.returncode == 0, (line, done.stderr)


def test_the_commands_of_your_own_text_run(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "my-texts"
    folder.mkdir()
    lines = [" ".join(rng.choices(WORDS, k=9)) + ("\n" if number % 5 == 4 else "") for number in range(600)]
    (folder / "a.txt").write_text("\n".join(lines))
    run_block("discern prepare my-texts/", 5, tmp_path)
    assert (tmp_path / "models" / "first" / "model.safetensors").is_file()

    rows = [f"{' '.join(rng.choices(WORDS, k=6))},{stars}" for stars in (1, 2, 3) * 20]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,stars", *rows]) + "\n")
    (tmp_path / "new-reviews.csv").write_text("review\nthe old cat sat\na red bird flew\n")
    run_block("discern finetune", 3, tmp_path)
    assert len((tmp_path / "predicted.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "models" / "stars" / "config.json").is_file()


def test_every_command_that_the_pages_name_exists() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    code = [block for text in texts for block in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.S)]
    named = {verb for block in code for verb in re.findall(r"(?:^|`)discern ([a-z]+)", block, flags=re.M)}
    assert len(named) > 15
    assert named <= {verb.name.partition(" ")[0] for verb in verbs()}


def test_the_chinese_page_shows_the_same_commands() -> None:
    commands = [re.sub(r" +#.*", "", block) for block in blocks()]
    assert commands == [re.sub(r" +#.*", "", block) for block in blocks(CHINESE)]
