"""Processes meet in a store in which others have met before them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from discern.errors import ConfigError, DataError, RanksError
from discern.storage.files import OutputFolder
from discern.training.distributed import open_store, rendezvous
from discern.training.process import lock_patience


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: Any) -> Any:
    return TCPStore("127.0.0.1", store.port, is_master=False)


def together(store: Any, ranks: list[int], world_size: int = 3, seconds: float = 20.0) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        met = [threads.submit(rendezvous, client(store), rank, world_size, seconds) for rank in ranks]
        return [each.result() for each in met]


def test_every_group_has_a_name_of_its_own(store: Any) -> None:
    first, second = together(store, [0, 1, 2]), together(store, [2, 0, 1])
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0], "what the first group has stored would be found by the second"


def test_what_a_dead_process_has_left_is_not_met(store: Any) -> None:
    with pytest.raises(RanksError, match=r"one of the processes .* did not join within 0 seconds"):
        rendezvous(client(store), 1, 3, 0.3)  # rank 1 came, and died
    late: list[str] = []
    waiting = threading.Thread(target=lambda: late.extend(together(store, [0, 2])))
    waiting.start()
    time.sleep(0.5)
    assert not late, "they wait for the rank 1 that is alive"
    assert together(store, [1]) * 2 == (waiting.join() or late)


def test_rank_0_names_who_is_missing(store: Any) -> None:
    with pytest.raises(RanksError, match=r"rank 1, 2 of 3 did not join"):
        rendezvous(client(store), 0, 3, 0.3)
    assert len(set(together(store, [0, 1, 2]))) == 1
    with pytest.raises(RanksError, match=r"rank 1, 2 of 3 did not join"):
        rendezvous(client(store), 0, 3, 0.5)  # they have been there, but confirm nothing


def test_a_store_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RanksError, match=r"rank 0, or torchrun on its machine, did not answer on 127.0.0.1:1 in 0 seconds"):
        open_store(1, 0.2)
    monkeypatch.setenv("MASTER_PORT", "here")
    with pytest.raises(ConfigError, match="MASTER_PORT='here'"):
        open_store(1, 0.2)


def test_a_restarted_run_waits_for_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert lock_patience() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert lock_patience() > 30
    with OutputFolder(tmp_path) as ending:
        ending.acquire()
        with OutputFolder(tmp_path) as impatient, pytest.raises(DataError, match="another process is using"):
            impatient.acquire()
        threading.Timer(0.3, ending.close).start()
        with OutputFolder(tmp_path) as restarted:
            restarted.acquire(patience=20)
