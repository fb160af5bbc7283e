"""FLOPs and peak memory of the training steps of a configuration, from the shapes of their tensors; nothing is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from discern.artifacts.run import build_objective
from discern.data.batching.synthetic import SPECIAL, SyntheticParts, SyntheticRows
from discern.objectives.base import Objective, Phase, Vocabulary
from discern.progress import Progress, Silent
from discern.training.average import update_average
from discern.training.distributed import Ranks
from discern.training.flops import RecordProducts
from discern.training.interrupt import StopRequest
from discern.training.loop import forward_backward, reduce_step_counts, setup_phase, update
from discern.training.metrics import NonFiniteGuard, StepCounters, StepMeter
from discern.training.precision import full_weights, raise_weights
from discern.training.prefetch import read_local_batch
from discern.training.pretrain_config import PretrainConfig
from discern.training.schedule import learning_rate, step_sizes
from discern.training.state import TrainContext


def meta_bench(config: PretrainConfig, vocab_size: int, fill: float) -> dict[str, Any]:
    """FLOPs and peak memory of a training step in one process on a GPU.

    Args:
        fill: fraction of real tokens in the rows.
    """
    objective = meta_objective(config, vocab_size)
    precision = "bfloat16" if config.train.precision == "auto" else config.train.precision
    step = meta_steps(config, objective, precision, vocab_size, fill)
    positions = config.train.sequences_per_step * config.data.sequence_length
    return {
        "objective": config.objective.name,
        "parameters": sum(parameter.numel() for parameter in objective.parameters()),
        "sequence_length": config.data.sequence_length,
        "sequences_per_step": config.train.sequences_per_step,
        "micro_batch_size": config.train.micro_batch_size or config.train.sequences_per_step,
        "vocab_size": vocab_size,
        "fill": fill,
        "precision": precision,
        "device": str(META),
        "flops_per_step": step.flops,
        "flops_per_position": step.flops / positions,
        "peak_memory_bytes": step.peak_memory_bytes,
        "torch": torch.__version__,
    }


def meta_objective(config: PretrainConfig, vocab_size: int) -> Objective:
    """The objective with its networks on the meta device.

    Raises:
        ConfigError: its parts don't fit together, such as an encoder that the objective cannot train.
    """
    # Which words are frequent changes no shape, so any counts will do.
    vocabulary = Vocabulary(vocab_size, SPECIAL, torch.ones(vocab_size, dtype=torch.int64))
    with META:
        objective = build_objective(config, vocabulary)
    objective.phases(config.train.max_steps)
    return objective


def meta_steps(config: PretrainConfig, objective: Objective, precision: str, vocab_size: int, fill: float = 1.0) -> MetaStep:
    """FLOPs of a training step, in the mean over the phases of a run, and the largest peak memory of them.

    Args:
        objective: on the meta device.
        precision: 'float32' or 'bfloat16'.
    """
    rows, run = config.train.sequences_per_step, config.train.micro_batch_size or config.train.sequences_per_step
    context = synthetic_context(config, objective.to(META), Ranks(0, 1, META), vocab_size, fill, Silent(), run)
    context = replace(context, precision=precision)
    phases = objective.phases(config.train.max_steps)
    steps = [meta_step(context, phase) for phase in phases]
    flops = sum(step.flops * phase.steps for step, phase in zip(steps, phases, strict=True)) / config.train.max_steps
    # The step held the memory of the slots of one micro-batch.
    others = slot_memory(config, objective) * max(rows - run, 0) // rows
    return MetaStep(round(flops), max(step.peak_memory_bytes for step in steps) + others)


def slot_memory(config: PretrainConfig, objective: Objective) -> int:
    """Bytes of the memory that the slots of the batch carry from step to step, in float32, over all processes."""
    passes = [each for phase in objective.phases(config.train.max_steps) for each in objective.forward_passes(phase)]
    slots = max(stretch.rows for stretch in step_sizes(config.train, config.data).stretches)
    found = 0
    for each in {id(each.network.encoder): each for each in passes}.values():
        sizes = each.network.encoder.config
        found += 4 * slots * each.remembered * sizes.num_layers * sizes.hidden_size
    return found


def synthetic_context(
    config: PretrainConfig,
    objective: Objective,
    ranks: Ranks,
    vocab_size: int,
    fill: float,
    progress: Progress,
    count: int,
) -> TrainContext:
    """A context of the loop on made-up text, in which nothing is written; its precision is float32.

    Args:
        fill: fraction of real tokens in the rows.
        count: number of rows after which they repeat.
    """
    train = config.train
    rows = SyntheticRows(vocab_size, config.data.sequence_length, fill, count, train.seed)
    return TrainContext(
        objective=objective,
        source=SyntheticParts(rows) if config.data.packing == "two-part" else rows,
        heldout=None,
        optimizer=config.optimizer,
        train=train,
        ranks=ranks,
        precision="float32",
        folder=Path(),
        metrics_log=None,
        progress=progress,
        stop=StopRequest(),
    )


META = torch.device("meta")
_BLOCK = 512  # torch's allocator on a GPU rounds up to multiples of it


@dataclass(frozen=True)
class MetaStep:
    """What a step on one rank costs.

    Attributes:
        flops: of its matrix products.
        peak_memory_bytes: most bytes of live tensors: weights, gradients, moments, activations and everything else.
    """

    flops: int
    peak_memory_bytes: int


def meta_step(context: TrainContext, phase: Phase) -> MetaStep:
    """Run a training step of a phase on the meta device, at the number of rows of the last steps of the run.

    One micro-batch is run; if there are more, it adds to gradients that exist already, as all but the first do.

    Args:
        context: with the objective on the meta device; the device of its ranks is not used.
    """
    rows = context.train.sequences_per_step
    size = min(context.train.micro_batch_size or rows, rows)
    changed = {"sequences_per_step": size, "micro_batch_size": None}
    context = replace(
        context, train=context.train.model_copy(update=changed), ranks=Ranks(0, 1, META), sizes=None, compilation="off"
    )
    context.objective.train()
    remembers = any(each.remembered for each in context.objective.forward_passes(phase))
    with torch.random.fork_rng([]):
        if phase.start is not None:
            phase.start()
        step = _Step(context, phase)
        if remembers:
            step.fill_memory()
        computed, updated = step.run(accumulates=rows > size)
        step.end()
    return MetaStep(round(computed * rows / size) + updated, step.ledger.peak)


class _Step:
    """Steps of a phase on the meta device."""

    def __init__(self, context: TrainContext, phase: Phase) -> None:
        self._context = context
        self.ledger = MemoryLedger()
        self._replica = setup_phase(context, phase)
        self._optimizer = self._replica.optimizer
        self._optimizer.begin_moments()
        self._average: dict[str, Tensor] = {}
        self._update_average(1)
        held = [value for state in self._optimizer.state.values() for value in state.values()]
        masters = self._optimizer.masters.values()
        for tensor in [*context.objective.parameters(), *context.objective.buffers(), *masters, *held, *self._average.values()]:
            self.ledger.track(tensor)

    @torch.no_grad()
    def fill_memory(self) -> None:
        """Let the rows of the next step find the states of earlier ones."""
        ((batch, randomness),) = read_local_batch(self._context, 0).micro_batches
        with self.ledger, GpuStandIns(low=self._context.precision == "bfloat16"):
            self._context.objective(batch.to(META), randomness.to(META))

    def run(self, number: int = 1, *, accumulates: bool) -> tuple[int, int]:
        """Run a step; return the FLOPs of its micro-batch and of the update.

        Args:
            accumulates: whether the gradients exist already.
        """
        context = self._context
        for parameter in context.objective.parameters():
            if accumulates and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
                self.ledger.track(parameter.grad)
        local = read_local_batch(context, number)
        totals = reduce_step_counts(context, local, StepMeter(0.0))
        guard = NonFiniteGuard(context.ranks, _never)
        computed, updated = RecordProducts(), RecordProducts()
        with self.ledger, GpuStandIns(low=context.precision == "bfloat16"):
            with computed:
                means = forward_backward(context, self._replica, local, totals.counts, number)
            with updated:
                norm = self._replica.clip(context.optimizer.clip_norm)
                allowed = guard.allow(StepCounters(number, 0, number, number), norm, means)
                update(self._optimizer, learning_rate(context.optimizer, number, context.train.max_steps), allowed)
                self._update_average(number + 2)
        return _flops(computed), _flops(updated)

    def end(self) -> None:
        """Let the weights be float32 again, as the next phase expects them."""
        raise_weights(self._context.objective, self._optimizer.masters)

    def _update_average(self, updates: int) -> None:
        decay = self._context.train.weight_average
        if decay:
            update_average(self._average, full_weights(self._context.objective, self._optimizer.masters), decay, updates)


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps account of the tensors on the meta device that operations in its context create, until each of them is freed.

    Attributes:
        live: bytes of the storages that exist now.
        peak: most bytes that existed at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.track(value)
        return result

    def track(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is counted already or on another device."""
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


class GpuStandIns(TorchFunctionMode):
    """Does on the meta device what autocast and fused attention do on a GPU.

    Active during the backward pass as well, where gradient checkpointing computes again.

    Args:
        low: whether matrix products run in bfloat16, as under autocast.
    """

    def __init__(self, *, low: bool) -> None:
        super().__init__()
        self._low = low
        # As autocast does, each weight is cast once.
        self._cast: dict[tuple[int, bool], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._low and func in _IN_BFLOAT16:
            args = tuple(self._lowered(value) for value in args)
        elif self._low and func in _IN_FLOAT32:
            args = tuple(_raised(value) for value in args)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _lowered(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or not value.is_meta:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        key = id(value), torch.is_grad_enabled()
        if key not in self._cast:
            self._cast[key] = value.to(torch.bfloat16)
        return self._cast[key]


_IN_BFLOAT16: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.mm,
        Tensor.bmm,
    }
)
_IN_FLOAT32: frozenset[Callable[..., Any]] = frozenset(
    {
        F.layer_norm,
        F.softmax,
        F.log_softmax,
        F.softplus,
        F.cross_entropy,
        F.binary_cross_entropy_with_logits,
        torch.softmax,
        torch.log_softmax,
        torch.exp,
        torch.log,
        Tensor.softmax,
        Tensor.log_softmax,
        Tensor.logsumexp,
        Tensor.exp,
        Tensor.log,
        Tensor.cumsum,
        Tensor.sum,
        Tensor.pow,
        Tensor.norm,
    }
)


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Fused attention, which keeps one number per query instead of its scores. The mask changes no shape."""
    needs_backward = torch.is_grad_enabled() and query.requires_grad
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    attended: Tensor = fused(query, key, value, None, needs_backward, dropout_p)[0]
    return attended


def _flops(record: RecordProducts) -> int:
    return sum(count * product.flops for product, count in record.found.items())


def _never(before: StepCounters, means: Mapping[str, float]) -> None:
    raise AssertionError("nothing is read of a step on the meta device")
