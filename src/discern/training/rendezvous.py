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

_INTERVAL = 0.1  # seconds between two looks at the store
_GROUP = "discern/group"
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
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"the environment has MASTER_PORT={port!r}, expected a port below 65536", hint=_CHECK)
    creates = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + seconds
    while not creates:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            break
        except OSError as problem:
            if time.monotonic() > deadline:
                raise RanksError(
                    f"rank 0, or torchrun on its machine, did not answer on {host}:{port} in {seconds:,.0f} seconds: {problem}",
                    hint=_CHECK,
                ) from problem
        time.sleep(_INTERVAL)
    timeout = timedelta(seconds=seconds)
    return TCPStore(host, int(port), is_master=creates, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def rendezvous(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """Wait until all processes are there. Return the name of their group, which no earlier group has had.

    Args:
        store: store that all of them see, see `open_store`.
        seconds: how long to wait.

    Raises:
        RanksError: not all processes have come in time.
    """
    own, name = os.urandom(8).hex(), ""
    tokens, confirmations = ([f"discern/{kind}/{number}" for number in range(world_size)] for kind in ("token", "confirmed"))
    store.set(tokens[rank], own)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if rank == 0 and store.check(tokens):
            store.set(_GROUP, json.dumps([token.decode() for token in store.multi_get(tokens)]))
        if store.check([_GROUP]):
            group: list[str] = json.loads(store.get(_GROUP))
            name = hashlib.sha256("".join(group).encode()).hexdigest()[:16]
            ready = f"discern/ready/{name}"
            if group[rank : rank + 1] == [own]:
                store.set(confirmations[rank], name)
                if rank == 0 and store.check(confirmations) and {*store.multi_get(confirmations)} == {name.encode()}:
                    store.set(ready, "")
                if store.check([ready]):
                    return name
        time.sleep(_INTERVAL)

    # Rank 0 names the ranks that have never come, or else those that have not confirmed the newest group.
    def lacks(key: str, value: str = "") -> bool:
        return not store.check([key]) or (bool(value) and store.get(key).decode() != value)

    numbers = range(world_size) if rank == 0 else []
    missing = [number for number in numbers if lacks(tokens[number])]
    missing = missing or [number for number in numbers if lacks(confirmations[number], name)]
    who = f"rank {', '.join(map(str, missing))} of {world_size}" if missing else "one of the processes that train together"
    raise RanksError(f"{who} did not join within {seconds:,.0f} seconds", hint=_CHECK)
