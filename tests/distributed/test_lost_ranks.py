"""Processes under torchrun, of which one is lost: it is named, the others end, and the last whole checkpoint is used."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from benchmarks import kills

from discern.errors import ConfigError
from discern.training import checkpoint
from discern.training.heartbeat import LEAVES_THE_REPORT
from discern.training.process import HEARTBEAT_VARIABLE, TIMEOUT_VARIABLE, heartbeat_timeout
from tests.processes import Program, ranks

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
BROKEN_SAVES = """
import resource
from dataclasses import replace
from pathlib import Path
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from discern.errors import CheckpointError
from discern.training import evaluation
from discern.training.loop import train
from discern.training.state import State
from tests.training.test_loop import build, context

write, evaluate, saves, unlimited = HuggingFaceStorageWriter.write_data, evaluation.evaluate, [], resource.RLIM_INFINITY

def broken(self, plan, planner):
    saves.append(plan)
    if case == "evaluation":
        time.sleep(1)  # the evaluation fails before the checkpoint is complete
    fails = len(saves) == 2 and ranks.rank == 1
    if case == "full" and fails:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, unlimited))
    try:
        done = write(self, plan, planner)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    if case == "killed" and fails:  # the file is there, and the checkpoint not yet published
        os.kill(os.getpid(), signal.SIGKILL)
    return done

def unreadable(*_, **__):
    raise DataError("a file cannot be read")

HuggingFaceStorageWriter.write_data = broken
for case in ("evaluation", "full", "killed"):
    saves.clear()
    evaluation.evaluate = unreadable if case == "evaluation" else evaluate
    folder = Path(FOLDER) / (case if ranks.writes else "other")
    often = dict(checkpoint_every_steps=3, evaluate_every_steps=3 if case == "evaluation" else 0)
    run = context(folder, build(0.0), parallel="fsdp", max_steps=9, sequences_per_step=4, **often)
    try:
        train(replace(run, ranks=ranks), State())
    except CheckpointError as error:
        assert case == "full" and "File too large" in error.message and "step-00000003" in error.hint, (error.message, error.hint)
        assert "process 1 on " in error.message, error.message
    except DataError as error:
        assert case == "evaluation", error.message
    else:
        raise AssertionError(case)
"""


def started(body: str, **variables: str) -> AbstractContextManager[list[Program]]:
    """Two processes as torchrun starts them, one on each machine; rank 0 keeps the store."""
    return ranks(2, "-c", START.replace("BODY", body.strip().replace("\n", "\n        ")), **variables)


def said(process: Program, code: int = 1) -> str:
    """What a process has printed when it ends by itself, with this exit code."""
    output = "".join(process.communicate(timeout=100))
    assert process.returncode == code, output
    return output


def named(process: Program) -> str:
    return f"rank 1 (pid {process.pid} on {socket.gethostname()}) "


def test_a_save_that_is_not_completed_leaves_the_one_before(tmp_path: Path) -> None:
    """An evaluation fails meanwhile, a disk is full, and a process is killed: its end is noticed at once, and named."""
    with started(BROKEN_SAVES.replace("FOLDER", repr(str(tmp_path)))) as (first, killed):
        killed.wait()  # an agent of torchrun does so at once
        assert named(killed) + "has ended without a message" in said(first)
    for case in ("evaluation", "full", "killed"):
        folder = tmp_path / case / "checkpoints"
        assert [path.name for path in checkpoint.found(folder)] == ["step-00000003"]
        partial = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert partial == ([".step-00000006.partial"] if case == "killed" else [])
        contents = checkpoint.load_newest(folder, pytest.fail)
        assert contents is not None
        assert contents.step == 3
        checkpoint.clean(folder)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_long_work_is_no_silence_and_a_stopped_rank_is_named_after_a_set_time() -> None:
    body = """
if ranks.rank == 0: time.sleep(5)  # a checkpoint or an evaluation may take longer than the limit of silence
ranks.barrier()
print("went on", flush=True)
if ranks.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
ranks.barrier()  # would wait for 24 hours: the heartbeat ends it
"""
    with started(body, **{HEARTBEAT_VARIABLE: "3"}) as (first, stopped):
        output = said(first)
        assert "went on" in output
        assert named(stopped) + "has shown no sign of life for" in output
        assert f"seconds ({HEARTBEAT_VARIABLE}): it was killed or stopped" in output


def test_a_rank_that_fails_says_so_itself() -> None:
    with started('if ranks.rank == 1: raise DataError("the disk is full")\nranks.sum([1.0])') as (first, second):
        assert "the disk is full" not in said(first, LEAVES_THE_REPORT)
        assert said(second).count("the disk is full") == 1


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    with started("if ranks.rank == 1: time.sleep(99)\nranks.sum([1.0])", **{TIMEOUT_VARIABLE: "5"}) as (first, second):
        assert named(second) + "did not join the others within 5 seconds" in said(first)


def test_the_limit_of_silence_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    assert heartbeat_timeout() == 40
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "long")
    with pytest.raises(ConfigError, match=HEARTBEAT_VARIABLE):
        heartbeat_timeout()


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    summary = kills.run(tmp_path, kills=3, seed=1, launchers=["torchrun", "nproc"], steps=240)
    assert all(result["nothing_lost"] for result in summary.values()), summary
