import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from discern.errors import CheckpointError
from discern.storage.checksums import checksum
from discern.training import checkpoint
from discern.training.checkpoint import Contents


def contents(step: int, *, averaged: bool = False) -> Contents:
    value = torch.full((2, 3), float(step))
    average = {"w": value / 2} if averaged else {}
    return Contents({"w": value, "b": value[0].clone()}, {"w.mean": value}, {}, {"step": step, "tokens": 5}, average)


def test_round_trip_and_pruning(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, contents(step), keep=2)
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-00000010", "step-00000003"]
    loaded = checkpoint.load_newest(tmp_path, pytest.fail)
    assert loaded is not None
    assert loaded.step == 10
    assert torch.equal(loaded.model["w"], torch.full((2, 3), 10.0))
    assert sorted(path.name for path in (tmp_path / "step-00000010").iterdir()) == [
        "checksums.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "average.safetensors", "optimizer.safetensors", "state.json", "checksums.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty"])
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path: Path, file: str, damage: str) -> None:
    checkpoint.save(tmp_path, contents(1), keep=2)
    broken = checkpoint.save(tmp_path, contents(2, averaged=True), keep=2) / file
    data = broken.read_bytes()
    if damage == "remove":
        broken.unlink()
    elif damage == "flip":
        broken.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    else:
        broken.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    warnings: list[str] = []
    loaded = checkpoint.load_newest(tmp_path, warnings.append)
    assert loaded is not None
    assert loaded.step == 1
    assert len(warnings) == 1
    assert "step-00000002" in warnings[0]


def test_nothing_sound_is_an_error_and_nothing_at_all_is_not(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path / "absent", pytest.fail) is None
    (checkpoint.save(tmp_path, contents(1), keep=2) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        checkpoint.load_newest(tmp_path, lambda _: None)


def test_a_failing_write_keeps_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, contents(1), keep=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for target in ("discern.training.checkpoint.save_file", "discern.training.checkpoint.sync_folder"):
        with monkeypatch.context() as patched:
            patched.setattr(target, full)
            with pytest.raises(CheckpointError, match="No space left") as caught:
                checkpoint.save(tmp_path, contents(2), keep=2)
        assert "step-00000001" in (caught.value.hint or "")
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    (checkpoint.save(tmp_path, contents(2), keep=2) / "model.safetensors").write_bytes(b"")
    checkpoint.save(tmp_path, contents(2), keep=2)
    assert checkpoint.load_newest(tmp_path, pytest.fail) is not None


def test_what_a_kill_left_is_cleaned_and_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005.partial").mkdir()
    (tmp_path / ".step-00000001.removed").mkdir()
    assert checkpoint.found(tmp_path) == []
    checkpoint.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, contents(1), keep=2)
    state = json.loads((path / "state.json").read_text()) | {"format": 99}
    (path / "state.json").write_text(json.dumps(state))
    sums = json.loads((path / "checksums.json").read_text())
    sums["state.json"] = checksum(path / "state.json")
    (path / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(path)


def test_weights_that_do_not_fit_are_named() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="bias"):
        checkpoint.load_model_tensors(model, {"weight": torch.zeros(2, 3)}, "here")
    with pytest.raises(CheckpointError, match=r"weight.*\(3, 3\)"):
        checkpoint.load_model_tensors(model, {"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}, "here")


def test_what_a_run_turned_back_from_stays_until_its_step_comes_again(tmp_path: Path) -> None:
    # Steps 20 and 30 are damaged, and the run goes on from 10.
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, contents(step), keep=3)
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    for step, steps in ((15, [30, 20, 15, 10]), (17, [30, 20, 17, 15]), (20, [30, 20, 17])):
        checkpoint.save(tmp_path, contents(step), keep=2)
        assert [checkpoint.step_of(path) for path in checkpoint.found(tmp_path)] == steps
        loaded = checkpoint.load_newest(tmp_path, lambda _: None)
        assert loaded is not None
        assert loaded.step == step


@pytest.mark.parametrize(
    ("name", "verify"), [("model.safetensors", "1"), ("model.safetensors", "0"), ("state.json", "1"), ("checksums.json", "1")]
)
def test_what_cannot_be_read_is_not_taken_for_damaged(
    tmp_path: Path, name: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, contents(step), keep=2)
    monkeypatch.setenv("DISCERN_VERIFY", verify)
    real = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if name in self.parts and "step-00000002" in self.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=rf"step-00000002.* cannot be read: {os.strerror(errno.EIO)}\n.*restore access"):
        checkpoint.load_newest(tmp_path, pytest.fail)


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, contents(1), keep=2)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        checkpoint.load_newest(tmp_path, pytest.fail)
