"""Over real sockets: many at once, slow clients, cut requests, a port in use, an end by signal."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from discern.errors import ConfigError
from discern.serve.limits import Limits
from discern.serve.model import ServedModel
from discern.serve.server import GuardedProtocol, bind
from tests.serve.conftest import Running, running, wait_until

BODY = json.dumps({"text": "the chef ate the meal"}).encode()


def post(server: Running, path: str = "/detect", body: bytes = BODY) -> dict[str, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body, {"Content-Type": "application/json"})
    found: dict[str, object] = json.loads(urllib.request.urlopen(request, timeout=60).read())
    return found


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection; reads what is there."""
    connection.settimeout(0.05)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_two_hundred_requests_at_once(served: ServedModel) -> None:
    found: list[dict[str, object]] = []
    problems: list[Exception] = []

    def ask(server: Running) -> None:
        try:
            found.append(post(server))
        except Exception as problem:
            problems.append(problem)

    with running([served], Limits()) as server:
        threads = [threading.Thread(target=ask, args=(server,)) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not problems
    assert len(found) == 200
    first = found[0]["replaced_probability"]
    assert all(each["replaced_probability"] == pytest.approx(first, abs=1e-5) for each in found)


def test_slow_clients_are_closed_and_others_are_served(served: ServedModel) -> None:
    limits = Limits(request_seconds=1.5, stalled_seconds=1.5, max_connections=6)
    half = b"POST /detect HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    with running([served], limits) as server:
        silent, cut, vanishing, unread = (server.connect() for _ in range(4))
        cut.sendall(half)
        vanishing.sendall(half)
        vanishing.close()
        # Asks again and again, and reads nothing: the answers of 80 kB fill the buffers of the sockets.
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        page = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        unread.setblocking(False)
        for _ in range(200):
            try:
                unread.sendall(page)
            except OSError:
                break
        assert post(server)["tokens"]
        assert wait_until(lambda: closed(silent) and closed(cut))
        # Within the limit, and only then refused: a server that is full says so.
        assert wait_until(lambda: len(_opened(server, 12)) < 12)
        assert wait_until(lambda: _answers(server))
        unread.close()


def _opened(server: Running, count: int) -> list[socket.socket]:
    """Connections of `count` that are not refused at once."""
    connections = [server.connect() for _ in range(count)]
    kept = [each for each in connections if not closed(each)]
    for each in connections:
        each.close()
    return kept


def _answers(server: Running) -> bool:
    try:
        return bool(post(server)["tokens"])
    except OSError:
        return False


def test_a_request_on_a_connection_that_was_idle_has_all_its_time() -> None:
    clock = SimpleNamespace(time=lambda: clock.now, call_later=lambda seconds, call: None, now=0.0)
    aborted: list[float] = []
    connection: Any = GuardedProtocol.__new__(GuardedProtocol)
    connection.limits = Limits(request_seconds=20, stalled_seconds=100)
    connection.loop, connection.cycle = clock, None
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: 0, abort=lambda: aborted.append(clock.now))
    connection._since = connection._read_at = connection._unread = 0
    connection._watched = None
    connection.cycle = SimpleNamespace(response_complete=True, more_body=False)  # answered
    for seconds in range(1, 16):
        clock.now = float(seconds)
        connection._watch()
    connection.cycle = SimpleNamespace(response_complete=False, more_body=True)  # a request whose body has not come yet
    for seconds in range(16, 50):
        clock.now = float(seconds)
        connection._watch()
        if aborted:
            break
    assert aborted == [37.0], "16 s, when it was seen, and more than 20 s later"


def test_what_is_no_http_gets_an_answer_or_nothing_and_the_server_lives(served: ServedModel) -> None:
    with running([served], Limits()) as server:
        for junk in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000, b"GET / HTTP/1.1\r\n\r\n"):
            connection = server.connect()
            connection.sendall(junk)
            connection.settimeout(10)
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
            connection.close()
        assert post(server)["tokens"]


def test_a_port_in_use_is_told() -> None:
    first = bind("127.0.0.1", 0)
    first.listening.listen()
    with pytest.raises(ConfigError, match=f"port {first.port} is in use") as caught:
        bind("127.0.0.1", first.port)
    assert f"--port {first.port + 1}" in (caught.value.hint or "")
    first.listening.close()
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("203.0.113.7", 0)


def test_a_token_is_needed_where_others_can_reach_the_server() -> None:
    alone, others, chosen = bind("127.0.0.1", 0), bind("0.0.0.0", 0), bind("0.0.0.0", 0, token="sesame")
    assert alone.access.token is None
    assert len(others.access.token or "") >= 32
    assert chosen.url.endswith("?token=sesame")
    odd = bind("0.0.0.0", 0, token="a+b&c=d%")
    assert parse_qs(urlsplit(odd.url).query, strict_parsing=True) == {"token": ["a+b&c=d%"]}
    for each in (alone, others, chosen, odd):
        each.listening.close()


def test_the_command_prints_its_address_and_ends_at_sigterm(run_folder: Path) -> None:
    command = [sys.executable, "-m", "discern", "serve", str(run_folder), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["models"] == [run_folder.name]
    assert post(Running(said["port"]))["tokens"]
    idle = Running(said["port"]).connect()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    idle.close()
    out, problems = process.communicate()
    assert (out, problems) == ("", "")
