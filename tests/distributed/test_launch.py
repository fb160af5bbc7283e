"""The processes of `--nproc`: what reaches them, and what becomes of the others when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from discern.errors import RanksError
from discern.training.launch import launch
from discern.training.rank_environment import LIFELINE, LOST_CONTACT, TIMEOUT_VARIABLE

PYTHON = (sys.executable, "-c")
RANK = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"


def start(body: str, tell: list[str] | None = None, nproc: int = 2) -> int:
    """Launch processes of a few lines instead of the command."""
    return launch([RANK + body], nproc, (tell if tell is not None else []).append, program=PYTHON)


def alive(folder: Path) -> list[int]:
    """Of the processes that wrote their numbers into a folder, those that live."""
    return [int(path.name) for path in folder.iterdir() if Path(f"/proc/{path.name}").exists()]


def mark(folder: Path) -> str:
    return f"open(os.path.join({str(folder)!r}, str(os.getpid())), 'w').close()\n"


def test_processes_know_each_other_and_their_exit_codes_are_passed_on() -> None:
    body = "assert os.environ['WORLD_SIZE'] == '3' and os.environ['LOCAL_RANK'] == os.environ['RANK']"
    assert start(body, nproc=3) == 0
    assert start("sys.exit(2 if rank == 1 else 0)") == 2


def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.pipe()
    monkeypatch.setattr(os, "pipe", lambda: opened)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: os.stat("/no-such-program"))
    with pytest.raises(FileNotFoundError):
        start("")
    for end in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_a_killed_process_is_named_and_the_others_end(tmp_path: Path) -> None:
    both = f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.02)\n"  # a busy machine may start one much later
    body = mark(tmp_path) + both + "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else (time.sleep(0.7), sys.exit(76))"
    with pytest.raises(RanksError, match=r"process 1 of 2 .* was killed by SIGKILL"):
        start(body)
    assert alive(tmp_path) == []


def test_a_stopped_process_is_told_of_and_given_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.5")
    told: list[str] = []
    body = mark(tmp_path) + f"os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 else (time.sleep(0.8), sys.exit({LOST_CONTACT}))"
    with pytest.raises(RanksError, match=r"process 0 of 2 .* was stopped by a signal and did not continue in time"):
        start(body, told)
    assert len(told) == 1
    assert "process 0 of 2 was stopped by a signal, and the others wait for it; kill -CONT" in told[0]
    assert alive(tmp_path) == []


def test_a_process_that_was_stopped_may_go_on() -> None:
    told: list[str] = []
    body = "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP); time.sleep(0.5)"

    def resume() -> None:
        while not told:
            time.sleep(0.05)
        os.kill(int(told[0].split("kill -CONT ")[1].split()[0]), signal.SIGCONT)

    helper = threading.Thread(target=resume)
    helper.start()
    assert start(body, told) == 0
    helper.join()
    assert told[1] == "process 0 of 2 was resumed"


def test_a_process_that_does_not_answer_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.training.launch._LAST_WORDS", 0.1)
    with pytest.raises(RanksError, match="a process has not responded"):
        start(f"sys.exit({LOST_CONTACT}) if rank == 0 else time.sleep(60)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_all_processes_once(number: signal.Signals, tmp_path: Path) -> None:
    both = f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.02)\n"  # the other process listens as well
    body = (
        "def leave(number, frame): time.sleep(0.3); sys.exit(128 + number)\n"
        f"signal.signal({int(number)}, leave)\n"
        f"{mark(tmp_path)}{both}"
        f"if rank == 1: os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(60)"
    )
    assert start(body) == 128 + number


def test_ranks_end_with_their_launcher_even_when_it_is_killed(tmp_path: Path) -> None:
    # The lifeline's end is what the processes of the command listen for: tests/training/test_rank_environment.py.
    body = RANK + mark(tmp_path) + f"os.read(int(os.environ[{LIFELINE!r}]), 1)"
    program = f"from discern.training.launch import launch; launch([{body!r}], 2, print, program={PYTHON!r})"
    launcher = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(alive(tmp_path)) == 2
    launcher.kill()
    launcher.wait()
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tmp_path) == []


SILENT = """
import os, sys, time
from discern.errors import RanksError
from discern.training.distributed import join_ranks
del os.environ["DISCERN_LIFELINE"]  # as torchrun starts it
try:
    with join_ranks("cpu") as ranks:
        assert ranks.sum([1.0]) == [2.0] and ranks.gather(ranks.rank, waits=True) == [0, 1]
        ranks.barrier()
        if ranks.rank == 1:
            time.sleep(6)
        ranks.sum([1.0])
except RanksError as error:
    assert "rank 1 (pid" in error.message and "did not join the others within 2 seconds" in error.message
    sys.exit(5)
"""


def test_a_rank_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2")
    assert launch([SILENT], 2, print, program=PYTHON) == 5
