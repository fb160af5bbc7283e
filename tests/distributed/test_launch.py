"""The command with `--nproc`: signals reach all processes, and what becomes of the others when one is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from discern.training import checkpoint
from tests.data.small_text import made_up, plain
from tests.processes import Program


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").write_text(plain(made_up(80)))
    tokenizer = TokenizerChoice(train="wordpiece", vocab_size=150)
    prepare(
        [str(folder / "text")], out=folder / "data", tokenizer=tokenizer, options=PrepareOptions(workers=1), progress=Silent()
    )
    return folder / "data"


@contextmanager
def training(data: Path, out: Path) -> Iterator[tuple[Program, list[int]]]:
    """A run of two processes that has saved a checkpoint, and the numbers of its processes."""
    line: list[str | Path] = ["-m", "discern", "pretrain", "--preset", "tiny", "--data", data, "--out", out, "--nproc", "2"]
    line += ["--set", "train.checkpoint_every_steps=5", "--set", "train.max_steps=100000"]
    launcher = Program(*line)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.newest_step(out / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.1)
        children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True)
        ranks = [*map(int, children.stdout.split())]
        assert len(ranks) == 2
        yield launcher, ranks
    finally:
        for process in (launcher.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.wait()


def ended(ranks: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_signal_saves_and_stops_all_processes(data: Path, tmp_path: Path) -> None:
    with training(data, tmp_path / "run") as (launcher, ranks):
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 128 + signal.SIGTERM
        assert errors.count("stopped and saved at step") == 1
        assert ended(ranks)


def test_a_killed_process_is_named_once_and_the_others_end(data: Path, tmp_path: Path) -> None:
    with training(data, tmp_path / "run") as (launcher, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        name = f"rank 1 (pid {ranks[1]} on {socket.gethostname()})"
        assert errors.count("error: ") == errors.count(f"{name} was killed by SIGKILL") == 1, errors
        assert "Traceback" not in errors
        assert ended(ranks)


def test_processes_save_when_the_launcher_is_killed(data: Path, tmp_path: Path) -> None:
    with training(data, tmp_path / "run") as (launcher, ranks):
        launcher.kill()
        assert ended(ranks)
        assert "stopped and saved at step" in launcher.communicate()[1]
