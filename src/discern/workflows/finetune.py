"""Fine-tuning: read and check the files, train one network a seed, judge each, and sum up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from discern.artifacts.guard import check_folder
from discern.artifacts.locks import Claim
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError
from discern.progress import Progress, warning_to
from discern.tasks import tasks as registry
from discern.tasks.base import Definition, TextEncoder
from discern.tasks.frames import FRAMES
from discern.tasks.readers.glue import GLUE
from discern.training.interrupt import stop_on_signals
from discern.training.parallel import Ranks, join_ranks
from discern.workflows.baselines import baselines_of
from discern.workflows.encoders import LoadedEncoder
from discern.workflows.finetune_folder import complete_seeds, keep_precision, prepare_folder
from discern.workflows.finetune_length import with_steps
from discern.workflows.finetune_seed import Plan, run_seed
from discern.workflows.finetune_settings import FinetuneConfig, Recipe, is_fitted, load_finetune_config
from discern.workflows.finetuned import RESULTS_FILE, SCORES_FILE, seed_folder, write_json
from discern.workflows.model_choice import choose_encoder
from discern.workflows.own_files import own_definition
from discern.workflows.rate_search import at_rate, search_rate
from discern.workflows.results import summarise
from discern.workflows.submission import check_rows, check_submission, submit
from discern.workflows.task_files import ReadingOptions, TaskData, TaskFiles, find_files, read_task

_FEW_JUDGED = 50
"""With fewer examples, the standard error of an accuracy is more than seven points."""


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
        baselines: measure simple predictors beside.
    """

    model: str
    out: Path
    tasks: Sequence[tuple[str, Path]] = ()
    config: Path | None = None
    overrides: Sequence[str] = ()
    recipe: Recipe = "auto"
    seeds: int = 1
    untrained: bool = False
    tokenizer: Path | None = None
    submission: Path | None = None
    debug: bool = False
    device: str = "auto"
    baselines: bool = True


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
    with join_ranks(request.device) as ranks:
        results = train_seeds(request, plan, ranks, progress)
        if request.submission is not None and ranks.writes:
            results |= submit(plan, results["best_seed"], request.submission, ranks.device, progress)
    return results


@dataclass(frozen=True)
class Settled:
    """What a fine-tuning will be, before its examples are read.

    Attributes:
        files: a task each.
        notes: what was decided about the settings, a line each.
        user_set: dotted keys that a file or --set gave.
    """

    files: list[TaskFiles]
    config: FinetuneConfig
    notes: list[str]
    user_set: frozenset[str]


def settle(request: FinetuneRequest, loaded: LoadedEncoder) -> Settled:
    """Find the files, and resolve and check the settings.

    Raises:
        ConfigError, DataError: something doesn't fit.
    """
    if request.tasks:
        definitions: list[Definition[Any]] = [registry.load(name) for name, _ in request.tasks]
        files = [find_files(each, folder) for each, (_, folder) in zip(definitions, request.tasks, strict=True)]
    else:
        first = own_definition(request.config, request.overrides)
        definitions, files = [first.definition], [first]
    names = [each.name for each in definitions]
    if len(set(names)) < len(names):
        raise ConfigError(f"a task is named twice: {', '.join(names)}", hint="name each task once")
    width, kind = loaded.encoder.config.hidden_size, type(loaded.encoder)
    resolved = load_finetune_config(definitions, width, request.config, request.overrides, request.recipe, kind)
    if request.tasks:
        _refuse_files(resolved.config, resolved.user_set)
    FRAMES[resolved.config.finetune.frame].check(loaded.encoder)
    config, notes = _fit_lengths(resolved.config, names, loaded, resolved.user_set)
    return Settled(files, config, notes, resolved.user_set)


def prepare_finetuning(request: FinetuneRequest, progress: Progress, loaded: LoadedEncoder | None = None) -> Plan:
    """Load the model, read, check and encode all files, resolve the settings. Writes nothing but cached rows.

    Args:
        loaded: the model, where it has been loaded already.
    """
    check_folder("--out", request.out, Path(request.model), *(folder for _, folder in request.tasks))
    if request.submission is not None:
        check_folder("--submission", request.submission, Path(request.model))
    if loaded is None:
        loaded = choose_encoder(request.model, request.tokenizer, untrained=request.untrained, warn=progress.note)
    settled = settle(request, loaded)
    config = settled.config
    tokenizer = load_tokenizer(loaded.tokenizer_path)
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    data = {each.definition.name: _read(each, request, settled, text, progress) for each in settled.files}
    config, fitted = with_steps(config, data, settled.user_set, debug=request.debug)
    for line in (*settled.notes, *((fitted,) if fitted else ())):
        progress.note(line)
    plan = Plan(loaded, config, data, request.out, request.debug)
    if request.submission is not None:
        check_rows(plan)
    return plan


def train_seeds(
    request: FinetuneRequest, plan: Plan, ranks: Ranks, progress: Progress, measured_in: Path | None = None
) -> dict[str, Any]:
    """Train and judge the seeds that are not complete; gives what results.json holds, of all that are complete then.

    Args:
        measured_in: where baselines are kept; None: in the folder of the fine-tuning.
    """
    with stop_on_signals() as stop, Claim() as claim:
        prepare_folder(plan, ranks, claim)
        plan = replace(plan, precision=keep_precision(plan, ranks))
        baselines = {}
        if request.baselines and ranks.writes:
            baselines = baselines_of(plan.data, measured_in or plan.out, progress)
        ranks.barrier()  # minutes with many tasks, and an exchange in the middle of a step does not wait as long
        rates = None
        if plan.config.finetune.rate_search:
            rates = search_rate(plan, ranks, progress, stop)
            plan = replace(plan, config=at_rate(plan.config, rates["learning_rate"]))
        first = plan.config.train.seed
        asked = range(first, first + request.seeds)
        for seed in asked:
            if not (seed_folder(plan.out, seed) / SCORES_FILE).is_file():
                run_seed(plan, seed, ranks, progress, stop)
            ranks.barrier()  # the others wait for the scores that the first writes
        further = sorted(complete_seeds(plan.out).difference(asked))
        if further:
            progress.note(f"{plan.out} has seed {', '.join(map(str, further))} from before: in the results with those asked for")
        seeds = sorted({*asked, *further})
        results = summarise(plan.out, plan.data, plan.config, plan.loaded.description, seeds, baselines)
        results |= {"debug": plan.debug, **({"rate_search": rates} if rates else {})}
        if ranks.writes:
            write_json(plan.out / RESULTS_FILE, results)
    return results


def _refuse_files(config: FinetuneConfig, user_set: frozenset[str]) -> None:
    """Files of one's own beside a named task would be read by nobody."""
    given = [f"files.{key}" for key, value in config.files if value is not None and f"files.{key}" in user_set]
    if given:
        raise ConfigError(
            f"a named task brings its own files and columns, and the settings give {', '.join(given)}",
            hint="leave out --task, or [files] in the file of settings",
        )


def _read(files: TaskFiles, request: FinetuneRequest, settled: Settled, text: TextEncoder, progress: Progress) -> TaskData:
    name, config = files.definition.name, settled.config
    submits = request.submission is not None and name in GLUE
    selects = config.finetune.rate_search or is_fitted(config.finetune.recipe, settled.user_set)
    options = ReadingOptions(config.finetune.heldout_fraction, config.finetune.train_rows, request.debug, submits, selects)
    data = read_task(files, config.task_config(name), text, options)
    for line in data.notes:
        progress.note(f"{name}: {line}")
    unknown = UnknownTokens(text.tokenizer)
    for split in (data.train, *data.judged.values(), *data.unlabelled.values()):
        unknown.add_ids(split.features.input_ids.values)
    unknown.report(progress.note, warning_to(progress), of=name)
    judged = len(data.judged[data.dev_name].examples)
    if judged < _FEW_JUDGED:
        warning_to(progress)(
            f"{name}: the scores come from {judged:,} example{'s' if judged > 1 else ''} ({data.dev_name}), so they are "
            "unreliable; evaluate on more examples with --dev FILE, or hold out more with --set finetune.heldout_fraction=0.3"
        )
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
        if length > there and key in user_set and loaded.encoder.limits_positions:
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
