"""What the training loop runs on, and where a run stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from discern.data.ordering import Integers
from discern.objectives.base import Objective
from discern.progress import Progress
from discern.training.checkpoint import Contents
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.evaluation import HeldoutRows
from discern.training.flops import RunFlops
from discern.training.interrupt import StopRequest
from discern.training.journal import Journal
from discern.training.pace import Pace
from discern.training.parallel import Ranks
from discern.training.watchman import Watchman
from discern.types import TokenBatch


@runtime_checkable
class BatchSource(Protocol):
    """Where the loop reads: batches by the numbers of their examples."""

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of an endless sequence."""


@dataclass(frozen=True)
class Watch:
    """A held-out figure that more of is better, and what follows from it.

    Attributes:
        patience: evaluations without a better one after which the run ends; 0: it never does.
        keep: the weights of the best evaluation are kept under `folder/best`.
        loss: of two equal figures the one with the lower of this is better; None: the first.
    """

    metric: str
    patience: int = 0
    keep: bool = False
    loss: str | None = None


@dataclass(frozen=True)
class Parts:
    """What the loop runs on.

    Attributes:
        folder: of the run; checkpoints and the journal go there.
        heldout: rows for evaluation, or None where there are none.
        watch: what the evaluations decide, if anything.
        precision: 'float32' or 'bfloat16'.
        header: what made this run, written into every checkpoint.
        flops: arithmetic of the run, for the journal; None where rows have no common length.
        watchman: looks at the evaluations and warns, where there is one.
        pace: what the clock asks for besides the intervals in steps, under a time budget.
    """

    objective: Objective
    source: BatchSource
    heldout: HeldoutRows | None
    optimizer: OptimizerConfig
    train: TrainConfig
    ranks: Ranks
    precision: str
    folder: Path
    journal: Journal | None
    progress: Progress
    stop: StopRequest
    header: dict[str, Any] = field(default_factory=dict)
    watch: Watch | None = None
    flops: RunFlops | None = None
    watchman: Watchman | None = None
    pace: Pace | None = None


_KEPT = ("step", "tokens", "seconds", "updates", "best", "best_loss", "waited", "interval", "owed")


@dataclass
class State:
    """Where a run stands.

    Attributes:
        step: updates done.
        tokens: real tokens read.
        seconds: of training, over all sessions.
        updates: of the present optimizer.
        optimizer: moments to continue from, by parameter name.
        best: of the figure that is watched.
        best_loss: held out, when the figure was best.
        waited: evaluations since then.
        over: the end, the end of the time, or a request to stop has been reached.
        cut: it was the request, before the end.
        interval: of an earlier session, the losses since the last line of its journal (see `Meter.interval`).
        owed: the line of the journal of this step while it is not written, under `line`, and under `evaluates` whether held-out
            figures belong to it. A checkpoint is saved before both, so a run that is resumed makes up for them.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    updates: int = 0
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    best: float | None = None
    best_loss: float | None = None
    waited: int = 0
    over: bool = False
    cut: bool = False
    interval: dict[str, Any] = field(default_factory=dict)
    owed: dict[str, Any] | None = None

    @classmethod
    def of(cls, contents: Contents) -> State:
        """Where a run stands that goes on from a checkpoint."""
        kept = {key: contents.state[key] for key in _KEPT if key in contents.state}
        return cls(**kept, optimizer=dict(contents.optimizer))
