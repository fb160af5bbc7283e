"""Where a server listens, who may use it, and its limits. uvicorn does the rest."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import quote, unquote, urlsplit

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from discern.errors import ConfigError

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        max_body_bytes, max_masks: sizes of a request. In a long text, each mask is predicted from a window of its own.
        max_connections: open connections, each with one request at most, from which on requests are refused.
        stop_seconds: time for open requests to end when the server stops.
    """

    max_body_bytes: int = 1 << 18
    max_masks: int = 1024
    max_connections: int = 512  # within the usual limit on open files, which is 1024
    stop_seconds: int = 5


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    Attributes:
        names: host names under which it may be asked for; IP addresses are always allowed, because a page from elsewhere that
            makes a browser ask this server (DNS rebinding) needs a name.
        token: secret that every request must carry; None: no secret is needed.
    """

    names: frozenset[str] = frozenset({"localhost"})
    token: str | None = None


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
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
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
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            hint = f"--port {port + 1}, or --port 0 for any free port"
            raise ConfigError(f"port {port} is in use on {host}", hint=hint) from None
        hint = "--host 127.0.0.1 --port 8765"
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}", hint=hint) from None
    bound, port = listening.getsockname()[:2]
    if ipaddress.ip_address(bound).is_loopback:
        return Address(listening, host, port, Access(frozenset({"localhost", *names})))
    known = {"localhost", socket.gethostname(), socket.getfqdn(), *names}
    return Address(listening, host, port, Access(frozenset(known), token or secrets.token_urlsafe(24)))


def run(app: ASGIApp, address: Address, limits: Limits, started: Callable[[uvicorn.Server], None]) -> None:
    """Serve until SIGINT or SIGTERM; then let open requests end, for a few seconds, and return.

    Args:
        started: called when connections are accepted, with the server; its `should_exit` stops it.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        headers=list(_HEADERS.items()),
        limit_concurrency=limits.max_connections,
        timeout_graceful_shutdown=limits.stop_seconds,
        h11_max_incomplete_event_size=1 << 14,
    )
    server = uvicorn.Server(config)
    address.listening.listen(config.backlog)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn raises the signal again when it has stopped
        started(server)
        server.run([address.listening])


def error_response(status: int, message: str, hint: str | None = None, **headers: str) -> Response:
    """An error as JSON: `{"error": {"message": ..., "hint": ...}}`."""
    return JSONResponse({"error": {"message": message, "hint": hint or ""}}, status, headers)


@final
class AuthMiddleware:
    """Refuses requests under unknown host names, from pages of other sites, or without the token."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._token = app, access.token
        self._names = {name.lower() for name in access.names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._refusal(Request(scope)) or self._app)(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not pass; None if it may."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._is_known(host):
            hint = "to allow another name, start the server with --name NAME"
            return error_response(403, "this server is not reached under that name", hint)
        if origin not in (None, f"http://{host}", f"https://{host}"):
            return error_response(403, "pages of other sites may not use this server")
        if self._token is None or request.scope["path"] == "/health":
            return None
        # With the port: browsers send the cookies of one port to all others of the machine.
        cookie = f"discern_token_{request.scope['server'][1]}"
        bearer = request.headers.get("authorization", "").partition(" ")[2].strip()
        if self._is_token(bearer) or self._is_token(unquote(request.cookies.get(cookie, ""))):
            return None
        # The address that the command prints has the token; the browser keeps it as a cookie, and the address loses it.
        if request.method == "GET" and self._is_token(request.query_params.get("token", "")):
            redirect = RedirectResponse(request.scope["path"], 303)
            redirect.set_cookie(cookie, quote(self._token, safe=""), httponly=True, samesite="strict")
            return redirect
        hint = "open the address that the command printed, or send the header 'Authorization: Bearer TOKEN'"
        return error_response(401, "this server needs its token", hint, **{"www-authenticate": "Bearer"})

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""  # in lower case
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())


def short_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, after as many parents as are needed to tell it from the others: "small/rtd", "large/rtd"."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = []
    for parts in paths:
        length = 1
        while length < len(parts) and any(other[-length:] == parts[-length:] for other in paths if other != parts):
            length += 1
        names.append(Path(*parts[-length:]).as_posix())
    return names
