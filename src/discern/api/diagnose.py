"""The verbs that measure, compare and explain. Results are the values that `--json` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from discern.api.use import Seed, Task
from discern.api.verb import (
    ConfigFile,
    Device,
    Listener,
    Names,
    PathLike,
    Precision,
    Preset,
    Settings,
    advanced,
    argument,
    listed,
    listening,
    model_folder,
    option,
    overrides_of,
    path_of,
    refuse_together,
    verb,
)
from discern.errors import ConfigError
from discern.storage.files import check_apart


@verb("Compare and diagnose")
def evaluate(
    model: Annotated[
        PathLike,
        argument(
            "MODEL",
            "A run, an export with all its networks ('discern export RUN --out DIR --all-networks') or a fine-tuned model. With "
            "--suite also any other export, or a Hugging Face folder with a pre-training head.",
        ),
    ],
    *,
    data: Annotated[
        PathLike | None,
        option(
            "Data set whose held-out split is used (default for a run: its own); for a fine-tuned model, a labeled file; with "
            "--suite, the folder of the suite.",
            "DATA",
        ),
    ] = None,
    task: Task = None,
    suite: Annotated[Literal["blimp"] | None, option("Evaluate on minimal pairs instead: BLiMP, read from --data.")] = None,
    sequences: Annotated[int, option("Number of held-out rows to evaluate on, evenly spaced; 0: all.", "N", min=0)] = 0,
    batch_size: Annotated[
        int | None, advanced("Rows per forward pass (default: 32). The metrics don't depend on it.", "N", min=1)
    ] = None,
    seed: Seed = None,
    limit: Annotated[
        int | None, advanced("With --suite: maximum number of pairs per paradigm (default: all).", "N", min=1)
    ] = None,
    scorer: Annotated[Names | None, advanced("Scorer for --suite, as in 'discern score'; may be repeated.", "NAME")] = None,
    device: Device = "auto",
    precision: Precision = "float32",
    progress: Listener = None,
) -> dict[str, Any]:
    """Evaluate a model on held-out text, or a fine-tuned model on a labeled file. Losses are in nats, other metrics in 0-1.

    Example: discern evaluate runs/first --data DATA

    Example: discern evaluate OUT --data reviews-dev.csv

    Example: discern evaluate runs/first --suite blimp --data blimp/data

    Returns:
        The metrics by name, and `hours`, `cost` and `energy_joules` of a run, as far as they are known; for a fine-tuned model
        `metric`, `score`, `metrics` and `loss`.

    Raises:
        ConfigError, DataError: the model or the data is not suitable.
        CheckpointError: weights are missing or damaged.
    """
    from discern.model_files.folder import open_model
    from discern.training.process import require_single_process

    listener, warn = listening(progress)
    require_single_process("an evaluation")
    folder = model_folder(model, listener)
    if suite is not None:
        from discern.inference.scoring.minimal_pairs import run_blimp

        unread = {"--sequences": sequences > 0, "--batch-size": batch_size is not None, "--task": task is not None}
        refuse_together("--suite", unread | {"--seed": seed is not None, "--precision": precision != "float32"})
        return run_blimp(folder, path_of(data), listener, warn, limit=limit, scorers=listed(scorer), device=device)
    refuse_together("an evaluation without --suite", {"--limit": limit is not None, "--scorer": scorer is not None})
    if open_model(folder, warn=warn).has_task_head:
        from discern.finetuning.evaluate import evaluate_finetuned

        refuse_together("a fine-tuned model", {"--sequences": sequences > 0, "--batch-size": batch_size is not None})
        return evaluate_finetuned(
            folder, path_of(data), task=task, seed=seed, device=device, precision=precision, progress=listener
        )
    refuse_together("a model that is not fine-tuned", {"--task": task is not None, "--seed": seed is not None})
    from discern.pretraining.evaluate import evaluate as run
    from discern.report.run_page import spent

    return spent(folder) | run(
        folder,
        data=path_of(data),
        sequences=sequences,
        batch_size=32 if batch_size is None else batch_size,
        device=device,
        precision=precision,
        progress=listener,
        warn=warn,
    )


@verb("Compare and diagnose", trains=True)
def compare(
    config: Annotated[
        PathLike, argument("COMPARE.toml", "Comparison file: the runs and the tasks to compare; see docs/howto/compare.md.")
    ],
    *,
    data: Annotated[PathLike, option("Data set for pre-training.", "DATA")],
    out: Annotated[PathLike, option("Output folder; interrupted work in it is continued.", "OUT")],
    task_data: Annotated[PathLike | None, option("Folder with one subfolder per task: RTE, CoLA, conll2000, ...", "DIR")] = None,
    preset: Preset = None,
    settings: Settings = None,
    dry_run: Annotated[bool, option("Print the runs with their steps and estimated hours; train nothing.")] = False,
    device: Device = "auto",
    progress: Listener = None,
) -> dict[str, Any]:
    """Pre-train several objectives or configurations at equal cost, fine-tune each, and compare the scores.

    The first run in the file sets the budget. You can interrupt the command with Ctrl-C at any time: run the same command again
    to continue; finished work is not repeated.

    Example: discern compare compare.toml --preset electra-small --data DATA --task-data tasks --out OUT

    Returns:
        `runs` with their costs and scores, `significance`, and `page`, the HTML page; with `dry_run`, the plan.

    Raises:
        ConfigError, DataError: the file, the settings or the data are invalid; nothing has been trained.
    """
    from discern.compare import run

    listener, _ = listening(progress)
    check_apart(Path(out), Path(data), path_of(task_data))
    result = run.compare(
        Path(config),
        data=Path(data),
        out=Path(out),
        task_data=path_of(task_data),
        preset=preset,
        overrides=overrides_of(settings),
        device=device,
        dry_run=dry_run,
        progress=listener,
    )
    return result if dry_run else {**result, "page": Path(out) / run.PAGE_FILE}


@verb("Compare and diagnose")
def report(
    run: Annotated[PathLike, argument("RUN", "A run, finished or not, or a fine-tuned model.")],
    *,
    out: Annotated[PathLike | None, option("File to write or replace (default: RUN/report.html).", "FILE.html")] = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Write a self-contained HTML page about a run or a fine-tuned model.

    For a run: curves, held-out metrics with their meaning, sizes, data and the full configuration. For a fine-tuned model:
    scores of all seeds, baselines, and the worst mistakes.

    Example: discern report runs/first --out first.html

    Returns:
        `out`, the page, and its size in `bytes`; `hours`, `cost` and `energy_joules` of a run, as far as they are known.

    Raises:
        DataError: the folder is neither a run nor a fine-tuned model.
    """
    from discern.report.run_page import report as write_report, spent

    _, warn = listening(progress)
    page = write_report(Path(run), path_of(out), warn=warn)
    return {"out": page, "bytes": page.stat().st_size, **spent(Path(run))}


@verb("Compare and diagnose", nproc=True)
def bench(
    config: ConfigFile = None,
    *,
    preset: Preset = None,
    settings: Settings = None,
    seconds: Annotated[float, option("Seconds to spend on each part; at least three steps are timed.", "N", min=0.0)] = 8.0,
    device: Annotated[
        str,
        option(
            "Device to use: auto, cpu, cuda, cuda:1, mps; meta: run nothing, and compute FLOPs and memory from the shapes alone.",
            "NAME",
        ),
    ] = "auto",
    vocab_size: Annotated[
        int | None,
        advanced("Vocabulary size (default: that of the preset, 30,522 for most and 8,192 for modern-cpu).", "N", min=16),
    ] = None,
    fill: Annotated[
        float,
        advanced(
            "Fraction of positions that hold real tokens rather than padding. Below 1, the rows have different lengths.",
            "FRACTION",
            min=0.05,
            max=1.0,
        ),
    ] = 1.0,
    check_only: bool = False,
    progress: Listener = None,
) -> dict[str, Any]:
    """Measure speed and memory of training steps and of forward passes, on made-up text. Nothing is written.

    Both are compared with the time of their matrix products alone, which no implementation can beat. On a CPU, a few steps are
    also run with one thread and, if train.precision is auto, in the other precision. OMP_NUM_THREADS sets the number of threads.
    With --device meta, nothing runs: the FLOPs and the peak memory of a training step on a GPU follow from the shapes of its
    tensors, for any configuration.

    Example: discern bench --preset electra-small --set train.sequences_per_step=32 --set train.precision=float32

    Returns:
        `tokens_per_second`, `peak_memory_bytes` and others; on ranks that don't report, an empty dictionary.

    Raises:
        ConfigError: the configuration is invalid, or the machine has no such device.
    """
    from discern.pretraining.bench import bench as run
    from discern.training.config import load_pretrain_config

    listener, _ = listening(progress)
    overrides = overrides_of(settings)
    if check_only:
        load_pretrain_config(path_of(config), preset, overrides)
        return {}
    measured = run(
        path_of(config),
        preset=preset,
        overrides=overrides,
        device=device,
        vocab_size=vocab_size,
        fill=fill,
        seconds=seconds,
        progress=listener,
    )
    return measured or {}


@verb("Compare and diagnose")
def doctor(
    folder: Annotated[
        PathLike | None,
        argument(
            "FOLDER",
            "Pre-training run to check (default: check this machine). With --files or --accept, also an export, a fine-tuned "
            "model or a data set.",
        ),
    ] = None,
    *,
    files: Annotated[bool, option("Compare every file of the folder with its checksum.")] = False,
    accept: Annotated[bool, option("Accept the files of the folder as they are, and rewrite their checksums.")] = False,
    sequences: Annotated[int, advanced("Number of rows of text to evaluate on.", "N", min=1)] = 500,
    device: Device = "auto",
    progress: Listener = None,
) -> dict[str, Any]:
    """Diagnose a run: each metric with its usual range, the likely cause and the setting to change.

    With --files: list the files of a folder that have changed since they were written; the exit code is 1 if there are any.

    Example: discern doctor runs/first

    Returns:
        `findings`, with facts about the run or the machine; or `files` and the number of `problems`; or what was `accepted`.

    Raises:
        ConfigError: options contradict each other.
        DataError: the folder is not a run.
    """
    listener, warn = listening(progress)
    refuse_together("--accept", {"--files": files and accept})
    if files or accept:
        from discern.doctor.files import accept_folder, check_folder

        if folder is None:
            raise ConfigError("no folder is given", hint=f"discern doctor {'--accept' if accept else '--files'} FOLDER")
        return accept_folder(Path(folder)) if accept else check_folder(Path(folder), listener)
    from discern.doctor.checks import examine

    return examine(path_of(folder), sequences, device, listener, warn)


@verb("Train", name="config show")
def config_show(file: ConfigFile = None, *, preset: Preset = None, settings: Settings = None) -> dict[str, Any]:
    """Print every value of a configuration and its origin. The output is itself a configuration file.

    Example: discern config show --preset electra-small --set objective.name=mlm

    Returns:
        `value` and `origin` of each key, and the inherited keys that were `dropped`.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    from discern.config.schema import flatten, nest
    from discern.training.config import load_pretrain_config

    resolved = load_pretrain_config(path_of(file), preset, overrides_of(settings))
    values = {
        key: {"value": value, "origin": resolved.origins[key], "set_by_user": key in resolved.user_set}
        for key, value in flatten(resolved.config).items()
    }
    return {**nest(values), "dropped": resolved.dropped}


@verb("Train", name="config check")
def config_check(
    file: ConfigFile = None, *, preset: Preset = None, settings: Settings = None, progress: Listener = None
) -> dict[str, Any]:
    """Check a configuration for `discern pretrain`, and report its problems.

    Example: discern config check my-run.toml

    Returns:
        `valid`, the `problems`, and the number of values by `origin`.
    """
    from collections import Counter

    from discern.config.resolve import usual_vocabulary
    from discern.pretraining.bench import synthetic_vocabulary
    from discern.pretraining.resume import meta_objective
    from discern.training.config import load_pretrain_config

    _, warn = listening(progress)
    try:
        resolved = load_pretrain_config(path_of(file), preset, overrides_of(settings))
        meta_objective(resolved.config, synthetic_vocabulary(usual_vocabulary(preset)))
    except ConfigError as error:
        # A file that cannot be read is a problem without a key.
        alone = [{"key": None, "text": error.message, "hint": error.hint}]
        problems = [vars(problem) for problem in getattr(error, "problems", ())] or alone
        return {"valid": False, "problems": problems, "message": error.message, "hint": error.hint}
    for line in resolved.without_effect:
        warn(line)
    return {"valid": True, "problems": [], "origins": dict(Counter(resolved.origins.values()).most_common())}


@verb("Train", name="config diff")
def config_diff(
    left: Annotated[str, argument("A", "Preset, TOML file, or folder of a run.")],
    right: Annotated[str, argument("B", "Preset, TOML file, or folder of a run to compare with.")],
) -> dict[str, Any]:
    """Print the values that differ between two configurations.

    Example: discern config diff electra-small electra-base

    Returns:
        `differences`: `key`, `left` and `right` of each; a side that lacks the key is left out.
    """
    from discern.config.schema import ABSENT
    from discern.training.config import differences

    rows = [
        {"key": key} | {side: value for side, value in (("left", first), ("right", second)) if value is not ABSENT}
        for key, first, second in differences(left, right)
    ]
    return {"left": left, "right": right, "differences": rows}


@verb("Train", name="config schema")
def config_schema() -> dict[str, Any]:
    """Print the JSON schema of configuration files, with which editors complete and check them. It is for pre-training only.

    Example: discern config schema > discern.schema.json

    Returns:
        The schema, draft 2020-12.
    """
    from discern.training.config import pretrain_schema

    return pretrain_schema()


@verb("Train", name="config presets")
def config_presets() -> dict[str, Any]:
    """List the presets that come with discern.

    Example: discern config presets

    Returns:
        `presets`: the summary of each by name.
    """
    from discern.config.resolve import preset_names, preset_summary

    return {"presets": {name: preset_summary(name) for name in preset_names()}}
