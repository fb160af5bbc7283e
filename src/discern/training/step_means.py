"""The losses of a step, and whether its update may happen, as values on the device that the host reads only now and then.

Between two records of the log the host learns nothing from the device: reading a value would make it wait until all work so far
is done, and the device would then wait for the host to submit more. On the CPU, where the two are one, every step is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from discern.training.parallel import Ranks


@dataclass(frozen=True)
class StepMeans:
    """Means of one step: of the losses, and of what else is logged.

    Attributes:
        names: name of each mean; the first is 'loss', the weighted sum.
        shares: (N,) this rank's share of each mean, float64; the shares of all ranks sum to the means.
    """

    names: tuple[str, ...]
    shares: Float[Tensor, "N"]

    def read(self, ranks: Ranks) -> dict[str, float]:
        """The means over all ranks by name. Waits for the device."""
        return dict(zip(self.names, ranks.sum_tensor(self.shares).tolist(), strict=True))


@dataclass(frozen=True)
class Progressed:
    """How far a run was before a step, in terms of the attributes of its state."""

    step: int
    tokens: int
    updates: int
    averaged: int


Stop = Callable[[Progressed, Mapping[str, float]], None]
"""Ends the run, given how far it was before the failed step, and the means of that step."""


class UpdateGuard:
    """Holds back all updates from the first step on whose gradient is not finite, so that the weights stay those before it.

    On the CPU the host decides at once. Otherwise the device decides, and the host learns of it from `check`, which must be
    called before a checkpoint.

    Args:
        stop: called at a failure.
    """

    def __init__(self, ranks: Ranks, stop: Stop) -> None:
        self._ranks, self._stop = ranks, stop
        self._failure: Tensor | None = None  # step, or -1, then the shares of its means
        self._names: tuple[str, ...] = ()
        self._before: dict[int, Progressed] = {}

    def admit(self, before: Progressed, norm: Float[Tensor, ""], means: StepMeans) -> Bool[Tensor, ""] | None:
        """Whether the update of a step may happen; None: it may, as the host has checked already.

        Args:
            before: how far the run was before the step.
            norm: norm of all gradients, the same on all ranks.
        """
        if self._ranks.reads_freely:
            if not math.isfinite(float(norm)):
                self._stop(before, means.read(self._ranks))
            return None
        now = torch.cat([means.shares.new_full((1,), before.step), means.shares])
        if self._failure is None:
            self._failure = torch.full_like(now, -1)
        self._names, self._before[before.step] = means.names, before
        fails = ~torch.isfinite(norm) & (self._failure[0] < 0)
        self._failure = torch.where(fails, now, self._failure)
        return self._failure[0] < 0

    def check(self) -> None:
        """Stop if an update was held back. Waits for the device."""
        if self._failure is not None and (step := int(self._failure[0])) >= 0:
            self._stop(self._before[step], StepMeans(self._names, self._failure[1:]).read(self._ranks))
        self._before.clear()
