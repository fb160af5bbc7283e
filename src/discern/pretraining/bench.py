"""Speed of a configuration on this machine, compared with the limit of its matrix products."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from discern import kernels
from discern.artifacts.run import build_objective, check_parameters
from discern.config.layers import usual_vocabulary
from discern.data.batching.synthetic import SPECIAL
from discern.errors import ConfigError, NumericsError
from discern.objectives.base import Phase, Vocabulary
from discern.pretraining.meta_bench import meta_bench, synthetic_context
from discern.pretraining.opened_run import workload_of
from discern.pretraining.rows import check_shares
from discern.progress import Progress, Silent
from discern.training.compilation import shared_compilation
from discern.training.distributed import Ranks, join_ranks
from discern.training.flops import Product, ProductTimer, executed_flops, fastest_product, record_products
from discern.training.loop import compile_encoders, forward_backward, reduce_step_counts, setup_phase, update
from discern.training.memory import lacks_memory, peak_memory
from discern.training.metrics import NonFiniteGuard, StepCounters, StepMeter
from discern.training.precision import autocast, shape_of, shared_precision
from discern.training.prefetch import Feed, read_local_batch
from discern.training.pretrain_config import PretrainConfig, load_pretrain_config
from discern.training.replica import shards_of
from discern.training.schedule import learning_rate
from discern.training.state import TrainContext

_STEPS_OF_ROWS = 4  # synthetic rows repeat after this many steps
_LEAST, _MOST = 3, 200  # number of timed steps by default


@dataclass(frozen=True)
class Span:
    """How long to measure: a number of steps, or as many as fit into the seconds (at least three)."""

    steps: int | None
    seconds: float


@dataclass
class Timing:
    """Measurements of repeated steps.

    Attributes:
        products: matrix products of one step on this rank.
        recorded_tokens: real tokens of that step, over all ranks.
        seconds: duration of each timed step.
        tokens: real tokens of each timed step, over all ranks.
        peak_bytes: peak memory so far, over all ranks.
    """

    products: Counter[Product]
    recorded_tokens: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps."""
        return statistics.median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def flops(self) -> int:
        """FLOPs of one step's matrix products on this rank."""
        return sum(count * product.flops for product, count in self.products.items())


def bench(
    config: Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    vocab_size: int | None = None,
    fill: float = 1.0,
    steps: int | None = None,
    seconds: float = 8.0,
    progress: Progress,
) -> dict[str, Any] | None:
    """Time training steps and forward passes on synthetic text. Return the measurements, or None on ranks that don't write.

    Args:
        config: TOML file of settings.
        overrides: settings that override preset and file, as "section.key=value".
        vocab_size: vocabulary size of the synthetic text; None: the usual one of the preset.
        fill: fraction of real tokens in its rows.
        steps: steps to time; None: as many as fit into `seconds`, at least three.
        seconds: time for the forward pass and for each phase of training.
        device: 'meta' runs one training step without numbers, for its FLOPs and memory on a GPU.

    Raises:
        ConfigError: the configuration is invalid, or the memory is too small for it.
    """
    pretrain_config = load_pretrain_config(config, preset, overrides).config
    train, size, span = pretrain_config.train, vocab_size or usual_vocabulary(preset), Span(steps, seconds)
    if device == "meta":
        return {"preset": preset} | meta_bench(pretrain_config, size, fill)
    with join_ranks(device) as ranks:
        check_shares(pretrain_config, ranks)
        # Speed does not depend on which words are frequent, so any counts will do.
        vocabulary = Vocabulary(size, SPECIAL, torch.ones(size, dtype=torch.int64))
        check_parameters(pretrain_config, vocabulary, ranks.device, shards_of(train, ranks))
        objective = build_objective(pretrain_config, vocabulary)
        objective.initialize(train.seed)
        objective.to(ranks.device)
        listener = progress if ranks.writes else Silent()
        tokens = (train.micro_batch_size or train.sequences_per_step // ranks.world_size) * pretrain_config.data.sequence_length
        precision = shared_precision(train.precision, ranks, shape_of(pretrain_config.model, tokens))
        workload = replace(workload_of(pretrain_config, ranks, precision.name), steps=None)
        compilation = shared_compilation(train.compile, ranks, workload)
        if train.compile:
            listener.note(compilation.note)
        count = _STEPS_OF_ROWS * train.sequences_per_step
        context = synthetic_context(pretrain_config, objective, ranks, size, fill, listener, count)
        context = replace(context, precision=precision.name, compilation=compilation.mode)
        phases = objective.phases(train.max_steps)
        listener.start("measuring", 1 + len(phases), "parts")
        try:
            forward = time_forward(context, span)
            training = [time_training(context, phase, span) for phase in phases]
        except RuntimeError as problem:
            if not lacks_memory(problem):
                raise
            raise _out_of_memory(pretrain_config, ranks.world_size) from problem
        finally:
            listener.finish()
        speeds = _speeds(context, forward, list(zip(training, phases, strict=True)))
        measured = {"preset": preset, "vocab_size": size, "fill": fill}
        return _described(measured, pretrain_config, context) | precision.record() | speeds if ranks.writes else None


def time_training(context: TrainContext, phase: Phase, span: Span) -> Timing:
    """Time whole steps of training: read, corrupt, forward, backward, clip, update. Nothing is written.

    Reading runs one step ahead in a thread, as it does in the loop.
    """
    context.objective.train()
    devices = [context.ranks.device] if context.ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as reader:
        if phase.start is not None:
            phase.start()
        return _time(_TrainingSteps(context, phase, reader), span)


@torch.no_grad()
def time_forward(context: TrainContext, span: Span) -> Timing:
    """Time the encoder that is exported by default, alone: uncorrupted rows, dropout off, as many rows as a micro-batch has."""
    compile_encoders(context.compilation, context.objective)
    context.objective.eval()
    return _time(_ForwardPasses(context), span)


class _TrainingSteps:
    """Training steps of a phase, one per call, which returns the tokens of the step."""

    def __init__(self, context: TrainContext, phase: Phase, reader: ThreadPoolExecutor) -> None:
        self.context = context
        self._replica = setup_phase(context, phase)
        self._step = 0
        self._meter = StepMeter(0.0)
        self._guard = NonFiniteGuard(context.ranks, _diverged)
        self._feed = Feed(context, reader, 0)

    def __call__(self) -> int:
        local = self._feed.take(self._step)
        totals = reduce_step_counts(self.context, local, self._meter)
        means = forward_backward(self.context, self._replica, local, totals.counts, self._step)
        norm = self._replica.clip(self.context.optimizer.clip_norm)
        allowed = self._guard.allow(StepCounters(self._step, 0, self._step, 0), norm, means)
        update(self._replica.optimizer, learning_rate(self.context.optimizer, self._step, self.context.train.max_steps), allowed)
        _wait(self.context.ranks.device)
        self._step += 1
        return totals.tokens


class _ForwardPasses:
    """Forward passes, one per call, which returns their tokens."""

    def __init__(self, context: TrainContext) -> None:
        self.context = context
        batch = read_local_batch(context, 0).micro_batches[0][0].tokens
        self._tokens = int(context.ranks.sum([float(batch.attention_mask.sum())])[0])
        self._batch = batch.to(context.ranks.device)
        self._encoder = next(iter(context.objective.networks().values())).encoder

    def __call__(self) -> int:
        batch = self._batch
        with autocast(self.context.precision, self.context.ranks.device):
            self._encoder(batch.input_ids, batch.visible_mask, batch.token_type_ids, batch.position_ids, batch.document_ids)
        _wait(self.context.ranks.device)
        return self._tokens


def _time(call: _TrainingSteps | _ForwardPasses, span: Span) -> Timing:
    context = call.context
    recorded: list[int] = []
    products = record_products(context.objective, lambda: recorded.append(call()))
    timing = Timing(products, recorded[0])
    call()  # caches, the heap, compilation
    each = _seconds(call, context.ranks)
    if each < 2.0:
        each = _seconds(call, context.ranks)
    # All ranks must run the same number of steps, so rank 0 decides.
    wanted = float(span.steps or min(max(math.ceil(span.seconds / each), _LEAST), _MOST))
    (steps,) = context.ranks.sum([wanted if context.ranks.writes else 0.0])
    _wait(context.ranks.device)
    context.ranks.barrier()
    for _ in range(int(steps)):
        begin = time.perf_counter()
        timing.tokens.append(call())
        timing.seconds.append(time.perf_counter() - begin)
        context.progress.advance(1 / steps, **{"tokens/s": f"{timing.tokens_per_second:,.0f}"})
    timing.peak_bytes = int(context.ranks.sum([float(peak_memory(context.ranks.device))])[0])
    return timing


def _seconds(call: _TrainingSteps | _ForwardPasses, ranks: Ranks) -> float:
    """Duration of a call on rank 0."""
    begin = time.perf_counter()
    call()
    took = time.perf_counter() - begin
    return ranks.sum([took if ranks.writes else 0.0])[0]


def _diverged(before: StepCounters, means: Mapping[str, float]) -> NoReturn:
    raise NumericsError(
        f"the gradient of step {before.step} is not finite", hint="try a lower optimizer.learning_rate or a longer warm-up"
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _speeds(context: TrainContext, forward: Timing, training: Sequence[tuple[Timing, Phase]]) -> dict[str, Any]:
    """The measurements. Several phases count in proportion to their steps in a run."""
    ranks, timer = context.ranks, ProductTimer(context.ranks.device)
    timings, weights = [timing for timing, _ in training], [phase.steps for _, phase in training]
    speed = statistics.harmonic_mean([timing.tokens_per_second for timing in timings], weights)
    limit = statistics.harmonic_mean([_limit(timing, timer, ranks) for timing in timings], weights)
    forward_limit = _limit(forward, timer, ranks)
    seconds = [second * 1000 for timing in timings for second in timing.seconds]
    products = sum(timing.flops * weight for timing, weight in zip(timings, weights, strict=True)) / sum(weights)
    (all_products,) = ranks.sum([products])
    tokens = timings[0].recorded_tokens
    asked = sum(_model_flops(context, phase) * phase.steps for _, phase in training) / sum(weights)
    model_flops, peak = asked / tokens, max(fastest_product(ranks.device, context.precision), timer.fastest())
    return {
        "tokens_per_second": speed,
        "tokens_per_second_forward": forward.tokens_per_second,
        "step_milliseconds": statistics.median(seconds),
        "step_milliseconds_min": min(seconds),
        "step_milliseconds_max": max(seconds),
        "steps": len(seconds),
        "peak_memory_bytes": timings[-1].peak_bytes,
        "peak_memory_bytes_forward": forward.peak_bytes,
        "gemm_limit_tokens_per_second": limit,
        "gemm_share": speed / limit,
        "gemm_limit_tokens_per_second_forward": forward_limit,
        "gemm_share_forward": forward.tokens_per_second / forward_limit,
        "gemm_flops_per_token": all_products / tokens,
        "flops_per_token": model_flops,
        "flops_per_second": model_flops * speed,
        "peak_flops_per_second": peak * ranks.world_size,
        "model_flops_utilization": model_flops * speed / (peak * ranks.world_size),
    }


def _limit(timing: Timing, timer: ProductTimer, ranks: Ranks) -> float:
    """Tokens per second if a step consisted only of its matrix products, each at its best speed; all ranks compute at once."""
    ranks.barrier()
    slowest: float = max(ranks.gather(timer.limit(timing.products)))
    return timing.recorded_tokens / slowest


def _model_flops(context: TrainContext, phase: Phase) -> float:
    """FLOPs that the model needs for a step of a phase: on real tokens, with nothing computed twice."""
    numbers = np.arange(context.train.sequences_per_step)
    lengths = context.source.batch(numbers, numbers).attention_mask.sum(1).tolist()
    passes = context.objective.forward_passes(phase)
    return sum(executed_flops(passes, length, count, recomputed=False) for length, count in Counter(lengths).items())


def _described(measured: dict[str, Any], config: PretrainConfig, context: TrainContext) -> dict[str, Any]:
    """The configuration that was measured, and the machine."""
    train, device = config.train, context.ranks.device
    return {
        "preset": measured["preset"],
        "objective": config.objective.name,
        "parameters": sum(parameter.numel() for parameter in context.objective.parameters()),
        "sequence_length": config.data.sequence_length,
        "sequences_per_step": train.sequences_per_step,
        "micro_batch_size": train.micro_batch_size or train.sequences_per_step // context.ranks.world_size,
        "vocab_size": measured["vocab_size"],
        "fill": measured["fill"],
        "precision": context.precision,
        "compile": context.compilation,
        "kernels": device.type == "cpu" and kernels.load_kernels().library is not None,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "processes": context.ranks.world_size,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _out_of_memory(config: PretrainConfig, world: int) -> ConfigError:
    rows = config.train.micro_batch_size or config.train.sequences_per_step // world
    smaller = f"--set train.micro_batch_size={max(1, rows // 4)}, or " if rows > 1 else ""
    return ConfigError(
        f"there is not enough memory for {rows} sequences of {config.data.sequence_length} tokens at once",
        hint=f"{smaller}--set train.gradient_checkpointing=true, or a shorter data.sequence_length",
    )
