"""What one server accepts, so that no client can use up its memory, its connections or its time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        max_body_bytes: bytes of the body of a request.
        max_held_bytes: bytes of all bodies that are being received.
        max_characters: characters of all texts of a request.
        max_texts: texts of a request.
        max_masks: masks of a request. In a long text, each is predicted from a window of its own.
        max_waiting: requests that wait for the model.
        max_waiting_characters: characters of their texts.
        max_connections: open connections; further ones are refused with 503.
        requests_per_second: requests of one client, in the long run.
        burst: requests of one client at once.
        request_seconds: time for a client to send a request, and for an unused connection to stay open.
        stalled_seconds: time that a client may leave an answer unread before its connection is closed.
        stop_seconds: time for open requests to end when the server stops.
    """

    max_body_bytes: int = 1 << 20
    max_held_bytes: int = 1 << 27
    max_characters: int = 100_000
    max_texts: int = 512
    max_masks: int = 1024
    max_waiting: int = 1024
    max_waiting_characters: int = 10_000_000
    max_connections: int = 1024
    requests_per_second: float = 100.0
    burst: int = 1000
    request_seconds: float = 20.0
    stalled_seconds: float = 20.0
    stop_seconds: float = 5.0


# Clients that are remembered; the one that was not seen for longest is forgotten first.
_CLIENTS = 10_000


class RateLimiter:
    """A token bucket for each client.

    Args:
        rate: requests per second that a client earns.
        burst: requests that a client can have earned at most.
        clock: seconds, never falling.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, client: str) -> float:
        """Count a request. Returns 0 if it is allowed, otherwise the seconds until it would be."""
        now = self._clock()
        left, seen = self._clients.get(client, (float(self._burst), now))
        left = min(float(self._burst), left + (now - seen) * self._rate)
        allowed = left >= 1
        self._clients[client] = (left - 1 if allowed else left, now)
        self._clients.move_to_end(client)
        if len(self._clients) > _CLIENTS:
            self._clients.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate
