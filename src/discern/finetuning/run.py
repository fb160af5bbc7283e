"""Fine-tuning; read this module first. It loads the model, reads the files, trains and evaluates each seed, and summarizes.

The steps are below in this order. `settings` resolves the configuration, `task_files` and `user_files` read the examples,
`length` fits the steps to the data, `rates` searches for a learning rate, `seed` trains and evaluates one network, `folder`
guards the output folder, and `results` writes the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from discern import __version__
from discern.config.layers import preset_names
from discern.data.tokenizer import fingerprint, load_tokenizer, special_tokens
from discern.data.tokenizer.unknown import UnknownTokens
from discern.errors import ConfigError, DataError, nearest
from discern.finetuning.folder import complete_seeds, keep_precision, prepare_folder
from discern.finetuning.length import with_steps
from discern.finetuning.rates import at_rate, check_selection, search_rate
from discern.finetuning.results import measured_baselines, summarize
from discern.finetuning.seed import FinetunePlan, encoder_of_preset, first_layers, fresh_encoder, run_seed
from discern.finetuning.settings import FinetuneConfig, Recipe, given_settings, is_fitted, load_finetune_config
from discern.finetuning.submission import check_rows, check_submission, submit
from discern.finetuning.task_files import HELD_OUT, ReadingOptions, TaskData, TaskFiles, find_files, read_task
from discern.finetuning.user_files import user_task
from discern.model_files.finetuned import RESULTS_FILE, SCORES_FILE, seed_folder
from discern.model_files.folder import LoadedEncoder, open_model
from discern.model_files.hub import local_model
from discern.progress import Progress, warning_to
from discern.storage.checksums import write_json
from discern.storage.output import OutputFolder
from discern.tasks import tasks as registry
from discern.tasks.base import Definition, TextEncoder
from discern.tasks.examples import tag_counts
from discern.tasks.frames import FRAMES
from discern.tasks.glue import GLUE
from discern.tasks.tags import resemble_marks
from discern.training.distributed import Ranks, check_ranks, join_ranks
from discern.training.interrupt import stop_on_signals
from discern.training.metrics_log import check_trackers
from discern.wording import counted

# With fewer examples, the standard error of an accuracy is more than seven points.
_FEW_EVALUATED = 50
_SHOWN_DIGITS = 16  # of a hash


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
    submission: Path | None = None,
    baselines: bool = True,
    debug: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Train and evaluate every seed, and return the contents of results.json.

    Complete seeds are not trained again; an interrupted seed is continued.

    Args:
        model: a run, an export, a Hugging Face folder, or the name of a preset.
        tasks: names of the tasks with the folders of their files; empty if the settings name files of the user's own.
        config: TOML file of settings, over the recipe.
        overrides: settings as "section.key=value", over the file.
        seeds: number of seeds, counted from `train.seed`.
        untrained: start from random weights instead of the model's.
        tokenizer: tokenizer of a preset, which has none of its own.
        submission: folder of the zip for the GLUE site.
        baselines: also evaluate simple predictors.
        debug: use a hundred examples of each file.

    Raises:
        ConfigError, DataError: an argument, a setting or a file is wrong; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt, SystemExit(143): the training was interrupted and has been saved.
    """
    check_folders(model, out, tasks, submission)
    loaded = choose_encoder(model, tokenizer, untrained=untrained, warn=progress.note)
    resolved = resolve_finetuning(loaded, tasks=tasks, config=config, overrides=overrides, recipe=recipe)
    check_trackers(resolved.config.train.tracker, tensorboard=resolved.config.train.tensorboard)
    plan = prepare_finetuning(loaded, resolved, out=out, debug=debug, submits=submission is not None, progress=progress)
    with join_ranks(device) as ranks:
        check_plan(plan, seeds, ranks)
        results = train_seeds(plan, seeds, ranks, progress, baselines_folder=out if baselines else None)
        if submission is not None and ranks.writes:
            results |= submit(plan, results["best_seed"], submission, ranks.device, progress)
    return results


def check_folders(model: str, out: Path, tasks: Sequence[tuple[str, Path]], submission: Path | None) -> None:
    """Check that the output does not overwrite an input, and that a submission is requested only for tasks of GLUE.

    Raises:
        ConfigError: it would, or no task is one of GLUE.
    """
    if submission is not None:
        check_submission([name for name, _ in tasks])
    OutputFolder(out).check(Path(model), *(folder for _, folder in tasks))
    if submission is not None:
        OutputFolder(submission).check(Path(model), option="--submission")


def choose_encoder(model: str, tokenizer: Path | None, *, untrained: bool, warn: Callable[[str], None]) -> LoadedEncoder:
    """Load the encoder to fine-tune.

    Args:
        model: folder of a run, an export, a fine-tuned model (of its best seed) or a Hugging Face model, the name of one on the
            Hub, or the name of a preset.
        tokenizer: tokenizer of a preset, which has none of its own.
        untrained: use the sizes and the tokenizer of the model, but random weights.

    Raises:
        ConfigError: a preset has no tokenizer, or one is given for a model.
        DataError: the model does not exist or cannot be read.
        CheckpointError: its weights are missing or damaged.
    """
    folder = Path(model) if model in preset_names() else local_model(model, warn)
    if folder.exists():
        if tokenizer is not None:
            raise ConfigError("--tokenizer is for presets; a model has its own", hint="leave out --tokenizer")
        loaded = open_model(folder, warn=warn).encoder
        return fresh_encoder(loaded, 0) if untrained else loaded
    if model not in preset_names():
        match = nearest(model, preset_names())
        near = f"did you mean the preset '{match}'?" if match else f"presets: {', '.join(preset_names())}"
        raise DataError(
            f"there is no folder {model}, and no preset of that name", hint=f"give a run, an export or a model folder; {near}"
        )
    if tokenizer is None:
        raise ConfigError(
            f"preset {model} has no tokenizer", hint="--tokenizer PATH: a tokenizer.json, a vocab.txt or a model folder"
        )
    return encoder_of_preset(model, tokenizer, 0)


@dataclass(frozen=True)
class ResolvedFinetuning:
    """The settings of a fine-tuning with its files, before any example is encoded.

    Attributes:
        files: the files of each task.
        notes: decisions about the settings, one per line.
        user_set: dotted keys that a file or --set gave.
    """

    files: list[TaskFiles]
    config: FinetuneConfig
    notes: list[str]
    user_set: frozenset[str]


def resolve_finetuning(
    loaded: LoadedEncoder,
    *,
    tasks: Sequence[tuple[str, Path]] = (),
    config: Path | None = None,
    overrides: Sequence[str] = (),
    recipe: Recipe = "auto",
) -> ResolvedFinetuning:
    """Find the files of the tasks, and resolve and check the settings.

    Raises:
        ConfigError, DataError: a task, a file or a setting is wrong.
    """
    given = given_settings(config, overrides)
    if tasks:
        definitions: list[Definition[Any]] = [registry.load(name) for name, _ in tasks]
        files = [find_files(each, folder) for each, (_, folder) in zip(definitions, tasks, strict=True)]
    else:
        files = [user_task(given)]
        definitions = [files[0].definition]
    names = [each.name for each in definitions]
    if len(set(names)) < len(names):
        raise ConfigError(f"a task is named twice: {', '.join(names)}", hint="name each task once")
    resolved = load_finetune_config(definitions, loaded.encoder.config, given, recipe=recipe, encoder=type(loaded.encoder))
    if tasks:
        _refuse_files(resolved.config, resolved.user_set)
    own = loaded.encoder.fine_tuning.get("finetune.frame", "cls-first")
    for each in definitions:
        source = each.source.configured(resolved.config.task_config(each.name))
        if source.needs_dropout and not resolved.config.finetune.dropout:
            raise ConfigError(
                "finetune.dropout is 0, but training on single texts encodes each text twice, with different dropout",
                hint="--set finetune.dropout=0.1, or --set task.positives=crop for paragraphs of text",
            )
        each.family.check_encoder(resolved.config.task_config(each.name), loaded.encoder.config)
        if each.family.own_frame and (frame := resolved.config.finetune.frame) != own:
            raise ConfigError(
                f"finetune.frame is '{frame}', but vectors of this encoder are read in its own framing, '{own}'",
                hint="leave it out",
            )
    FRAMES[resolved.config.finetune.frame].check(loaded.encoder)
    fitted, notes = _fit_lengths(resolved.config, names, loaded, resolved.user_set)
    return ResolvedFinetuning(files, fitted, notes, resolved.user_set)


def prepare_finetuning(
    loaded: LoadedEncoder,
    resolved: ResolvedFinetuning,
    *,
    out: Path,
    progress: Progress,
    debug: bool = False,
    submits: bool = False,
) -> FinetunePlan:
    """Read, check and encode all files, and fix the length of the training. Writes nothing.

    Args:
        submits: also read the test files of GLUE, for a submission.

    Raises:
        ConfigError, DataError: a file does not fit its task, or is not the whole test file that a submission needs.
    """
    if resolved.config.finetune.layers is not None:
        loaded = first_layers(loaded, resolved.config.finetune.layers)
    tokenizer = load_tokenizer(loaded.tokenizer_path)
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    data = {}
    for files in resolved.files:
        name = files.definition.name
        options = ReadingOptions(
            resolved.config.finetune.heldout_fraction,
            resolved.config.finetune.train_rows,
            debug=debug,
            test=submits and name in GLUE,
            selects=resolved.config.finetune.rate_search or is_fitted(resolved.config.finetune.recipe, resolved.user_set),
        )
        data[name] = read_task(files, resolved.config.task_config(name), text, options)
        _note_data(data[name], text, progress)
    config, fitted = with_steps(resolved.config, data, resolved.user_set, debug=debug)
    for line in (*resolved.notes, *((fitted,) if fitted else ())):
        progress.note(line)
    plan = FinetunePlan(loaded, config, data, out, debug)
    if submits:
        check_rows(plan)
    return plan


def _refuse_passes_of_divided_weights(config: FinetuneConfig, task: str, ranks: Ranks) -> None:
    """Raise a ConfigError if the gradient of a step is computed from parts of it while no rank has the whole weights."""
    passes = getattr(config.task_config(task), "texts_per_pass", None)
    if passes and config.train.divides_weights(ranks.world_size):
        raise ConfigError(
            f"{config.task_prefix(task)}texts_per_pass is {passes}, which needs whole weights on every process, but "
            f"train.parallel is '{config.train.parallel}'",
            hint="--set train.parallel=ddp, or leave out texts_per_pass",
        )


def check_plan(plan: FinetunePlan, seeds: int, ranks: Ranks) -> None:
    """Check that the settings work on several ranks, and that all are about to train the same model on the same examples.

    Raises:
        ConfigError, DataError: they do not, or a rank differs; the message names it. Nothing has been written.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}, expected at least 1", hint="3 is usual for a table of results")
    train = plan.config.train
    check_selection(plan)
    if ranks.world_size == 1:
        return
    if train.sequences_per_step % ranks.world_size:
        raise ConfigError(
            f"train.sequences_per_step {train.sequences_per_step} cannot be divided evenly among {ranks.world_size} processes",
            hint=f"--set train.sequences_per_step={-(-train.sequences_per_step // ranks.world_size) * ranks.world_size}",
        )
    for name in plan.data:
        _refuse_passes_of_divided_weights(plan.config, name, ranks)
    examples = {
        f"examples of {name} ({split})": digest[:_SHOWN_DIGITS]
        for name, data in plan.data.items()
        for split, digest in data.digests.items()
    }
    check_ranks(
        ranks,
        plan.out,
        plan.config,
        model=plan.loaded.source_fingerprint[:_SHOWN_DIGITS],
        tokenizer=fingerprint(load_tokenizer(plan.loaded.tokenizer_path))[:_SHOWN_DIGITS],
        seeds=str(seeds),
        debug=str(plan.debug),
        version=__version__,
        **examples,
    )


def train_seeds(
    plan: FinetunePlan, seeds: int, ranks: Ranks, progress: Progress, *, baselines_folder: Path | None = None
) -> dict[str, Any]:
    """Train and evaluate the seeds that are not complete; return the contents of results.json, over all complete seeds.

    Args:
        baselines_folder: folder in which measured baselines are kept; None: measure no baselines.
    """
    with stop_on_signals() as stop, OutputFolder(plan.out) as folder:
        prepare_folder(plan, ranks, folder)
        plan = replace(plan, precision=keep_precision(plan, ranks))
        baselines = {}
        if baselines_folder is not None and ranks.writes:
            baselines = measured_baselines(plan.data, baselines_folder, progress)
        # With many tasks, baselines take minutes, which is longer than ranks wait for each other within a step.
        ranks.barrier()
        search = None
        if plan.config.finetune.rate_search:
            search = search_rate(plan, ranks, progress, stop)
            plan = replace(plan, config=at_rate(plan.config, search["learning_rate"]))
        first = plan.config.train.seed
        asked = range(first, first + seeds)
        for seed in asked:
            if not (seed_folder(plan.out, seed) / SCORES_FILE).is_file():
                run_seed(plan, seed, ranks, progress, stop)
            ranks.barrier()  # the others wait for the scores that rank 0 writes
        earlier = sorted(complete_seeds(plan.out).difference(asked))
        if earlier:
            seeds_of, them = ("seed", "it") if len(earlier) == 1 else ("seeds", "them")
            progress.note(f"{plan.out} already holds {seeds_of} {', '.join(map(str, earlier))}; the results include {them}")
        results = summarize(plan.out, plan.data, plan.config, plan.loaded.description, sorted({*asked, *earlier}), baselines)
        results |= {"debug": plan.debug, **({"rate_search": search} if search else {})}
        if ranks.writes:
            write_json(plan.out / RESULTS_FILE, results)
    return results


def _refuse_files(config: FinetuneConfig, user_set: frozenset[str]) -> None:
    """Raise a ConfigError if the settings name files of the user's own, which a named task would ignore."""
    given = [f"files.{key}" for key, value in config.files if value is not None and f"files.{key}" in user_set]
    if given:
        raise ConfigError(
            f"a named task has its own files and columns, but the settings contain {', '.join(given)}",
            hint="leave out --task, or remove [files] from the settings file",
        )


def _note_data(data: TaskData, text: TextEncoder, progress: Progress) -> None:
    """Report the notes of the files, unknown tokens, a lack of examples to evaluate on, and the labels."""
    name = data.task.name
    for line in data.notes:
        progress.note(f"{name}: {line}")
    unknown = UnknownTokens(text.tokenizer)
    for split in (data.train, *data.evaluated.values(), *data.unlabeled.values()):
        unknown.add_ids(split.features.input_ids.values)
    unknown.report(progress.note, warning_to(progress), of=name)
    evaluated = len(data.evaluated[data.dev_name].examples)
    if evaluated < _FEW_EVALUATED:
        ways = ["hold out more with --set finetune.heldout_fraction=0.3"] if data.dev_name == HELD_OUT else []
        if name not in registry.names():
            ways.insert(0, "evaluate on more examples with --dev FILE")
        warning_to(progress)(
            f"{name}: the scores come from {counted(evaluated, 'example')} ({data.dev_name}), so they are "
            + "; ".join(["unreliable", *([", or ".join(ways)] if ways else [])])
        )
    labels = data.task.labels.names
    if data.task.labels.kind == "tags" and data.task.labels.scheme == "none":
        tags = list(tag_counts(data.train.examples))
        if resemble_marks(tags):
            warning_to(progress)(
                f"{name}: tags such as {', '.join(tags[:5])} mark no spans, so the score is the accuracy over words, not the F1 "
                "of spans. For F1, write B-TYPE for the first word of a span, I-TYPE for its other words, and O (the letter) "
                "outside of spans"
            )
    if labels:
        progress.note(f"{name}: {counted(len(labels), 'label')}: {', '.join(labels[:12])}{', ...' if len(labels) > 12 else ''}")


def _fit_lengths(
    config: FinetuneConfig, names: Sequence[str], loaded: LoadedEncoder, user_set: frozenset[str]
) -> tuple[FinetuneConfig, list[str]]:
    """Lower default lengths to the positions that were pre-trained; check lengths that the user set against the model's."""
    notes = []
    several = len(names) > 1
    updates = {}
    sizes = loaded.encoder.config
    limited = loaded.encoder.limits_positions(lambda name: getattr(sizes, name))
    for name in names:
        task, key = config.task_config(name), f"tasks.{name}.sequence_length" if several else "task.sequence_length"
        length, positions = task.sequence_length, sizes.max_positions
        if length > positions and key in user_set and limited:
            raise ConfigError(f"{key} is {length}, but the model has {positions} positions", hint=f"--set {key}={positions}")
        if length > loaded.max_length and key not in user_set:
            notes.append(f"{name}: sequence length {loaded.max_length}, which the model was trained on, instead of {length}")
            task = task.model_copy(update={"sequence_length": loaded.max_length})
        elif length > loaded.max_length:
            notes.append(f"{name}: positions from {loaded.max_length} on were not trained in pre-training")
        updates[name] = task
    if several:
        section = getattr(config, "tasks").model_copy(update=updates)  # noqa: B009
        return config.model_copy(update={"tasks": section}), notes
    return config.model_copy(update={"task": updates[names[0]]}), notes
