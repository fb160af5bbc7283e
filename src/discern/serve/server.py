"""The HTTP server: its socket, its limits on connections, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, final
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from discern.errors import ConfigError
from discern.serve.access import Access, Gate, is_loopback
from discern.serve.limits import Limits

_REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_BACKLOG = 2048
_SPARE_FILES = 200  # that a model, a terminal and Python itself need beside the connections


@final
@dataclass(frozen=True)
class Address:
    """Where a server listens, and who may use it.

    Attributes:
        listening: the bound socket.
    """

    listening: socket.socket
    host: str
    port: int
    access: Access

    @property
    def url(self) -> str:
        """The address to open in a browser; with the token, if one is needed."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"?token={quote(self.access.token, safe='')}" if self.access.token else "")


def bind(host: str, port: int, *, names: tuple[str, ...] = (), token: str | None = None) -> Address:
    """Bind a socket before any model is loaded, so that a port in use is reported at once.

    Args:
        host: address to listen on.
        port: port; 0: any free one.
        names: host names under which browsers may ask for the server, beside localhost and the machine's own.
        token: secret of a server that others can reach; None: a new one. Without others, none is needed.

    Raises:
        ConfigError: the port is in use, or the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as problem:
        listening.close()
        if problem.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is in use on {host}", hint=f"--port {port + 1}, or --port 0 for any free port"
            ) from None
        if problem.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(f"this user may not listen on port {port}", hint="--port 8765, or any other above 1023") from None
        raise ConfigError(f"cannot listen on {host}: {problem.strerror or problem}", hint="--host 127.0.0.1") from None
    alone = is_loopback(host)
    known = {"localhost", *names} if alone else {"localhost", socket.gethostname(), socket.getfqdn(), *names}
    chosen = token if alone else token or secrets.token_urlsafe(24)
    return Address(listening, host, listening.getsockname()[1], Access(frozenset(known), chosen))


class GuardedProtocol(H11Protocol):
    """A connection that is closed if its client is slow: with a request, with reading the answer, or for lack of a request."""

    limits: ClassVar[Limits] = Limits()
    watch_seconds: ClassVar[float] = 1.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self._read_at = self.loop.time()
        self._unread = 0
        self._watched: object = None
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.limits.max_connections:
            transport.write(_REFUSED)
            transport.close()
            return
        self._timer = self.loop.call_later(self.watch_seconds, self._watch)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Close the connection if its client keeps it waiting; otherwise look again later."""
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()
        if not unread or unread < self._unread:
            self._read_at = now
        self._unread = unread
        if self.cycle is not self._watched:  # a new request: the time before it was nobody's
            self._watched, self._since = self.cycle, now
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if answering or unread:
            self._since = now
        limits = self.limits
        if now - self._since > limits.request_seconds or now - self._read_at > limits.stalled_seconds:
            # Not `close`, which would wait until the client has read everything.
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.watch_seconds, self._watch)


@final
class Handle:
    """A running server, to be stopped from any thread."""

    def __init__(self, server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop

    def stop(self) -> None:
        """Let open requests end, for a few seconds; at the second call, no more."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True


def run(app: Gate, address: Address, limits: Limits, started: Callable[[Handle], None]) -> None:
    """Serve until SIGINT or SIGTERM; then let open requests end, for a few seconds, and return.

    Args:
        started: called when connections are accepted.
    """
    chosen = limits.max_connections

    class Protocol(GuardedProtocol):
        pass

    Protocol.limits = Limits(**{**vars(limits), "max_connections": min(chosen, _files() - _SPARE_FILES)})
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would print every accept that fails for lack of files
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=max(1, round(limits.stop_seconds)),
        h11_max_incomplete_event_size=1 << 14,
    )
    asyncio.run(_serve(_Server(config), address.listening, started))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_serve`: the library would raise them again after a graceful end."""
        yield


async def _serve(server: _Server, listening: socket.socket, started: Callable[[Handle], None]) -> None:
    loop = asyncio.get_running_loop()
    handle = Handle(server, loop)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
            loop.add_signal_handler(number, handle.stop)

    async def tell() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        started(handle)

    telling = asyncio.ensure_future(tell())
    try:
        await server.serve(sockets=[listening])
    finally:
        telling.cancel()


def _files() -> int:
    """Number of files that this process may open, after raising the limit as far as it goes, to a few thousand."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 16
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft
