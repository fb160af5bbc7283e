"""Trackers get the numbers of each record; a missing one is refused, a failing one costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from discern.errors import ConfigError
from discern.training.metrics_log import MetricsLog, check_trackers, read_metrics


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A package with the functions of a tracker, and the calls that it gets."""
    found: list[tuple[Any, ...]] = []
    package = ModuleType("trackio")
    package.__spec__ = sys.__spec__

    def init(**options: Any) -> None:
        print("Welcome!")  # as trackio does
        found.append(("init", options))

    package.init = init  # type: ignore[attr-defined]
    package.finish = lambda: found.append(("finish",))  # type: ignore[attr-defined]

    def log(values: dict[str, float], step: int) -> None:
        if values.get("loss") == 13:
            raise OSError("no\nnetwork")
        found.append(("log", step, values))

    package.log = log  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", package)
    return found


def test_a_tracker_gets_the_numbers_of_each_record_and_keeps_stdout_clean(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, 0, tracker="trackio", warn=pytest.fail)
    log.write({"step": 5, "loss": 2.0, "grad_norm": float("nan"), "note": "x"})
    log.close()
    (_, started), *others = calls
    assert started == {"project": "discern", "name": started["name"], "resume": "allow"}
    assert started["name"].startswith(f"{tmp_path.name}-")
    assert others == [("log", 5, {"loss": 2.0}), ("finish",)]
    assert capsys.readouterr().out == ""


def test_a_tracker_that_fails_costs_no_record(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    warnings: list[str] = []
    log = MetricsLog(tmp_path, 0, tracker="trackio", warn=warnings.append)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 13})
    log.close()
    assert warnings == ["train.tracker: trackio failed and receives no more records: no network"]
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2, 3]
    assert [each[0] for each in calls] == ["init"]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="the package wandb is not installed") as caught:
        check_trackers("wandb", tensorboard=False)
    assert caught.value.hint == "pip install wandb"
    check_trackers("none", tensorboard=False)


@pytest.mark.parametrize(("tracker", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_is_known_by_its_folder(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tracker: Any, key: str
) -> None:
    monkeypatch.setitem(sys.modules, tracker, sys.modules["trackio"])
    for folder in ("a/seed-0", "a/seed-0", "b/seed-0"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        MetricsLog(tmp_path / folder, 0, tracker=tracker, warn=pytest.fail).close()
    first, resumed, other = (call[1][key] for call in calls if call[0] == "init")
    assert first == resumed != other
