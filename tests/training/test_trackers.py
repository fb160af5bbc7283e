"""Trackers get the numbers of each record; a missing one is refused, a failing one costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from discern.errors import ConfigError
from discern.training.metrics import MetricsLog, check_trackers, read_metrics


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A package with the functions of a tracker, and the calls that it gets."""
    received: list[tuple[Any, ...]] = []

    def init(**options: Any) -> None:
        print("Welcome!")  # as trackio does
        received.append(("init", options))

    def log(values: dict[str, float], step: int) -> None:
        if values.get("loss") == 13:
            raise OSError("no\nnetwork")
        received.append(("log", step, values))

    package = ModuleType("trackio")
    vars(package).update(__spec__=sys.__spec__, init=init, log=log, finish=lambda: received.append(("finish",)))
    for name in ("trackio", "wandb"):
        monkeypatch.setitem(sys.modules, name, package)
    return received


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
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert [call[0] for call in calls] == ["init"]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="the package wandb is not installed") as caught:
        check_trackers("wandb", tensorboard=False)
    assert caught.value.hint == "pip install wandb"


@pytest.mark.parametrize(("tracker", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_is_known_by_its_folder(tmp_path: Path, calls: list[tuple[Any, ...]], tracker: Any, key: str) -> None:
    for folder in ("a/seed-0", "a/seed-0", "b/seed-0"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        MetricsLog(tmp_path / folder, 0, tracker=tracker, warn=pytest.fail).close()
    first, resumed, other = (call[1][key] for call in calls if call[0] == "init")
    assert first == resumed != other
