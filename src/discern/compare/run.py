"""A comparison: plan every run, pre-train and fine-tune each seed, and publish the summary. Read this module first.

All runs are pre-trained on the same text at equal cost and evaluated on the same tasks.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from discern.compare.plan import ComparisonPlan, plan_comparison
from discern.compare.results import (
    Unit,
    check_results,
    curve,
    hours_of,
    reference_of,
    units,
    waits_for,
    why_left_out,
)
from discern.compare.settings import finetune_overrides
from discern.compare.summary import summarize
from discern.compare.tasks import TaskFolder
from discern.errors import ConfigError, DataError, DiscernError, NumericsError
from discern.finetuning.run import finetune
from discern.model_files.export import export
from discern.model_files.finetuned import MODEL_FILE
from discern.model_files.run import CHECKPOINTS, CONFIG_FILE, arithmetic, build_objective, make_record, read_record, vocabulary_of
from discern.pretraining.bench import processor_name
from discern.pretraining.run import fill_folder, pretrain
from discern.pretraining.warm_start import start_generator
from discern.progress import Progress
from discern.report.comparison import comparison_page
from discern.report.page import render_page
from discern.storage.checksums import remove_recorded, write_json
from discern.storage.files import alone_in, held, sync_folder, write_text
from discern.storage.output import OutputFolder
from discern.training import checkpoint
from discern.training.distributed import Ranks, choose_device
from discern.training.flops import run_flops
from discern.training.metrics_log import held_out_metrics, read_metrics
from discern.training.precision import shared_precision
from discern.training.pretrain_config import read_written_config
from discern.training.rank_environment import require_single_process
from discern.training.schedule import step_sizes

COMPARISON_FILE, PAGE_FILE = "comparison.json", "comparison.html"
_POLL_SECONDS = 5.0  # between checks of a run that another process works on


def compare(
    config: Path,
    *,
    data: Path,
    out: Path,
    progress: Progress,
    task_data: Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
) -> dict[str, Any]:
    """Pre-train and fine-tune everything that is not finished yet, and return the contents of comparison.json.

    Several processes may work in the same folder, one per GPU for instance: each takes a run that no other is working on.
    However the work ends, the page shows what is finished.

    Args:
        config: TOML file of the comparison.
        data: data set for pre-training.
        task_data: folder that holds the folders of the tasks.
        preset: preset of all runs that name none; None: the preset that the file names.
        overrides: "section.key=value" for all runs.

    Raises:
        ConfigError, DataError: settings are not compatible, or the folder holds another comparison; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt, SystemExit(143): the comparison was interrupted, and has been saved.
    """
    require_single_process("a comparison")
    plan = plan_comparison(config, data=data, out=out, task_data=task_data, preset=preset, overrides=overrides, device=device)
    every = units(plan)
    check_results(plan, every)
    for line in plan.notes:
        progress.note(line)
    _claim(out)
    try:
        _work(plan, every, progress)
    except (KeyboardInterrupt, SystemExit, DiscernError):
        with suppress(DiscernError):  # report the error that ended the work, not this one
            publish(plan, every)
        raise
    return publish(plan, every)


def _work(plan: ComparisonPlan, every: list[Unit], progress: Progress) -> None:
    """Take one unit after another; those that wait for a reference run of another process come last."""
    waiting: list[tuple[Unit, Unit, str]] = []
    for number, unit in enumerate(every, 1):
        label = f"{number} of {len(every)}: {unit.label}"
        reference, reason = waits_for(plan, unit), why_left_out(plan, unit)
        if reason is not None:
            progress.note(reason)
        if reference is not None:
            progress.note(f"{label}: waiting for {reference.label}, which another process is running")
            waiting.append((unit, reference, label))
        elif not _take(plan, unit, label, progress):
            progress.note(f"{label}: in progress in another process")
        if number % len(plan.runs) == 0 and number < len(every):
            publish(plan, every)  # one seed of all runs is done: a first result
    for unit, reference, label in waiting:
        # If the other process has been stopped, this one trains the reference.
        while waits_for(plan, unit) is not None and not _take(plan, reference, reference.label, progress):
            time.sleep(_POLL_SECONDS)
        reason = why_left_out(plan, unit)
        if reason is not None:
            progress.note(reason)
        elif not _take(plan, unit, label, progress):
            progress.note(f"{label}: in progress in another process")


def publish(plan: ComparisonPlan, every: list[Unit]) -> dict[str, Any]:
    """Write comparison.json and the page from the existing result files."""
    out = plan.out
    try:
        with alone_in(out):  # if several processes end together, the last one to write has also read last
            found = summarize(plan, every)
            write_json(out / COMPARISON_FILE, found)
            write_text(out / PAGE_FILE, render_page(comparison_page(found)))
    except OSError as problem:
        raise DataError(
            f"cannot write to {out}: {problem.strerror or problem}", hint="free some space, then run the same command"
        ) from problem
    return found


def _claim(out: Path) -> None:
    """Create the folder; refuse one that contains something else, unless a comparison has begun in it."""
    folder = OutputFolder(out)
    if not ((out / "results").is_dir() or (out / COMPARISON_FILE).is_file()):
        folder.refuse_others({"results", "work", COMPARISON_FILE, PAGE_FILE}, "comparison")
    folder.make(shared=True)


def _take(plan: ComparisonPlan, unit: Unit, label: str, progress: Progress) -> bool:
    """Finish a unit and delete what is not to be kept; False if another process works on it."""
    if unit.is_finished(plan) and not unit.work.is_dir():
        return True
    with held(unit.lock) as mine:
        if mine:
            if not unit.is_finished(plan):
                progress.note(label)
                _do(plan, unit, progress)
            _tidy(plan, unit)
        return mine


def _do(plan: ComparisonPlan, unit: Unit, progress: Progress) -> None:
    """Do what is left of a unit: pre-train it, and fine-tune it on every task."""
    unit.begin()
    done = unit.pretraining()
    if done is None:
        done = _pretrained(plan, unit, progress) if unit.run.trained else _at_step_zero(plan, unit, progress)
        unit.end(done)
    if "failure" in done:
        progress.note(f"{unit.label} failed: {done['failure']}; {unit.retry}")
        return
    pending = [task for task in plan.tasks if not unit.is_finetuned(plan, task)]
    model = _model(unit, progress) if pending else unit.encoder
    for task in pending:
        progress.note(f"{unit.label}: {task.name}")
        unit.keep_scores(plan, task, _finetune(plan, unit, task, model, progress))


def _pretrained(plan: ComparisonPlan, unit: Unit, progress: Progress) -> dict[str, Any]:
    """Pre-train to the end; divergence is a result too."""
    run, folder = unit.run, unit.checkpoints_of
    hours = hours_of(plan, unit)
    assert hours is not None or reference_of(plan, unit) is None, "the run would have no limit"
    failure = None
    try:
        pretrain(
            run.file,
            data=plan.data.folder,
            out=folder,
            preset=run.preset,
            overrides=run.overrides_of(unit.seed, hours),
            device=plan.device,
            same_precision_as=_like(plan, unit),
            progress=progress,
        )
    except NumericsError as problem:
        failure = problem.message
    records = [record for record in read_metrics(folder) if isinstance(record.get("step"), int)]
    last = records[-1] if records else {}
    config, step = read_written_config(folder / CONFIG_FILE), int(last.get("step", 0))
    with torch.device("meta"):
        objective = build_objective(config, vocabulary_of(plan.data))
    sizes = step_sizes(config.train, config.data)
    spent = run_flops(objective, config.train.max_steps, sizes).after(step)
    return {
        **({} if failure is None else {"failure": failure}),
        **_made_of(plan, unit, read_record(folder)),
        **({} if hours is None else {"max_hours": hours}),
        "steps": step,
        "tokens": last.get("tokens", 0),
        "positions": sizes.positions_before(step),
        "seconds": last.get("seconds", 0.0),
        "flops": spent.executed,
        "flops_paper_convention": spent.paper,
        "held_out": held_out_metrics(last),
        "curve": curve(records),
    }


def _like(plan: ComparisonPlan, unit: Unit) -> dict[str, Any] | None:
    """The machine of another finished seed of the run, so that all seeds are trained in its precision."""
    for other in units(plan):
        done = other.pretraining() if other.run is unit.run else None
        if done is not None and done.get("machine", {}).get("processor") == processor_name():
            machine: dict[str, Any] = done["machine"]
            return machine
    return None


def _at_step_zero(plan: ComparisonPlan, unit: Unit, progress: Progress) -> dict[str, Any]:
    """Write a run folder with the weights that the reference starts from."""
    folder = unit.checkpoints_of
    config = unit.run.config.model_copy(update={"train": unit.run.config.train.model_copy(update={"seed": unit.seed})})
    objective = build_objective(config, vocabulary_of(plan.data))
    objective.initialize(unit.seed)
    begin = config.objective.generator_source
    if begin is not None:
        start_generator(objective, Path(begin), plan.data.tokenizer_fingerprint, progress.note)
    device = choose_device(plan.device)
    tokens = config.train.sequences_per_step * config.data.sequence_length
    precision = shared_precision(config.train.precision, Ranks(0, 1, device), config.model, tokens, _like(plan, unit))
    record = make_record(plan.data, objective, arithmetic(device, precision.name)) | precision.record()
    folder.mkdir(parents=True, exist_ok=True)
    fill_folder(folder, config, record, plan.data)
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "updates": 0}
    contents = checkpoint.Contents(checkpoint.model_tensors(objective), {}, objective.carry_state(), state)
    checkpoint.save(folder / CHECKPOINTS, contents, 2)
    nothing = dict.fromkeys(("steps", "tokens", "positions", "flops", "flops_paper_convention"), 0)
    return {**_made_of(plan, unit, record), **nothing, "seconds": 0.0, "held_out": {}, "curve": []}


def _made_of(plan: ComparisonPlan, unit: Unit, record: dict[str, Any]) -> dict[str, Any]:
    """Data, budget, sizes, machine and versions, without paths and host names."""
    return {
        "equal": plan.config.equal,
        "budget": unit.run.spec.budget,
        "data_fingerprint": plan.data.fingerprint,
        "network": unit.run.network,
        "parameters": record["parameters"],
        "statistics": record["statistics"],
        "vocab_size": record["vocab_size"],
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), **record["arithmetic"], **_accelerator()},
        "versions": {"discern": record["discern"], **record["versions"]},
    }


def _accelerator() -> dict[str, str]:
    return {"accelerator": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _model(unit: Unit, progress: Progress) -> Path:
    """The folder to fine-tune: the exported network, or the run itself if the network has no equivalent in transformers."""
    if not unit.encoder.is_dir():
        try:
            export(unit.checkpoints_of, out=unit.encoder, network=unit.run.spec.network, progress=progress, warn=progress.note)
        except ConfigError:
            if unit.run.spec.network is not None:
                raise
            return unit.checkpoints_of
    return unit.encoder


def _finetune(plan: ComparisonPlan, unit: Unit, task: TaskFolder, model: Path, progress: Progress) -> dict[str, Any]:
    spec = plan.config.finetune
    return finetune(
        str(model),
        out=unit.finetuning(task),
        progress=progress,
        tasks=[(task.name, task.folder)],
        overrides=finetune_overrides(plan.config, task.name),
        recipe=spec.recipe,
        seeds=spec.seeds,
        device=plan.device,
        baselines=False,
    )


def _tidy(plan: ComparisonPlan, unit: Unit) -> None:
    """Delete what is not to be kept of a finished unit."""
    if plan.config.keep == "all" or not unit.work.is_dir():
        return
    if plan.config.keep == "results":
        shutil.rmtree(unit.work)
        return
    for weights in unit.work.glob(f"tasks/*/seed-*/{MODEL_FILE}"):
        remove_recorded([weights])
    if unit.encoder.is_dir():
        shutil.rmtree(unit.checkpoints_of, ignore_errors=True)
    sync_folder(unit.work)
