"""One seed of a fine-tuning: build the network, run the loop, judge it, write what came out."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.checksums import forget_checksums
from discern.data.ordering import derive_key
from discern.errors import NumericsError
from discern.model.dropout import Dropout
from discern.model.encoder import Encoder
from discern.progress import Progress
from discern.records import read_object
from discern.tasks.stream import TaskRowsInOrder, TaskStream
from discern.tasks.supervised import SupervisedObjective, refuse_non_finite
from discern.training import checkpoint
from discern.training.interrupt import StopRequest
from discern.training.journal import Journal, lines_of
from discern.training.loop import train
from discern.training.parallel import Ranks
from discern.training.parts import Parts, State, Watch
from discern.training.prediction import outputs_of
from discern.workflows.encoders import LoadedEncoder, draw_weights
from discern.workflows.finetune_settings import FinetuneConfig
from discern.workflows.finetuned import (
    MODEL_FILE,
    SCORES_FILE,
    predictions_file,
    seed_folder,
    write_json,
    write_lines,
    write_weights,
)
from discern.workflows.pretrain import leave_if_stopped
from discern.workflows.task_files import TaskData

DRAWS_FILE = "failed-draws.json"


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that is known before training.

    Attributes:
        loaded: what every seed starts from.
        data: by task.
        out: folder of the fine-tuning.
        debug: of each file only the first examples were read.
        precision: of all seeds, 'float32' or 'bfloat16'.
    """

    loaded: LoadedEncoder
    config: FinetuneConfig
    data: dict[str, TaskData]
    out: Path
    debug: bool = False
    precision: str = "float32"


@dataclass(frozen=True, eq=False)
class Trained:
    """A network after its training.

    Attributes:
        padding: share of the slots of the batches that held padding.
        diverged: why its weights are of no use, or None.
    """

    objective: SupervisedObjective
    state: State
    padding: float
    diverged: str | None


def run_seed(plan: Plan, seed: int, ranks: Ranks, progress: Progress, stop: StopRequest) -> None:
    """Train one seed, judge it, and write what came out; a run that fails is a result too, once no draw is left."""
    folder = seed_folder(plan.out, seed)
    failed = _failed_draws(folder)
    while True:
        place = folder / f"retry-{len(failed)}" if failed else folder
        trained = train_network(plan, draw_of(seed, len(failed)), place, f"seed {seed}", ranks, progress, stop)
        if plan.config.finetune.keep == "best" and trained.diverged is None:
            _take_best(place, trained, progress)
            ranks.barrier()  # the first removes them in the end
        found = _judge(plan, trained, folder, writes=ranks.writes)
        reason = found.get("failure") or "; ".join(found.get("failures", {}).values())
        if not reason or len(failed) >= plan.config.finetune.retries:
            break
        failed = [*failed, {"draw": draw_of(seed, len(failed)), "failure": reason}]
        if ranks.writes:
            write_json(folder / DRAWS_FILE, {"draws": failed})
            _tidy(place, diverged="failure" in found)
        progress.note(f"seed {seed} failed: {reason}; draw {len(failed) + 1} of {plan.config.finetune.retries + 1}")
    if ranks.writes:
        # Written last: it says that the seed is complete.
        write_json(folder / SCORES_FILE, found | ({"retried": failed} if failed else {}))
        _tidy(place, diverged="failure" in found)


def draw_of(seed: int, attempt: int) -> int:
    """Seed of the random numbers: the seed itself at first, then another number."""
    return derive_key(seed, "another draw", attempt) % 2**31 if attempt else seed


def _failed_draws(folder: Path) -> list[dict[str, Any]]:
    """The draws of a seed that failed before it was interrupted."""
    path = folder / DRAWS_FILE
    if not path.is_file():
        return []
    hint = f"remove {folder}, then run the same `discern finetune` command"
    found: list[dict[str, Any]] = read_object(path, hint=hint).get("draws", [])
    return found


def _tidy(place: Path, *, diverged: bool) -> None:
    """Remove what only an interrupted training needs; what is needed to look into one that diverged stays."""
    for name in ("checkpoints", "best", *(() if diverged else ("debug",))):
        shutil.rmtree(place / name, ignore_errors=True)


def train_network(plan: Plan, draw: int, folder: Path, name: str, ranks: Ranks, progress: Progress, stop: StopRequest) -> Trained:
    """Train a network, from the newest checkpoint in a folder where there is one.

    Args:
        draw: what everything random follows from.
        folder: of the checkpoints and the journal.
        name: as the progress bar calls it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = plan.config.train.model_copy(update={"seed": draw})
    objective = build_supervised(plan)
    objective.initialise(draw)
    if not plan.loaded.trained:
        draw_weights(objective.encoder, draw)
    state = _resume(folder, objective, progress, plan.config.finetune.patience)
    objective.to(ranks.device)
    features = {name: data.train.features for name, data in plan.data.items()}
    source = TaskStream(features, draw, config.sequences_per_step, plan.config.finetune.task_alpha)
    heldout = None
    if config.evaluate_every_steps > 0:
        heldout = TaskRowsInOrder({name: split.features for name, split in objective.heldout.items()})
    journal = Journal(folder, state.step, tensorboard=config.tensorboard) if ranks.writes else None
    progress.start(name, config.max_steps, "steps")
    progress.advance(state.step)
    diverged = None
    try:
        train(
            Parts(
                objective=objective,
                source=source,
                heldout=heldout,
                optimizer=plan.config.optimizer,
                train=config,
                ranks=ranks,
                precision=plan.precision,
                folder=folder,
                journal=journal,
                progress=progress,
                stop=stop,
                watch=_watch(plan) if heldout is not None else None,
            ),
            state,
        )
        told = any("padding_fraction" in line for line in lines_of(folder, state.step))
        if journal is not None and not state.cut and not told:
            journal.write({"step": state.step, "padding_fraction": _padding(source, state)})
    except NumericsError as problem:
        diverged = problem.message
    finally:
        progress.finish()
        if journal is not None:
            journal.close()
    leave_if_stopped(stop, state, progress)
    return Trained(objective, state, _padding(source, state), diverged)


def _padding(source: TaskStream, state: State) -> float:
    """Share of the slots of the batches so far that held padding."""
    return round(source.padding_fraction(state.step), 4)


def _watch(plan: Plan) -> Watch:
    """The headline of the task, or the mean of several."""
    (first, *others) = plan.data.values()
    finetuning = plan.config.finetune
    metric, loss = (first.task.metrics[0], "loss") if not others else ("mean_headline", "mean_loss")
    # Few examples often tie, and F1 is 0 for long: then the loss tells which weights are better.
    selects = all(data.selection is not None for data in plan.data.values())
    return Watch(metric, finetuning.patience, finetuning.keep == "best", loss if selects else None)


def _take_best(folder: Path, trained: Trained, progress: Progress) -> None:
    contents = checkpoint.load_newest(folder / "best", progress.note) if (folder / "best").is_dir() else None
    if contents is not None:
        checkpoint.load_model_tensors(trained.objective, contents.model, str(folder))
        progress.note(f"kept the weights of step {contents.step:,} of {trained.state.step:,}")


def _judge(plan: Plan, trained: Trained, folder: Path, *, writes: bool) -> dict[str, Any]:
    """What is known of a seed: its scores under `tasks`, and why it failed, if it did; writes predictions, mistakes, weights.

    Weights may overflow in the last update, which shows only in what they say.
    """
    scores: dict[str, Any] = {
        "steps": trained.state.step,
        "seconds": round(trained.state.seconds, 3),
        "tokens": trained.state.tokens,
        "padding_fraction": trained.padding,
    }
    diverged = trained.diverged
    if diverged is None:
        try:
            scores |= _figures(plan, trained.objective, folder if writes else None)
        except NumericsError as problem:
            diverged = problem.message
    if diverged is not None:
        scores |= {"tasks": {}, "failure": f"diverged: {diverged}"}
    if writes and diverged is None:
        write_weights(folder, trained.objective)
    elif writes:
        # Of an earlier draw, or of the splits before the one that showed it.
        forget_checksums(folder, [MODEL_FILE])
        for path in (*folder.glob("predictions-*.jsonl"), *folder.glob("mistakes-*.jsonl"), folder / MODEL_FILE):
            path.unlink(missing_ok=True)
    return scores


def _figures(plan: Plan, objective: SupervisedObjective, folder: Path | None) -> dict[str, Any]:
    """The metrics of each task under `tasks`, and under `failures` why some learned nothing; writes what is said of each split.

    Args:
        folder: of the seed; None: nothing is written.

    Raises:
        NumericsError: what the network says is not finite.
    """
    found: dict[str, Any] = {"tasks": {}}
    for name, data in plan.data.items():
        task = data.task
        entry: dict[str, float] = {}
        for split_name, split in data.judged.items():
            outputs, loss = outputs_of(objective, name, split.features)
            refuse_non_finite(name, outputs, loss)
            predictions = task.predict(split.examples, split.features, outputs)
            judged = task.score(split.examples, predictions)
            further = "" if split_name == data.dev_name else f"{split_name.removeprefix('dev_')}_"
            entry |= {f"{further}{metric}": value for metric, value in judged.values.items()}
            entry[f"{further}loss"] = loss
            if folder is not None:
                write_lines(predictions_file(folder, name, split_name if further else None), predictions)
            if not further:
                failure = task.failure(predictions)
                if failure is not None:
                    found.setdefault("failures", {})[name] = failure
                if folder is not None:
                    write_lines(folder / f"mistakes-{name}.jsonl", task.mistakes(split.examples, predictions))
        found["tasks"][name] = entry
        if folder is not None:
            for split_name in data.unlabelled:
                predict_split(plan, objective, name, split_name, predictions_file(folder, name, split_name))
    return found


def predict_split(plan: Plan, objective: SupervisedObjective, task: str, split: str, path: Path) -> None:
    """Write what is said of a split without labels.

    Raises:
        NumericsError: it is not finite.
    """
    data = plan.data[task]
    part = data.unlabelled[split]
    outputs, loss = outputs_of(objective, task, part.features)
    refuse_non_finite(task, outputs, loss)
    write_lines(path, data.task.predict(part.examples, part.features, outputs))


def build_supervised(plan: Plan) -> SupervisedObjective:
    """A copy of the encoder with a new head for each task."""
    finetuning = plan.config.finetune
    encoder = copy.deepcopy(plan.loaded.encoder)
    set_dropout(encoder, finetuning.dropout)
    return SupervisedObjective(
        encoder,
        {name: data.task for name, data in plan.data.items()},
        dropout=finetuning.dropout,
        reduction=finetuning.reduction,
        frame=finetuning.frame,
        sequences_per_step=plan.config.train.sequences_per_step,
        heldout={name: data.watched.split for name, data in plan.data.items()},
    )


def set_dropout(encoder: Encoder, probability: float) -> None:
    """Of hidden states and attention alike; networks pre-trained without dropout are fine-tuned with it."""
    encoder.config = encoder.config.model_copy(update={"hidden_dropout": probability, "attention_dropout": probability})
    for part in encoder.modules():
        if isinstance(part, Dropout):
            part.probability = probability


def _resume(folder: Path, objective: SupervisedObjective, progress: Progress, patience: int) -> State:
    """The state of the newest checkpoint; a seed that patience had ended is not trained on."""
    contents = checkpoint.load_newest(folder / "checkpoints", progress.note) if (folder / "checkpoints").is_dir() else None
    if contents is None:
        return State()
    checkpoint.load_model_tensors(objective, contents.model, str(folder))
    progress.note(f"resuming {folder} at step {contents.step}")
    state = State.of(contents)
    state.over = 0 < patience <= state.waited
    return state
