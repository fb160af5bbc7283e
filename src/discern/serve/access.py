"""Access control: the Host and Origin of a request, its token, and the rate of requests. Pure ASGI, before anything else."""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response

from discern.serve.limits import Limits, RateLimiter

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "discern_token"  # with the port: browsers send the cookies of one port to all others of the machine
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def problem(status: int, message: str, hint: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """A refusal, as JSON: `{"error": {"message": ..., "hint": ...}}`."""
    return JSONResponse({"error": {"message": message, "hint": hint}}, status, headers=dict(headers or {}))


@final
class Gate:
    """Lets a request through to the application, or refuses it; adds headers that keep pages from other sites away."""

    def __init__(self, app: App, access: Access, limits: Limits) -> None:
        self._app, self._access = app, access
        self._rates = RateLimiter(limits.requests_per_second, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items() if name.encode() not in known]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not pass; None if it may."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not self._is_known(host):
            return problem(
                403, "this server is not reached under that name", "to allow another name, start the server with --name NAME"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return problem(403, "pages of other sites may not use this server")
        client = scope["client"][0] if scope.get("client") else ""
        seconds = self._rates.wait(client)
        if seconds:
            return problem(429, "too many requests", "wait a moment", {"retry-after": str(math.ceil(seconds))})
        if self._access.token is None or scope["path"] == "/health":
            return None
        return self._without_token(scope, headers, self._access.token)

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""  # in lower case
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {each.lower() for each in self._access.names}
        return True

    def _without_token(self, scope: Scope, headers: Mapping[str, str], token: str) -> Response | None:
        """The answer to a request without the token; None if it has it, in its header or its cookie."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _same(given.strip(), token):
            return None
        # `http.cookies` would drop all cookies behind one that it cannot read, such as that of another program at this address.
        cookie = cookie_parser(headers.get("cookie", "")).get(_cookie(scope))
        if cookie is not None and _same(unquote(cookie), token):
            return None
        # The address that the command prints has the token; the browser keeps it as a cookie, and the address loses it.
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and asked and _same(asked, token):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(_cookie(scope), quote(token, safe=""), httponly=True, samesite="strict")
            return answer
        return problem(
            401,
            "this server needs its token",
            "open the address that the command printed, or send the header 'Authorization: Bearer TOKEN'",
            {"www-authenticate": "Bearer"},
        )


def _cookie(scope: Scope) -> str:
    """The name of the cookie of this server."""
    return f"{COOKIE}_{scope['server'][1]}"


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
