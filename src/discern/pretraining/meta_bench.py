"""FLOPs and peak memory of the training steps of a configuration, from the shapes of their tensors; nothing is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
from discern.training.distributed import Ranks
from discern.training.flops import RecordProducts
from discern.training.interrupt import StopRequest
from discern.training.loop import forward_backward, setup_phase, update
from discern.training.metrics import NonFiniteGuard, StepCounters
from discern.training.precision import raise_weights
from discern.training.prefetch import read_local_batch
from discern.training.pretrain_config import PretrainConfig
from discern.training.schedule import learning_rate, step_sizes
from discern.training.state import State, TrainContext

META = torch.device("meta")
_BLOCK = 512  # torch's allocator on a GPU rounds up to multiples of it


def meta_bench(config: PretrainConfig, vocab_size: int, fill: float) -> dict[str, Any]:
    """FLOPs and peak memory of a training step in one process on a GPU.

    Args:
        fill: fraction of real tokens in the rows.
    """
    objective = meta_objective(config, vocab_size)
    precision = "bfloat16" if config.train.precision == "auto" else config.train.precision
    step = meta_steps(config, objective, precision, vocab_size, fill)
    return description(config, objective, precision, vocab_size, fill) | {
        "device": str(META),
        "flops_per_step": step.flops,
        "flops_per_position": step.flops / (config.train.sequences_per_step * config.data.sequence_length),
        "peak_memory_bytes": step.peak_memory_bytes,
        "torch": torch.__version__,
    }


def description(
    config: PretrainConfig, objective: Objective, precision: str, vocab_size: int, fill: float, processes: int = 1
) -> dict[str, Any]:
    """What is measured, for --json."""
    train = config.train
    return {
        "objective": config.objective.name,
        "parameters": sum(parameter.numel() for parameter in objective.parameters()),
        "sequence_length": config.data.sequence_length,
        "sequences_per_step": train.sequences_per_step,
        "micro_batch_size": train.micro_batch_size or train.sequences_per_step // processes,
        "vocab_size": vocab_size,
        "fill": fill,
        "precision": precision,
    }


def meta_objective(config: PretrainConfig, vocab_size: int) -> Objective:
    """The objective with its networks on the meta device.

    Raises:
        ConfigError: its parts don't fit together, such as an encoder that the objective cannot train.
    """
    with META:
        objective = build_objective(config, synthetic_vocabulary(vocab_size))
    objective.phases(config.train.max_steps)
    return objective


def synthetic_vocabulary(size: int) -> Vocabulary:
    """A vocabulary in which all words are equally frequent: neither shapes nor speed depend on their frequencies."""
    with torch.device("cpu"):
        return Vocabulary(size, SPECIAL, torch.ones(size, dtype=torch.int64))


def synthetic_context(
    config: PretrainConfig, objective: Objective, ranks: Ranks, vocab_size: int, fill: float, progress: Progress, count: int
) -> TrainContext:
    """A context of the loop on made-up text, in which nothing is written; its precision is float32.

    Args:
        fill: fraction of real tokens in the rows.
        count: number of rows after which they repeat.
    """
    rows = SyntheticRows(vocab_size, config.data.sequence_length, fill, count, config.train.seed)
    return TrainContext(
        objective=objective,
        source=SyntheticParts(rows) if config.data.packing == "two-part" else rows,
        heldout=None,
        optimizer=config.optimizer,
        train=config.train,
        ranks=ranks,
        precision="float32",
        folder=Path(),
        metrics_log=None,
        progress=progress,
        stop=StopRequest(),
    )


@dataclass(frozen=True)
class MetaStep:
    """What a step on one rank costs.

    Attributes:
        flops: of its matrix products.
        peak_memory_bytes: most bytes of live tensors: weights, gradients, moments, activations and everything else.
    """

    flops: int
    peak_memory_bytes: int


def meta_steps(config: PretrainConfig, objective: Objective, precision: str, vocab_size: int, fill: float = 1.0) -> MetaStep:
    """FLOPs of a training step, in the mean over the phases of a run, and the largest peak memory of them.

    Args:
        objective: on the meta device.
        precision: 'float32' or 'bfloat16'.
    """
    rows, at_once = config.train.sequences_per_step, config.train.micro_batch_size or config.train.sequences_per_step
    context = synthetic_context(config, objective.to(META), Ranks(0, 1, META), vocab_size, fill, Silent(), at_once)
    context = replace(context, precision=precision)
    phases = objective.phases(config.train.max_steps)
    steps = [meta_step(context, phase) for phase in phases]
    flops = sum(step.flops * phase.steps for step, phase in zip(steps, phases, strict=True)) / config.train.max_steps
    # The step held the memory of the slots of one micro-batch.
    others = slot_memory(config, objective) * max(rows - at_once, 0) // rows
    return MetaStep(round(flops), max(step.peak_memory_bytes for step in steps) + others)


def slot_memory(config: PretrainConfig, objective: Objective) -> int:
    """Bytes of the memory that the slots of the batch carry from step to step, in float32, over all processes."""
    slots = max(segment.rows for segment in step_sizes(config.train, config.data).segments)
    remembered = {
        part.network.encoder.config: part.remembered
        for phase in objective.phases(config.train.max_steps)
        for part in objective.forward_passes(phase)
        if part.remembered
    }
    return sum(4 * slots * length * sizes.num_layers * sizes.hidden_size for sizes, length in remembered.items())


def meta_step(context: TrainContext, phase: Phase, around: AbstractContextManager[object] | None = None) -> MetaStep:
    """Run a training step of a phase on the meta device, at the number of rows of the last steps of the run.

    One micro-batch is run; if there are more, it adds to gradients that exist already, as all but the first do.

    Args:
        context: with the objective on the meta device; the device of its ranks is not used.
        around: entered for the step itself, from the copy of the batch to the update.
    """
    objective, rows = context.objective, context.train.sequences_per_step
    size = min(context.train.micro_batch_size or rows, rows)
    train = context.train.model_copy(update={"sequences_per_step": size, "micro_batch_size": None})
    context = replace(context, train=train, ranks=Ranks(0, 1, META), sizes=None, compilation="off")
    ledger, state = MemoryLedger(), State(averaged=1)
    computed, updated = RecordProducts(), RecordProducts()
    with torch.random.fork_rng([]):
        # Weights, moments and the average of the weights
        objective.train()
        if phase.start is not None:
            phase.start()
        replica = setup_phase(context, phase)
        optimizer = replica.optimizer
        optimizer.begin_moments()
        state.masters = optimizer.masters
        if train.weight_average:
            replica.update_average(state)
        moments = [value for values in optimizer.state.values() for value in values.values()]
        held = [*objective.parameters(), *objective.buffers(), *optimizer.masters.values(), *moments, *state.average.values()]
        for tensor in held:
            ledger.track(tensor)

        # States of an earlier step, and gradients of earlier micro-batches
        low = context.precision == "bfloat16"
        if any(part.remembered for part in objective.forward_passes(phase)):
            ((batch, randomness),) = read_local_batch(context, 0).micro_batches
            with ledger, GpuStandIns(low=low), torch.no_grad():
                objective(batch.to(META), randomness.to(META))
        for parameter in objective.parameters():
            if rows > size and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
                ledger.track(parameter.grad)

        # The step
        local = read_local_batch(context, 1)
        counts = objective.counts(local.micro_batches[0][0])
        guard, rate = NonFiniteGuard(context.ranks, _never), learning_rate(context.optimizer, 1, train.max_steps)
        with around or nullcontext(), ledger, GpuStandIns(low=low):
            with computed:
                means = forward_backward(context, replica, local, counts, 1)
            with updated:
                norm = replica.clip(context.optimizer.clip_norm)
                update(optimizer, rate, guard.allow(StepCounters(1, 0, 1, 1), norm, means))
                if train.weight_average:
                    state.averaged = 2
                    replica.update_average(state)
        raise_weights(objective, optimizer.masters)  # as the next phase expects them
    return MetaStep(round(computed.flops * rows / size) + updated.flops, ledger.peak)


def _never(before: StepCounters, means: Mapping[str, float]) -> None:
    raise AssertionError("nothing is read of a step on the meta device")


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
        if key not in self._sizes:
            self._sizes[key] = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self.live += self._sizes[key]
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
        if self._low and func in _IN_BFLOAT16:
            args = tuple(self._lowered(value) for value in args)
        elif self._low and func in _IN_FLOAT32:
            args = tuple(
                value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value for value in args
            )
        return (_attention if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))

    def _lowered(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or not value.is_meta:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        key = id(value), torch.is_grad_enabled()
        if key not in self._cast:
            self._cast[key] = value.to(torch.bfloat16)
        return self._cast[key]


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    """The functions of these names in torch, in torch.nn.functional and among the methods of a tensor."""
    return frozenset(getattr(module, name) for name in names for module in (torch, F, Tensor) if hasattr(module, name))


_IN_BFLOAT16 = _functions(
    *("linear", "scaled_dot_product_attention", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")
)
_IN_FLOAT32 = _functions(
    *("layer_norm", "softmax", "log_softmax", "softplus", "cross_entropy", "binary_cross_entropy_with_logits", "logsumexp"),
    *("exp", "log", "cumsum", "sum", "pow", "norm"),
)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Fused attention, which keeps one number per query instead of its scores. The mask changes no shape."""
    needs_backward = torch.is_grad_enabled() and query.requires_grad
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    attended: Tensor = fused(query, key, value, None, needs_backward, dropout_p)[0]
    return attended
