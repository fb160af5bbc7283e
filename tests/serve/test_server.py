"""Requests that arrive together are computed together; over real sockets, slow clients, a port in use, an end by signal."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from discern.errors import ConfigError, DataError
from discern.serve.app import Batcher
from discern.serve.model import ServedModel
from discern.serve.server import Limits, bind
from tests.serve.conftest import Running, running


def batched(work: Callable[[Batcher], Awaitable[Any]]) -> Any:
    """The result of a coroutine that uses a batcher."""

    async def main() -> Any:
        batcher = Batcher()
        try:
            return await asyncio.wait_for(work(batcher), 20)
        finally:
            batcher.close(5)

    return asyncio.run(main())


class Recorder:
    """A model that waits until it is free, and records its batches; 'wrong' fails, and 'panic' does as the tokenizers library."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.batches: list[list[str]] = []

    def upper(self, items: Sequence[str], option: int = 0) -> list[str]:
        self.free.wait(10)
        self.batches.append(list(items))
        if "wrong" in items:
            raise ConfigError("no")
        if "panic" in items:
            raise type("PanicException", (BaseException,), {})("backtrack limit")
        return [item.upper() for item in items]


def test_requests_that_wait_share_a_batch_in_order() -> None:
    model = Recorder()

    async def ask(batcher: Batcher) -> Any:
        first = asyncio.ensure_future(batcher.run(model.upper, ["a"]))
        await asyncio.sleep(0.05)  # it computes now
        others = [batcher.run(model.upper, [text, text], *options) for text, *options in (("b",), ("c", 1), ("d",))]
        tasks = [first, *map(asyncio.ensure_future, others)]
        await asyncio.sleep(0.05)
        model.free.set()
        return await asyncio.gather(*tasks)

    assert batched(ask) == [["A"], ["B", "B"], ["C", "C"], ["D", "D"]]
    assert model.batches == [["a"], ["b", "b", "d", "d"], ["c", "c"]]


def test_a_wrong_request_fails_alone_and_a_cancelled_one_is_not_computed() -> None:
    model = Recorder()

    async def ask(batcher: Batcher) -> Any:
        tasks = []
        for text in ("a", "wrong", "panic", "b", "gone"):
            tasks.append(asyncio.ensure_future(batcher.run(model.upper, [text])))
            await asyncio.sleep(0.05)  # the first one is computed meanwhile
        tasks[4].cancel()
        await asyncio.sleep(0.05)
        model.free.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    one, wrong, panic, two, gone = batched(ask)
    assert (one, two) == (["A"], ["B"])
    assert [type(error) for error in (wrong, panic, gone)] == [ConfigError, DataError, asyncio.CancelledError]
    assert not [batch for batch in model.batches if "gone" in batch]


def post(server: Running) -> Any:
    """The answer to a request to detect."""
    body = json.dumps({"text": "the chef ate the meal"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/detect", body, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=60).read())


def test_slow_and_vanishing_clients_do_not_stop_others(served: ServedModel) -> None:
    half = b"POST /detect HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    with running([served], Limits(max_connections=6)) as server:
        slow, vanishing = server.connect(), server.connect()
        slow.sendall(half)
        vanishing.sendall(half)
        vanishing.close()
        assert post(server)["tokens"]
        connections = [server.connect() for _ in range(6)]
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connections[-1].recv(100).startswith(b"HTTP/1.1 503"), "a server that is full says so"


def test_a_port_in_use_is_told() -> None:
    with bind("127.0.0.1", 0).listening as listening:
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use") as caught:
            bind("127.0.0.1", port)
        assert f"--port {port + 1}" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("203.0.113.7", 0)


@pytest.mark.parametrize("token", [None, "sesame", "a+b&c=d%"])
def test_a_token_is_needed_where_others_can_reach_the_server(token: str | None) -> None:
    alone, others = bind("127.0.0.1", 0, token=token), bind("0.0.0.0", 0, token=token)
    alone.listening.close()
    others.listening.close()
    assert alone.access.token is None
    assert parse_qs(urlsplit(others.url).query) == {"token": [token or others.access.token]}
    assert token or len(others.access.token or "") >= 32


def test_the_command_prints_its_address_and_ends_at_sigterm(run_folder: Path) -> None:
    command = [sys.executable, "-m", "discern", "serve", str(run_folder), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["models"] == [run_folder.name]
    server = Running(said["port"])
    assert post(server)["tokens"]
    assert urllib.request.urlopen(f"http://127.0.0.1:{server.port}/").headers["x-frame-options"] == "DENY"
    with server.connect():  # an idle connection
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert process.communicate() == ("", "")
