"""The command with `--nproc`: signals reach all processes, and what becomes of the others when one is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from discern.training import checkpoint
from discern.training.rank_environment import HEARTBEAT_VARIABLE
from tests.data.small_text import made_up, plain


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").write_text(plain(made_up(80)))
    tokenizer = TokenizerChoice(train="wordpiece", vocab_size=150)
    prepare([str(folder / "text")], out=folder / "data", tokenizer=tokenizer, build=BuildOptions(workers=1), progress=Silent())
    return folder / "data"


def command(data: Path, out: Path, *sets: str) -> list[str]:
    options = [part for each in ("train.checkpoint_every_steps=5", *sets) for part in ("--set", each)]
    return [sys.executable, "-m", "discern", "pretrain", "--preset", "tiny", "--data", str(data), "--out", str(out), *options]


@contextmanager
def training(data: Path, out: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two processes that has saved a checkpoint, and the numbers of its processes."""
    line = [*command(data, out, "train.max_steps=100000"), "--nproc", "2"]
    launcher = subprocess.Popen(line, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.newest_step(out / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.1)
        children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True).stdout.split()
        ranks = [*map(int, children)]
        assert len(ranks) == 2
        yield launcher, ranks
    finally:
        for process in (launcher.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.wait()
        assert launcher.stderr is not None
        launcher.stderr.close()


def ended(ranks: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_all_processes(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    with training(data, tmp_path / "run") as (launcher, ranks):
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 128 + number
        assert errors.count("stopped and saved at step") == 1
        assert ended(ranks)


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has shown no sign of life for 3")]
)
def test_a_lost_process_is_named_once_and_the_others_end(number: signal.Signals, why: str, data: Path, tmp_path: Path) -> None:
    with training(data, tmp_path / "run", **{HEARTBEAT_VARIABLE: "3"}) as (launcher, ranks):
        os.kill(ranks[1], number)
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        assert errors.count("error: ") == errors.count(f"rank 1 (pid {ranks[1]} on {socket.gethostname()}) {why}") == 1, errors
        assert "Traceback" not in errors
        assert ended(ranks)


def test_processes_save_when_the_launcher_is_killed(data: Path, tmp_path: Path) -> None:
    with training(data, tmp_path / "run") as (launcher, ranks):
        launcher.kill()
        assert ended(ranks)
        assert "stopped and saved at step" in launcher.communicate()[1]


@pytest.mark.parametrize(
    ("sets", "code", "says"), [("train.max_step=1", 2, "unknown key"), ("train.sequences_per_step=3", 2, "evenly")]
)
def test_one_error_without_a_traceback(sets: str, code: int, says: str, data: Path, tmp_path: Path) -> None:
    done = subprocess.run([*command(data, tmp_path / "run", sets), "--nproc", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert done.stderr.count("error: ") == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
