"""How fast a configuration trains on this machine, and how far that is from what its matrix products allow."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discern import kernels
from discern.config.presets import usual_vocabulary
from discern.data.synthetic import SPECIAL, SyntheticParts, SyntheticRows
from discern.errors import ConfigError
from discern.objectives.base import Objective, Phase, Vocabulary
from discern.objectives.passes import step_passes
from discern.progress import Progress, Silent
from discern.training.flops import executed_flops
from discern.training.interrupt import StopRequest
from discern.training.parallel import Ranks, join_ranks
from discern.training.parts import Parts
from discern.training.precision import settle_precision, shape_of
from discern.training.products import ProductTimer, fastest_product
from discern.training.speed import Span, Timing, time_forward, time_training
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.pretrain import check_shares
from discern.workflows.runs import build_objective, check_parameters
from discern.workflows.settings import PretrainConfig

_STEPS_OF_ROWS = 4  # as many steps pass before a made-up row comes again


@dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    Attributes:
        config: TOML file, or None.
        preset: name of a preset, or None.
        overrides: "section.key=value".
        device: 'auto', 'cpu', 'cuda', ...
        vocab_size: V of the made-up text; None: that which the preset is meant for.
        fill: share of real tokens in its rows.
        span: how long to measure each of forward and training.
    """

    config: Path | None = None
    preset: str | None = None
    overrides: Sequence[str] = ()
    device: str = "auto"
    vocab_size: int | None = None
    fill: float = 1.0
    span: Span = field(default_factory=lambda: Span(None, 8.0))

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary."""
        return self.vocab_size or usual_vocabulary(self.preset)


def bench(request: BenchRequest, progress: Progress) -> dict[str, Any] | None:
    """Time training steps and forward passes on made-up text; gives the figures, or None on ranks that don't write.

    Raises:
        ConfigError: something doesn't fit, or the memory doesn't suffice.
    """
    config = load_pretrain_config(request.config, request.preset, request.overrides).config
    with join_ranks(request.device) as ranks:
        check_shares(config, ranks)
        # Speed doesn't depend on which words are frequent, so any counts will do.
        counts = torch.ones(request.vocabulary, dtype=torch.int64)
        vocabulary = Vocabulary(request.vocabulary, SPECIAL, counts)
        check_parameters(config, vocabulary, ranks.device)
        objective = build_objective(config, vocabulary)
        objective.initialise(config.train.seed)
        objective.to(ranks.device)
        listener = progress if ranks.writes else Silent()
        tokens = (config.train.micro_batch_size or config.train.sequences_per_step // ranks.world) * config.data.sequence_length
        precision = settle_precision(config.train.precision, ranks, shape_of(config.model, tokens))
        parts = replace(_parts(request, config, objective, ranks, listener), precision=precision.name)
        phases = objective.phases(config.train.max_steps)
        listener.start("measuring", 1 + len(phases), "parts")
        try:
            forward = time_forward(parts, request.span)
            training = [time_training(parts, phase, request.span) for phase in phases]
        except RuntimeError as problem:
            if not _lacks_memory(problem):
                raise
            raise _out_of_memory(config, ranks.world) from problem
        finally:
            listener.finish()
        speeds = _speeds(parts, forward, list(zip(training, phases, strict=True)))
        return _described(request, config, parts) | precision.record() | speeds if ranks.writes else None


def _parts(request: BenchRequest, config: PretrainConfig, objective: Objective, ranks: Ranks, progress: Progress) -> Parts:
    """What the loop runs on, without anything that is written."""
    train = config.train
    rows = SyntheticRows(
        request.vocabulary, config.data.sequence_length, request.fill, _STEPS_OF_ROWS * train.sequences_per_step, train.seed
    )
    return Parts(
        objective=objective,
        source=SyntheticParts(rows) if config.data.packing == "two-part" else rows,
        heldout=None,
        optimizer=config.optimizer,
        train=train,
        ranks=ranks,
        precision="float32",
        folder=Path(),
        journal=None,
        progress=progress,
        stop=StopRequest(),
    )


def _speeds(parts: Parts, forward: Timing, training: Sequence[tuple[Timing, Phase]]) -> dict[str, Any]:
    """The figures. Several phases count by how many steps of a run they are."""
    ranks, timer = parts.ranks, ProductTimer(parts.ranks.device)
    timings, weights = [timing for timing, _ in training], [phase.steps for _, phase in training]
    speed = statistics.harmonic_mean([timing.tokens_per_second for timing in timings], weights)
    limit = statistics.harmonic_mean([_limit(timing, timer, ranks) for timing in timings], weights)
    forward_limit = _limit(forward, timer, ranks)
    seconds = [second * 1000 for timing in timings for second in timing.seconds]
    products = sum(timing.flops * weight for timing, weight in zip(timings, weights, strict=True)) / sum(weights)
    (all_products,) = ranks.sum([products])
    tokens = timings[0].recorded_tokens
    asked = sum(_model_flops(parts, phase) * phase.steps for _, phase in training) / sum(weights)
    model_flops, peak = asked / tokens, max(fastest_product(ranks.device, parts.precision), timer.fastest())
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
        "peak_flops_per_second": peak * ranks.world,
        "model_flops_utilisation": model_flops * speed / (peak * ranks.world),
    }


def _limit(timing: Timing, timer: ProductTimer, ranks: Ranks) -> float:
    """Tokens a second if a step were its matrix products alone, each at its best; all ranks compute at the same time."""
    ranks.barrier()
    slowest: float = max(ranks.gather(timer.limit(timing.products)))
    return timing.recorded_tokens / slowest


def _model_flops(parts: Parts, phase: Phase) -> float:
    """FLOPs of a step of a phase that the model asks for: of real tokens, nothing computed twice."""
    numbers = np.arange(parts.train.sequences_per_step)
    lengths = parts.source.batch(numbers, numbers).attention_mask.sum(1).tolist()
    passes = step_passes(parts.objective, phase)
    return sum(executed_flops(passes, length, count, recomputed=False) for length, count in Counter(lengths).items())


def _described(request: BenchRequest, config: PretrainConfig, parts: Parts) -> dict[str, Any]:
    """What was measured, and where."""
    train, device = config.train, parts.ranks.device
    return {
        "preset": request.preset,
        "objective": config.objective.name,
        "parameters": sum(parameter.numel() for parameter in parts.objective.parameters()),
        "sequence_length": config.data.sequence_length,
        "sequences_per_step": train.sequences_per_step,
        "micro_batch_size": train.micro_batch_size or train.sequences_per_step // parts.ranks.world,
        "vocab_size": request.vocabulary,
        "fill": request.fill,
        "precision": parts.precision,
        "compile": train.compile,
        "kernels": device.type == "cpu" and kernels.load_kernels().library is not None,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "processes": parts.ranks.world,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor_name() -> str:
    """The processor's model, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _lacks_memory(problem: RuntimeError) -> bool:
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


def _out_of_memory(config: PretrainConfig, world: int) -> ConfigError:
    rows = config.train.micro_batch_size or config.train.sequences_per_step // world
    smaller = f"--set train.micro_batch_size={max(1, rows // 4)}, or " if rows > 1 else ""
    return ConfigError(
        f"there is not enough memory for {rows} sequences of {config.data.sequence_length} at once",
        hint=f"{smaller}--set train.gradient_checkpointing=true, or a shorter data.sequence_length",
    )
