"""Fine-tuning; read this module first: plan, rows, train each seed, choose the weights, evaluate, write.

`plan` finds the model, the files and the settings, `settings` resolves them, `data` reads the files, and `results` guards the
output folder and summarizes.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from discern.data.batching.stream import derive_key
from discern.errors import CheckpointError, ConfigError, NumericsError
from discern.finetuning.plan import FinetunePlan, TaskData, read_rows, resolve_settings
from discern.finetuning.results import (
    check_ranks_agree,
    complete_seeds,
    keep_precision,
    measured_baselines,
    prepare_folder,
    summarize,
)
from discern.finetuning.settings import Recipe, sweep_combinations
from discern.model_files.finetuned import MODEL_FILE, RESULTS_FILE, SCORES_FILE, predictions_file, seed_folder
from discern.model_files.folder import choose_encoder, draw_weights
from discern.models.layers import Dropout
from discern.progress import Progress, warning_to
from discern.storage.checksums import read_json, remove_recorded, write_json, write_lines, write_recorded
from discern.storage.files import OutputFolder, check_apart
from discern.tasks.features import TaskRowsInOrder, TaskStream
from discern.tasks.supervised import (
    Distillation,
    SupervisedObjective,
    fit_few_shot,
    fit_ngrams,
    fit_scales,
    ngram_logits,
    outputs_of,
    refuse_non_finite,
    scale,
    supervised,
)
from discern.training import checkpoint
from discern.training.checkpoint import model_tensors
from discern.training.distributed import Ranks, check_consistency, join_ranks
from discern.training.loop import train
from discern.training.metrics import MetricsLog, read_metrics
from discern.training.process import StopRequest, leave_if_stopped, stop_on_signals
from discern.training.state import EarlyStopping, State, TrainContext, use_average

SWEEP_FILE = "sweep.json"
_RATE_FACTORS = (1.0, 1 / 3, 3.0)
# Length of a trial of a learning rate: a fraction of the steps of a seed, and a minimum.
_TRIAL_FRACTION, _MIN_TRIAL_STEPS = 1 / 3, 100


def finetune(
    model: str,
    *,
    out: Path,
    progress: Progress,
    tasks: Sequence[tuple[str, Path]] = (),
    config: Path | None = None,
    overrides: Sequence[str] = (),
    recipe: Recipe = "auto",
    seeds: int = 1,
    untrained: bool = False,
    tokenizer: Path | None = None,
    sweep: Sequence[str] = (),
    submission: Path | None = None,
    baselines: bool = True,
    debug: bool = False,
    overwrite: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Train and evaluate every seed, and return the contents of results.json.

    Complete seeds are not trained again; an interrupted seed is continued. With a sweep, each combination has a folder of its
    own in `out`, and the results are those of the best combination by the median of its seeds; `chosen_on` names the splits
    whose scores chose it.

    Args:
        model: a run, an export, a Hugging Face folder, or the name of a preset.
        tasks: names of the tasks with the folders of their files; empty if the settings name files of the user's own.
        config: TOML file of settings, over the recipe.
        overrides: settings as "section.key=value", over the file.
        seeds: number of seeds, counted from `train.seed`.
        untrained: start from random weights instead of the model's.
        tokenizer: tokenizer of a preset, which has none of its own.
        sweep: values per setting, "learning_rate=1e-4,3e-4"; the section of a key may be left out.
        submission: folder of the zip for the GLUE site.
        baselines: also evaluate simple predictors.
        debug: use a hundred examples of each file.
        overwrite: replace another fine-tuning in `out`.

    Raises:
        ConfigError, DataError: an argument, a setting or a file is wrong; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt, SystemExit(143): the training was interrupted and has been saved.
    """
    # Plan: the arguments, the model, and the settings of every combination, so that a mistake in the last one shows at once.
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}, expected at least 1", hint="3 is usual for a table of results")
    combinations = sweep_combinations(sweep)
    folders = [out / name if name else out for name in combinations]
    submits = submission is not None
    if submission is not None:
        from discern.finetuning.submission import check_submission

        check_submission([name for name, _ in tasks])
        check_apart(submission, Path(model), option="--submission")
    for folder in folders:
        check_apart(folder, Path(model), *(data for _, data in tasks))
    loaded = choose_encoder(model, tokenizer, untrained=untrained, warn=progress.note)
    settings = [
        resolve_settings(loaded, tasks, config, (*overrides, *assignments), recipe, progress)
        for assignments in combinations.values()
    ]

    runs: list[tuple[str, FinetunePlan, dict[str, Any]]] = []
    with join_ranks(device) as ranks:
        check_consistency(ranks, {"sweep": " ".join(combinations)})
        for name, folder, resolved in zip(combinations, folders, settings, strict=True):
            if name:
                progress.note(f"sweep: {name}")
            plan = read_rows(loaded, resolved, folder, progress, ranks.device, debug=debug, submits=submits)
            plan = replace(plan, seeds=seeds, baselines=baselines, overwrite=overwrite)
            check_ranks_agree(plan, ranks)
            runs.append((name, plan, train_seeds(plan, ranks, progress)))
        best, plan, results = max(runs, key=lambda run: float("-inf") if run[2]["median"] is None else run[2]["median"])
        if sweep:
            keys = ("metric", "median", "standard_deviation", "scores", "failed_seeds")
            table = [{"folder": name, **{key: entry[key] for key in keys}} for name, _, entry in runs]
            splits = ", ".join(dict.fromkeys(data.dev_name for data in plan.data.values()))
            results |= {"best_folder": best, "chosen_on": splits if len(runs) > 1 else None, "sweep": table}
            if ranks.writes:
                write_json(out / SWEEP_FILE, results)
        if submission is not None and ranks.writes:
            from discern.finetuning.submission import submit

            results |= submit(plan, results["best_seed"], submission, ranks.device, progress)
    return results


# ---- Train each seed ----


def train_seeds(plan: FinetunePlan, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Train and evaluate the seeds that are not complete; return the contents of results.json, over all complete seeds."""
    with stop_on_signals() as stop, OutputFolder(plan.out) as folder:
        prepare_folder(plan, ranks, folder)
        plan = replace(plan, precision=keep_precision(plan, ranks))
        baselines = measured_baselines(plan.data, progress) if plan.baselines and ranks.writes else {}
        # With many tasks, baselines take minutes, which is longer than ranks wait for each other within a step.
        ranks.barrier()
        search = None
        if plan.config.finetune.rate_search:
            search = search_rate(plan, ranks, progress, stop)
            plan = replace(plan, config=plan.config.with_values({"optimizer.learning_rate": search["learning_rate"]}))
        first = plan.config.train.seed
        requested = range(first, first + plan.seeds)
        for seed in requested:
            if not (seed_folder(plan.out, seed) / SCORES_FILE).is_file():
                run_seed(plan, seed, ranks, progress, stop)
            ranks.barrier()  # the others wait for the scores that rank 0 writes
        earlier = sorted(complete_seeds(plan.out).difference(requested))
        if earlier:
            seeds_of, them = ("seed", "it") if len(earlier) == 1 else ("seeds", "them")
            progress.note(f"{plan.out} already holds {seeds_of} {', '.join(map(str, earlier))}; the results include {them}")
        results = summarize(plan, sorted({*requested, *earlier}), baselines)
        results |= {"debug": plan.debug, **({"rate_search": search} if search else {})}
        if ranks.writes:
            write_json(plan.out / RESULTS_FILE, results)
            shutil.rmtree(plan.out / "rates", ignore_errors=True)
    return results


def search_rate(plan: FinetunePlan, ranks: Ranks, progress: Progress, stop: StopRequest) -> dict[str, Any]:
    """The learning rate whose short training run scored best on the evaluated split, with all trials under `trials`.

    Each trial has its own warm-up and decay. Equal scores are decided by the lower loss. The configured rate is tried first,
    and is used if every trial diverges. Trials that were interrupted are continued.
    """
    finished = plan.out / RESULTS_FILE
    if finished.is_file():
        earlier: dict[str, Any] = read_json(finished, hint=f"remove {finished}")["rate_search"]
        return earlier
    folder, trials = plan.out / "rates", list[dict[str, Any]]()
    optimizer, whole = plan.config.optimizer, plan.config.train.max_steps
    steps = min(whole, max(_MIN_TRIAL_STEPS, round(whole * _TRIAL_FRACTION)))
    for factor in _RATE_FACTORS:
        rate = optimizer.learning_rate if factor == 1 else float(f"{optimizer.learning_rate * factor:.2g}")
        shorter: dict[str, Any] = {
            "optimizer.learning_rate": rate,
            "optimizer.warmup_steps": round(optimizer.warmup_steps * steps / whole),
            "train.max_steps": steps,
            "train.evaluate_every_steps": steps,
            "finetune.keep": "last",
            "finetune.patience": 0,
        }
        if optimizer.decay_steps is not None:
            shorter["optimizer.decay_steps"] = max(1, round(optimizer.decay_steps * steps / whole))
        trial = replace(plan, config=plan.config.with_values(shorter))
        trained = train_network(trial, trial.config.train.seed, folder / f"{rate:g}", f"rate {rate:g}", ranks, progress, stop)
        score, loss = (None, None) if trained.diverged else (trained.state.best, trained.state.best_loss)
        came_to = "diverged" if score is None else f"{score:.4f}"
        progress.note(f"learning rate {rate:g}: {came_to} after {trained.state.step:,} steps")
        trials.append({"learning_rate": rate, "steps": trained.state.step, "score": score, "loss": loss})
    best = max(trials, key=lambda trial: (-1e9, 0.0) if trial["score"] is None else (trial["score"], -trial["loss"]))
    tried = ", ".join(format(trial["learning_rate"], "g") for trial in trials)
    progress.note(f"learning rate {best['learning_rate']:g}, the best of {tried}")
    return {"learning_rate": best["learning_rate"], "trials": trials}


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
    folder, retries = seed_folder(plan.out, seed), plan.config.finetune.retries
    failed: list[dict[str, Any]] = []
    while True:
        attempt = folder / f"retry-{len(failed)}" if failed else folder
        draw = attempt_seed(seed, len(failed))
        trained = train_network(plan, draw, attempt, f"seed {seed}", ranks, progress, stop)
        kept_step = trained.state.step
        if plan.config.finetune.keep == "best" and trained.diverged is None:
            best = checkpoint.load_newest(attempt / "best", progress.note) if (attempt / "best").is_dir() else None
            if best is not None:
                checkpoint.load_model_tensors(trained.objective, best.weights, str(attempt))
                kept_step = best.step
                progress.note(f"kept the weights of step {kept_step:,} of {trained.state.step:,}")
            ranks.barrier()  # rank 0 removes the best weights at the end
        scores = {"kept_step": kept_step} | evaluate(plan, trained, folder, progress, writes=ranks.writes)
        reason = scores.get("failure") or "; ".join(scores.get("failures", {}).values())
        done = not reason or len(failed) >= retries
        if ranks.writes:
            if done:  # written last: this file marks the seed as complete
                write_json(folder / SCORES_FILE, scores | ({"retried": failed} if failed else {}))
            # What only an interrupted training needs. The debug files of a diverged training are kept.
            for name in ("checkpoints", "best", *(() if "failure" in scores else ("debug",))):
                shutil.rmtree(attempt / name, ignore_errors=True)
        if done:
            return
        failed = [*failed, {"draw": draw, "failure": reason}]
        progress.note(f"seed {seed} failed: {reason}; attempt {len(failed) + 1} of {retries + 1}")


def attempt_seed(seed: int, attempt: int) -> int:
    """Random seed of an attempt: the seed itself for the first one, numbers derived from it for the others."""
    return derive_key(seed, "another draw", attempt) % 2**31 if attempt else seed


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
    config, finetuning = plan.config.train.model_copy(update={"seed": seed}), plan.config.finetune
    objective = build_supervised(plan)
    objective.initialize(seed)
    if not plan.loaded.trained:
        draw_weights(objective.encoder, seed)

    # The newest checkpoint; the training is finished if early stopping had already ended it.
    contents = checkpoint.load_newest(folder / "checkpoints", progress.note) if (folder / "checkpoints").is_dir() else None
    state = State()
    if contents is not None:
        checkpoint.load_model_tensors(objective, contents.model, str(folder))
        progress.note(f"resuming {folder} at step {contents.step}")
        state = State.from_checkpoint(contents)
        state.finished = 0 < finetuning.patience <= state.evaluations_since_best
    objective.to(ranks.device)
    if finetuning.few_shot:
        return TrainedNetwork(objective, state, 0.0, None)
    source = TaskStream(
        {name: data.train.features for name, data in plan.data.items()}, seed, config.sequences_per_step, finetuning.task_alpha
    )
    heldout = early_stopping = None
    if config.evaluate_every_steps > 0:
        heldout = TaskRowsInOrder({name: split.features for name, split in objective.heldout.items()})
        several, task = len(plan.data) > 1, next(iter(plan.data.values())).task
        # On few examples scores often tie, and F1 stays 0 for long: the loss then decides which weights are better.
        metric, loss = ("mean_headline", "mean_loss") if several else (task.metrics[0], "loss")
        early_stopping = EarlyStopping(metric, finetuning.patience, finetuning.keep == "best", loss)
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
                early_stopping=early_stopping,
                # 'auto' does not compile here: fine-tuning is short, and its rows have many lengths.
                compiled=config.compile is True,
            ),
            state,
        )
        logged = any(line["step"] == state.step and "padding_fraction" in line for line in read_metrics(folder))
        if metrics_log is not None and not state.interrupted and not logged:
            metrics_log.write({"step": state.step, "padding_fraction": round(source.padding_fraction(state.step), 4)})
    except NumericsError as problem:
        diverged = problem.message
    finally:
        progress.finish()
        if metrics_log is not None:
            metrics_log.close()
    leave_if_stopped(stop, state.step, progress)
    if diverged is None:
        use_average(objective, state.average)
    return TrainedNetwork(objective, state, round(source.padding_fraction(state.step), 4), diverged)


def build_supervised(plan: FinetunePlan) -> SupervisedObjective:
    """The objective: a copy of the encoder, with the dropout of the settings, and a new head for each task."""
    finetuning = plan.config.finetune
    encoder = copy.deepcopy(plan.loaded.encoder)
    dropouts = {"hidden_dropout": finetuning.dropout, "attention_dropout": finetuning.dropout}
    encoder.config = encoder.config.model_copy(update=dropouts)
    for module in encoder.modules():
        if isinstance(module, Dropout):
            module.probability = finetuning.dropout
    targets: Any = next(iter(plan.data.values())).train.features.targets
    weights = finetuning.teacher_weight, finetuning.teacher_temperature, finetuning.teacher_states_weight
    width = targets["teacher_state"].shape[1] if "teacher_state" in targets else 0
    distillation = Distillation(*weights, width) if "teacher" in targets else None
    return supervised(
        encoder,
        {name: data.task for name, data in plan.data.items()},
        distillation=distillation,
        dropout=finetuning.dropout,
        reduction=finetuning.reduction,
        frame=finetuning.frame,
        sequences_per_step=plan.config.train.sequences_per_step,
        heldout={name: data.evaluated[data.dev_name] for name, data in plan.data.items()},
    )


# ---- Evaluate, write ----


def evaluate(plan: FinetunePlan, trained: TrainedNetwork, folder: Path, progress: Progress, *, writes: bool) -> dict[str, Any]:
    """Evaluate a trained network, and return the contents of scores.json.

    `tasks` has the metrics of each task, `failures` the reason for each that learned nothing, `failure` that of a network that
    diverged. Writes predictions, mistakes and weights. Weights may overflow in the last update, which only the outputs show.
    """
    rows = sum(len(data.train.features) for data in plan.data.values())
    scores: dict[str, Any] = {
        "steps": trained.state.step,
        "passes": round(trained.state.step * plan.config.train.sequences_per_step / rows, 2),
        "seconds": round(trained.state.seconds, 3),
        "tokens": trained.state.tokens,
        "padding_fraction": trained.padding,
    }
    diverged = trained.diverged
    if diverged is None:
        try:
            for data in plan.data.values():
                calibrate(trained.objective, data, few_shot=plan.config.finetune.few_shot)
            scores |= _measure(plan, trained.objective, folder if writes else None, progress)
        except NumericsError as problem:
            diverged = problem.message
    if diverged is not None:
        scores |= {"tasks": {}, "failure": f"diverged: {diverged}"}
    if writes and diverged is None:
        trained.objective.projections.clear()
        write_weights(folder, trained.objective)
    elif writes:
        # Files of an earlier attempt, or of the splits before the one whose outputs were not finite.
        remove_recorded([*folder.glob("predictions-*.jsonl"), *folder.glob("mistakes-*.jsonl"), folder / MODEL_FILE])
    return scores


def calibrate(objective: SupervisedObjective, data: TaskData, *, few_shot: bool) -> None:
    """Fit the n-grams of the head, if it has them, and scale the logits by the examples that the score is computed on.

    The scales are folded into the head. They have one or two parameters, and do not change what a network alone predicts.

    Args:
        few_shot: fit the output layer, too; its scale comes from cross-validation.
    """
    head: Any = objective.heads[data.task.name]
    split = data.evaluated[data.dev_name]
    ngrams: Any = getattr(head, "ngrams", None)
    kind = data.task.labels.kind
    if kind not in ("single", "multi", "tags") and (kind != "number" or ngrams is None):
        return
    if few_shot:
        # Without its last layer, the head returns the states.
        output, head.output, head.ngrams = head.output, nn.Identity(), None
        outputs, _ = outputs_of(objective, data.task.name, replace(data.train.features, targets={}))
        head.output, head.ngrams = output, ngrams
    else:
        outputs, loss = outputs_of(objective, data.task.name, split.features)
        refuse_non_finite(data.task.name, outputs, loss)
    # Fitted in float64, which some devices lack.
    device = head.output.weight.device
    head.cpu()
    if few_shot:
        fit_few_shot(head.output, ngrams, torch.from_numpy(np.stack([row["logits"] for row in outputs])), data.train.features)
    else:
        # Tags have logits for each token, and for the padding of the batch.
        lengths = split.features.input_ids.lengths
        rows = [np.atleast_2d(row["logits"])[:length] for row, length in zip(outputs, lengths, strict=True)]
        logits = [torch.from_numpy(np.concatenate(rows))]
        if ngrams is not None:
            fit_ngrams(ngrams, data.train.features)
            logits.append(ngram_logits(ngrams, split.features, range(len(split.features))))
        scale(fit_scales(logits, split.features.targets), head.output, ngrams)
    head.to(device)


def _measure(plan: FinetunePlan, objective: SupervisedObjective, folder: Path | None, progress: Progress) -> dict[str, Any]:
    """`tasks` and `failures` of scores.json.

    Args:
        folder: folder of the seed, for predictions and mistakes; None: write nothing.

    Raises:
        NumericsError: the outputs of the network are not finite.
    """
    scores: dict[str, Any] = {"tasks": {}}
    for name, data in plan.data.items():
        task = data.task
        entry: dict[str, float] = {}
        for split_name, split in data.evaluated.items():
            predictions, loss = predict_split(objective, data, split_name)
            values = task.score(split.examples, predictions)
            for line in values.undefined(split_name):
                progress.note(f"{name}: {line}")
            headline = split_name == data.dev_name
            prefix = "" if headline else f"{split_name.removeprefix('dev_')}_"
            entry |= {f"{prefix}{metric}": value for metric, value in values.values.items()} | {f"{prefix}loss": loss}
            if folder is not None:
                write_lines(predictions_file(folder, name, None if headline else split_name), predictions)
            if headline:
                if (failure := task.failure(split.examples, predictions)) is not None:
                    scores.setdefault("failures", {})[name] = failure
                if folder is not None:
                    write_lines(folder / f"mistakes-{name}.jsonl", task.mistakes(split.examples, predictions))
        scores["tasks"][name] = entry
        if folder is not None:
            for split_name in data.unlabeled:
                write_lines(predictions_file(folder, name, split_name), predict_split(objective, data, split_name)[0])
    return scores


def predict_split(objective: SupervisedObjective, data: TaskData, split_name: str) -> tuple[list[dict[str, Any]], float]:
    """The predictions for a split, and the mean loss.

    Raises:
        NumericsError: the outputs of the network are not finite.
    """
    split = (data.evaluated | data.unlabeled)[split_name]
    outputs, loss = outputs_of(objective, data.task.name, split.features)
    refuse_non_finite(data.task.name, outputs, loss)
    return data.task.predict(split.examples, split.features, outputs), loss


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
