"""Speed of a configuration on this machine, compared with the limit of its matrix products."""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from discern import kernels
from discern.artifacts.run import build_objective, check_parameters
from discern.config.layers import usual_vocabulary
from discern.errors import NumericsError
from discern.objectives.base import Phase
from discern.pretraining.meta_bench import description, meta_bench, synthetic_context, synthetic_vocabulary
from discern.pretraining.run import check_shares, workload_of
from discern.progress import Progress, Silent
from discern.training.compilation import shared_compilation
from discern.training.distributed import join_ranks
from discern.training.flops import Product, executed_flops, fastest_product, record_products, shortest_time
from discern.training.loop import compile_encoders, forward_backward, reduce_step_counts, setup_phase, update
from discern.training.memory import lacks_memory, out_of_memory, peak_memory
from discern.training.metrics import NonFiniteGuard, StepCounters, StepMeter
from discern.training.precision import autocast, shared_precision
from discern.training.prefetch import Feed, read_local_batch
from discern.training.pretrain_config import load_pretrain_config
from discern.training.replica import num_shards
from discern.training.schedule import learning_rate
from discern.training.state import TrainContext

_STEPS_OF_ROWS = 4  # synthetic rows repeat after this many steps
_LEAST, _MOST = 3, 200  # number of timed steps by default


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
    settings = load_pretrain_config(config, preset, overrides).config
    train, size = settings.train, vocab_size or usual_vocabulary(preset)
    if device == "meta":
        return {"preset": preset} | meta_bench(settings, size, fill)
    with join_ranks(device) as ranks:
        # Build
        check_shares(settings, ranks)
        check_parameters(settings, synthetic_vocabulary(size), ranks.device, num_shards(train, ranks.world_size))
        objective = build_objective(settings, synthetic_vocabulary(size))
        objective.initialize(train.seed)
        objective.to(ranks.device)
        listener = progress if ranks.writes else Silent()
        tokens = (train.micro_batch_size or train.sequences_per_step // ranks.world_size) * settings.data.sequence_length
        precision = shared_precision(train.precision, ranks, settings.model, tokens)
        compilation = shared_compilation(train.compile, ranks, replace(workload_of(settings, ranks, precision.name), steps=None))
        if train.compile:
            listener.note(compilation.note)
        context = synthetic_context(settings, objective, ranks, size, fill, listener, _STEPS_OF_ROWS * train.sequences_per_step)
        context = replace(context, precision=precision.name, compilation=compilation.mode)

        # Measure
        phases = objective.phases(train.max_steps)
        listener.start("measuring", 1 + len(phases), "parts")
        try:
            forward = time_forward(context, steps, seconds)
            training = [time_training(context, phase, steps, seconds) for phase in phases]
        except RuntimeError as problem:
            if not lacks_memory(problem):
                raise
            raise out_of_memory(train, ranks.world_size, ranks.device) from problem
        finally:
            listener.finish()
        speeds = _speeds(context, forward, training, phases)
        if not ranks.writes:
            return None
        return {
            "preset": preset,
            **description(settings, objective, context.precision, size, fill, ranks.world_size),
            "compile": context.compilation,
            "kernels": ranks.device.type == "cpu" and kernels.load_kernels().library is not None,
            "device": str(ranks.device),
            "device_name": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else processor_name(),
            "threads": torch.get_num_threads(),
            "processes": ranks.world_size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **precision.record(),
            **speeds,
        }


def time_training(context: TrainContext, phase: Phase, steps: int | None = None, seconds: float = 8.0) -> Timing:
    """Time whole steps of training: read, corrupt, forward, backward, clip, update. Nothing is written.

    Reading runs one step ahead in a thread, as it does in the loop.
    """
    context.objective.train()
    ranks, optimizer = context.ranks, context.optimizer
    with torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []), ThreadPoolExecutor(1) as reader:
        if phase.start is not None:
            phase.start()
        replica, meter, guard = setup_phase(context, phase), StepMeter(0.0), NonFiniteGuard(ranks, _diverged)
        feed, numbers = Feed(context, reader, 0), itertools.count()

        def step() -> int:
            number = next(numbers)
            local = feed.take(number)
            totals = reduce_step_counts(context, local, meter)
            means = forward_backward(context, replica, local, totals.counts, number)
            allowed = guard.allow(StepCounters(number, 0, number, 0), replica.clip(optimizer.clip_norm), means)
            update(replica.optimizer, learning_rate(optimizer, number, context.train.max_steps), allowed)
            return totals.tokens

        return _time(context, step, steps, seconds)


@torch.no_grad()
def time_forward(context: TrainContext, steps: int | None, seconds: float) -> Timing:
    """Time the encoder that is exported by default, alone: uncorrupted rows, dropout off, as many rows as a micro-batch has."""
    compile_encoders(context.compilation, context.objective)
    context.objective.eval()
    rows = read_local_batch(context, 0).micro_batches[0][0].tokens
    tokens = int(context.ranks.sum([float(rows.attention_mask.sum())])[0])
    batch, encoder = rows.to(context.ranks.device), next(iter(context.objective.networks().values())).encoder

    def forward() -> int:
        with autocast(context.precision, context.ranks.device):
            encoder(batch.input_ids, batch.visible_mask, batch.token_type_ids, batch.position_ids, batch.document_ids)
        return tokens

    return _time(context, forward, steps, seconds)


def _time(context: TrainContext, step: Callable[[], int], steps: int | None, seconds: float) -> Timing:
    """Time a step, which returns its tokens, again and again."""
    ranks = context.ranks

    def timed() -> tuple[int, float]:
        begin = time.perf_counter()
        tokens = step()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return tokens, time.perf_counter() - begin

    recorded: list[int] = []
    products = record_products(context.objective, lambda: recorded.append(timed()[0]))
    timing = Timing(products, recorded[0])
    # Warm up: caches, the heap, compilation. A step that compiles takes long and says nothing about the next one.
    timed()
    duration = timed()[1]
    if duration < 2.0:
        duration = timed()[1]
    # All ranks must run the same number of steps, so rank 0 decides.
    wanted = float(steps or min(max(math.ceil(seconds / duration), _LEAST), _MOST))
    (count,) = ranks.sum([wanted if ranks.writes else 0.0])
    ranks.barrier()
    for _ in range(int(count)):
        tokens, duration = timed()
        timing.tokens.append(tokens)
        timing.seconds.append(duration)
        context.progress.advance(1 / count, **{"tokens/s": f"{timing.tokens_per_second:,.0f}"})
    timing.peak_bytes = int(ranks.sum([float(peak_memory(ranks.device))])[0])
    return timing


def _diverged(before: StepCounters, means: Mapping[str, float]) -> NoReturn:
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
        slowest: float = max(ranks.gather(sum(count * shortest(product) for product, count in timing.products.items())))
        return timing.recorded_tokens / slowest

    def mean(values: Sequence[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    speed = statistics.harmonic_mean([timing.tokens_per_second for timing in training], weights)
    bound, forward_bound = statistics.harmonic_mean([limit(timing) for timing in training], weights), limit(forward)
    milliseconds = [1000 * second for timing in training for second in timing.seconds]
    # FLOPs that are executed, and those that the model needs: on real tokens, with nothing computed twice
    tokens = training[0].recorded_tokens
    executed = mean([sum(count * product.flops for product, count in timing.products.items()) for timing in training])
    numbers = np.arange(context.train.sequences_per_step)
    lengths = Counter(context.source.batch(numbers, numbers).attention_mask.sum(1).tolist())
    needed = mean(
        [
            sum(
                executed_flops(context.objective.forward_passes(phase), length, rows, recomputed=False)
                for length, rows in lengths.items()
            )
            for phase in phases
        ]
    )
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
        "flops_per_second": needed / tokens * speed,
        "peak_flops_per_second": peak,
        "model_flops_utilization": needed / tokens * speed / peak,
    }


def processor_name() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
