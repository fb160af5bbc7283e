"""Cost of a run, estimated before it starts: parameters, memory, FLOPs and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.run import build_objective, check_words, vocabulary_of
from discern.config.tree import to_toml
from discern.models.base import Encoder, Network
from discern.models.xlnet.encoder import XLNetEncoder
from discern.objectives.base import ForwardPass, Objective
from discern.pretrain.resolved_run import ResolvedRun, Resume, resolve_run
from discern.pretrain.run import epochs_of, notes_on_rows, precision_of, training_stream
from discern.training.average import average_warning
from discern.training.config import NO_STEP_LIMIT
from discern.training.flops import RunFlops, run_flops
from discern.training.optimizer import counts_by_rule, counts_text, moment_bytes
from discern.training.parallel import Ranks, choose_device
from discern.training.pretrain_config import PretrainConfig
from discern.training.products import fastest_product
from discern.training.step_sizes import step_sizes

# Fraction of the speed of plain matrix products that a whole training step reached in measurements on CPUs.
_SHARE_OF_PRODUCTS = 0.6


@dataclass(frozen=True)
class Estimate:
    """Estimates of a run: values for programs, text for people."""

    values: dict[str, Any]
    text: str


def estimate(
    config: Path | None = None,
    *,
    data: Path,
    out: Path,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    resume: Resume = "auto",
    device: str = "auto",
    init_from: Path | None = None,
    decay_from: Path | None = None,
) -> Estimate:
    """Estimate parameters, memory, FLOPs and time of a run, without starting it. The arguments are those of `pretrain`.

    Memory is estimated from the shapes, time from the speed of matrix products on this machine.

    Raises:
        ConfigError, DataError: the options do not fit together.
    """
    resolved = resolve_run(
        data=data,
        out=out,
        config=config,
        preset=preset,
        overrides=overrides,
        resume=resume,
        init_from=init_from,
        decay_from=decay_from,
        warn=lambda _: None,
    )
    return _estimate(resolved, choose_device(device))


def _estimate(resolved: ResolvedRun, device: torch.device) -> Estimate:
    config, data = resolved.config, resolved.data
    precision = precision_of(resolved, Ranks(0, 1, device)).name
    check_words(config, data)
    vocabulary = vocabulary_of(data)
    with torch.device("meta"):
        objective = build_objective(config, vocabulary)
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    sizes = step_sizes(config.train, config.data)
    whole = run_flops(objective, config.train.max_steps, sizes)
    speed = fastest_product(device, precision) * _SHARE_OF_PRODUCTS
    steps = _steps_in_time(config, whole, speed)
    begin = 0 if resolved.decay is None else resolved.decay.step
    flops = whole.after(steps) - whole.after(begin)
    epochs = epochs_of(training_stream(data, config), sizes.examples_before(steps))
    values = {
        "steps": steps - begin,
        "parameters": parameters,
        "parameters_by_network": {name: _size(network) for name, network in objective.networks().items()},
        "parameters_by_optimizer": counts_by_rule(objective, config.optimizer),
        "flops": flops.executed,
        "flops_paper_convention": flops.paper,
        "memory_bytes": _memory(objective, config, parameters, precision),
        "slot_memory_bytes": _slot_memory(objective, config),
        "estimated_seconds": flops.executed / speed,
        "epochs": epochs,
        "precision": precision,
        "device": str(device),
        "warnings": _warnings(config, steps, epochs) + notes_on_rows(data, config),
    }
    return Estimate(values, _text(config, values))


def _steps_in_time(config: PretrainConfig, flops: RunFlops, speed: float) -> int:
    """Number of steps of a run: all, or the estimated number that fits into its hours."""
    if config.train.max_hours is None:
        return config.train.max_steps
    return max(1, min(config.train.max_steps, flops.steps_within(config.train.max_hours * 3600 * speed)))


def _size(network: Network) -> int:
    modules = [module for module in (network.encoder, network.head, network.bilinear) if module is not None]
    parts = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(parts.values())


def _memory(objective: Objective, config: PretrainConfig, parameters: int, precision: str) -> int:
    """Bytes in one process: weights, their average, gradients and moments in float32, activations kept for the backward pass,
    and the memory of the slots."""
    rows = config.train.micro_batch_size or config.train.sequences_per_step
    length = config.data.sequence_length
    number = 2 if precision == "bfloat16" else 4
    kept, logits = 0.0, 0.0
    passes = {id(each.network.encoder): each for each in _passes(objective, config)}
    for network in objective.networks().values():
        sizes, encoder = network.encoder.config, network.encoder
        layers = 1 if config.train.gradient_checkpointing else sizes.num_layers
        kept += rows * number * layers * _of_a_row(encoder, length, passes.get(id(encoder)))
    for each in _passes(objective, config):
        if each.predicts_words:
            logits = max(logits, 4 * 4 * rows * length * each.head_share * each.network.encoder.embeddings.vocab_size)
    averaged = 4 * parameters if config.train.weight_average else 0
    return int(8 * parameters + averaged + moment_bytes(objective, config.optimizer) + kept + logits) + _slot_memory(
        objective, config
    )


def _of_a_row(encoder: Encoder, length: int, step: ForwardPass | None) -> float:
    """Numbers that a block keeps per row.

    Inputs and outputs of the products, dropout masks and normalized states; probabilities three times: raw, mask, dropped. An
    XLNet also has the query stream, the scores of all distances, and the keys and values of its memory.
    """
    sizes = encoder.config
    inside = 14 * sizes.hidden_size + 3 * sizes.feedforward_size
    if not isinstance(encoder, XLNetEncoder) or step is None:
        return length * (inside + 3 * length * sizes.num_heads)
    tokens, keys = length * (1 + step.query_share), length + step.remembered
    scores = 3 * keys + (keys + length)
    return tokens * (inside + scores * sizes.num_heads) + 3 * step.remembered * sizes.hidden_size


def _slot_memory(objective: Objective, config: PretrainConfig) -> int:
    """Bytes of the memory that the slots of the batch carry from step to step, in float32, over all processes."""
    found, slots = 0, max(stretch.rows for stretch in step_sizes(config.train, config.data).stretches)
    for each in {id(each.network.encoder): each for each in _passes(objective, config)}.values():
        sizes = each.network.encoder.config
        found += 4 * slots * each.remembered * sizes.num_layers * sizes.hidden_size
    return found


def _passes(objective: Objective, config: PretrainConfig) -> list[ForwardPass]:
    """Forward passes of the steps of all phases."""
    return [each for phase in objective.phases(config.train.max_steps) for each in objective.forward_passes(phase)]


def _warnings(config: PretrainConfig, steps: int, epochs: float) -> list[str]:
    found = []
    if config.optimizer.warmup_steps > steps // 2:
        of = "train.max_steps" if steps == config.train.max_steps else "the steps that fit into train.max_hours, about"
        found.append(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps:,} is more than half of {of} {steps:,}: "
            "most of the run is warm-up"
        )
    if epochs > 100:
        found.append(f"the data set would be read {epochs:,.0f} times; use more text or fewer steps")
    average = average_warning(config.train, steps)
    if average is not None:
        found.append(average)
    return found


def _steps_text(config: PretrainConfig, steps: int) -> str:
    if config.train.max_hours is None or steps == config.train.max_steps:
        return f"{steps:,}"
    bound = "" if config.train.max_steps >= NO_STEP_LIMIT else f"; train.max_steps allows {config.train.max_steps:,}"
    return f"about {steps:,} fit into {config.train.max_hours:g} hours (estimate){bound}"


def _text(config: PretrainConfig, values: dict[str, Any]) -> str:
    hours = values["estimated_seconds"] / 3600
    time_text = f"{hours:,.1f} hours" if hours >= 1 else f"{values['estimated_seconds']:,.0f} seconds"
    sizes = ", ".join(f"{name} {size:,}" for name, size in values["parameters_by_network"].items())
    remembered = values["slot_memory_bytes"] / 2**30
    slots = f", of which {remembered:,.1f} GiB for the memory of the slots, shared by all processes" if remembered >= 0.05 else ""
    lines = [
        to_toml(config).rstrip(),
        "",
        f"# parameters    {values['parameters']:,} ({sizes})",
        f"# optimizer     {counts_text(values['parameters_by_optimizer'])}",
        f"# arithmetic    {values['flops']:.4e} FLOPs executed; {values['flops_paper_convention']:.4e} by the paper's convention",
        f"# memory        about {values['memory_bytes'] / 2**30:.1f} GiB (estimate){slots}",
        f"# time          about {time_text} on this machine's {values['device']} in {values['precision']} (estimate)",
        f"# steps         {_steps_text(config, values['steps'])}",
        f"# epochs        {values['epochs']:,.2f}",
        *(f"# warning       {warning}" for warning in values["warnings"]),
        "# nothing was trained or written: this was a dry run",
    ]
    return "\n".join(lines)
