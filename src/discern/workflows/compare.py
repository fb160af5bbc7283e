"""Objectives or configurations side by side: each pre-trained on the same text at equal cost, each judged by the same tasks."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.files import sync_folder, write_text
from discern.artifacts.locks import alone_in, held
from discern.config.tree import to_toml
from discern.data.manifest import TOKENIZER_NAME
from discern.errors import ConfigError, DataError, DiscernError, NumericsError
from discern.progress import Progress
from discern.report.comparison import comparison_page
from discern.report.page import render_page
from discern.training import checkpoint
from discern.training.flops import run_flops
from discern.training.journal import held_out_figures, read_metrics
from discern.training.parallel import Ranks, choose_device
from discern.training.place import refuse_ranks
from discern.training.precision import settle_precision, shape_of
from discern.workflows.bench import processor_name
from discern.workflows.compare_plan import ComparePlan, CompareRequest, plan_comparison
from discern.workflows.compare_results import (
    Unit,
    check_results,
    curve,
    hours_of,
    reference_of,
    units,
    waits_for,
    why_left_out,
)
from discern.workflows.compare_settings import as_overrides
from discern.workflows.compare_summary import summarise
from discern.workflows.compare_tasks import TaskFolder
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.export import ExportRequest, export
from discern.workflows.finetune import FinetuneRequest, finetune
from discern.workflows.finetuned import MODEL_FILE, write_json
from discern.workflows.generator_start import start_generator
from discern.workflows.pretrain import pretrain
from discern.workflows.runs import (
    CHECKPOINTS,
    CONFIG_FILE,
    RECORD_FILE,
    TOKENIZER_FILE,
    arithmetic,
    build_objective,
    make_record,
    read_record,
    vocabulary_of,
)

COMPARISON_FILE, PAGE_FILE = "comparison.json", "comparison.html"
_LOOK_AGAIN = 5.0  # seconds between looks at what another process works on


def compare(request: CompareRequest, progress: Progress) -> dict[str, Any]:
    """Do all that isn't done; gives what comparison.json holds.

    Several processes may do so at once in the same folder, one for each GPU for instance: each takes what none works on.

    Raises:
        ConfigError, DataError: something doesn't fit, or the folder holds another comparison; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint damaged.
        KeyboardInterrupt, SystemExit(143): it was asked to stop, and has saved.

    Whatever ends the work, the page shows what is finished.
    """
    refuse_ranks("a comparison")
    plan = plan_comparison(request)
    every = units(plan)
    check_results(plan, every)
    for line in plan.notes:
        progress.note(line)
    _claim(request.out)
    try:
        _work(plan, every, progress)
    except (KeyboardInterrupt, SystemExit, DiscernError):
        with suppress(DiscernError):  # what ended the work is what the user must know
            publish(plan, every)
        raise
    return publish(plan, every)


def _work(plan: ComparePlan, every: list[Unit], progress: Progress) -> None:
    """Take one unit after another; what needs the time of a reference that another process makes, after all others."""
    waiting: list[tuple[Unit, Unit, str]] = []
    for number, unit in enumerate(every, 1):
        label = f"{number} of {len(every)}: {unit.label}"
        reference, reason = waits_for(plan, unit), why_left_out(plan, unit)
        if reason is not None:
            progress.note(reason)
        if reference is not None:
            progress.note(f"{label}: waits for {reference.label}, which another process works on")
            waiting.append((unit, reference, label))
        elif not _take(plan, unit, label, progress):
            progress.note(f"{label}: another process is at it")
        if number % len(plan.runs) == 0 and number < len(every):
            publish(plan, every)  # a whole round: something to look at while the rest goes on
    for unit, reference, label in waiting:
        # The other process may have been stopped: then this one makes the reference.
        while waits_for(plan, unit) is not None and not _take(plan, reference, reference.label, progress):
            time.sleep(_LOOK_AGAIN)
        reason = why_left_out(plan, unit)
        if reason is not None:
            progress.note(reason)
        elif not _take(plan, unit, label, progress):
            progress.note(f"{label}: another process is at it")


def publish(plan: ComparePlan, every: list[Unit]) -> dict[str, Any]:
    """Write comparison.json and the page from the result files that there are."""
    out = plan.request.out
    try:
        with alone_in(out):  # processes that end together must not write at once, nor the one that read earlier last
            found = summarise(plan, every)
            write_json(out / COMPARISON_FILE, found)
            write_text(out / PAGE_FILE, render_page(comparison_page(found)))
    except OSError as problem:
        raise DataError(f"cannot write to {out}: {problem}", hint="free some space, then run the same command") from problem
    return found


def _claim(out: Path) -> None:
    """Make the folder; refuse one that holds something else."""
    own = {"results", "work", COMPARISON_FILE, PAGE_FILE}
    if out.exists() and (
        not out.is_dir() or {path.name.removeprefix(".").removesuffix(".partial") for path in out.iterdir()} - own
    ):
        raise DataError(f"{out} is not empty and holds no comparison", hint="choose another --out, or empty the folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(f"cannot write to {out}: {problem}", hint="choose another --out") from problem


def _take(plan: ComparePlan, unit: Unit, label: str, progress: Progress) -> bool:
    """Finish a unit and clear up behind it; False where another process is at it."""
    if unit.is_finished(plan) and not unit.work.is_dir():
        return True
    with held(unit.lock) as mine:
        if mine:
            if not unit.is_finished(plan):
                progress.note(label)
                _do(plan, unit, progress)
            _tidy(plan, unit)
        return mine


def _do(plan: ComparePlan, unit: Unit, progress: Progress) -> None:
    """Pre-train a unit and judge it on every task, as far as that isn't done."""
    unit.begin()
    done = unit.pretraining()
    if done is None:
        done = _pretrained(plan, unit, progress) if unit.run.trained else _at_step_zero(plan, unit, progress)
        unit.end(done)
    if "failure" in done:
        progress.note(f"{unit.label} failed: {done['failure']}; {unit.retry}")
        return
    pending = [task for task in plan.tasks if not unit.is_judged(plan, task)]
    model = _model(unit, progress) if pending else unit.encoder
    for task in pending:
        progress.note(f"{unit.label}: {task.name}")
        unit.keep_scores(plan, task, finetune(_finetuning(plan, unit, task, model), progress))


def _pretrained(plan: ComparePlan, unit: Unit, progress: Progress) -> dict[str, Any]:
    """Run the pre-training to its end; one that diverges is a result too."""
    run, folder = unit.run, unit.checkpoints_of
    hours = hours_of(plan, unit)
    assert hours is not None or reference_of(plan, unit) is None, "nothing would end the run"
    request = replace(run.request(unit.seed, folder, plan.request.data, plan.request.device, hours), like=_like(plan, unit))
    failure = None
    try:
        pretrain(request, progress)
    except NumericsError as problem:
        failure = problem.message
    records = [record for record in read_metrics(folder) if isinstance(record.get("step"), int)]
    last = records[-1] if records else {}
    config, step = load_pretrain_config(folder / CONFIG_FILE, None).config, int(last.get("step", 0))
    with torch.device("meta"):
        objective = build_objective(config, vocabulary_of(plan.data))
    train, length = config.train, config.data.sequence_length
    spent = run_flops(objective, train.max_steps, length, train.sequences_per_step).after(step)
    return {
        **({} if failure is None else {"failure": failure}),
        **_made_of(plan, unit, read_record(folder)),
        **({} if hours is None else {"max_hours": hours}),
        "steps": step,
        "tokens": last.get("tokens", 0),
        "positions": step * length * train.sequences_per_step,
        "seconds": last.get("seconds", 0.0),
        "flops": spent.executed,
        "flops_paper_convention": spent.paper,
        "held_out": held_out_figures(last),
        "curve": curve(records),
    }


def _like(plan: ComparePlan, unit: Unit) -> dict[str, Any] | None:
    """Machine of another seed of the same run that is done: seeds should not differ in their precision by chance."""
    for other in units(plan):
        done = other.pretraining() if other.run is unit.run else None
        if done is not None and done.get("machine", {}).get("processor") == processor_name():
            machine: dict[str, Any] = done["machine"]
            return machine
    return None


def _at_step_zero(plan: ComparePlan, unit: Unit, progress: Progress) -> dict[str, Any]:
    """A run's folder with the weights that the reference started from."""
    folder = unit.checkpoints_of
    config = unit.run.config.model_copy(update={"train": unit.run.config.train.model_copy(update={"seed": unit.seed})})
    objective = build_objective(config, vocabulary_of(plan.data))
    objective.initialise(unit.seed)
    begin = getattr(config.objective, "generator_checkpoint", None)
    if begin is not None:
        start_generator(objective, Path(begin), plan.data.tokenizer_fingerprint, progress.note)
    device = choose_device(plan.request.device)
    shape = shape_of(config.model, config.train.sequences_per_step * config.data.sequence_length)
    precision = settle_precision(config.train.precision, Ranks(0, 1, device), shape, _like(plan, unit))
    record = make_record(plan.data, objective, arithmetic(device, precision.name)) | precision.record()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = (plan.data.folder / TOKENIZER_NAME).read_text(encoding="utf-8")
    write_text(folder / TOKENIZER_FILE, tokenizer)
    write_text(folder / CONFIG_FILE, to_toml(config))
    write_json(folder / RECORD_FILE, record)
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "updates": 0}
    contents = checkpoint.Contents(checkpoint.model_tensors(objective), {}, objective.carry_state(), state)
    checkpoint.save(folder / CHECKPOINTS, contents, 2)
    nothing = dict.fromkeys(("steps", "tokens", "positions", "flops", "flops_paper_convention"), 0)
    return {**_made_of(plan, unit, record), **nothing, "seconds": 0.0, "held_out": {}, "curve": []}


def _made_of(plan: ComparePlan, unit: Unit, record: dict[str, Any]) -> dict[str, Any]:
    """Data, share of the budget, sizes, machine and versions; no path and no name of a machine."""
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
    """What is fine-tuned: the exported network; the run itself where the network has no form in transformers."""
    if not unit.encoder.is_dir():
        try:
            export(ExportRequest(unit.checkpoints_of, unit.encoder, unit.run.spec.network), progress, progress.note)
        except ConfigError:
            if unit.run.spec.network is not None:
                raise
            return unit.checkpoints_of
    return unit.encoder


def _finetuning(plan: ComparePlan, unit: Unit, task: TaskFolder, model: Path) -> FinetuneRequest:
    spec = plan.config.finetune
    return FinetuneRequest(
        model=str(model),
        out=unit.finetuning(task),
        tasks=[(task.name, task.folder)],
        overrides=as_overrides({**spec.set, **spec.task_set.get(task.name, {})}),
        recipe=spec.recipe,
        seeds=spec.seeds,
        device=plan.request.device,
        baselines=False,
    )


def _tidy(plan: ComparePlan, unit: Unit) -> None:
    """Remove of a finished unit what isn't to be kept."""
    if plan.config.keep == "all" or not unit.work.is_dir():
        return
    if plan.config.keep == "results":
        shutil.rmtree(unit.work)
        return
    for weights in unit.work.glob(f"tasks/*/seed-*/{MODEL_FILE}"):
        weights.unlink()
    if unit.encoder.is_dir():
        shutil.rmtree(unit.checkpoints_of, ignore_errors=True)
    sync_folder(unit.work)
