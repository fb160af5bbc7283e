"""Processes under torchrun: whoever is lost is named, and the others end. Longer ones: benchmarks/kills.py."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from discern.errors import ConfigError
from discern.training.heartbeat import LEAVES_THE_REPORT
from discern.training.rank_environment import HEARTBEAT_VARIABLE, TIMEOUT_VARIABLE, heartbeat_timeout

ROOT = Path(__file__).parents[2]

START = """
import os, signal, sys, time
from discern.errors import DataError, RanksError
from discern.training.distributed import join_ranks
try:
    with join_ranks("cpu") as ranks:
        assert ranks.sum([1.0]) == [ranks.world_size]
        BODY
except (RanksError, DataError) as error:
    print(error, flush=True)
    sys.exit(1)
"""


def start(body: str, **variables: str) -> list[subprocess.Popen[str]]:
    """Processes as torchrun starts them, one on each machine; rank 0 keeps the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    program = START.replace("BODY", body.strip().replace("\n", "\n        "))
    return [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | shared | {"RANK": str(rank)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def said(process: subprocess.Popen[str], code: int = 1, seconds: float = 60) -> str:
    """What a process has printed when it ends by itself, with this exit code."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def test_a_killed_rank_is_named_and_the_other_ends() -> None:
    first, killed = start("if ranks.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nranks.sum([1.0])")
    killed.wait()  # an agent of torchrun does so at once
    begin = time.monotonic()
    output = said(first)
    assert f"rank 1 (pid {killed.pid} on {socket.gethostname()}) has ended without a message" in output, output
    assert time.monotonic() - begin < 20


def test_a_stopped_rank_is_named_after_a_set_time() -> None:
    first, stopped = start(
        "if ranks.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nranks.barrier()", **{HEARTBEAT_VARIABLE: "3"}
    )
    try:
        # The exchange itself would wait for 24 hours, as rank 0 may have long work to do: the heartbeat ends it.
        output = said(first)
    finally:
        stopped.kill()
        stopped.communicate()
    assert f"rank 1 (pid {stopped.pid} on {socket.gethostname()}) has shown no sign of life for" in output
    assert f"seconds ({HEARTBEAT_VARIABLE}): it was killed or stopped" in output


def test_long_work_is_no_silence_and_a_rank_that_fails_says_so() -> None:
    # A checkpoint or an evaluation of rank 0 may take longer than the limit of silence, as the process lives.
    body = """
if ranks.rank == 0: time.sleep(7)
ranks.barrier()
print("went on", flush=True)
if ranks.rank == 1: raise DataError("the disk of this machine is full")
ranks.sum([1.0])
"""
    first, second = start(body, **{HEARTBEAT_VARIABLE: "4"})
    outputs = [said(first, LEAVES_THE_REPORT), said(second)]
    assert all("went on" in output for output in outputs)
    # Its own message is enough on one machine.
    assert "the disk of this machine is full" not in outputs[0]
    assert outputs[1].count("the disk of this machine is full") == 1


def test_the_limit_of_silence_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    assert heartbeat_timeout() == 40
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "long")
    with pytest.raises(ConfigError, match=HEARTBEAT_VARIABLE):
        heartbeat_timeout()


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    body = "if ranks.rank == 1: time.sleep(9)\nranks.sum([1.0])"
    first, second = start(body, **{TIMEOUT_VARIABLE: "2"})
    assert f"rank 1 (pid {second.pid} on {socket.gethostname()}) did not join the others within 2 seconds" in said(first)
    second.kill()
    second.communicate()


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("kills", ROOT / "benchmarks" / "kills.py")
    assert spec is not None
    assert spec.loader is not None
    kills = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = kills
    spec.loader.exec_module(kills)
    summary = kills.run(tmp_path, kills=3, seed=1, launchers=["torchrun", "nproc"], steps=240)
    assert all(each["nothing_lost"] for each in summary.values()), summary
