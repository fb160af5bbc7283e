"""Fine-tuning: read and check the files, train one network a seed, judge each, and sum up."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.config.tree import flatten, nest, plain, to_toml
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.tasks import tasks as registry
from discern.tasks.base import Definition, TextEncoder
from discern.tasks.frames import FRAMES
from discern.training import checkpoint
from discern.training.interrupt import stop_on_signals
from discern.training.parallel import Ranks, join_ranks
from discern.workflows.encoders import LoadedEncoder
from discern.workflows.finetune_seed import Plan, run_seed
from discern.workflows.finetune_settings import FinetuneConfig, Recipe, load_finetune_config
from discern.workflows.finetuned import (
    CONFIG_FILE,
    RECORD_FILE,
    RESULTS_FILE,
    SCORES_FILE,
    TOKENIZER_FILE,
    make_record,
    seed_folder,
    write_json,
)
from discern.workflows.model_choice import choose_encoder
from discern.workflows.own_files import own_definition
from discern.workflows.results import summarise
from discern.workflows.runs import is_finetuned
from discern.workflows.submission import check_rows, check_submission, submit
from discern.workflows.task_files import ReadingOptions, TaskData, TaskFiles, find_files, read_task


@dataclass(frozen=True)
class FinetuneRequest:
    """What to fine-tune, on what, into which folder.

    Attributes:
        model: a run, an export, a Hugging Face folder, or the name of a preset.
        tasks: names and folders of the tasks; none: the files are one's own, named in the settings.
        config: TOML file, or None.
        overrides: "section.key=value".
        seeds: how many runs, from seed 0 (or train.seed) on.
        untrained: the model's sizes with fresh weights.
        tokenizer: of an untrained preset.
        submission: folder for GLUE's zip, or None.
    """

    model: str
    out: Path
    tasks: Sequence[tuple[str, Path]] = ()
    config: Path | None = None
    overrides: Sequence[str] = ()
    recipe: Recipe = "paper"
    seeds: int = 1
    untrained: bool = False
    tokenizer: Path | None = None
    submission: Path | None = None
    debug: bool = False
    device: str = "auto"


def finetune(request: FinetuneRequest, progress: Progress) -> dict[str, Any]:
    """Train and judge every seed; gives what results.json holds.

    A seed that is complete is not trained again; one that was interrupted goes on.

    Raises:
        ConfigError, DataError: something doesn't fit; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint damaged.
        KeyboardInterrupt, SystemExit(143): it was asked to stop, and has saved.
    """
    if request.submission is not None:
        check_submission([name for name, _ in request.tasks])
    plan = prepare_finetuning(request, progress)
    if request.submission is not None:
        check_rows(plan)
    with join_ranks(request.device) as ranks, stop_on_signals() as stop:
        _prepare_folder(request, plan, ranks)
        first = plan.config.train.seed
        seeds = range(first, first + request.seeds)
        for seed in seeds:
            if not (seed_folder(plan.out, seed) / SCORES_FILE).is_file():
                run_seed(plan, seed, ranks, progress, stop)
            ranks.barrier()  # the others wait for the scores that the first writes
        results = summarise(plan.out, plan.data, plan.config, plan.loaded.description, seeds)
        if ranks.writes:
            write_json(plan.out / RESULTS_FILE, results)
            if request.submission is not None:
                results |= submit(plan, results["best_seed"], request.submission, progress)
    return results


def prepare_finetuning(request: FinetuneRequest, progress: Progress) -> Plan:
    """Load the model, read, check and encode all files, resolve the settings. Writes nothing but cached rows."""
    loaded = choose_encoder(request.model, request.tokenizer, untrained=request.untrained, warn=progress.note)
    width = loaded.encoder.config.hidden_size
    if request.tasks:
        definitions: list[Definition[Any]] = [registry.load(name) for name, _ in request.tasks]
        files = [find_files(each, folder) for each, (_, folder) in zip(definitions, request.tasks, strict=True)]
    else:
        first = own_definition(request.config, request.overrides)
        definitions, files = [first.definition], [first]
    names = [each.name for each in definitions]
    if len(set(names)) < len(names):
        raise ConfigError(f"a task is named twice: {', '.join(names)}", hint="name each task once")
    kind = type(loaded.encoder)
    resolved = load_finetune_config(definitions, width, request.config, request.overrides, request.recipe, kind)
    FRAMES[resolved.config.finetune.frame].check(loaded.encoder)
    config, notes = _fit_lengths(resolved.config, names, loaded, resolved.user_set)
    tokenizer = load_tokenizer(loaded.tokenizer_path)
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    options = ReadingOptions(
        config.finetune.heldout_fraction, config.finetune.train_rows, request.debug, request.submission is not None
    )
    data = {each.definition.name: _read(each, config, text, options, progress) for each in files}
    config = _with_steps(config, sum(len(each.train.features) for each in data.values()), resolved.user_set, debug=request.debug)
    for line in notes:
        progress.note(line)
    return Plan(loaded, config, data, request.out)


def _read(files: TaskFiles, config: FinetuneConfig, text: TextEncoder, options: ReadingOptions, progress: Progress) -> TaskData:
    name = files.definition.name
    data = read_task(files, config.task_config(name), text, options)
    for line in data.notes:
        progress.note(f"{name}: {line}")
    shown = ", ".join(data.task.labels.names[:12]) + (", ..." if len(data.task.labels.names) > 12 else "")
    if shown:
        progress.note(f"{name}: {len(data.task.labels.names)} labels: {shown}")
    return data


def _fit_lengths(
    config: FinetuneConfig, names: Sequence[str], loaded: LoadedEncoder, user_set: frozenset[str]
) -> tuple[FinetuneConfig, list[str]]:
    """Default lengths are lowered to the positions that were trained; lengths that the user set, to those there are."""
    notes = []
    several = len(names) > 1
    updates = {}
    for name in names:
        task, key = config.task_config(name), f"tasks.{name}.sequence_length" if several else "task.sequence_length"
        length, there = task.sequence_length, loaded.encoder.config.max_positions
        if length > there and key in user_set:
            raise ConfigError(f"{key} is {length}, but the model has {there} positions", hint=f"--set {key}={there}")
        if length > loaded.max_length and key not in user_set:
            notes.append(
                f"{name}: rows of {loaded.max_length} tokens, the length that the model was trained on, instead of {length}"
            )
            task = task.model_copy(update={"sequence_length": loaded.max_length})
        elif length > loaded.max_length:
            notes.append(f"{name}: positions from {loaded.max_length} on have not been pre-trained")
        updates[name] = task
    if several:
        section = getattr(config, "tasks").model_copy(update=updates)  # noqa: B009
        return config.model_copy(update={"tasks": section}), notes
    return config.model_copy(update={"task": updates[names[0]]}), notes


def _with_steps(config: FinetuneConfig, rows: int, user_set: frozenset[str], *, debug: bool) -> FinetuneConfig:
    """The steps and the warm-up that the epochs come to, unless they were given."""
    per_step = config.train.sequences_per_step
    epochs = min(config.finetune.epochs, 3.0) if debug else config.finetune.epochs
    steps = config.train.max_steps
    if "train.max_steps" not in user_set:
        # The released code fills the last batch of an epoch up.
        whole = -(-rows // per_step) if config.finetune.recipe == "google" else rows / per_step
        steps = max(1, int(whole * epochs) if config.finetune.recipe == "google" else round(whole * epochs))
    warmup = config.optimizer.warmup_steps
    if "optimizer.warmup_steps" not in user_set:
        warmup = int(steps * config.finetune.warmup_fraction)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"max_steps": steps}),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup}),
        }
    )


def _prepare_folder(request: FinetuneRequest, plan: Plan, ranks: Ranks) -> None:
    """The files that say what the fine-tuning is; refuses a folder that holds another."""
    out = plan.out
    record = make_record(
        plan.loaded,
        {name: data.task for name, data in plan.data.items()},
        {name: data.files for name, data in plan.data.items()},
        {name: data.source for name, data in plan.data.items()},
        plan.config.finetune.frame,
    )
    if is_finetuned(out):
        _refuse_another(out, record, plan.config)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not empty and holds no fine-tuning", hint="choose another --out, or empty the folder")
    if ranks.writes:
        try:
            out.mkdir(parents=True, exist_ok=True)
            tokenizer = load_tokenizer(plan.loaded.tokenizer_path)
            checkpoint.write_text(out / TOKENIZER_FILE, tokenizer.to_str())
            checkpoint.write_text(out / CONFIG_FILE, to_toml(plan.config))
            write_json(out / RECORD_FILE, record)
        except OSError as problem:
            raise DataError(f"cannot write to {out}: {problem}", hint="choose another --out, or free some space") from problem
    ranks.barrier()


def _refuse_another(out: Path, record: dict[str, Any], config: FinetuneConfig) -> None:
    old = json.loads((out / RECORD_FILE).read_text(encoding="utf-8"))
    hint = "choose another --out; a folder holds one fine-tuning"
    if list(old["tasks"]) != list(record["tasks"]):
        raise DataError(f"{out} holds results of {', '.join(old['tasks'])}, not of {', '.join(record['tasks'])}", hint=hint)
    if old["encoder_fingerprint"] != record["encoder_fingerprint"]:
        raise DataError(f"{out} was fine-tuned from another model ({old['model']}) than {record['model']}", hint=hint)
    differing = [
        f"{name}.{key}"
        for name in record["tasks"]
        for key in ("labels", "files")
        if json.loads(json.dumps(record["tasks"][name][key])) != old["tasks"][name][key]
    ]
    before = tomllib.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
    now = nest({key: plain(value) for key, value in flatten(config).items() if value is not None})
    differing += sorted(_differing(before, now))
    if differing:
        raise ConfigError(f"{out} holds a fine-tuning with other settings: {', '.join(differing)}", hint=hint)


def _differing(before: Any, now: Any, prefix: str = "") -> list[str]:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix.removesuffix(".")]
    keys = dict.fromkeys((*before, *now))
    return [found for key in keys for found in _differing(before.get(key), now.get(key), f"{prefix}{key}.")]
