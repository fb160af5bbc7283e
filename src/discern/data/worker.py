"""What runs in a worker process: messages in, replies out, over its standard streams.

It is a plain child process rather than one of `multiprocessing`: no fork of a process that has threads, no second run of
the caller's main module, and a worker whose parent dies sees the end of its input and leaves.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from discern.errors import DiscernError

Service = Callable[[Any], Any]
"""Gives the reply to a message."""


def serve() -> None:
    """First message: a function and its arguments, which give the service. Then messages in, `(reply, error)` out."""
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get into the stream of replies
    try:
        make, arguments = pickle.load(incoming)
        service: Service = make(*arguments)
        while True:
            reply = _reply(service, pickle.load(incoming))
            pickle.dump(reply, outgoing, protocol=pickle.HIGHEST_PROTOCOL)
            outgoing.flush()
    except EOFError:  # no more work
        return
    except BrokenPipeError:  # the parent is gone
        os._exit(1)


def _reply(service: Service, message: Any) -> tuple[Any, DiscernError | None]:
    try:
        return service(message), None
    except DiscernError as problem:
        return None, problem
