"""What a run would do and cost, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from discern.config.tree import to_toml
from discern.model.encoder import Encoder
from discern.model.network import Network
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import Objective
from discern.objectives.passes import Pass, has_vocabulary, step_passes
from discern.training.config import NO_STEP_LIMIT
from discern.training.flops import RunFlops, run_flops
from discern.training.parallel import Ranks, choose_device
from discern.training.products import fastest_product
from discern.workflows.pretrain import notes_on_rows, precision_of, training_stream
from discern.workflows.request import PretrainRequest, settle
from discern.workflows.runs import build_objective, check_words, vocabulary_of
from discern.workflows.settings import PretrainConfig

# Share of the speed of plain matrix products that a whole training step was measured to reach on CPUs.
_SHARE_OF_PRODUCTS = 0.6


@dataclass(frozen=True)
class Plan:
    """What would run: figures for programs, text for people."""

    values: dict[str, Any]
    text: str


def plan(request: PretrainRequest) -> Plan:
    """Parameters, memory, arithmetic and time of a run, without starting it.

    Memory and time are estimates: the first from the shapes, the second from the speed of matrix products here.
    """
    settled = settle(request, lambda _: None)
    config, data = settled.config, settled.data
    device = choose_device(request.device)
    precision = precision_of(settled, Ranks(0, 1, device)).name
    check_words(config, data)
    vocabulary = vocabulary_of(data)
    with torch.device("meta"):
        objective = build_objective(config, vocabulary)
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    rows = training_stream(data, config).num_rows
    length = config.data.sequence_length
    whole = run_flops(objective, config.train.max_steps, length, config.train.sequences_per_step)
    speed = fastest_product(device, precision) * _SHARE_OF_PRODUCTS
    steps = _steps_in_time(config, whole, speed)
    flops = whole.after(steps)
    sequences = config.train.sequences_per_step * steps
    values = {
        "steps": steps,
        "parameters": parameters,
        "parameters_by_network": {name: _size(network) for name, network in objective.networks().items()},
        "flops": flops.executed,
        "flops_paper_convention": flops.paper,
        "memory_bytes": _memory(objective, config, parameters, precision),
        "slot_memory_bytes": _slot_memory(objective, config),
        "estimated_seconds": flops.executed / speed,
        "epochs": sequences / rows,
        "precision": precision,
        "device": str(device),
        "warnings": _warnings(config, steps, sequences / rows) + notes_on_rows(data, config),
    }
    return Plan(values, _text(config, values))


def _steps_in_time(config: PretrainConfig, flops: RunFlops, speed: float) -> int:
    """The steps that a run will have: all, or as many as its hours are enough for, by an estimate."""
    if config.train.max_hours is None:
        return config.train.max_steps
    return max(1, min(config.train.max_steps, flops.steps_within(config.train.max_hours * 3600 * speed)))


def _size(network: Network) -> int:
    modules = [module for module in (network.encoder, network.head, network.bilinear) if module is not None]
    parts = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(parts.values())


def _memory(objective: Objective, config: PretrainConfig, parameters: int, precision: str) -> int:
    """Bytes: weights, gradients and two moments in float32, what the forward pass keeps for the backward one, and what slots
    remember; all of it in one process."""
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
        if has_vocabulary(each.network):
            logits = max(logits, 4 * 4 * rows * length * each.head_share * each.network.encoder.embeddings.vocab_size)
    return int(16 * parameters + kept + logits) + _slot_memory(objective, config)


def _of_a_row(encoder: Encoder, length: int, step: Pass | None) -> float:
    """Numbers that a block keeps of a row.

    Inputs and outputs of the products, dropout masks and normalised states; probabilities thrice: raw, mask, dropped. An XLNet
    has queries besides the content, scores of all distances besides those of the keys, and keys and values of its memory.
    """
    sizes = encoder.config
    inside = 14 * sizes.hidden_size + 3 * sizes.feedforward_size
    if not isinstance(encoder, XLNetEncoder) or step is None:
        return length * (inside + 3 * length * sizes.num_heads)
    tokens, keys = length * (1 + step.query_share), length + step.remembered
    scores = 3 * keys + (keys + length)
    return tokens * (inside + scores * sizes.num_heads) + 3 * step.remembered * sizes.hidden_size


def _slot_memory(objective: Objective, config: PretrainConfig) -> int:
    """Bytes that the slots of the batch remember from step to step, in float32, over all processes."""
    found = 0
    for each in {id(each.network.encoder): each for each in _passes(objective, config)}.values():
        sizes = each.network.encoder.config
        found += 4 * config.train.sequences_per_step * each.remembered * sizes.num_layers * sizes.hidden_size
    return found


def _passes(objective: Objective, config: PretrainConfig) -> list[Pass]:
    """What the steps of any phase run."""
    return [each for phase in objective.phases(config.train.max_steps) for each in step_passes(objective, phase)]


def _warnings(config: PretrainConfig, steps: int, epochs: float) -> list[str]:
    found = []
    if config.optimizer.warmup_steps > steps // 2:
        of = "train.max_steps" if steps == config.train.max_steps else "the steps that fit into train.max_hours, about"
        found.append(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps:,} is more than half of {of} {steps:,}: "
            "the learning rate hardly gets past its warm-up"
        )
    if epochs > 100:
        found.append(f"the data set would be read {epochs:,.0f} times; more text, or fewer steps, serve better")
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
    slots = f", of which {remembered:,.1f} GiB what the slots remember, shared by all processes" if remembered >= 0.05 else ""
    lines = [
        to_toml(config).rstrip(),
        "",
        f"# parameters    {values['parameters']:,} ({sizes})",
        f"# arithmetic    {values['flops']:.4e} FLOPs executed; {values['flops_paper_convention']:.4e} by the paper's convention",
        f"# memory        about {values['memory_bytes'] / 2**30:.1f} GiB (estimate){slots}",
        f"# time          about {time_text} on this machine's {values['device']} in {values['precision']} (estimate)",
        f"# steps         {_steps_text(config, values['steps'])}",
        f"# epochs        {values['epochs']:,.2f}",
        *(f"# warning       {warning}" for warning in values["warnings"]),
        "# nothing was trained or written: this was a dry run",
    ]
    return "\n".join(lines)
