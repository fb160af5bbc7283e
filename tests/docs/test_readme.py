"""The README's commands, run as they stand, on a small text."""

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
CHINESE = README.with_name("README.zh.md")
WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
# What makes the commands of hours a matter of seconds; everything else is run as written.
SMALL = {
    "--preset electra-small": "--preset tiny",
    "train.max_hours=10": "train.max_steps=4",
    "--vocab-size 16000": "--vocab-size 200",
}


def blocks(page: Path = README) -> list[str]:
    """The blocks of commands, in order; those of another language are left out."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [body for language, body in found if not language]


def run_lines(commands: str, folder: Path) -> None:
    """Run each line in a folder; every one must succeed."""
    for line in commands.strip().splitlines():
        arguments = shlex.split(line)
        assert arguments[0] == "discern"
        done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (line, done.stderr)


def test_the_commands_of_your_own_text_run(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "my-texts"
    folder.mkdir()
    lines = [" ".join(rng.choices(WORDS, k=9)) + ("\n" if number % 5 == 4 else "") for number in range(2000)]
    (folder / "a.txt").write_text("\n".join(lines))
    commands = next(block for block in blocks() if "discern prepare my-texts/" in block)
    for shortcut, small in SMALL.items():
        commands = commands.replace(shortcut, small)
    assert commands.count("discern ") == 5
    run_lines(commands, tmp_path)
    assert (tmp_path / "models" / "first" / "model.safetensors").is_file()

    rows = [f"{' '.join(rng.choices(WORDS, k=6))},{stars}" for stars in (1, 2, 3) * 20]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,stars", *rows]) + "\n")
    (tmp_path / "new-reviews.csv").write_text("review\nthe old cat sat\na red bird flew\n")
    commands = next(block for block in blocks() if "discern finetune" in block)
    assert commands.count("discern ") == 3
    run_lines(commands, tmp_path)
    assert len((tmp_path / "predicted.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "models" / "stars" / "config.json").is_file()


def test_every_command_that_the_pages_show_exists() -> None:
    pages = [README, CHINESE, README.parent / "CHANGELOG.md", *sorted((README.parent / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    code = [block for text in texts for block in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.S)]
    shown = {verb for block in code for verb in re.findall(r"(?:^|`)discern ([a-z]+)", block, flags=re.M)}
    help_text = subprocess.run([sys.executable, "-m", "discern", "--help"], capture_output=True, text=True).stdout
    verbs = set(re.findall(r"^  ([a-z]+) {2,}", help_text, flags=re.M))
    assert verbs == {
        "prepare",
        "pretrain",
        "adapt",
        "evaluate",
        "export",
        "import",
        "detect",
        "score",
        "rerank",
        "fill",
        "report",
        "compare",
        "demo",
        "embed",
        "serve",
        "watch",
        "bench",
        "doctor",
        "config",
        "finetune",
        "predict",
    }
    assert shown <= verbs


def test_the_chinese_page_shows_the_same_commands() -> None:
    commands = [re.sub(r" +#.*", "", block) for block in blocks()]
    assert commands == [re.sub(r" +#.*", "", block) for block in blocks(CHINESE)]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = README.parent / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
