"""What of the environment makes a process one of several."""

from __future__ import annotations

import pytest

from discern.errors import ConfigError
from discern.training.process import (
    SINGLE_PROCESS,
    TIMEOUT_VARIABLE,
    RankEnvironment,
    missing_variables,
    rank_environment,
    ranks_timeout,
    require_single_process,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, TIMEOUT_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_what_torchrun_sets_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, **TORCHRUN)
    assert rank_environment() == RankEnvironment(3, 4, 1, 2)
    with pytest.raises(ConfigError, match="a comparison runs in one process"):
        require_single_process("a comparison")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="RANK=3 and WORLD_SIZE=1"):
        rank_environment()
    monkeypatch.setenv("RANK", "0")
    assert rank_environment() == SINGLE_PROCESS


@pytest.mark.parametrize("left", [{"RANK": "1"}, {"WORLD_SIZE": "8"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}])
def test_a_part_of_a_place_is_none(monkeypatch: pytest.MonkeyPatch, left: dict[str, str]) -> None:
    put(monkeypatch, **left)
    assert rank_environment() == SINGLE_PROCESS
    assert missing_variables() == [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in left]
    require_single_process("a comparison")


@pytest.mark.parametrize("wrong", [{"RANK": "one"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "-1"}])
def test_a_place_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]) -> None:
    put(monkeypatch, **(TORCHRUN | wrong))
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        rank_environment()


def test_the_patience_of_ranks_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_timeout() == 600
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2.5")
    assert ranks_timeout() == 2.5
    for wrong in ("soon", "0", "inf"):
        monkeypatch.setenv(TIMEOUT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=TIMEOUT_VARIABLE):
            ranks_timeout()
