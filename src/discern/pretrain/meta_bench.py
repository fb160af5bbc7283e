"""FLOPs and peak memory of the training steps of a configuration, from the shapes of their tensors; nothing is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.run import build_objective
from discern.data.batching.synthetic import SPECIAL, SyntheticParts, SyntheticRows
from discern.objectives.base import Objective, Vocabulary
from discern.progress import Progress, Silent
from discern.training.context import TrainContext
from discern.training.interrupt import StopRequest
from discern.training.meta_step import META, MetaStep, meta_step
from discern.training.parallel import Ranks
from discern.training.pretrain_config import PretrainConfig
from discern.training.step_sizes import step_sizes


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
