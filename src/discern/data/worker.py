"""A worker process: reads pickled documents from standard input, writes pickled blocks to standard output.

It is a plain child process rather than one of `multiprocessing`: no fork of a process that has
threads, no second run of the caller's main module, and a worker whose parent dies sees the end of its input and leaves.
"""

from __future__ import annotations

import os
import pickle
import sys

from discern.data.encoder import Encoder
from discern.errors import DiscernError


def serve() -> None:
    """First message: the arguments of `Encoder`. Then documents in, `(block, None)` or `(None, error)` out."""
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get into the stream of blocks
    encoder = Encoder(*pickle.load(incoming))
    while True:
        try:
            documents = pickle.load(incoming)
        except EOFError:
            return
        try:
            reply = (encoder.encode(documents), None)
        except DiscernError as problem:
            reply = (None, problem)
        try:
            pickle.dump(reply, outgoing, protocol=pickle.HIGHEST_PROTOCOL)
            outgoing.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(1)
