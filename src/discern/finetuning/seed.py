"""Training and evaluation of one seed."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from discern.corruption.randomness import key_of
from discern.data.batching.stream import derive_key
from discern.data.tokenizer import load_tokenizer, vocab_size
from discern.errors import CheckpointError, ConfigError, NumericsError
from discern.finetuning.settings import FinetuneConfig
from discern.finetuning.task_files import TaskData
from discern.model_files.finetuned import MODEL_FILE, SCORES_FILE, predictions_file, seed_folder
from discern.model_files.folder import LoadedEncoder
from discern.models.base import Encoder, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.fused_ops import Dropout
from discern.models.initialization import initialize
from discern.progress import Progress, warning_to
from discern.storage.checksums import read_object, remove_recorded, write_json, write_lines, write_recorded
from discern.tasks.features import TaskRowsInOrder, TaskStream
from discern.tasks.supervised import SupervisedObjective, outputs_of, refuse_non_finite, supervised
from discern.training import checkpoint
from discern.training.checkpoint import model_tensors
from discern.training.distributed import Ranks
from discern.training.interrupt import StopRequest, leave_if_stopped
from discern.training.loop import train
from discern.training.metrics_log import MetricsLog, read_metrics
from discern.training.pretrain_config import load_pretrain_config
from discern.training.replica import use_average
from discern.training.state import EarlyStopping, State, TrainContext

ATTEMPTS_FILE = "failed-draws.json"


@dataclass(frozen=True, eq=False)
class FinetunePlan:
    """Model, settings and data of a fine-tuning, complete before any training.

    Attributes:
        loaded: encoder that every seed starts from.
        data: examples and features of each task.
        out: output folder.
        debug: whether only the first examples of each file were read.
        precision: arithmetic of all seeds, 'float32' or 'bfloat16'.
    """

    loaded: LoadedEncoder
    config: FinetuneConfig
    data: dict[str, TaskData]
    out: Path
    debug: bool = False
    precision: str = "float32"


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A network after training.

    Attributes:
        padding: fraction of positions in the batches that held padding.
        diverged: message of the numerical error that ended the training, or None.
    """

    objective: SupervisedObjective
    state: State
    padding: float
    diverged: str | None


def run_seed(plan: FinetunePlan, seed: int, ranks: Ranks, progress: Progress, stop: StopRequest) -> None:
    """Train and evaluate one seed, and write its scores.

    A seed that diverges or learns nothing is trained again with other random numbers, `finetune.retries` times at most; the
    failure of the last attempt is a result as well.
    """
    folder = seed_folder(plan.out, seed)
    failed = _failed_attempts(folder)
    while True:
        place = folder / f"retry-{len(failed)}" if failed else folder
        trained = train_network(plan, attempt_seed(seed, len(failed)), place, f"seed {seed}", ranks, progress, stop)
        kept_step = trained.state.step
        if plan.config.finetune.keep == "best" and trained.diverged is None:
            kept_step = _take_best(place, trained, progress)
            ranks.barrier()  # rank 0 removes the best weights at the end
        found = {"kept_step": kept_step} | _evaluate(plan, trained, folder, progress, writes=ranks.writes)
        reason = found.get("failure") or "; ".join(found.get("failures", {}).values())
        if not reason or len(failed) >= plan.config.finetune.retries:
            break
        failed = [*failed, {"draw": attempt_seed(seed, len(failed)), "failure": reason}]
        if ranks.writes:
            write_json(folder / ATTEMPTS_FILE, {"draws": failed})
            _tidy(place, diverged="failure" in found)
        progress.note(f"seed {seed} failed: {reason}; attempt {len(failed) + 1} of {plan.config.finetune.retries + 1}")
    if ranks.writes:
        # Written last: this file marks the seed as complete.
        write_json(folder / SCORES_FILE, found | ({"retried": failed} if failed else {}))
        _tidy(place, diverged="failure" in found)


def attempt_seed(seed: int, attempt: int) -> int:
    """Random seed of an attempt: the seed itself for the first one, numbers derived from it for the others."""
    return derive_key(seed, "another draw", attempt) % 2**31 if attempt else seed


def _failed_attempts(folder: Path) -> list[dict[str, Any]]:
    """The failed attempts of a seed that was interrupted later."""
    path = folder / ATTEMPTS_FILE
    if not path.is_file():
        return []
    hint = f"remove {folder}, then run the same `discern finetune` command"
    found: list[dict[str, Any]] = read_object(path, hint=hint).get("draws", [])
    return found


def _tidy(place: Path, *, diverged: bool) -> None:
    """Remove the files that only an interrupted training needs. The debug files of a diverged training are kept."""
    for name in ("checkpoints", "best", *(() if diverged else ("debug",))):
        shutil.rmtree(place / name, ignore_errors=True)


def train_network(
    plan: FinetunePlan, seed: int, folder: Path, name: str, ranks: Ranks, progress: Progress, stop: StopRequest
) -> TrainedNetwork:
    """Train a network, continuing from the newest checkpoint in the folder if there is one.

    Args:
        seed: seed of all random numbers.
        folder: folder of the checkpoints and the metrics log.
        name: label of the progress bar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = plan.config.train.model_copy(update={"seed": seed})
    objective = build_supervised(plan)
    objective.initialize(seed)
    if not plan.loaded.trained:
        draw_weights(objective.encoder, seed)
    state = _resume(folder, objective, progress, plan.config.finetune.patience)
    objective.to(ranks.device)
    features = {name: data.train.features for name, data in plan.data.items()}
    source = TaskStream(features, seed, config.sequences_per_step, plan.config.finetune.task_alpha)
    heldout = None
    if config.evaluate_every_steps > 0:
        heldout = TaskRowsInOrder({name: split.features for name, split in objective.heldout.items()})
    metrics_log = None
    if ranks.writes:
        metrics_log = MetricsLog(
            folder, state.logged_step, tensorboard=config.tensorboard, tracker=config.tracker, warn=warning_to(progress)
        )
    progress.start(name, config.max_steps, "steps")
    progress.advance(state.step)
    diverged = None
    try:
        train(
            TrainContext(
                objective=objective,
                source=source,
                heldout=heldout,
                optimizer=plan.config.optimizer,
                train=config,
                ranks=ranks,
                precision=plan.precision,
                folder=folder,
                metrics_log=metrics_log,
                progress=progress,
                stop=stop,
                early_stopping=_early_stopping(plan) if heldout is not None else None,
                # 'auto' does not compile here: fine-tuning is short, and its rows have many lengths.
                compiled=config.compile is True,
            ),
            state,
        )
        told = any(line["step"] == state.step and "padding_fraction" in line for line in read_metrics(folder))
        if metrics_log is not None and not state.interrupted and not told:
            metrics_log.write({"step": state.step, "padding_fraction": _padding(source, state)})
    except NumericsError as problem:
        diverged = problem.message
    finally:
        progress.finish()
        if metrics_log is not None:
            metrics_log.close()
    leave_if_stopped(stop, state.step, progress)
    if diverged is None:
        use_average(objective, state.average)
    return TrainedNetwork(objective, state, _padding(source, state), diverged)


def _padding(source: TaskStream, state: State) -> float:
    """Fraction of positions in the batches so far that held padding."""
    return round(source.padding_fraction(state.step), 4)


def _early_stopping(plan: FinetunePlan) -> EarlyStopping:
    """Early stopping by the task's headline metric, or by the mean over several tasks."""
    (first, *others) = plan.data.values()
    finetuning = plan.config.finetune
    metric, loss = (first.task.metrics[0], "loss") if not others else ("mean_headline", "mean_loss")
    # On few examples scores often tie, and F1 stays 0 for long: the loss then decides which weights are better.
    selects = all(data.selection is not None for data in plan.data.values())
    return EarlyStopping(metric, finetuning.patience, finetuning.keep == "best", loss if selects else None)


def _take_best(folder: Path, trained: TrainedNetwork, progress: Progress) -> int:
    """Take the best weights, and return their step."""
    contents = checkpoint.load_newest(folder / "best", progress.note) if (folder / "best").is_dir() else None
    if contents is None:
        return trained.state.step
    checkpoint.load_model_tensors(trained.objective, contents.weights, str(folder))
    progress.note(f"kept the weights of step {contents.step:,} of {trained.state.step:,}")
    return contents.step


def _evaluate(plan: FinetunePlan, trained: TrainedNetwork, folder: Path, progress: Progress, *, writes: bool) -> dict[str, Any]:
    """Evaluate a trained network, and return the seed's scores under `tasks`, with the reason if it failed.

    Writes predictions, mistakes and weights. Weights may overflow in the last update, which only the outputs show.
    """
    rows = sum(len(data.train.features) for data in plan.data.values())
    scores: dict[str, Any] = {
        "steps": trained.state.step,
        "epochs": round(trained.state.step * plan.config.train.sequences_per_step / rows, 2),
        "seconds": round(trained.state.seconds, 3),
        "tokens": trained.state.tokens,
        "padding_fraction": trained.padding,
    }
    diverged = trained.diverged
    if diverged is None:
        try:
            scores |= _measure(plan, trained.objective, folder if writes else None, progress)
        except NumericsError as problem:
            diverged = problem.message
    if diverged is not None:
        scores |= {"tasks": {}, "failure": f"diverged: {diverged}"}
    if writes and diverged is None:
        write_weights(folder, trained.objective)
    elif writes:
        # Files of an earlier attempt, or of the splits before the one whose outputs were not finite.
        remove_recorded([*folder.glob("predictions-*.jsonl"), *folder.glob("mistakes-*.jsonl"), folder / MODEL_FILE])
    return scores


def _measure(plan: FinetunePlan, objective: SupervisedObjective, folder: Path | None, progress: Progress) -> dict[str, Any]:
    """The metrics of each task under `tasks`, and the reason for each task that learned nothing under `failures`.

    Args:
        folder: folder of the seed, for predictions and mistakes; None: write nothing.

    Raises:
        NumericsError: the outputs of the network are not finite.
    """
    found: dict[str, Any] = {"tasks": {}}
    for name, data in plan.data.items():
        task = data.task
        entry: dict[str, float] = {}
        for split_name, split in data.evaluated.items():
            outputs, loss = outputs_of(objective, name, split.features)
            refuse_non_finite(name, outputs, loss)
            predictions = task.predict(split.examples, split.features, outputs)
            scores = task.score(split.examples, predictions)
            for line in scores.undefined(split_name):
                progress.note(f"{name}: {line}")
            further = "" if split_name == data.dev_name else f"{split_name.removeprefix('dev_')}_"
            entry |= {f"{further}{metric}": value for metric, value in scores.values.items()}
            entry[f"{further}loss"] = loss
            if folder is not None:
                write_lines(predictions_file(folder, name, split_name if further else None), predictions)
            if not further:
                failure = task.failure(split.examples, predictions)
                if failure is not None:
                    found.setdefault("failures", {})[name] = failure
                if folder is not None:
                    write_lines(folder / f"mistakes-{name}.jsonl", task.mistakes(split.examples, predictions))
        found["tasks"][name] = entry
        if folder is not None:
            for split_name in data.unlabeled:
                predict_split(plan, objective, name, split_name, predictions_file(folder, name, split_name))
    return found


def predict_split(plan: FinetunePlan, objective: SupervisedObjective, task: str, split: str, path: Path) -> None:
    """Write the predictions for a split without labels.

    Raises:
        NumericsError: the outputs of the network are not finite.
    """
    data = plan.data[task]
    part = data.unlabeled[split]
    outputs, loss = outputs_of(objective, task, part.features)
    refuse_non_finite(task, outputs, loss)
    write_lines(path, data.task.predict(part.examples, part.features, outputs))


def build_supervised(plan: FinetunePlan) -> SupervisedObjective:
    """The objective: a copy of the encoder with a new head for each task."""
    finetuning = plan.config.finetune
    encoder = copy.deepcopy(plan.loaded.encoder)
    set_dropout(encoder, finetuning.dropout)
    return supervised(
        encoder,
        {name: data.task for name, data in plan.data.items()},
        dropout=finetuning.dropout,
        reduction=finetuning.reduction,
        frame=finetuning.frame,
        sequences_per_step=plan.config.train.sequences_per_step,
        heldout={name: data.monitored.split for name, data in plan.data.items()},
    )


def set_dropout(encoder: Encoder, probability: float) -> None:
    """Set the dropout of hidden states and attention, including networks that were pre-trained without dropout."""
    encoder.config = encoder.config.model_copy(update={"hidden_dropout": probability, "attention_dropout": probability})
    for part in encoder.modules():
        if isinstance(part, Dropout):
            part.probability = probability


def _resume(folder: Path, objective: SupervisedObjective, progress: Progress, patience: int) -> State:
    """The state of the newest checkpoint, finished if early stopping had already ended the training."""
    contents = checkpoint.load_newest(folder / "checkpoints", progress.note) if (folder / "checkpoints").is_dir() else None
    if contents is None:
        return State()
    checkpoint.load_model_tensors(objective, contents.model, str(folder))
    progress.note(f"resuming {folder} at step {contents.step}")
    state = State.from_checkpoint(contents)
    state.finished = 0 < patience <= state.evaluations_since_best
    return state


def write_weights(folder: Path, objective: SupervisedObjective) -> None:
    """Write the weights of a seed, whole or not at all. The same weights give the same bytes."""
    try:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in model_tensors(objective).items()}
        content = save(tensors, {"format": "pt"})
        write_recorded(folder, {MODEL_FILE: content})
    except OSError as problem:
        raise CheckpointError(
            f"cannot write to {folder}: {problem.strerror or problem}", hint="free some space, then run the same command"
        ) from problem


def fresh_encoder(like: LoadedEncoder, seed: int) -> LoadedEncoder:
    """An encoder of the same sizes, tokenizer and settings with the weights of step 0, the baseline of pre-training."""
    embedding_size = like.encoder.embeddings.embedding_size
    encoder = _untrained(like.encoder.config, like.vocabulary_size, embedding_size, seed)
    return LoadedEncoder(encoder, like.tokenizer_path, like.max_length, f"untrained, as {like.description}", trained=False)


def encoder_of_preset(name: str, tokenizer: Path, seed: int) -> LoadedEncoder:
    """An encoder of a preset's sizes, with the weights of step 0.

    Args:
        tokenizer: a file or folder that `load_tokenizer` accepts.

    Raises:
        ConfigError: there is no such preset.
        DataError: the tokenizer is missing or damaged.
    """
    config = load_pretrain_config(None, name).config
    encoder = _untrained(config.model, vocab_size(load_tokenizer(tokenizer)), config.model.embedding_size, seed)
    return LoadedEncoder(encoder, tokenizer, config.data.sequence_length, f"untrained, preset {name}", trained=False)


def _untrained(config: ModelConfig, vocabulary_size: int, embedding_size: int, seed: int) -> Encoder:
    encoder = build_encoder(build_embeddings(vocabulary_size, embedding_size, config), config)
    draw_weights(encoder, seed)
    return encoder


def draw_weights(encoder: Encoder, seed: int) -> None:
    """Give an encoder the weights of step 0, as a function of the seed alone."""
    initialize(encoder, torch.Generator().manual_seed(key_of(seed, "weights")), encoder.config)


def check_layers(loaded: LoadedEncoder, count: int) -> None:
    """Raise a ConfigError if the encoder has fewer layers than `count`."""
    if count > loaded.encoder.config.num_layers:
        raise ConfigError(
            f"finetune.layers is {count}, but the encoder has {loaded.encoder.config.num_layers}",
            hint="give fewer, or leave it out",
        )


def first_layers(loaded: LoadedEncoder, count: int) -> LoadedEncoder:
    """The encoder without the layers after the first `count`.

    Raises:
        ConfigError: it has fewer layers.
    """
    whole = loaded.encoder
    check_layers(loaded, count)
    config = whole.config.model_copy(update={"num_layers": count})
    encoder = build_encoder(build_embeddings(loaded.vocabulary_size, whole.embeddings.embedding_size, config), config)
    weights = whole.state_dict()
    encoder.load_state_dict({name: weights[name] for name in encoder.state_dict()})
    described = f"the first {count} of {whole.config.num_layers} layers of {loaded.description}"
    return replace(loaded, encoder=encoder, description=described)
