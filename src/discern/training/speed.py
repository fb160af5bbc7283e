"""How fast a configuration trains here: steps as the loop runs them, timed."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from discern.objectives.base import Phase
from discern.training.loop import agree, begin_phase, compile_encoders, compute_gradients, read_share, update
from discern.training.memory import peak_memory
from discern.training.meter import Meter
from discern.training.parallel import Ranks
from discern.training.parts import Parts
from discern.training.precision import autocast
from discern.training.products import Product, record_products

_LEAST, _MOST = 3, 200  # timed steps, where their number is not given


@dataclass
class Timing:
    """What was timed, step by step.

    Attributes:
        products: the matrix products of one step of this rank.
        recorded_tokens: of that step, over all ranks.
        seconds: of each timed step.
        tokens: real tokens of each, over all ranks.
        peak_bytes: largest memory until now, over all ranks.
    """

    products: Counter[Product]
    recorded_tokens: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Median of the steps."""
        return statistics.median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def flops(self) -> int:
        """Arithmetic of one step's products on this rank."""
        return sum(count * product.flops for product, count in self.products.items())


@dataclass(frozen=True)
class Span:
    """How long to measure: so many steps, or as many as fit into the seconds (three at least)."""

    steps: int | None
    seconds: float


def time_training(parts: Parts, phase: Phase, span: Span) -> Timing:
    """Whole steps of training: read, corrupt, forward, backward, clip, update. Nothing is written.

    Reading runs one step ahead in a thread, as it does in the loop.
    """
    parts.objective.train()
    devices = [parts.ranks.device] if parts.ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as reader:
        if phase.start is not None:
            phase.start()
        return _time(_Trainer(parts, phase, reader), span)


@torch.no_grad()
def time_forward(parts: Parts, span: Span) -> Timing:
    """The encoder that export takes, by itself: states of uncorrupted rows, dropout off, as many rows as a micro-batch has."""
    compile_encoders(parts)
    parts.objective.eval()
    return _time(_Reader(parts), span)


class _Trainer:
    """Steps of a phase, one a call; gives the step's tokens."""

    def __init__(self, parts: Parts, phase: Phase, reader: ThreadPoolExecutor) -> None:
        self.parts = parts
        self._forward, self._optimizer = begin_phase(parts, phase)
        self._reader = reader
        self._step = 0
        self._meter = Meter(0.0)
        self._upcoming = reader.submit(read_share, parts, 0)

    def __call__(self) -> int:
        share = self._upcoming.result()
        self._upcoming = self._reader.submit(read_share, self.parts, self._step + 1)
        agreed = agree(self.parts, share, self._meter)
        compute_gradients(self.parts, self._forward, share, agreed.counts, self._step)
        update(self.parts, self._optimizer, self._step, agreed.seconds)
        self._step += 1
        return agreed.tokens


class _Reader:
    """Forward passes, one a call; gives their tokens."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        batch = read_share(parts, 0).batches[0][0].tokens
        self._tokens = int(parts.ranks.sum([float(batch.attention_mask.sum())])[0])
        self._batch = batch.to(parts.ranks.device)
        self._encoder = next(iter(parts.objective.networks().values())).encoder

    def __call__(self) -> int:
        batch = self._batch
        with autocast(self.parts.precision, self.parts.ranks.device):
            self._encoder(batch.input_ids, batch.visible_mask, batch.token_type_ids, batch.position_ids, batch.document_ids)
        _wait(self.parts.ranks.device)
        return self._tokens


def _time(call: _Trainer | _Reader, span: Span) -> Timing:
    parts = call.parts
    recorded: list[int] = []
    products = record_products(parts.objective, lambda: recorded.append(call()))
    timing = Timing(products, recorded[0])
    call()  # caches, the heap, compilation
    each = _seconds(call, parts.ranks)
    if each < 2.0:
        each = _seconds(call, parts.ranks)
    # All ranks must run as many steps, so they go by what the first one says.
    wanted = float(span.steps or min(max(math.ceil(span.seconds / each), _LEAST), _MOST))
    (steps,) = parts.ranks.sum([wanted if parts.ranks.writes else 0.0])
    _wait(parts.ranks.device)
    parts.ranks.barrier()
    for _ in range(int(steps)):
        begin = time.perf_counter()
        timing.tokens.append(call())  # a step of training waits for the device itself, for its losses
        timing.seconds.append(time.perf_counter() - begin)
        parts.progress.advance(1 / steps, **{"tokens/s": f"{timing.tokens_per_second:,.0f}"})
    timing.peak_bytes = int(parts.ranks.sum([float(peak_memory(parts.ranks.device))])[0])
    return timing


def _seconds(call: _Trainer | _Reader, ranks: Ranks) -> float:
    """How long a call takes on the first rank."""
    begin = time.perf_counter()
    call()
    took = time.perf_counter() - begin
    return ranks.sum([took if ranks.writes else 0.0])[0]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
