"""Runs that are killed, stopped, out of space or disturbed: real processes, real signals."""

import json
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from discern.storage.checksums import write_recorded
from discern.storage.output import OutputFolder
from tests.pretraining.commands import DISCERN, LIMIT, command, figures, run, weights


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.time() + LIMIT
    while not path.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)


def kill_and_resume(data: Path, folder: Path, kills: int, steps: int) -> None:
    """Kill a run at random moments, saves included, and compare its end with that of one left alone."""
    done = run(*command(data, folder / "whole", steps), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == steps
    rng = random.Random(kills)
    killed = 0
    for attempt in range(kills):
        process = subprocess.Popen(
            [*DISCERN, *command(data, folder / "cut", steps)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        target = (attempt + 1) * steps // (kills + 1) // 3 * 3
        wait_for(folder / "cut" / "checkpoints" / f"step-{max(target, 3):08d}", process)
        time.sleep(rng.random() * 0.15)
        killed += process.poll() is None
        process.kill()
        process.wait()
    assert killed >= kills - 1, "the run was too fast to be killed; give it more steps"
    done = run(*command(data, folder / "cut", steps), "--json")
    assert done.returncode == 0, done.stderr
    assert weights(folder / "whole", steps) == weights(folder / "cut", steps)
    assert figures(folder / "whole") == figures(folder / "cut")
    assert not [path for path in (folder / "cut" / "checkpoints").iterdir() if path.name.startswith(".")]


def test_killed_three_times_it_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    kill_and_resume(data, tmp_path, kills=3, steps=90)


@pytest.mark.slow
def test_killed_twenty_times_it_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    kill_and_resume(data, tmp_path, kills=20, steps=400)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_exits(data: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [*DISCERN, *command(data, out, 10**6)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    wait_for(out / "checkpoints" / "step-00000003", process)  # type: ignore[arg-type]
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == code
    assert not any(word in said for word in ("error", "Traceback"))
    number_of_step, advice = said.split("stopped and saved at step ")[1].split(";")
    assert advice.split() == "run the same command to continue".split()
    step = int(number_of_step.replace(",", ""))
    assert (out / "checkpoints" / f"step-{step:08d}").is_dir()


def test_a_reader_of_the_progress_who_leaves_loses_nothing(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen([*DISCERN, *command(data, out, 10**6)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()  # as `2>&1 | head -1` does
    assert process.wait(timeout=LIMIT) == 141
    assert len(list((out / "checkpoints").glob("step-*"))) > 0


def test_a_disk_that_takes_no_more_keeps_the_last_good_checkpoint(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*command(data, out, 6)).returncode == 0
    before = weights(out, 6)

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    done = run(*command(data, out, 30), preexec_fn=small_files_only)
    assert done.returncode == 1, done.stderr
    assert "step-00000006" in done.stderr
    assert "Traceback" not in done.stderr
    assert weights(out, 6) == before
    assert run(*command(data, out, 9)).returncode == 0, "with space again, the same command goes on"


def test_a_run_killed_while_it_began_can_begin_again(data: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("half of i")
    done = run(*command(data, tmp_path, 3))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tokenizer.json").read_text() == (data / "tokenizer.json").read_text()


def test_a_run_that_ended_before_its_first_checkpoint_can_begin_again_otherwise(data: Path, tmp_path: Path) -> None:
    """With another length, other settings and other data, as nothing would be lost."""
    out = tmp_path / "run"
    assert run(*command(data, out, 6)).returncode == 0
    shutil.rmtree(out / "checkpoints")
    log = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    early = "".join(line for line in log if json.loads(line)["step"] < 3)
    write_recorded(out, {"metrics.jsonl": early})  # as if it was killed then
    missing = run(*command(data, out, 6, "--resume", "must"))
    assert "has no checkpoint to resume from" in missing.stderr
    done = run(*command(data, out, 4, "--set", "train.seed=5"))
    assert done.returncode == 0, done.stderr
    assert "holds a run without a checkpoint; it starts again" in done.stderr
    assert not (tmp_path / "run.1").exists()
    assert max(record["step"] for record in figures(out)) == 4
    fresh = tmp_path / "fresh"
    assert run(*command(data, fresh, 4, "--set", "train.seed=5")).returncode == 0
    assert weights(out, 4) == weights(fresh, 4)


def test_a_run_whose_checkpoints_were_removed_is_kept_when_another_begins(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*command(data, out, 6)).returncode == 0
    log = (out / "metrics.jsonl").read_bytes()
    shutil.rmtree(out / "checkpoints")
    done = run(*command(data, out, 4, "--set", "train.seed=5"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == log
    shutil.rmtree(out / "checkpoints")
    (out / "metrics.jsonl").unlink()
    (out / "blimp.json").write_text("{}")  # evaluated before it was damaged
    assert run(*command(data, out, 4, "--set", "train.seed=5")).returncode == 0
    assert (tmp_path / "run.2" / "blimp.json").read_text() == "{}"


def test_a_second_process_does_not_touch_a_run_that_is_being_trained(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with OutputFolder(out) as other:
        out.mkdir()
        other.acquire()
        begun = run(*command(data, out, 3))
        assert begun.returncode == 1
        assert "another process is using" in begun.stderr
        assert not list(out.iterdir())
    assert run(*command(data, out, 3)).returncode == 0
    with OutputFolder(out) as other:
        other.acquire()
        for more in ([], ["--resume", "never"]):
            done = run(*command(data, out, 6, *more))
            assert done.returncode == 1
            assert "another process is using" in done.stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert run(*command(data, out, 6)).returncode == 0
