"""Worker processes that tokenise, with the results in the order of the input."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from discern.data.encoder import Document, EncodedChunk
from discern.data.words import SegmenterName
from discern.errors import DataError


class EncoderPool:
    """Several processes that encode chunks of documents; at most `2 * workers` chunks are under way.

    Args:
        tokenizer_json: the tokenizer, serialised.
        segmenter: where word boundaries come from.
        workers: processes, each with one thread.
    """

    def __init__(self, tokenizer_json: str, segmenter: SegmenterName, workers: int) -> None:
        self._window = 2 * workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="encoder")
        try:
            for _ in range(workers):
                self._processes.append(_start())
            for process in self._processes:
                _send(process, (tokenizer_json, segmenter))
                self._idle.put(process)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def encode(self, chunks: Iterable[list[Document]]) -> Iterator[EncodedChunk]:
        """Each chunk encoded, in order.

        Raises:
            DataError: a worker process died.
        """
        pending: deque[Future[EncodedChunk]] = deque()
        for chunk in chunks:
            pending.append(self._threads.submit(self._encode, chunk))
            if len(pending) >= self._window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _encode(self, chunk: list[Document]) -> EncodedChunk:
        """Runs in a thread: hands the chunk to an idle process and waits for its reply."""
        process = self._idle.get()
        try:
            _send(process, chunk)
            assert process.stdout is not None
            result, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as problem:
            raise DataError(
                f"a worker process ended unexpectedly (exit status {process.poll()})",
                hint="if memory ran out, use fewer --workers; otherwise its last words are above",
            ) from problem
        finally:
            self._idle.put(process)
        if error is not None:
            raise error
        assert isinstance(result, EncodedChunk)
        return result

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _close(stream)


def _start() -> subprocess.Popen[bytes]:
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    program = "import sys; sys.path[:] = sys.argv[1:]; from discern.data.worker import serve; serve()"
    # A process group of its own: Ctrl-C in the terminal reaches only the parent, which ends its workers itself.
    return subprocess.Popen(
        [sys.executable, "-c", program, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,
    )


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    pickle.dump(message, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()


def _close(stream: object) -> None:
    try:
        stream.close()  # type: ignore[attr-defined]
    except BrokenPipeError:
        pass  # the rest of a message that nobody reads any more
