"""The training loop: read, forward, backward, update, write. Every objective and every task runs through it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from discern.artifacts.files import write_text
from discern.corruption.randomness import Randomness, key_of
from discern.errors import CheckpointError, NumericsError
from discern.objectives.base import Objective, Phase
from discern.training import checkpoint
from discern.training.diagnosis import embedding_norm
from discern.training.evaluation import evaluate
from discern.training.journal import add_held_out
from discern.training.memory import peak_memory
from discern.training.meter import Meter
from discern.training.optimizer import AdamW, clip_gradients, parameter_groups
from discern.training.parts import Parts, State, Watch
from discern.training.precision import autocast
from discern.training.schedule import learning_rate
from discern.types import CorruptedBatch


@dataclass(frozen=True)
class Share:
    """This rank's part of one step: corrupted micro-batches with their random numbers."""

    batches: list[tuple[CorruptedBatch, Randomness]]


def train(parts: Parts, state: State) -> dict[str, Any]:
    """Run from `state` to the end, to the end of the time budget, or to a request to stop.

    Gives the last record of the journal. A checkpoint of the last step is always written.

    Raises:
        NumericsError: a loss or gradient is not finite; the weights before the update are kept under `folder/debug`.
        CheckpointError: a checkpoint could not be written.
    """
    record: dict[str, Any] = {}
    devices = [parts.ranks.device] if parts.ranks.device.type == "cuda" else []
    parts.objective.train()
    with torch.random.fork_rng(devices), ThreadPoolExecutor(1) as reader:
        for phase, first, last in _spans(parts.objective.phases(parts.train.max_steps)):
            if state.step < last and not state.over:
                record = _run_phase(parts, state, (phase, first, last), reader)
    return record


def _run_phase(parts: Parts, state: State, span: tuple[Phase, int, int], reader: ThreadPoolExecutor) -> dict[str, Any]:
    phase, first, last = span
    if state.step == first and phase.start is not None:
        phase.start()
    forward, optimizer = begin_phase(parts, phase)
    names = {parameter: name for name, parameter in parts.objective.named_parameters()}
    if state.step > first or not phase.fresh_optimizer:
        optimizer.load_tensors(_moving(state.optimizer, names), names, state.updates)
    meter = Meter(state.seconds)
    scheduled, begins = _schedule(parts, span)
    record: dict[str, Any] = {}
    upcoming = reader.submit(read_share, parts, state.step)
    while state.step < last and not state.over:
        share = upcoming.result()
        upcoming = reader.submit(read_share, parts, state.step + 1)
        counts, tokens, seconds, stopping = agree(parts, share, meter)

        losses, norm = compute_gradients(parts, forward, share, counts, state.step)
        if not np.isfinite(norm):
            _fail(parts, state, optimizer, losses)
        update(scheduled, optimizer, state.step - begins, seconds)

        state.step, state.tokens, state.updates = state.step + 1, state.tokens + tokens, optimizer.updates
        state.seconds = meter.seconds()
        meter.add(losses, tokens)
        # Ranks must stop after the same step, so they go by what they agreed on; one alone may look again.
        stopping = stopping or (parts.ranks.world == 1 and parts.stop.requested)
        out_of_time = parts.train.max_hours is not None and seconds >= parts.train.max_hours * 3600
        state.over = state.step >= parts.train.max_steps or stopping or out_of_time
        state.cut = stopping and state.step < parts.train.max_steps
        record = _write(parts, state, optimizer, meter, norm) or record
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


def agree(parts: Parts, share: Share, meter: Meter) -> tuple[dict[str, int], int, float, bool]:
    """Denominators and tokens of the whole step, seconds of the run, and whether anybody wants to stop: one exchange."""
    own: dict[str, int] = {}
    for batch, _ in share.batches:
        for name, count in parts.objective.counts(batch).items():
            own[name] = own.get(name, 0) + count
    tokens = sum(batch.num_tokens for batch, _ in share.batches)
    seconds = meter.seconds() if parts.ranks.writes else 0.0
    values = [*map(float, own.values()), float(tokens), seconds, float(parts.stop.requested)]
    *counts, all_tokens, all_seconds, stops = parts.ranks.sum(values)
    return dict(zip(own, map(int, counts), strict=True)), int(all_tokens), all_seconds, stops > 0


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


def _write(parts: Parts, state: State, optimizer: AdamW, meter: Meter, norm: float) -> dict[str, Any] | None:
    """Journal, evaluation and checkpoint, where they are due after this step."""
    train = parts.train
    every = train.evaluate_every_steps
    # Whoever asks it to stop does not want to wait for figures.
    due = (state.over and not state.cut) or (every > 0 and state.step % every == 0)
    evaluates = parts.heldout is not None and due
    shown = {"loss": f"{meter.last['loss']:.3f}", "tokens/s": f"{meter.speed():,.0f}"}
    parts.progress.advance(1, **shown)
    record = None
    if evaluates or state.over or state.step % train.log_every_steps == 0 or state.step == 1:
        record = {
            "step": state.step,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 3),
            "tokens_per_second": round(meter.speed(), 1),
            "learning_rate": optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            **meter.means(),
            **({} if parts.flops is None else {"flops": round(parts.flops.after(state.step).executed)}),
            "peak_memory_bytes": int(parts.ranks.sum([float(peak_memory(parts.ranks.device))])[0]),
        }
        meter.restart()
    if evaluates and parts.heldout is not None and record is not None:
        with meter.paused():
            held = evaluate(
                parts.objective, parts.heldout, parts.ranks, sequences=train.evaluate_sequences, precision=parts.precision
            )
        record = add_held_out(record, held)
        parts.progress.note(f"step {state.step}: held out {_summary(held)}")
        if parts.watchman is not None:
            for warning in parts.watchman.notes(state.step, held, embedding_norm(parts.objective)):
                parts.progress.note(warning)
        if parts.watch is not None:
            _weigh(parts, parts.watch, state, optimizer, held[parts.watch.metric])
    if record is not None and parts.journal is not None:
        parts.journal.write(record)
    if state.over or state.step % train.checkpoint_every_steps == 0:
        with meter.paused():
            save_checkpoint(parts, state, optimizer, parts.folder / "checkpoints")
    return record


def _weigh(parts: Parts, watch: Watch, state: State, optimizer: AdamW, figure: float) -> None:
    """Keep the weights where the figure is the best so far; end the run where it has not been for too long."""
    if state.best is None or figure > state.best:
        state.best, state.waited = figure, 0
        if watch.keep:
            save_checkpoint(parts, state, optimizer, parts.folder / "best")
        return
    state.waited += 1
    if watch.patience and state.waited >= watch.patience and not state.over:
        state.over = True
        parts.progress.note(f"step {state.step}: no better {watch.metric} in {state.waited} evaluations, so this is the end")


def save_checkpoint(parts: Parts, state: State, optimizer: AdamW, folder: Path) -> None:
    """Write a checkpoint of this moment; rank 0 writes, the others wait."""
    # A rank carries what belongs to its own rows; what all carry alike, rank 0 gives.
    carried = parts.ranks.gather_first(parts.objective.carry_state())
    if parts.ranks.writes:
        names = {parameter: name for name, parameter in parts.objective.named_parameters()}
        contents = checkpoint.Contents(
            model=checkpoint.model_tensors(parts.objective),
            optimizer=optimizer.tensors(names),
            carry={name: tensor for state in reversed(carried) for name, tensor in state.items()},
            state={
                "step": state.step,
                "tokens": state.tokens,
                "seconds": state.seconds,
                "updates": state.updates,
                **({"best": state.best, "waited": state.waited} if parts.watch is not None else {}),
                **parts.header,
            },
        )
        if parts.journal is not None:
            parts.journal.sync()
        checkpoint.save(folder, contents, parts.train.keep_checkpoints)
    parts.ranks.barrier()


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
        save_checkpoint(parts, state, optimizer, folder)
        if parts.ranks.writes:
            details = {"step": state.step, "examples": [first, first + parts.train.sequences_per_step], "losses": losses}
            write_text(folder / "failure.json", json.dumps(details, indent=1) + "\n")
    except (CheckpointError, OSError) as problem:
        kept = f"the weights before the update could not be kept ({problem})"
    raise NumericsError(
        f"step {state.step}: the gradient is not finite; losses {_summary(losses)}; "
        f"examples {first} to {first + parts.train.sequences_per_step - 1}",
        hint=f"{kept}; try a lower optimizer.learning_rate or a longer warm-up",
    )


def _summary(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
