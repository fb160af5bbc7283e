"""Rows for the training loop: read and corrupted one step ahead by a thread and, for a GPU, copied on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.models.attention import span_obstacle
from discern.training.state import TrainContext
from discern.types import CorruptedBatch, TokenBatch, map_tensors, with_spans

BatchT = TypeVar("BatchT", TokenBatch, CorruptedBatch)
MicroBatches = list[tuple[CorruptedBatch, Randomness]]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's rows of one step: corrupted micro-batches, each with its random numbers.

    Attributes:
        micro_batches: on the host, to be counted without waiting for the device.
        on_device: those to compute with: on the device if they were copied ahead, else the same.
    """

    micro_batches: MicroBatches
    on_device: MicroBatches


def read_local_batch(context: TrainContext, step: int) -> LocalBatch:
    """This rank's rows of a step, corrupted on the host. It runs in a thread and touches no network."""
    micro_batches = [(_corrupted(context, tokens, rows), rows) for tokens, rows in read_rows(context, step)]
    return LocalBatch(micro_batches, micro_batches)


def _corrupted(context: TrainContext, tokens: TokenBatch, rows: Randomness) -> CorruptedBatch:
    return context.objective.corrupt(tokens, rows).locate(context.objective.reads(), even=not context.ranks.reads_freely)


def read_rows(context: TrainContext, step: int) -> Iterator[tuple[TokenBatch, Randomness]]:
    """This rank's rows of a step, in micro-batches, each with its random numbers."""
    examples, ranks = context.rows_of(step), context.ranks
    per_rank = len(examples) // ranks.world_size
    slots = np.arange(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)
    batch = context.source.batch(examples.start + slots, slots)
    # Keyed by seed, step and slot in the global batch: the same whatever the number of ranks and micro-batches.
    randomness = Randomness(context.train.seed, step, batch.slot)
    size = context.micro_batch_size(step) or per_rank
    for start in range(0, per_rank, size):
        yield batch.rows(start, start + size), randomness.rows(start, start + size)


def read_onto_device(context: TrainContext, step: int, device: torch.device, *, spans: bool, pin: bool) -> LocalBatch:
    """The same rows, with copies on a device.

    They are corrupted there if the result is the same, bit for bit: that saves the host most of its work. The thread then waits
    for the stream of the copies, to count positions and to find them; the thread that trains does not.

    Args:
        spans: whether the networks attend to spans.
        pin: copy through page-locked memory, so that the copy does not hold up the host.
    """
    micro_batches, copies = [], []
    for tokens, rows in read_rows(context, step):
        tokens = with_spans(tokens) if spans else tokens
        moved_rows = replace(rows, examples=_pinned(rows.examples, pin=pin)).to(device)
        if context.objective.corrupts_anywhere:
            copied = _corrupted(context, _copied(tokens, device, pin=pin), moved_rows)
            batch = replace(copied, tokens=tokens)
        else:
            batch = _corrupted(context, tokens, rows)
            copied = _copied(batch, device, pin=pin)
        micro_batches.append((batch, rows))
        copies.append((copied, moved_rows))
    return LocalBatch(micro_batches, copies)


class Feed:
    """Reads the rows of the next step while the current one computes.

    On a GPU the thread also copies them, on a stream of its own, so that the copy overlaps with the computation.

    Args:
        reader: executor with one thread.
    """

    def __init__(self, context: TrainContext, reader: ThreadPoolExecutor, step: int) -> None:
        self._context = context
        self._reader = reader
        self._stream: Any = None
        device = context.ranks.device
        if device.type == "cuda":
            self._gpu = torch.get_device_module(device)
            self._stream = self._gpu.Stream(device)
            self._spans = span_obstacle(context.objective, device, context.precision) is None
        self._upcoming = self._read(step)

    def take(self, step: int) -> LocalBatch:
        """The rows of a step, which must be the one after the last; waits for them. Begins to read those of the next.

        Raises:
            DataError: the rows could not be read.
        """
        local, ready = self._upcoming.result()
        if ready is not None:
            self._gpu.current_stream(self._context.ranks.device).wait_event(ready)
        self._upcoming = self._read(step + 1)
        return local

    def _read(self, step: int) -> Future[tuple[LocalBatch, Any]]:
        if self._stream is None:
            return self._reader.submit(lambda: (read_local_batch(self._context, step), None))
        # What was launched so far uses the rows of the step before the current one. Their memory is free for new copies once
        # that is done, and the copies wait for it.
        launched = self._gpu.current_stream(self._context.ranks.device).record_event()
        return self._reader.submit(self._copy, step, launched)

    def _copy(self, step: int, launched: Any) -> tuple[LocalBatch, Any]:
        with self._gpu.stream(self._stream):
            self._stream.wait_event(launched)
            local = read_onto_device(self._context, step, self._context.ranks.device, spans=self._spans, pin=True)
            return local, self._stream.record_event()


def _copied(batch: BatchT, device: torch.device, *, pin: bool) -> BatchT:
    return map_tensors(batch, lambda tensor: _pinned(tensor, pin=pin)).to(device)


def _pinned(tensor: Tensor, *, pin: bool) -> Tensor:
    return tensor.pin_memory() if pin and tensor.device.type == "cpu" else tensor
