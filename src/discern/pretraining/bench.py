"""Speed of a configuration on this machine, compared with the limit of its matrix products."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from discern import kernels
from discern.config.resolve import usual_vocabulary
from discern.data.batching.synthetic import SPECIAL, SyntheticRows
from discern.errors import NumericsError
from discern.model_files.run import build_objective
from discern.objectives.base import Objective, Phase, Vocabulary
from discern.pretraining.resume import check_parameters, meta_objective
from discern.pretraining.run import check_shares
from discern.progress import Progress, Silent
from discern.training.config import PretrainConfig, learning_rate, load_pretrain_config, step_sizes
from discern.training.device import device_name
from discern.training.distributed import Ranks, explain_lack_of_memory, join_ranks, peak_memory
from discern.training.execution import (
    autocast,
    choose_compilation,
    compile_encoders,
    fastest_in_turns,
    one_thread,
    shared_precision,
)
from discern.training.flops import Product, RecordProducts, executed_flops, fastest_product, record_products, shortest_time
from discern.training.loop import forward_backward, reduce_step_counts, setup_phase, update
from discern.training.metrics import NonFiniteGuard, StepCounters, StepMeter
from discern.training.optimizer import clip_gradients
from discern.training.prefetch import Feed, read_local_batch
from discern.training.process import StopRequest
from discern.training.state import State, TrainContext

_STEPS_OF_ROWS = 4  # synthetic rows repeat after this many steps


@dataclass
class Timing:
    """Measurements of repeated steps.

    Attributes:
        products: matrix products of one step on this rank.
        seconds: duration of each timed step.
        tokens: real tokens of each timed step, over all ranks; the first has the rows of the step whose products were recorded.
        peak_bytes: peak memory so far, over all ranks.
        speedups: on one CPU, the speed as a multiple of that in another precision, and of that with one thread.
    """

    products: Counter[Product]
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    speedups: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps."""
        return statistics.median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))


def bench(
    config: Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    vocab_size: int | None = None,
    fill: float = 1.0,
    seconds: float = 8.0,
    progress: Progress,
) -> dict[str, Any] | None:
    """Time training steps and forward passes on synthetic text. Return the measurements, or None on ranks that don't write.

    Args:
        config: TOML file of settings.
        overrides: settings that override preset and file, as "section.key=value".
        vocab_size: vocabulary size of the synthetic text; None: the usual one of the preset.
        fill: fraction of real tokens in its rows.
        seconds: time for the forward pass and for each phase of training; at least three steps are timed.
        device: 'meta' runs one training step without numbers, for its FLOPs and memory on a GPU.

    Raises:
        ConfigError: the configuration is invalid, or the memory is too small for it.
    """
    settings = load_pretrain_config(config, preset, overrides).config
    train, size = settings.train, vocab_size or usual_vocabulary(preset)
    if device == "meta":
        return {"preset": preset} | meta_bench(settings, size, fill)
    with join_ranks(device) as ranks:
        # Build
        check_shares(settings, ranks)
        vocabulary = synthetic_vocabulary(size)
        check_parameters(settings, vocabulary, ranks.device, ranks.world_size)
        objective = build_objective(settings, vocabulary)
        objective.initialize(train.seed)
        objective.to(ranks.device)
        listener = progress if ranks.writes else Silent()
        tokens = (train.micro_batch_size or train.sequences_per_step // ranks.world_size) * settings.data.sequence_length
        precision = shared_precision(train.precision, ranks, settings.model, tokens)
        compilation = choose_compilation(train.compile, ranks.device, None)
        if train.compile:
            listener.note(compilation.note)
        rows = _STEPS_OF_ROWS * train.sequences_per_step
        context = synthetic_context(settings, objective, ranks, precision.name, size, fill, listener, rows)
        context = replace(context, compiled=compilation.enabled)

        # Measure
        phases = objective.phases(train.max_steps)
        listener.start("measuring", 1 + len(phases), "parts")
        try:
            with explain_lack_of_memory(train, ranks):
                forward = time_forward(context, seconds)
                training = [time_training(context, phase, seconds, precision.milliseconds) for phase in phases]
        finally:
            listener.finish()
        speeds = _speeds(context, forward, training, phases)
        if not ranks.writes:
            return None
        return {
            "preset": preset,
            **description(settings, objective, context.precision, size, fill, ranks.world_size),
            "compile": context.compiled,
            "kernels": ranks.device.type == "cpu" and kernels.load_kernels().library is not None,
            "device": str(ranks.device),
            "device_name": device_name(ranks.device),
            "threads": torch.get_num_threads(),
            "processes": ranks.world_size,
            "torch": torch.__version__,
            **precision.record(),
            **speeds,
            **training[-1].speedups,
        }


def time_training(context: TrainContext, phase: Phase, seconds: float = 8.0, precisions: Iterable[str] = ()) -> Timing:
    """Time whole steps of training: read, corrupt, forward, backward, clip, update. Nothing is written.

    Args:
        precisions: precisions to compare with, in a single process.
    """
    ranks = context.ranks
    context.objective.train()
    devices = [] if ranks.device.type == "cpu" else [ranks.device]
    with torch.random.fork_rng(devices, device_type=ranks.device.type), ThreadPoolExecutor(1) as reader:
        if phase.start is not None:
            phase.start()
        step = training_step(context, phase, reader)
        timing = _time(context, step, seconds)
        if ranks.device.type != "cpu" or ranks.world_size > 1:
            return timing
        # What else the user may try
        others = {*precisions} - {context.precision}
        calls = {name: training_step(replace(context, precision=name), phase, reader) for name in others}
        if torch.get_num_threads() > 1:
            calls["one_thread"] = one_thread()(step)
        if calls:
            fastest = fastest_in_turns(calls | {"as_it_is": step}, seconds / 4)
            timing.speedups = {f"speedup_over_{name}": fastest[name] / fastest["as_it_is"] for name in calls}
    return timing


def training_step(context: TrainContext, phase: Phase, reader: ThreadPoolExecutor) -> Callable[[], int]:
    """A function that trains one more step, and returns its tokens. A thread reads one step ahead, as in the loop."""
    ranks, optimizer, numbers = context.ranks, context.optimizer, itertools.count()
    replica, meter, guard = setup_phase(context, phase), StepMeter(0.0), NonFiniteGuard(ranks, _stop)
    feed = Feed(context, reader, 0)

    def step() -> int:
        number = next(numbers)
        local = feed.take(number)
        totals = reduce_step_counts(context, local, meter)
        means = forward_backward(context, replica, local, totals.counts, number)
        norm = clip_gradients(replica.objective.parameters(), optimizer.clip_norm)
        allowed = guard.allow(StepCounters(number, 0, number, 0), norm, means)
        update(replica.optimizer, learning_rate(optimizer, number, context.train.max_steps), allowed)
        return totals.tokens

    return step


@torch.no_grad()
def time_forward(context: TrainContext, seconds: float) -> Timing:
    """Time the encoder that is exported by default, alone: uncorrupted rows, dropout off, as many rows as a micro-batch has."""
    if context.compiled:
        compile_encoders(context.objective)
    context.objective.eval()
    rows = read_local_batch(context, 0).micro_batches[0][0].tokens
    tokens: int = sum(context.ranks.gather(int(rows.attention_mask.sum())))
    batch, encoder = rows.to(context.ranks.device), next(iter(context.objective.networks().values())).encoder

    def forward() -> int:
        with autocast(context.precision, context.ranks.device):
            encoder(batch.input_ids, batch.visible_mask, batch.token_type_ids, batch.position_ids, batch.document_ids)
        return tokens

    return _time(context, forward, seconds)


def _time(context: TrainContext, step: Callable[[], int], seconds: float) -> Timing:
    """Time a step, which returns its tokens, again and again."""
    ranks = context.ranks

    def timed() -> tuple[int, float]:
        begin = time.perf_counter()
        tokens = step()
        if ranks.device.type != "cpu":
            torch.accelerator.synchronize(ranks.device)
        return tokens, time.perf_counter() - begin

    timing = Timing(record_products(context.objective, step))
    # Warm up (caches, the heap, compilation) until the rows repeat
    duration = [timed()[1] for _ in range(_STEPS_OF_ROWS - 1)][-1]
    # All ranks must run the same number of steps, so rank 0 decides.
    count = ranks.gather(min(max(math.ceil(seconds / duration), 3), 200))[0]
    for _ in range(count):
        tokens, duration = timed()
        timing.tokens.append(tokens)
        timing.seconds.append(duration)
        context.progress.advance(1 / count, **{"tokens/s": f"{timing.tokens_per_second:,.0f}"})
    timing.peak_bytes = sum(ranks.gather(peak_memory(ranks.device)))
    return timing


def _stop(before: StepCounters, means: Mapping[str, float]) -> NoReturn:
    raise NumericsError(
        f"the gradient of step {before.step} is not finite", hint="try a lower optimizer.learning_rate or a longer warm-up"
    )


def _speeds(context: TrainContext, forward: Timing, training: Sequence[Timing], phases: Sequence[Phase]) -> dict[str, Any]:
    """The measurements. Several phases count in proportion to their steps in a run."""
    ranks, weights = context.ranks, [phase.steps for phase in phases]
    shortest = cache(lambda product: shortest_time(product, ranks.device))

    def limit(timing: Timing) -> float:
        """Tokens per second if a step consisted only of its matrix products, each at its best speed; all ranks at once."""
        ranks.barrier()
        seconds = ranks.gather(sum(count * shortest(product) for product, count in timing.products.items()))
        return float(timing.tokens[0] / max(seconds))

    speed = statistics.harmonic_mean([timing.tokens_per_second for timing in training], weights)
    bound, forward_bound = statistics.harmonic_mean([limit(timing) for timing in training], weights), limit(forward)
    milliseconds = [1000 * second for timing in training for second in timing.seconds]
    # FLOPs that are executed, and those that the model needs: on real tokens, with nothing computed twice
    tokens = training[0].tokens[0]
    flops = [sum(count * product.flops for product, count in timing.products.items()) for timing in training]
    executed = statistics.fmean(flops, weights)
    numbers = np.arange(context.train.sequences_per_step)
    lengths = Counter(context.source.batch(numbers, numbers).attention_mask.sum(1).tolist())
    passes = [context.objective.forward_passes(phase) for phase in phases]
    required = [sum(executed_flops(each, *size, recomputed=False) for size in lengths.items()) for each in passes]
    needed = statistics.fmean(required, weights)
    measured = [product.flops / shortest(product) for timing in (forward, *training) for product in timing.products]
    peak = max(fastest_product(ranks.device, context.precision), *measured) * ranks.world_size
    return {
        "tokens_per_second": speed,
        "tokens_per_second_forward": forward.tokens_per_second,
        "step_milliseconds": statistics.median(milliseconds),
        "step_milliseconds_min": min(milliseconds),
        "step_milliseconds_max": max(milliseconds),
        "steps": len(milliseconds),
        "peak_memory_bytes": training[-1].peak_bytes,
        "peak_memory_bytes_forward": forward.peak_bytes,
        "gemm_limit_tokens_per_second": bound,
        "gemm_share": speed / bound,
        "gemm_limit_tokens_per_second_forward": forward_bound,
        "gemm_share_forward": forward.tokens_per_second / forward_bound,
        "gemm_flops_per_token": ranks.sum([executed])[0] / tokens,
        "flops_per_token": needed / tokens,
        "model_flops_utilization": needed / tokens * speed / peak,
    }


META = torch.device("meta")
_BLOCK = 512  # torch's allocator on a GPU rounds up to multiples of it


def meta_bench(config: PretrainConfig, vocab_size: int, fill: float) -> dict[str, Any]:
    """FLOPs and peak memory of a training step in one process on a GPU.

    Args:
        fill: fraction of real tokens in the rows.
    """
    objective = meta_objective(config, synthetic_vocabulary(vocab_size))
    precision = "bfloat16" if config.train.precision == "auto" else config.train.precision
    step = meta_steps(config, objective, precision, vocab_size, fill)
    return description(config, objective, precision, vocab_size, fill) | {
        "device": str(META),
        "flops_per_step": step.flops,
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


def synthetic_vocabulary(size: int) -> Vocabulary:
    """A vocabulary in which all words are equally frequent: neither shapes nor speed depend on their frequencies."""
    with torch.device("cpu"):
        return Vocabulary(size, SPECIAL, torch.ones(size, dtype=torch.int64))


def synthetic_context(
    config: PretrainConfig,
    objective: Objective,
    ranks: Ranks,
    precision: str,
    vocab_size: int,
    fill: float,
    progress: Progress,
    count: int,
) -> TrainContext:
    """A context of the loop on made-up text, in which nothing is written.

    Args:
        fill: fraction of real tokens in the rows.
        count: number of rows after which they repeat.
    """
    two_parts, length = config.data.packing == "two-part", config.data.sequence_length
    return TrainContext(
        objective=objective,
        source=SyntheticRows(vocab_size, length, fill, count, config.train.seed, two_parts=two_parts),
        heldout=None,
        optimizer=config.optimizer,
        train=config.train,
        ranks=ranks,
        precision=precision,
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
    context = synthetic_context(config, objective.to(META), Ranks(0, 1, META), precision, vocab_size, fill, Silent(), at_once)
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
    context = replace(context, train=train, ranks=Ranks(0, 1, META), sizes=None, compiled=False)
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
        if train.weight_average:
            replica.update_average(state)
        moments = [value for values in optimizer.state.values() for value in values.values()]
        held = [*objective.parameters(), *objective.buffers(), *moments, *state.average.values()]
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
        guard, rate = NonFiniteGuard(context.ranks, _stop), learning_rate(context.optimizer, 1, train.max_steps)
        with around or nullcontext(), ledger, GpuStandIns(low=low):
            with computed:
                means = forward_backward(context, replica, local, counts, 1)
            with updated:
                norm = clip_gradients(objective.parameters(), context.optimizer.clip_norm)
                update(optimizer, rate, guard.allow(StepCounters(1, 0, 1, 1), norm, means))
                if train.weight_average:
                    state.averaged = 2
                    replica.update_average(state)
    return MetaStep(round(computed.flops * rows / size) + updated.flops, ledger.peak)


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
        if self._low and (func in _IN_BFLOAT16 or func in _IN_FLOAT32):
            args = tuple(self._converted(value, func in _IN_BFLOAT16) if isinstance(value, Tensor) else value for value in args)
        return (_attention if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))

    def _converted(self, value: Tensor, lower: bool) -> Tensor:
        if not lower:
            return value.float() if value.dtype == torch.bfloat16 else value
        if value.dtype != torch.float32 or not value.is_meta:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.bfloat16()
        key = id(value), torch.is_grad_enabled()
        if key not in self._cast:
            self._cast[key] = value.bfloat16()
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
    """Fused attention, which keeps one number per query instead of its scores. A mask of booleans changes no shape."""
    needs_backward = torch.is_grad_enabled() and query.requires_grad
    bias = attn_mask if attn_mask is not None and attn_mask.requires_grad else None
    fused = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs_backward, dropout_p)
    return fused[0]  # type: ignore[no-any-return]
