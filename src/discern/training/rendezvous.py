"""How the processes that train together meet, also after torchrun has started some of them again.

torchrun may keep one store over all restarts, and torch would find addresses in it that dead processes have left. So every
process brings a random token, rank 0 makes a group of the newest tokens, and the group is complete when all of its processes have
confirmed it, which dead ones never do. Everything else is stored under the name of the group.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from discern.errors import ConfigError, RanksError

_LOOK = 0.1  # seconds between two looks
_CHECK = "look for its message, and check that every machine was started with the same address, port and number of machines"


def open_store(rank: int, seconds: float) -> Any:
    """The store at the address in the environment. Rank 0 creates it, unless torchrun or `--nproc` has.

    torch's own function waits where no signal reaches Python, and torchrun has to kill the process.

    Args:
        seconds: how long to wait for the store, and later for an answer of it.

    Raises:
        ConfigError: the port in the environment is not a number.
        RanksError: there is no store in time.
    """
    host, found = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not found.isdecimal() or int(found) >= 1 << 16:
        raise ConfigError(f"the environment has MASTER_PORT={found!r}, expected a port below 65536", hint=_CHECK)
    port, creates = int(found), rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not creates:
        _wait_for_port(host, port, seconds)
    timeout = timedelta(seconds=seconds)
    return TCPStore(host, port, is_master=creates, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _wait_for_port(host: str, port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as problem:
            if time.monotonic() > deadline:
                raise RanksError(
                    f"rank 0, or torchrun on its machine, did not answer on {host}:{port} in {seconds:,.0f} seconds: {problem}",
                    hint=_CHECK,
                ) from problem
        time.sleep(_LOOK)


def rendezvous(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """Wait until all processes are there. Return the name of their group, which no earlier group has had.

    Args:
        store: store that all of them see, see `open_store`.
        seconds: how long to wait.

    Raises:
        RanksError: not all processes have come in time.
    """
    own = os.urandom(8).hex()
    store.set(_token(rank), own)
    tokens, confirmed = ([key(each) for each in range(world_size)] for key in (_token, _confirmed))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if rank == 0 and store.check(tokens):
            found = [value.decode() for value in store.multi_get(tokens)]
            store.set(_GROUP, json.dumps(found))
        if store.check([_GROUP]):
            found = json.loads(store.get(_GROUP))
            name = _name(found)
            if found[rank : rank + 1] == [own]:
                store.set(_confirmed(rank), name)
                if rank == 0 and store.check(confirmed) and {*store.multi_get(confirmed)} == {name.encode()}:
                    store.set(_ready(name), "")
                if store.check([_ready(name)]):
                    return name
        time.sleep(_LOOK)
    missing = _missing(store, world_size) if rank == 0 else []
    who = f"rank {', '.join(map(str, missing))} of {world_size}" if missing else "one of the processes that train together"
    raise RanksError(
        f"{who} did not join within {seconds:,.0f} seconds",
        hint=_CHECK,
    )


def _missing(store: Any, world_size: int) -> list[int]:
    """The ranks that have never come, or else those that have not confirmed the newest group."""
    never = [rank for rank in range(world_size) if not store.check([_token(rank)])]
    if never or not store.check([_GROUP]):
        return never
    name = _name(json.loads(store.get(_GROUP))).encode()
    return [rank for rank in range(world_size) if not store.check([_confirmed(rank)]) or store.get(_confirmed(rank)) != name]


def _name(tokens: list[str]) -> str:
    return hashlib.sha256("".join(tokens).encode()).hexdigest()[:16]


_GROUP = "discern/group"


def _token(rank: int) -> str:
    return f"discern/token/{rank}"


def _confirmed(rank: int) -> str:
    return f"discern/confirmed/{rank}"


def _ready(name: str) -> str:
    return f"discern/ready/{name}"
