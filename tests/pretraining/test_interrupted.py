"""Runs that are killed, stopped or disturbed."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from discern.errors import CheckpointError, DataError
from discern.storage.checksums import write_recorded
from discern.storage.files import OutputFolder
from discern.training.checkpoint import newest_step
from tests.pretraining.commands import CONSTANT, LIMIT, figures, start, train, weights


def test_interrupted_in_every_way_a_run_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    """Killed, asked to stop, and left by the reader of its progress (as `2>&1 | head` does)."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGPIPE, 141)):
        before, deadline = newest_step(cut / "checkpoints"), time.monotonic() + LIMIT
        with start(data, cut, 10**6, *CONSTANT) as process:
            assert process.stderr is not None
            if number == signal.SIGPIPE:
                process.stderr.close()
            while newest_step(cut / "checkpoints") < before + 9 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            if number != signal.SIGPIPE:
                process.send_signal(number)
                said = process.stderr.read()
            assert process.wait(LIMIT) == code
        step = newest_step(cut / "checkpoints")
        assert step > before
        assert "Traceback" not in said
        if number == signal.SIGTERM:
            assert f"stopped and saved at step {step:,}; run the same command to continue" in " ".join(said.split())
    for out in (whole, cut):
        train(data, out, step + 4, *CONSTANT)
    assert weights(whole, step + 4) == weights(cut, step + 4)
    assert figures(whole) == figures(cut)
    assert not [path for path in (cut / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_run_killed_while_it_began_can_begin_again(data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("half of i")
    train(data, tmp_path, 1)
    assert (tmp_path / "tokenizer.json").read_text() == (data / "tokenizer.json").read_text()


def test_a_run_that_ended_before_its_first_checkpoint_can_begin_again_otherwise(data: Path, tmp_path: Path) -> None:
    """With another length and other settings, as nothing would be lost."""
    out, fresh = tmp_path / "run", tmp_path / "fresh"
    train(data, out, 6)
    shutil.rmtree(out / "checkpoints")
    first, *_ = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(first)["step"] < 3
    write_recorded(out, {"metrics.jsonl": first})  # as if it was killed then
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        train(data, out, 6, resume="must")
    assert "holds a run without a checkpoint; it starts again" in train(data, out, 4, "train.seed=5")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    train(data, fresh, 4, "train.seed=5")
    assert weights(out, 4) == weights(fresh, 4)
    assert figures(out) == figures(fresh)


def test_a_run_whose_checkpoints_were_removed_is_moved_aside_when_another_begins(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(data, out, 6)
    log = (out / "metrics.jsonl").read_bytes()
    shutil.rmtree(out / "checkpoints")
    train(data, out, 4, "train.seed=5")
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == log
    shutil.rmtree(out / "checkpoints")
    (out / "metrics.jsonl").unlink()
    (out / "blimp.json").write_text("{}")  # evaluated before it was damaged
    train(data, out, 4, "train.seed=5")
    assert (tmp_path / "run.2" / "blimp.json").read_text() == "{}"


def test_a_second_process_does_not_touch_a_run_that_is_being_trained(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(data, out, 3)
    before = sorted(tmp_path.rglob("*"))
    with OutputFolder(out) as other:
        other.acquire()
        for resume in ("auto", "never"):
            with pytest.raises(DataError, match="another process is using"):
                train(data, out, 6, resume=resume)
    assert sorted(tmp_path.rglob("*")) == before
    train(data, out, 6)
