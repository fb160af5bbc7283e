"""One seed of a fine-tuning: build the network, run the loop, judge it, write what came out."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.errors import NumericsError
from discern.model.dropout import Dropout
from discern.model.encoder import Encoder
from discern.progress import Progress
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
from discern.workflows.finetuned import SCORES_FILE, predictions_file, seed_folder, write_json, write_lines, write_weights
from discern.workflows.pretrain import leave_if_stopped
from discern.workflows.task_files import TaskData


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


def run_seed(plan: Plan, seed: int, ranks: Ranks, progress: Progress, stop: StopRequest) -> None:
    """Train one seed, judge it, and write what came out; a run that diverges is a result too."""
    folder = seed_folder(plan.out, seed)
    folder.mkdir(parents=True, exist_ok=True)
    config = plan.config.train.model_copy(update={"seed": seed})
    objective = build_supervised(plan)
    objective.initialise(seed)
    if not plan.loaded.trained:
        draw_weights(objective.encoder, seed)
    state = _resume(folder, objective, progress, plan.config.finetune.patience)
    objective.to(ranks.device)
    features = {name: data.train.features for name, data in plan.data.items()}
    source = TaskStream(features, seed, config.sequences_per_step, plan.config.finetune.task_alpha)
    heldout = None
    if config.evaluate_every_steps > 0:
        heldout = TaskRowsInOrder({name: split.features for name, split in objective.heldout.items()})
    journal = Journal(folder, state.step, tensorboard=config.tensorboard) if ranks.writes else None
    progress.start(f"seed {seed}", config.max_steps, "steps")
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
    if plan.config.finetune.keep == "best" and diverged is None and heldout is not None:
        _take_best(folder, objective, state, progress)
    scores = {
        "steps": state.step,
        "seconds": round(state.seconds, 3),
        "tokens": state.tokens,
        "padding_fraction": _padding(source, state),
    }
    diverged = _judge(plan, objective, folder, scores, diverged, writes=ranks.writes)
    if ranks.writes:
        # What is needed to look into a seed that diverged stays.
        for name in ("checkpoints", "best", *(() if diverged else ("debug",))):
            shutil.rmtree(folder / name, ignore_errors=True)


def _padding(source: TaskStream, state: State) -> float:
    """Share of the slots of the batches so far that held padding."""
    return round(source.padding_fraction(state.step), 4)


def _watch(plan: Plan) -> Watch:
    """The headline of the task, or the mean of several."""
    (first, *others) = plan.data.values()
    finetuning = plan.config.finetune
    return Watch(first.task.metrics[0] if not others else "mean_headline", finetuning.patience, finetuning.keep == "best")


def _take_best(folder: Path, objective: SupervisedObjective, state: State, progress: Progress) -> None:
    contents = checkpoint.load_newest(folder / "best", progress.note)
    if contents is not None:
        checkpoint.load_model_tensors(objective, contents.model, str(folder))
        progress.note(f"kept the weights of step {contents.step:,} of {state.step:,}")


def _judge(
    plan: Plan,
    objective: SupervisedObjective,
    folder: Path,
    scores: dict[str, Any],
    diverged: str | None,
    *,
    writes: bool,
) -> str | None:
    """Scores, predictions, mistakes and weights of a seed; the scores are written last, and say that it is complete.

    Gives why it diverged, if it did: weights may overflow in the last update, which shows only in what they say.

    Args:
        scores: what is known of the seed so far.
    """
    found: dict[str, Any] = {}
    if diverged is None:
        try:
            found = _figures(plan, objective, folder if writes else None)
        except NumericsError as problem:
            diverged = problem.message
    if diverged is not None:
        found = {"tasks": {}, "failure": f"diverged: {diverged}"}
    if writes:
        if diverged is None:
            write_weights(folder, objective)
        else:
            for path in (*folder.glob("predictions-*.jsonl"), *folder.glob("mistakes-*.jsonl")):
                path.unlink()
        write_json(folder / SCORES_FILE, scores | found)
    return diverged


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
        heldout={name: data.judged[data.dev_name] for name, data in plan.data.items()},
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
