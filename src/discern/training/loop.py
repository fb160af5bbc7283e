"""The training loop: read, forward, backward, update; then checkpoint, evaluate and log.

Pre-training and fine-tuning both use it, with different objectives. `train_steps` is the loop. The functions that it calls are
below it, in the order of the calls; the work after an update is in bookkeeping.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from discern.corruption.randomness import key_of
from discern.errors import CheckpointError, DataError, DiscernError, RanksError
from discern.objectives.base import Objective, Phase
from discern.training.average import average_warning
from discern.training.bookkeeping import (
    catch_up,
    due_after_step,
    evaluate,
    log,
    make_record,
    note_done,
    stop_at_failed_read,
    stop_at_nonfinite,
    timed,
)
from discern.training.checkpoint import AVERAGE_FILE, model_tensors
from discern.training.compilation import Mode, compile_networks
from discern.training.interrupt import agree_to_stop
from discern.training.memory import lacks_memory, out_of_memory
from discern.training.metrics import Due, NonFiniteGuard, StepCounters, StepMeans, StepMeter, device_clock
from discern.training.optimizer import Optimizer, counts_by_rule, counts_text
from discern.training.precision import autocast, emulation_warning, lowered, raise_weights
from discern.training.prefetch import Feed, LocalBatch
from discern.training.replica import Replica, build_replica
from discern.training.schedule import learning_rate
from discern.training.state import State, TrainContext


@dataclass(frozen=True)
class StepTotals:
    """Facts about a step that all ranks know before they compute it.

    Attributes:
        counts: denominators of the losses, over all ranks.
        tokens: real tokens, over all ranks.
        seconds: duration of the run, by the clock of rank 0.
        stopping: whether any rank was asked to stop.
        due: the work that the time budget schedules after the step, by the clock of rank 0.
    """

    counts: dict[str, int]
    tokens: int
    seconds: float
    stopping: bool
    due: Due


def train(context: TrainContext, state: State) -> dict[str, Any]:
    """Train from `state` to the last step, the end of the time budget or a request to stop. Return the last record.

    A checkpoint of the last step is always written, before the last evaluation.

    Raises:
        ConfigError: a step does not fit into memory.
        NumericsError: a loss or gradient is not finite; the weights before the update are kept under `folder/debug`.
        CheckpointError: a checkpoint could not be written.
        DataError: an evaluation failed.
    """
    record: dict[str, Any] = {}
    # Dropout seeds torch's global generators, which belong to the caller.
    devices = [context.ranks.device] if context.ranks.device.type == "cuda" else []
    context.objective.train()
    _begin_average(context, state)
    if context.ranks.writes:
        for line in _notes(context, state):
            context.progress.note(line)
    try:
        with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as reader:
            if state.pending is not None:
                with lowered(context.objective, context.train.weight_precision) as masters:
                    state.masters = masters  # the best weights may be saved
                    record = catch_up(context, state)
                state.masters = {}
            for phase, first, last in _phases_with_steps(context):
                if state.step < last and not state.finished:
                    try:
                        record = train_phase(context, state, (phase, first, last), reader) or record
                    finally:
                        raise_weights(context.objective, state.masters)
                        state.masters = {}
    except RuntimeError as problem:
        if not lacks_memory(problem):
            raise
        raise out_of_memory(context.train, context.ranks.world_size, context.ranks.device, state.step) from problem
    agree_to_stop(context.stop, context.ranks)  # so that all ranks leave in the same way
    return record


def train_phase(context: TrainContext, state: State, span: tuple[Phase, int, int], reader: ThreadPoolExecutor) -> dict[str, Any]:
    """Train one phase of the objective (most have only one) from `state.step`. Return the last record that was written."""
    phase, first, _ = span
    if state.step == first and phase.start is not None:
        phase.start()
        state.average, state.averaged = {}, 0  # the weights before have nothing to do with those that follow
    replica = setup_phase(context, phase)
    try:
        return train_steps(context, state, span, reader, replica)
    except (DiscernError, RuntimeError) as problem:
        if not isinstance(problem, CheckpointError | RanksError):  # of a write that failed, or needs a rank that is gone
            replica.complete_write()
        raise


def train_steps(
    context: TrainContext, state: State, span: tuple[Phase, int, int], reader: ThreadPoolExecutor, replica: Replica
) -> dict[str, Any]:
    """The steps of `train_phase`. This is the loop."""
    phase, first, last = span
    optimizer, moments = replica.optimizer, replica.moments
    state.masters = optimizer.masters
    replica.begin_average(state)
    if state.step > first or not phase.fresh_optimizer:
        replica.load_moments(state.optimizer, state.updates)
    # Means in the log are taken over steps of one phase only.
    interval = state.interval if state.step > first else None
    meter, state.interval = StepMeter(state.seconds, interval, device_clock(context.ranks.device)), {}
    schedule_start, schedule_length = (first, last - first) if phase.own_schedule else (0, context.train.max_steps)
    guard = NonFiniteGuard(context.ranks, partial(_stop_at_nonfinite, context, state, replica))
    record: dict[str, Any] = {}
    feed, started = Feed(context, reader, state.step), state.step

    while state.step < last and not state.finished:
        # Read. A thread reads and corrupts the next rows while this step computes.
        try:
            with meter.waiting():
                local = feed.take(state.step)
        except DataError as problem:
            guard.check()
            meter.read(context.ranks)
            state.interval = meter.interval()
            stop_at_failed_read(context, state, replica.save, problem)
        # Several losses share parameters, so each must be divided by its count over all ranks and micro-batches before the
        # first backward pass. Counts follow from the corruption alone; no network has run yet.
        totals = reduce_step_counts(context, local, meter)

        if context.changes_size(state.step):
            replica.reset_memory()

        # Forward and backward, micro-batch by micro-batch.
        losses = forward_backward(context, replica, local, totals.counts, state.step)
        norm = replica.clip(context.optimizer.clip_norm)

        # Update, unless the gradient is not finite. A GPU decides that by itself, so that the host need not wait for it.
        allowed = guard.allow(StepCounters(state.step, state.tokens, state.updates, state.averaged), norm, losses)
        if state.step == first:
            state.phase_seconds = totals.seconds if first else 0.0
        used = _time_used(context, totals.seconds, state.phase_seconds if phase.own_schedule else 0.0)
        rate = learning_rate(context.optimizer, state.step - schedule_start, schedule_length, used)
        update(optimizer, rate, allowed)
        state.step, state.tokens, state.updates = state.step + 1, state.tokens + totals.tokens, optimizer.updates
        if context.train.weight_average:
            state.averaged += 1
            replica.update_average(state)
        if context.compilation != "off" and state.step == started + 1:
            meter.begin_again()
        state.seconds = meter.seconds()
        meter.add(losses, totals.tokens)
        _finish_or_interrupt(context, state, totals)
        due = due_after_step(context, state, totals.due)
        if context.ranks.reads_freely or due.log or due.checkpoint:
            guard.check()
            meter.read(context.ranks)
        shown = {"loss": f"{meter.last['loss']:.3f}"} if meter.last else {}
        context.progress.advance(1, **shown, **{"tokens/s": f"{meter.tokens_per_second():,.0f}"}, **meter.waits_shown())

        if due.evaluate or state.finished:
            with meter.paused():
                replica.gather_full_state(state)

        # Checkpoint, evaluate, log. The checkpoint comes first and holds the pending record: an evaluation that fails, or a
        # kill while it runs, then costs no training.
        if due.log:
            state.pending = make_record(context, state, meter, rate=rate, norm=float(norm), evaluates=due.evaluate)
            meter.restart()
            state.interval = {}
            note_done(context, meter, "log")
        if due.checkpoint:
            state.interval = meter.interval()
            with timed(context, meter, "checkpoint"):
                replica.save(state)
        # A user who interrupts a run does not want to wait for an evaluation; the resumed run does it instead.
        if due.log and not (due.evaluate and state.interrupted):
            with timed(context, meter, "evaluate") if due.evaluate else meter.paused():
                held_out = evaluate(context, state, moments, saved=due.checkpoint) if due.evaluate else {}
                record = log(context, state, held_out)
            if state.finished and not due.checkpoint:  # the evaluation used up the patience
                state.interval = meter.interval()
                replica.save(state)
        if state.step < last and not state.finished:
            replica.release_full_state()
    replica.close()
    replica.gather_full_state(state)
    state.optimizer = dict(moments())
    return record


def _stop_at_nonfinite(
    context: TrainContext, state: State, replica: Replica, before: StepCounters, losses: Mapping[str, float]
) -> NoReturn:
    replica.gather_full_state(state)
    stop_at_nonfinite(context, state, replica.moments, before, losses)


def setup_phase(context: TrainContext, phase: Phase) -> Replica:
    """What this rank trains in a phase, with an optimizer of the parameters that the phase trains."""
    _freeze_others(context.objective, phase)
    return build_replica(context, partial(compile_encoders, context.compilation))


def reduce_step_counts(context: TrainContext, local: LocalBatch, meter: StepMeter) -> StepTotals:
    """Sum the counts of a step over all ranks, and share the other facts about it, in one exchange."""
    counts: dict[str, int] = {}
    for batch, _ in local.micro_batches:
        for name, count in context.objective.counts(batch).items():
            counts[name] = counts.get(name, 0) + count
    tokens = sum(batch.num_tokens for batch, _ in local.micro_batches)
    # Only rank 0 reads the clock: with clocks of their own, ranks would stop after different steps.
    seconds = meter.seconds() if context.ranks.writes else 0.0
    due = context.time_budget.due(seconds) if context.time_budget is not None and context.ranks.writes else Due()
    flags = map(float, (context.stop.requested, due.log, due.evaluate, due.checkpoint))
    sums = context.ranks.sum([*map(float, counts.values()), float(tokens), seconds, *flags])
    *total_counts, total_tokens, total_seconds, stops, logs, evaluates, saves = sums
    return StepTotals(
        counts=dict(zip(counts, map(int, total_counts), strict=True)),
        tokens=int(total_tokens),
        seconds=total_seconds,
        stopping=stops > 0,
        due=Due(logs > 0, evaluates > 0, saves > 0),
    )


def forward_backward(context: TrainContext, replica: Replica, local: LocalBatch, counts: dict[str, int], step: int) -> StepMeans:
    """Compute the gradients of the step's mean loss. Return the mean of each loss, and other means to log."""
    ranks, last = context.ranks, len(local.micro_batches) - 1
    # In float64 on the device: the host learns them when it reads them.
    sums: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    tallies: dict[str, Tensor] = {}
    for number, (batch, randomness) in enumerate(local.on_device):
        # Dropout follows from seed, step, micro-batch and rank, so a resumed run drops the same elements.
        torch.manual_seed(key_of(context.train.seed, "dropout", step, number, ranks.rank))
        with replica.backward(last=number == last):
            with autocast(context.precision, ranks.device):
                output = replica.model(batch.to(ranks.device), randomness.to(ranks.device))
            loss = sum(term.total * (term.weight / max(counts[name], 1)) for name, term in output.terms.items())
            # Gradients are averaged over the ranks, hence the factor: the counts are already those of all ranks.
            (loss * ranks.world_size).backward()
        for name, term in output.terms.items():
            sums[name] = sums.get(name, 0.0) + term.total.detach().double()
        for name, tally in context.objective.step_statistics(output).items():
            tallies[name] = tallies[name] + tally if name in tallies else tally
        for name, mean in output.metrics.items():
            others[name] = others.get(name, 0.0) + mean.total.detach().double()
            numbers[name] = numbers.get(name, 0) + mean.count
    replica.finish_gradients()
    replica.update_state(step, {name: ranks.sum_tensor(tally) for name, tally in tallies.items()})
    means = {name: sums[name] / max(count, 1) for name, count in counts.items()}
    # The numbers of items of all ranks, which the hosts know.
    all_numbers = ranks.sum([float(number) for number in numbers.values()]) if numbers else []
    logged = {name: total / max(number, 1) for (name, total), number in zip(others.items(), all_numbers, strict=True)}
    loss = sum(output.terms[name].weight * mean for name, mean in means.items())
    found = {"loss": loss, **{f"{name}_loss": mean for name, mean in means.items()}, **logged}
    return StepMeans(tuple(found), torch.stack([torch.as_tensor(value) for value in found.values()]))


def update(optimizer: Optimizer, rate: float, allowed: Tensor | None = None) -> None:
    """Update the weights with their gradients, at this learning rate; not if a device has found that it is not `allowed`."""
    optimizer.set_learning_rate(rate)
    optimizer.step(allowed=allowed)
    optimizer.zero_grad(set_to_none=True)


def compile_encoders(compilation: Mode, objective: Objective) -> None:
    """Compile the encoders if the run asks for it."""
    compile_networks((network.encoder for network in objective.networks().values()), compilation)


def _begin_average(context: TrainContext, state: State) -> None:
    """Move the average of a resumed run to the device.

    Raises:
        CheckpointError: the checkpoint has none, or one of other weights, although the run keeps an average.
    """
    own = model_tensors(context.objective)
    state.average = {name: tensor.to(context.ranks.device) for name, tensor in state.average.items()}
    if not context.train.weight_average or (state.step == 0 and not state.average):
        return
    if {name: tensor.shape for name, tensor in state.average.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise CheckpointError(
            f"train.weight_average is {context.train.weight_average:g}, but the checkpoint of step {state.step:,} has no "
            f"average of these weights ({AVERAGE_FILE})",
            hint="copy the file back, or start a new run in another folder",
        )


def _notes(context: TrainContext, state: State) -> list[str]:
    """What Muon updates, whether the average of the weights spans more than the run, and whether bfloat16 is emulated."""
    found = []
    if context.optimizer.name == "muon":
        found.append(counts_text(counts_by_rule(context.objective, context.optimizer)))
    warnings = (
        average_warning(context.train, context.train.max_steps),
        emulation_warning(context.precision, context.ranks.device, resumed=state.step > 0),
    )
    return found + [f"warning: {warning}" for warning in warnings if warning is not None]


def _finish_or_interrupt(context: TrainContext, state: State, totals: StepTotals) -> None:
    """Set whether the run ends after this step, and whether it was interrupted."""
    train = context.train
    # Ranks must stop after the same step, so they use what they exchanged; a single process may check again.
    stopping = totals.stopping or (context.ranks.world_size == 1 and context.stop.requested)
    out_of_time = train.max_hours is not None and totals.seconds >= train.max_hours * 3600
    state.finished = state.step >= train.max_steps or stopping or out_of_time
    state.interrupted = stopping and state.step < train.max_steps and not out_of_time
    if train.max_hours is not None and (state.interrupted or not state.finished):
        # This step may have used up the time. The run is not complete: it still lacks its last evaluation, which it makes after
        # a resume only if time is left.
        state.seconds = min(state.seconds, math.nextafter(train.max_hours * 3600, 0.0))


def _time_used(context: TrainContext, seconds: float, since: float) -> float | None:
    """Fraction that is used of the time budget, or of what was left of it after `since` seconds; None without a budget."""
    hours = context.train.max_hours
    return None if hours is None else (seconds - since) / max(hours * 3600 - since, 1e-9)


def _phases_with_steps(context: TrainContext) -> Iterator[tuple[Phase, int, int]]:
    """Each phase with the steps at which it begins and ends."""
    first = 0
    for phase in context.objective.phases(context.train.max_steps):
        yield phase, first, first + phase.steps
        first += phase.steps


def _freeze_others(objective: Objective, phase: Phase) -> None:
    """Train only the networks of the phase. Weights shared with a frozen network are trained too, unless it is held."""
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
