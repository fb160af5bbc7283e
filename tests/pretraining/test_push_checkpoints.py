"""`discern pretrain --push-checkpoints`: a process beside the training pushes what it saves to the Hugging Face Hub."""

import time
from pathlib import Path

import pytest

import discern
from discern.errors import ConfigError
from tests.model_files.hub_server import Hub, serving
from tests.pretraining.commands import CONSTANT, FAST, Notes, figures, train, weights

STEPS = 8


class Slow(Notes):
    """A listener that makes a run last longer than the watcher of its checkpoints waits."""

    def advance(self, amount: float, **metrics: str) -> None:
        time.sleep(0.4)


def pushed(data: Path, out: Path, name: str = "me/run") -> str:
    """Train as `train` does, but slowly, and push the checkpoints; gives the notes."""
    notes = Slow()
    settings = [f"train.max_steps={STEPS}", *FAST, *CONSTANT]
    discern.pretrain(data=data, out=out, preset="tiny", settings=settings, push_checkpoints=name, progress=notes)
    return "\n".join(notes.lines)


def test_checkpoints_are_pushed_and_training_is_the_same(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, out, plain = Hub(), tmp_path / "run", tmp_path / "plain"
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.failing = {"commit": [403]}
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        notes = pushed(data, out)
        assert notes.count("warning: a checkpoint was not pushed to me/run: me/run@step-") == 1
        assert f"not now; to push the newest one: discern export {out} --out DIR --push me/run" in notes
        revisions = hub.repositories["me/run"]
        assert {"main", f"step-{STEPS}"} <= set(revisions) <= {"main", "step-3", "step-6", f"step-{STEPS}"}
        assert revisions["main"] == revisions[f"step-{STEPS}"]
        assert hub.created[0]["visibility"] == "private"
        text = ["The old town."]
        assert (discern.load("me/run", device="cpu").encode(text) == discern.load(out, device="cpu").encode(text)).all()
    # A Hub that does not respond delays nothing but the push
    assert pushed(data, out).count("cannot be written on the Hugging Face Hub: [Errno") == 2
    train(data, plain, STEPS, *CONSTANT)
    assert weights(out, STEPS) == weights(plain, STEPS)
    assert figures(out) == figures(plain)


def test_a_name_that_is_wrong_is_reported_before_training(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a name"):
        pushed(data, tmp_path / "run", "run")
    assert not (tmp_path / "run").exists()
