"""The blocks of commands of the pages, run in order in a folder that has what they name.

What takes hours, or a download, is replaced as `SMALL` says, or left out as `NOT_RUN` says; tests/docs/test_pages.py checks that
every command is understood in any case. Commands that write the same folder in different blocks of a page are alternatives: the
folder of an earlier block is removed first.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.docs.world import ROOT, STEPS, Server, shell, write_texts

SHELL = ("", "sh", "console")
# Files that a page shows, and its commands read.
SHOWN = {"compare": "compare.toml", "finetune": "stars.toml"}
# Pages whose Python belongs to their commands.
PYTHON = ("export", "serve-elsewhere")

SMALL = (
    (r" *\\\n *", " "),  # a command continued on the next line is one line
    # Sizes. `bench --device meta` computes nothing, so it is left as it is.
    (r"--preset (?:electra-\w+|cpu-small|modern-cpu|gpu-minutes|demo)", "--preset tiny"),
    (r'preset = "demo"', 'preset = "tiny"'),
    (r"train\.max_(?:steps|hours) ?= ?[\d.]+", "train.max_steps=4"),
    (r"discern (pretrain|adapt) (.*--set train\.max_steps=4)", r"discern \1 \2 --set train.sequences_per_step=4"),
    (r"discern (pretrain|adapt) (?!.*(?:train\.max_steps|--decay-from))", rf"discern \1 {STEPS} "),
    (r"optimizer\.decay_steps=\d+", "optimizer.decay_steps=2"),
    (r"train\.micro_batch_size=\d+", "train.micro_batch_size=4"),
    (r"discern bench (?!.*--device meta)", "discern bench --seconds 0 "),
    (r"--set finetune\.epochs=\d+", ""),
    (r"discern finetune ", "discern finetune --set train.max_steps=2 "),
    (r"discern compare (?!.*--dry-run)", f"discern compare {STEPS} --set train.evaluate_sequences=8 "),
    (r"finetune\.train_rows = \d+", "train.max_steps = 2"),
    (r"seeds = [345]", "seeds = 1"),
    (r"--seeds \d", "--seeds 2"),
    (r"--vocab-size \d+", "--vocab-size 200"),
    (r"--add-tokens \d+", "--add-tokens 2"),
    (r"--limit \d+", "--limit 2"),
    (r"collect\(4_000_000", "collect(100_000"),
    # What a network of four steps reaches.
    (r"--precision 0\.9", "--precision 0.05"),
    (r"--max-loss [\d.]+", "--max-loss 1"),
)

# (page, beginning of the line) -> why it is not run.
NOT_RUN = {
    ("README", "make "): "sets up an environment; CI runs it",
    ("README.zh", "make "): "sets up an environment; CI runs it",
    ("start", "pip install"): "downloads",
    ("start", "discern demo"): "minutes; tests/demo runs it",
    ("chinese", "pip install"): "downloads",
    ("prepare-at-scale", "pip install"): "downloads",
    ("prepare-at-scale", "discern prepare https:"): "network",
    ("prepare-at-scale", "discern prepare 's3:"): "network",
    ("prepare-at-scale", "discern prepare hf:"): "network",
    ("prepare-at-scale", "discern prepare text/ --out DATA --tokenizer vocab.txt --engine ray"): "tests/data starts a cluster",
    ("export", "hf auth login"): "network; tests/model_files pushes to a server on this machine",
    ("export", "discern export runs/first --out models/first --push"): "network",
    ("export", "discern pretrain"): "network",
    ("export", "discern evaluate USER/NAME"): "network",
    ("one-gpu-day", ""): "a GPU",
    ("gpu", "nvidia-smi"): "a GPU",
    ("eight-gpus", ""): "eight GPUs",
    ("continue-deberta", ""): "a model of the Hub",
    ("cluster", ""): "several machines; tests/distributed has processes of one",
}
QUICK = ("prepare", "prepare-at-scale")
SLOW = (
    *("README.zh", "start", "faq"),
    *("laptop", "domain", "chinese", "two-objectives", "one-gpu-day", "eight-gpus", "cluster", "continue-deberta"),
    *(
        "adapt",
        "compare",
        "detect",
        "doctor",
        "embeddings",
        "export",
        "finetune",
        "gpu",
        "import",
        "look-at-it",
        "rerank",
        "score",
    ),
    *("serve-elsewhere", "speed"),
)
# No blocks of commands; their Python is run by tests of their own.
WITHOUT = ("add-a-task", "python")


def page_of(name: str) -> Path:
    """The page of that name, wherever it lies."""
    return next(
        path for folder in (".", "docs", "docs/howto", "docs/tutorials") if (path := ROOT / folder / f"{name}.md").is_file()
    )


def left_out(page: str, line: str) -> bool:
    return any(page == name and line.startswith(start) for name, start in NOT_RUN)


def to_run(page: str) -> Iterator[str]:
    """The blocks of a page as they are run: small, without what is not run; a file that the page shows is written first."""
    shown = SHOWN.get(page)
    for language, body in blocks(page_of(page).read_text(encoding="utf-8")):
        if language == "toml" and shown:
            text, shown = f"cat > {shown} <<'TOML'\n{body}TOML\n", None
        elif language == "python" and page in PYTHON:
            text = f"python - <<'PYTHON'\n{body}PYTHON\n"
        elif language in SHELL:
            text = body
        else:
            continue
        for written, small in SMALL:
            text = re.sub(written, small, text)
        kept = [line for line in text.splitlines() if not left_out(page, line)]
        if any(kept):
            yield "\n".join(kept) + "\n"


def run_page(page: str, folder: Path) -> None:
    """Run the blocks of a page in a folder; servers run until the next one or the end."""
    server: Server | None = None
    written: set[str] = set()
    try:
        for commands in to_run(page):
            outputs = set(re.findall(r"--out ([\w./-]+)", commands))
            made = re.findall(r"^mkdir ([\w-]+)", commands, flags=re.M)
            for name in {*outputs, *(f"{each}-data" for each in outputs), *made}:
                if name in written or name in made or not reads(commands, name):
                    remove(folder / name)
            written |= outputs
            if not re.search(r"^discern (?:serve|watch)", commands, flags=re.M):
                if server:
                    commands = re.sub(r"http://127\.0\.0\.1:\d+", server.address, commands)
                shell(folder, commands)
                continue
            for line in commands.splitlines():
                if server:
                    server.stop()
                server = Server(folder, line)
    finally:
        if server:
            server.stop()


def reads(commands: str, name: str) -> bool:
    """Whether commands use a folder before they write it."""
    commands = re.sub(r"--(?:text|pair|label|words|tags) \S+", "", commands)  # names of columns
    first = re.search(rf"(?<![\w/.-]){re.escape(name)}(?![\w.-])", commands)
    return first is not None and not commands[: first.start()].endswith("--out ")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("page", QUICK)
def test_a_page_without_models_runs(page: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    shutil.copytree(ROOT / "examples" / "models" / "modern-cpu", tmp_path / "MODEL")
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_a_page_runs(page: str, world: Path, tmp_path: Path) -> None:
    if not list(to_run(page)):
        pytest.skip("; ".join(reason for (name, _), reason in NOT_RUN.items() if name == page))
    folder = tmp_path / "here"
    shutil.copytree(world, folder, symlinks=True)
    run_page(page, folder)


def test_every_page_with_commands_is_run() -> None:
    pages = [*(ROOT / "docs" / "howto").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert {page.stem for page in pages} | {"README.zh"} == {*QUICK, *SLOW, *WITHOUT}
    for page in WITHOUT:
        assert not list(to_run(page))


@pytest.mark.parametrize(("page", "start"), NOT_RUN)
def test_what_is_not_run_is_on_its_page(page: str, start: str) -> None:
    shown = [line for language, body in blocks(page_of(page).read_text(encoding="utf-8")) for line in body.splitlines()]
    assert any(line.startswith(start) for line in shown)


def test_a_server_that_names_no_address_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silent.py").write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setattr("tests.docs.world.START_SECONDS", 0.2)
    with pytest.raises(AssertionError, match="silent named no address in time"):
        Server(tmp_path, "silent")
