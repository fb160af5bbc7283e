"""The training loop: load a batch, forward and backward, update; then save, evaluate and log.

Pre-training and fine-tuning both use it, with different objectives. `train_steps` is the loop; below it are its parts, in the
order of the calls. What only some runs need is behind two objects: the replica (ranks, sharded weights, moving average) and the
meter (means, throughput and shares of the time).
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from discern.corruption.randomness import key_of
from discern.diagnosis.health import embedding_norm
from discern.errors import CheckpointError, DataError, DiscernError, NumericsError, RanksError
from discern.objectives.base import Phase
from discern.storage.files import write_text
from discern.training import evaluation
from discern.training.config import learning_rate
from discern.training.device import energy
from discern.training.distributed import explain_lack_of_memory, peak_memory
from discern.training.execution import autocast, eager_evaluation, emulation_warning
from discern.training.metrics import (
    NonFiniteGuard,
    StepCounters,
    StepMeans,
    StepMeter,
    Work,
    add_held_out,
    device_clock,
    headlines,
)
from discern.training.optimizer import Optimizer, clip_gradients, counts_by_rule, counts_text
from discern.training.prefetch import Feed, LocalBatch
from discern.training.process import agree_to_stop
from discern.training.state import (
    EarlyStopping,
    Moments,
    Replica,
    State,
    TrainContext,
    average_warning,
    averaged,
    build_replica,
    save_checkpoint,
)

_EVALUATED_ROWS = 32
_ENERGY_STEPS = 8  # between readings of the counters


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
    objective, ranks, first = context.objective, context.ranks, 0
    objective.train()
    state.average = {name: tensor.to(ranks.device) for name, tensor in state.average.items()}
    if ranks.writes:
        if context.optimizer.name == "muon":
            context.progress.note(counts_text(counts_by_rule(objective, context.optimizer)))
        emulation = emulation_warning(context.precision, ranks.device)
        for warning in filter(None, (average_warning(context.train, context.train.max_steps), emulation)):
            context.progress.note(f"warning: {warning}")
    explained = explain_lack_of_memory(context.train, ranks, lambda: f"step {state.step}: ")
    # Dropout seeds torch's global generators, which belong to the caller.
    devices = [] if ranks.device.type == "cpu" else [ranks.device]
    forked = torch.random.fork_rng(devices, device_type=ranks.device.type)
    with explained, forked, ThreadPoolExecutor(1) as reader:
        for phase in objective.phases(context.train.max_steps):
            end = first + phase.steps
            if (state.step < end and not state.finished) or (state.step <= end and state.pending is not None):
                record = train_phase(context, state, phase, first, reader) or record
            first = end
    agree_to_stop(context.stop, ranks)  # so that all ranks leave in the same way
    return record


def train_phase(context: TrainContext, state: State, phase: Phase, first: int, reader: ThreadPoolExecutor) -> dict[str, Any]:
    """Train one phase of the objective (most have only one), which begins at step `first`. Return the last record."""
    if state.step == first and phase.start is not None:
        phase.start()
        state.average, state.averaged = {}, 0  # the weights before have nothing to do with those that follow
    replica = setup_phase(context, phase)
    try:
        return train_steps(context, state, phase, first, reader, replica)
    except (DiscernError, RuntimeError) as problem:
        if not isinstance(problem, CheckpointError | RanksError):  # of a write that failed, or needs a rank that is gone
            replica.complete_write()
        raise


def train_steps(
    context: TrainContext, state: State, phase: Phase, first: int, reader: ThreadPoolExecutor, replica: Replica
) -> dict[str, Any]:
    """The steps of `train_phase`. This is the loop."""
    settings, ranks, last = context.train, context.ranks, first + phase.steps
    # Continue where an earlier session stopped. What it may have written of its last record is written again.
    if state.step > first or not phase.fresh_optimizer:
        replica.optimizer.load_tensors(state.optimizer, state.updates)
    record: dict[str, Any] = {}
    if state.pending is not None:
        replica.gather_full_state(state)
        record = log(context, state, evaluate(context, state, replica.optimizer.tensors) if state.pending["evaluates"] else {})
        replica.release_full_state()
    interval = state.interval if state.step > first else None  # means in the log are taken over steps of one phase only
    meter, state.interval = StepMeter(state.seconds, interval, device_clock(ranks.device)), {}
    energy_meter = energy(ranks.device)
    joules = (math.nan if state.joules is None else state.joules) + next(energy_meter)
    guard = NonFiniteGuard(ranks, partial(_stop_at_nonfinite, context, state, replica))
    feed, started = Feed(context, reader, state.step), state.step

    @contextmanager
    def saves_first() -> Iterator[None]:
        """Save what has been trained before an error about the data ends the run; a checkpoint needs all ranks."""
        try:
            yield
        except DataError:
            if ranks.world_size == 1 and state.step > 0:
                guard.check()
                meter.read(ranks)
                state.interval = meter.interval()
                replica.save(state)
            raise

    while state.step < last and not state.finished:
        # Load a batch. A thread reads and corrupts the next rows while this step computes.
        with saves_first(), meter.waiting():
            local = feed.take(state.step)
        # Several losses share parameters, so each must be divided by its count over all ranks and micro-batches before the
        # first backward pass. Counts follow from the corruption alone; no network has run yet.
        totals = reduce_step_counts(context, local, meter)

        # Forward and backward, micro-batch by micro-batch.
        if context.sizes is not None and context.sizes.changes_at(state.step):
            replica.objective.reset_memory()
        means = forward_backward(context, replica, local, totals.counts, state.step)
        norm = clip_gradients(replica.objective.parameters(), context.optimizer.clip_norm)

        # Update, unless the gradient is not finite. A GPU decides that by itself, so that the host need not wait for it.
        allowed = guard.allow(StepCounters(state.step, state.tokens, state.updates, state.averaged), norm, means)
        if state.step == first:
            state.phase_seconds = totals.seconds if first else 0.0
        # Under a time budget, a phase with its own schedule has what was left of it.
        start, length = (first, phase.steps) if phase.own_schedule else (0, settings.max_steps)
        since, hours = state.phase_seconds if phase.own_schedule else 0.0, settings.max_hours
        used = None if hours is None else (totals.seconds - since) / max(hours * 3600 - since, 1e-9)
        rate = learning_rate(context.optimizer, state.step - start, length, used)
        update(replica.optimizer, rate, allowed)
        state.step, state.tokens, state.updates = state.step + 1, state.tokens + totals.tokens, replica.optimizer.updates
        if settings.weight_average:
            state.averaged += 1
            replica.update_average(state)
        if context.compiled and state.step == started + 1:
            meter.begin_again()
        state.seconds = meter.seconds()
        meter.add(means, totals.tokens)

        # Whether the run ends after this step, or was interrupted. Ranks must stop after the same step, so they use what they
        # exchanged; a single process may check again.
        stopping = totals.stopping or (ranks.world_size == 1 and context.stop.requested)
        out_of_time = hours is not None and totals.seconds >= hours * 3600
        state.finished = state.step >= settings.max_steps or stopping or out_of_time
        state.interrupted = stopping and state.step < settings.max_steps and not out_of_time
        if hours is not None and (state.interrupted or not state.finished):
            # This step may have used up the time. The run is not complete: it still lacks its last evaluation, which it makes
            # after a resume only if time is left.
            state.seconds = min(state.seconds, math.nextafter(hours * 3600, 0.0))

        # What follows this step, by the intervals in steps or by the clock.
        ends = state.finished and not state.interrupted
        on_schedule = settings.evaluate_every_steps > 0 and state.step % settings.evaluate_every_steps == 0
        evaluates = context.heldout is not None and (ends or on_schedule or "evaluate" in totals.due)
        logs = evaluates or ends or "log" in totals.due or state.step == 1 or state.step % settings.log_every_steps == 0
        saves = state.finished or "checkpoint" in totals.due or state.step % settings.checkpoint_every_steps == 0
        if ranks.reads_freely or logs or saves:
            guard.check()
            meter.read(ranks)
        if logs or saves or state.step % _ENERGY_STEPS == 0:
            measured = next(energy_meter)
        if logs or saves:
            used_joules = joules + ranks.sum([measured])[0]
            state.joules = None if math.isnan(used_joules) else used_joules
        shown = {"loss": meter.shown_loss} if meter.shown_loss else {}
        context.progress.advance(1, **shown, **{"tokens/s": f"{meter.tokens_per_second():,.0f}"}, **meter.waits_shown())

        # Save, evaluate, log. The checkpoint comes first and holds the pending record: an evaluation that fails, or a kill while
        # it runs, then costs no training.
        if evaluates or state.finished:
            with meter.paused():
                replica.gather_full_state(state)
        if logs:
            line = {
                "step": state.step,
                "tokens": state.tokens,
                "seconds": round(state.seconds, 3),
                "tokens_per_second": round(meter.tokens_per_second(), 1),
                **meter.shares(),
                "learning_rate": rate,
                "grad_norm": float(norm),
                **meter.means(),
                **({} if context.flops is None else {"flops": round(context.flops.after(state.step).executed)}),
                **({} if state.joules is None else {"energy_joules": round(state.joules, 1)}),
                "peak_memory_bytes": int(ranks.sum([float(peak_memory(ranks.device))])[0]),
            }
            state.pending = {"line": line, "evaluates": evaluates}
            meter.restart()
            state.interval = {}
            context.time_budget.done("log", meter.seconds())
        if saves:
            state.interval = meter.interval()
            with _timed(context, meter, "checkpoint"):
                replica.save(state)
        # A user who interrupts a run does not want to wait for an evaluation; the resumed run does it instead.
        if logs and not (evaluates and state.interrupted):
            with saves_first(), _timed(context, meter, "evaluate" if evaluates else None):
                record = log(context, state, evaluate(context, state, replica.optimizer.tensors) if evaluates else {})
            if state.finished and not saves:  # the evaluation used up the patience
                state.interval = meter.interval()
                replica.save(state)
        if state.step < last and not state.finished:
            replica.release_full_state()
    replica.close()
    replica.gather_full_state(state)
    state.optimizer = replica.optimizer.tensors()
    return record


def setup_phase(context: TrainContext, phase: Phase) -> Replica:
    """What this rank trains in a phase, with an optimizer of the parameters that the phase trains.

    Weights shared with a network that the phase does not train are trained too, unless it is held.
    """
    objective, trains = context.objective, phase.trains
    objective.requires_grad_(trains is None)
    for name, network in objective.networks().items():
        if trains is not None and name in trains:
            for parameter in network.trained():
                parameter.requires_grad_(True)
    for name in phase.holds:
        for part in objective.networks()[name].parts():
            part.requires_grad_(False)
    return build_replica(context)


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
    due: set[Work]


def reduce_step_counts(context: TrainContext, local: LocalBatch, meter: StepMeter) -> StepTotals:
    """Sum the counts of a step over all ranks, and share the other facts about it, in one exchange."""
    counts: dict[str, int] = {}
    for batch, _ in local.micro_batches:
        for name, count in context.objective.counts(batch).items():
            counts[name] = counts.get(name, 0) + count
    tokens = sum(batch.num_tokens for batch, _ in local.micro_batches)
    # Only rank 0 reads the clock: with clocks of their own, ranks would stop after different steps.
    seconds = meter.seconds() if context.ranks.writes else 0.0
    due = context.time_budget.due(seconds) if context.ranks.writes else set()
    kinds: tuple[Work, ...] = ("log", "evaluate", "checkpoint")
    facts = [tokens, seconds, context.stop.requested, *(kind in due for kind in kinds)]
    totals = context.ranks.sum([float(value) for value in (*counts.values(), *facts)])
    total_tokens, total_seconds, stops, *flags = totals[len(counts) :]
    return StepTotals(
        counts={name: int(total) for name, total in zip(counts, totals, strict=False)},
        tokens=int(total_tokens),
        seconds=total_seconds,
        stopping=stops > 0,
        due={kind for kind, flag in zip(kinds, flags, strict=True) if flag},
    )


def forward_backward(context: TrainContext, replica: Replica, local: LocalBatch, counts: dict[str, int], step: int) -> StepMeans:
    """Compute the gradients of the step's mean loss. Return the mean of each loss, and other means to log."""
    ranks, last = context.ranks, len(local.micro_batches) - 1
    # Sums in float64, on the device unless it lacks that (mps): the host learns them when it reads them.
    sums: dict[str, Any] = defaultdict(float)
    statistics: dict[str, Any] = defaultdict(float)
    for number, (batch, randomness) in enumerate(local.on_device):
        # Dropout follows from seed, step, micro-batch and rank, so a resumed run drops the same elements.
        torch.manual_seed(key_of(context.train.seed, "dropout", step, number, ranks.rank))
        with replica.backward(last=number == last):
            with autocast(context.precision, ranks.device):
                output = replica.model(batch.to(ranks.device), randomness.to(ranks.device))
            loss = sum(term.total * (term.weight / max(counts[name], 1)) for name, term in output.terms.items())
            # Gradients are averaged over the ranks, hence the factor: the counts are already those of all ranks.
            (loss * ranks.world_size).backward()
        for name, term in (output.terms | output.metrics).items():
            total = term.total.detach()
            sums[name] = sums[name] + (total.cpu() if ranks.reads_freely else total).double()
        for name, statistic in context.objective.step_statistics(output).items():
            statistics[name] = statistics[name] + statistic
    totals = {name: ranks.sum_tensor(statistic) for name, statistic in statistics.items()}
    for objective in {context.objective, replica.objective}:  # of sharded weights, the first corrupts the rows
        objective.update_state(step, totals)
    # This rank's shares of the means over all ranks, as the counts are those of all ranks
    means = {name: sums[name] / max(count, 1) for name, count in counts.items()}
    shares = {"loss": sum(term.weight * means[name] for name, term in output.terms.items())}
    shares |= {name if name in output.metrics else f"{name}_loss": mean for name, mean in means.items()}
    return StepMeans(tuple(shares), torch.stack([torch.as_tensor(value) for value in shares.values()]))


def update(optimizer: Optimizer, rate: float, allowed: Tensor | None = None) -> None:
    """Update the weights with their gradients, at this learning rate; not if a device has found that it is not `allowed`."""
    optimizer.set_learning_rate(rate)
    optimizer.step(allowed=allowed)
    optimizer.zero_grad(set_to_none=True)


def evaluate(context: TrainContext, state: State, moments: Moments) -> dict[str, float]:
    """Evaluate on held-out rows, the averaged weights if there are any; keep the best weights and stop early, if the run asks
    for it. Return the metrics.

    Raises:
        DataError: the rows could not be read; the same command repeats the evaluation.
    """
    assert context.heldout is not None
    examples = evaluation.ExampleRows()
    with averaged(context.objective, state.average), eager_evaluation(context.compiled):
        metrics = evaluation.evaluate(
            context.objective,
            context.heldout,
            context.ranks,
            sequences=context.train.evaluate_sequences,
            # At most as many rows at a time as are trained on at a time
            batch_size=min(_EVALUATED_ROWS, context.train.micro_batch_size or _EVALUATED_ROWS),
            precision=context.precision,
            observer=None if context.metrics_log is None else examples.update,
        )
    if context.metrics_log is not None:
        context.metrics_log.write_examples(state.step, examples.rows)
    context.progress.note(f"step {state.step}: held out {_summary(headlines(metrics))}")
    if context.health_monitor is not None:
        for warning in context.health_monitor.notes(state.step, metrics, embedding_norm(context.objective)):
            context.progress.note(warning)
    if context.early_stopping is not None:
        note_best(context, state, moments, metrics, context.early_stopping)
    return metrics


def log(context: TrainContext, state: State, held_out: Mapping[str, float]) -> dict[str, Any]:
    """Write the pending record to metrics.jsonl, with the metrics of its evaluation if it has one. Return the record.

    Raises:
        CheckpointError: the file could not be written.
    """
    assert state.pending is not None
    record = add_held_out(state.pending["line"], held_out) if state.pending["evaluates"] else state.pending["line"]
    if context.metrics_log is not None:
        context.metrics_log.write(record)
    state.pending = None
    return record


def note_best(
    context: TrainContext, state: State, moments: Moments, metrics: Mapping[str, float], stopping: EarlyStopping
) -> None:
    """Keep the weights if the metric is the best so far; finish the run if it has not improved for too long."""
    value, loss = metrics[stopping.metric], metrics.get(stopping.loss or "")
    tied = value == state.best and loss is not None and state.best_loss is not None and loss < state.best_loss
    if state.best is None or value > state.best or tied:
        state.best, state.best_loss, state.evaluations_since_best = value, loss, 0
        if stopping.keep:
            save_checkpoint(context, state, moments, context.folder / "best")
        return
    state.evaluations_since_best += 1
    if stopping.patience and state.evaluations_since_best >= stopping.patience and not state.finished:
        state.finished = True
        waited = f"{state.evaluations_since_best} evaluations"
        context.progress.note(f"step {state.step}: {stopping.metric} has not improved for {waited}; training stops")


# ---- parts of the loop in a few lines each ----


@contextmanager
def _timed(context: TrainContext, meter: StepMeter, kind: Work | None) -> Iterator[None]:
    """Stop the clock of the interval during some work, and report the work and its duration to the time budget."""
    begin = time.perf_counter()
    with meter.paused():
        yield
    if kind is not None:
        context.time_budget.done(kind, meter.seconds(), time.perf_counter() - begin)


def _stop_at_nonfinite(
    context: TrainContext, state: State, replica: Replica, before: StepCounters, losses: Mapping[str, float]
) -> NoReturn:
    """Keep what is needed to investigate a gradient that is not finite, and stop.

    Args:
        before: how far the run was before the step, to which the state returns: no update has changed the weights since.
        losses: means of the step.

    Raises:
        NumericsError: always.
    """
    replica.gather_full_state(state)
    state.step, state.tokens, state.updates, state.averaged = before.step, before.tokens, before.updates, before.averaged
    folder, examples = context.folder / "debug", context.rows_of(state.step)
    kept = f"the weights before the update are in {folder}"
    try:
        save_checkpoint(context, state, replica.optimizer.tensors, folder)
        if context.ranks.writes:
            details = {"step": state.step, "examples": [examples.start, examples.stop], "losses": losses}
            write_text(folder / "failure.json", json.dumps(details, indent=1) + "\n")
    except (CheckpointError, OSError) as problem:
        kept = f"the weights before the update could not be kept ({problem})"
    raise NumericsError(
        f"step {state.step}: the gradient is not finite; losses {_summary(losses)}; "
        f"examples {examples.start} to {examples.stop - 1}",
        hint=f"{kept}; try a lower optimizer.learning_rate or a longer warm-up",
    )


def _summary(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
