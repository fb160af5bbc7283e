"""A run that goes on with its decay in another folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from discern.errors import CheckpointError, ConfigError
from discern.pretraining.estimate import estimate
from discern.pretraining.run import open_run, plan, pretrain
from discern.progress import Silent
from discern.storage.files import OutputFolder
from discern.training.distributed import join_ranks
from tests.pretraining.commands import Notes, figures, weights

STABLE = ("optimizer.schedule=wsd", "optimizer.name=muon", "train.weight_average=0.5", "train.log_every_steps=4")
STABLE += ("optimizer.warmup_steps=10",)


@pytest.fixture(scope="module")
def stable(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at step 20 of 1,000, as if it had been interrupted; its warm-up took 10 steps."""
    out = tmp_path_factory.mktemp("stable") / "run"
    lengths = ("train.max_steps=20", "optimizer.schedule=constant", "train.checkpoint_every_steps=5", "train.keep_checkpoints=9")
    pretrain(data=data, out=out, preset="tiny", overrides=(*STABLE, *lengths), progress=Silent())
    return out


def test_a_decay_equals_a_run_that_was_as_long_from_the_start(data: Path, stable: Path, tmp_path: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in sorted(stable.rglob("*"))}
    whole, decayed = tmp_path / "whole", tmp_path / "decayed"
    lengths = ("train.max_steps=26", "optimizer.decay_steps=6")
    same = "optimizer.schedule=constant"  # repeating what the run was trained with asks for no other schedule than a decay's
    pretrain(data=data, out=whole, preset="tiny", overrides=(*STABLE, *lengths), progress=Silent())
    for steps in ((same,), ("train.keep_checkpoints=3",)):  # the second time there is nothing left to do
        overrides = ("optimizer.decay_steps=6", *steps)
        pretrain(data=data, out=decayed, decay_from=stable, overrides=overrides, progress=Silent())
    for name in ("model.safetensors", "average.safetensors", "optimizer.safetensors"):
        ends = [(out / "checkpoints" / "step-00000026" / name).read_bytes() for out in (whole, decayed)]
        assert ends[0] == ends[1], name
    end = figures(decayed)[-1]
    assert (end["step"], end["learning_rate"]) == (26, pytest.approx(figures(whole)[-1]["learning_rate"]))
    assert end["heldout_loss"] == figures(whole)[-1]["heldout_loss"]
    assert [line["step"] for line in figures(decayed)] == [1, 4, 8, 12, 16, 20, 24, 26]
    assert {path: path.stat().st_mtime_ns for path in sorted(stable.rglob("*"))} == times, "the stable run is left alone"
    record = json.loads((decayed / "run.json").read_text())["decay"]
    assert record == {"run": str(stable.resolve()), "step": 20}
    with pytest.raises(ConfigError, match="decay_steps: 6 in that run, 7 now"):
        pretrain(data=data, out=decayed, decay_from=stable, overrides=("optimizer.decay_steps=7",), progress=Silent())


def test_an_interrupted_decay_continues_although_the_run_itself_went_on(data: Path, stable: Path, tmp_path: Path) -> None:
    source, decayed = tmp_path / "source", tmp_path / "decayed"
    shutil.copytree(stable, source)
    chosen = source / "checkpoints" / "step-00000010"
    pretrain(data=data, out=tmp_path / "whole", decay_from=chosen, overrides=("optimizer.decay_steps=6",), progress=Silent())
    resolved = plan(data=data, out=decayed, decay_from=chosen, overrides=("optimizer.decay_steps=6",), warn=pytest.fail)
    with join_ranks("cpu") as ranks, OutputFolder(decayed) as folder:
        open_run(resolved, ranks, folder, Silent())  # and then killed
    shutil.rmtree(chosen)
    pretrain(data=data, out=decayed, decay_from=source, overrides=("optimizer.decay_steps=6",), progress=Silent())
    assert weights(decayed, 16) == weights(tmp_path / "whole", 16)
    # By default a fifth of the whole is decay.
    planned = estimate(plan(data=data, out=tmp_path / "planned", decay_from=source, warn=pytest.fail))
    assert planned.values["steps"] == 5
    assert "steps         5, from step 20 on" in planned.text


def test_the_note_on_a_run_that_is_longer_after_its_decay(data: Path, tmp_path: Path) -> None:
    notes = Notes()
    wsd = ("optimizer.schedule=wsd", "optimizer.decay_steps=2", "optimizer.warmup_steps=2")
    for steps in (4, 6):
        pretrain(data=data, out=tmp_path, preset="tiny", overrides=(*wsd, f"train.max_steps={steps}"), progress=notes)
    assert len([line for line in notes.lines if "rises to 0.001 again in the longer run" in line]) == 1


def test_a_decay_that_cannot_be_is_refused(data: Path, stable: Path, tmp_path: Path) -> None:
    def refused(*overrides: str, path: Path = stable, **options: Any) -> ConfigError:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            plan(data=data, out=tmp_path / "decayed", decay_from=path, overrides=overrides, warn=pytest.fail, **options)
        return caught.value  # type: ignore[return-value]

    for says, overrides in (
        ("optimizer.learning_rate: 0.001 in that run, 0.1 now", ("optimizer.learning_rate=0.1",)),
        ("train.max_hours", ("train.max_hours=1",)),
        ("train.max_steps: 26 in that run, 30 now", ("train.max_steps=30", "optimizer.decay_steps=6")),
    ):
        assert says in refused(*overrides).message
    assert "--preset is not allowed" in refused(preset="tiny").message
    assert "the learning rate is not at its peak" in refused(path=stable / "checkpoints" / "step-00000005").message
    assert "step-00000007" in refused(path=stable / "checkpoints" / "step-00000007").message
    ended = tmp_path / "ended"
    pretrain(data=data, out=ended, decay_from=stable, overrides=("optimizer.decay_steps=3",), progress=Silent())
    assert f"at step 23 of {ended} the learning rate is not at its peak" in refused(path=ended).message
    linear = tmp_path / "linear"
    pretrain(data=data, out=linear, preset="tiny", overrides=("train.max_steps=1",), progress=Silent())
    assert "schedule 'linear'" in refused(path=linear).message
    with pytest.raises(ConfigError, match="is not a decay of another run"):
        plan(data=data, out=linear, decay_from=stable, warn=pytest.fail)
