"""The training loop: read, forward, backward, update, write. Every objective and every task runs through it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from discern.artifacts.files import write_text
from discern.corruption.randomness import Randomness, key_of
from discern.errors import CheckpointError, NumericsError
from discern.objectives.base import Objective, Phase
from discern.training.bookkeeping import catch_up, finish_step, save_checkpoint, summary
from discern.training.interrupt import agree_to_stop
from discern.training.meter import Meter
from discern.training.optimizer import AdamW, clip_gradients, parameter_groups
from discern.training.pace import KINDS, Due
from discern.training.parts import Parts, State
from discern.training.precision import autocast
from discern.training.schedule import learning_rate
from discern.types import CorruptedBatch


@dataclass(frozen=True)
class Share:
    """This rank's part of one step: corrupted micro-batches with their random numbers."""

    batches: list[tuple[CorruptedBatch, Randomness]]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step before they compute it.

    Attributes:
        counts: denominators of the losses, over all ranks.
        tokens: real tokens, over all ranks.
        seconds: of the run, by the clock of the first rank.
        stopping: somebody asked for a stop.
        due: what the clock of the first rank asks for after the step.
    """

    counts: dict[str, int]
    tokens: int
    seconds: float
    stopping: bool
    due: Due


def train(parts: Parts, state: State) -> dict[str, Any]:
    """Run from `state` to the end, to the end of the time budget, or to a request to stop.

    Gives the last record of the journal. A checkpoint of the last step is always written, before the last evaluation.

    Raises:
        NumericsError: a loss or gradient is not finite; the weights before the update are kept under `folder/debug`.
        CheckpointError: a checkpoint could not be written.
        DataError: an evaluation failed.
    """
    record: dict[str, Any] = {}
    devices = [parts.ranks.device] if parts.ranks.device.type == "cuda" else []
    parts.objective.train()
    with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as reader:
        if state.owed is not None:
            compile_encoders(parts)  # figures of the same arithmetic as without an interruption
            record = catch_up(parts, state)
        for phase, first, last in _spans(parts.objective.phases(parts.train.max_steps)):
            if state.step < last and not state.over:
                record = _run_phase(parts, state, (phase, first, last), reader) or record
    agree_to_stop(parts.stop, parts.ranks)  # so that all of them leave in the same way
    return record


def _run_phase(parts: Parts, state: State, span: tuple[Phase, int, int], reader: ThreadPoolExecutor) -> dict[str, Any]:
    phase, first, last = span
    if state.step == first and phase.start is not None:
        phase.start()
    forward, optimizer = begin_phase(parts, phase)
    names = {parameter: name for name, parameter in parts.objective.named_parameters()}
    if state.step > first or not phase.fresh_optimizer:
        optimizer.load_tensors(_moving(state.optimizer, names), names, state.updates)
    # The means of an interval end with the phase that they are of.
    meter, state.interval = Meter(state.seconds, state.interval if state.step > first else None), {}
    scheduled, begins = _schedule(parts, span)
    record: dict[str, Any] = {}
    upcoming = reader.submit(read_share, parts, state.step)
    while state.step < last and not state.over:
        share = upcoming.result()
        upcoming = reader.submit(read_share, parts, state.step + 1)
        agreed = agree(parts, share, meter)

        losses, norm = compute_gradients(parts, forward, share, agreed.counts, state.step)
        if not np.isfinite(norm):
            _fail(parts, state, optimizer, losses)
        update(scheduled, optimizer, state.step - begins, agreed.seconds)

        state.step, state.tokens, state.updates = state.step + 1, state.tokens + agreed.tokens, optimizer.updates
        state.seconds = meter.seconds()
        meter.add(losses, agreed.tokens)
        # Ranks must stop after the same step, so they go by what they agreed on; one alone may look again.
        stopping = agreed.stopping or (parts.ranks.world == 1 and parts.stop.requested)
        out_of_time = parts.train.max_hours is not None and agreed.seconds >= parts.train.max_hours * 3600
        state.over = state.step >= parts.train.max_steps or stopping or out_of_time
        state.cut = stopping and state.step < parts.train.max_steps
        record = finish_step(parts, state, optimizer, meter, norm, agreed.due) or record
    state.optimizer = optimizer.tensors(names)
    return record


def _schedule(parts: Parts, span: tuple[Phase, int, int]) -> tuple[Parts, int]:
    """What the learning rate of a phase goes by, and the step that its schedule counts from."""
    phase, first, last = span
    if not phase.own_schedule:
        return parts, 0
    return replace(parts, train=parts.train.model_copy(update={"max_steps": last - first})), first


def begin_phase(parts: Parts, phase: Phase) -> tuple[nn.Module, AdamW]:
    """What a phase runs forward, as the ranks share it, and an optimizer of the parameters that it trains."""
    _freeze_all_but(parts.objective, phase)
    return _wrap(parts), AdamW(parameter_groups(parts.objective, parts.optimizer), parts.optimizer)


def read_share(parts: Parts, step: int) -> Share:
    """This rank's examples of a step, corrupted, in micro-batches. Runs ahead in a thread; touches no network."""
    each = parts.train.sequences_per_step // parts.ranks.world
    slots = np.arange(parts.ranks.rank * each, (parts.ranks.rank + 1) * each)
    batch = parts.source.batch(step * parts.train.sequences_per_step + slots, slots)
    randomness = Randomness(parts.train.seed, step, batch.slot)
    size = parts.train.micro_batch_size or each
    batches = []
    for start in range(0, each, size):
        rows = randomness.rows(start, start + size)
        batches.append((parts.objective.corrupt(batch.rows(start, start + size), rows), rows))
    return Share(batches)


def agree(parts: Parts, share: Share, meter: Meter) -> Agreed:
    """What all ranks must know of a step, in one exchange."""
    own: dict[str, int] = {}
    for batch, _ in share.batches:
        for name, count in parts.objective.counts(batch).items():
            own[name] = own.get(name, 0) + count
    tokens = sum(batch.num_tokens for batch, _ in share.batches)
    seconds = meter.seconds() if parts.ranks.writes else 0.0
    due = parts.pace.due(seconds) if parts.pace is not None and parts.ranks.writes else Due()
    asked = [float(getattr(due, kind)) for kind in KINDS]
    values = [*map(float, own.values()), float(tokens), seconds, float(parts.stop.requested), *asked]
    *counts, all_tokens, all_seconds, stops, line, evaluation, save = parts.ranks.sum(values)
    asked_for = Due(line > 0, evaluation > 0, save > 0)
    return Agreed(dict(zip(own, map(int, counts), strict=True)), int(all_tokens), all_seconds, stops > 0, asked_for)


def compute_gradients(
    parts: Parts, forward: nn.Module, share: Share, counts: dict[str, int], step: int
) -> tuple[dict[str, float], float]:
    """Clipped gradients of the step's exact mean loss; gives the losses over all ranks, and the norm before clipping."""
    losses = _forward_backward(parts, forward, share, counts, step)
    return losses, float(clip_gradients(parts.objective.parameters(), parts.optimizer.clip_norm))


def update(parts: Parts, optimizer: AdamW, step: int, seconds: float) -> None:
    """Move the weights by their gradients, at the learning rate of this step, `seconds` into the run."""
    optimizer.set_learning_rate(learning_rate(parts.optimizer, parts.train, step, seconds / 3600))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _forward_backward(parts: Parts, forward: nn.Module, share: Share, counts: dict[str, int], step: int) -> dict[str, float]:
    """Gradients of the step's exact mean loss; gives the mean of each term over all ranks."""
    sums = dict.fromkeys(counts, 0.0)
    figures: dict[str, tuple[float, float]] = {}
    for number, (batch, randomness) in enumerate(share.batches):
        torch.manual_seed(key_of(parts.train.seed, "dropout", step, number, parts.ranks.rank))
        with _synchronise_after(forward, last=number == len(share.batches) - 1):
            with autocast(parts.precision, parts.ranks.device):
                output = forward(batch.to(parts.ranks.device), randomness.to(parts.ranks.device))
            # DDP averages over the ranks, hence the factor: the denominators already are those of all of them.
            loss = sum(term.total * (term.weight / max(counts[name], 1)) for name, term in output.terms.items())
            (loss * parts.ranks.world).backward()
        for name, term in output.terms.items():
            sums[name] += float(term.total.detach())
        for name, figure in output.figures.items():
            total, count = figures.get(name, (0.0, 0.0))
            figures[name] = total + float(figure.total), count + figure.count
    # One exchange for all of them.
    numbers = parts.ranks.sum([*sums.values(), *(number for pair in figures.values() for number in pair)])
    totals, pairs = numbers[: len(sums)], numbers[len(sums) :]
    means = {name: total / max(counts[name], 1) for name, total in zip(sums, totals, strict=True)}
    logged = {name: pairs[2 * place] / max(pairs[2 * place + 1], 1) for place, name in enumerate(figures)}
    weights = {name: term.weight for name, term in output.terms.items()}
    losses = {f"{name}_loss": mean for name, mean in means.items()}
    return {"loss": sum(weights[name] * mean for name, mean in means.items()), **losses, **logged}


def _spans(phases: list[Phase]) -> Iterator[tuple[Phase, int, int]]:
    """Each phase with the steps it begins and ends at."""
    first = 0
    for phase in phases:
        yield phase, first, first + phase.steps
        first += phase.steps


def _freeze_all_but(objective: Objective, phase: Phase) -> None:
    """Let only the networks move that the phase trains; what they share with a frozen one moves too, unless it is held."""
    trains = phase.trains
    objective.requires_grad_(trains is None)
    for name, network in objective.networks().items():
        if trains is not None and name in trains:
            for parameter in network.trained():
                parameter.requires_grad_(True)
    for name, network in objective.networks().items():
        if name in phase.holds:
            for part in network.parts():
                part.requires_grad_(False)


def _moving(moments: dict[str, Tensor], names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """The moments of the parameters that move, and of those that are unknown, which the optimizer refuses."""
    still = {name for parameter, name in names.items() if not parameter.requires_grad}
    return {key: value for key, value in moments.items() if key.rpartition(".")[0] not in still}


def compile_encoders(parts: Parts) -> None:
    """Compile what runs forward, where the run asks for it."""
    if parts.train.compile:
        for network in parts.objective.networks().values():
            network.encoder.compile()


def _wrap(parts: Parts) -> nn.Module:
    compile_encoders(parts)
    if parts.ranks.world == 1:
        return parts.objective
    ids = [parts.ranks.device.index] if parts.ranks.device.type == "cuda" else None
    return DistributedDataParallel(parts.objective, device_ids=ids)


def _synchronise_after(forward: nn.Module, *, last: bool) -> AbstractContextManager[object]:
    """Ranks exchange gradients once a step, in the last backward pass."""
    return forward.no_sync() if isinstance(forward, DistributedDataParallel) and not last else nullcontext()


def _fail(parts: Parts, state: State, optimizer: AdamW, losses: dict[str, float]) -> None:
    """Keep what is needed to look into a loss that is not finite, and stop."""
    folder = parts.folder / "debug"
    first = state.step * parts.train.sequences_per_step
    kept = f"the weights before the update are in {folder}"
    try:
        names = {parameter: name for name, parameter in parts.objective.named_parameters()}
        save_checkpoint(parts, state, lambda: optimizer.tensors(names), folder)
        if parts.ranks.writes:
            details = {"step": state.step, "examples": [first, first + parts.train.sequences_per_step], "losses": losses}
            write_text(folder / "failure.json", json.dumps(details, indent=1) + "\n")
    except (CheckpointError, OSError) as problem:
        kept = f"the weights before the update could not be kept ({problem})"
    raise NumericsError(
        f"step {state.step}: the gradient is not finite; losses {summary(losses)}; "
        f"examples {first} to {first + parts.train.sequences_per_step - 1}",
        hint=f"{kept}; try a lower optimizer.learning_rate or a longer warm-up",
    )
