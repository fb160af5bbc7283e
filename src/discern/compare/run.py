"""A comparison: plan every run, pre-train and fine-tune each seed, and publish the summary. Read this module first.

All runs are pre-trained on the same text at equal cost and evaluated on the same tasks. A unit is one seed of one run.
In the output folder it has

results/NAME/seed-N/result.json   its settings, cost, held-out metrics, curve and scores; small, and all that a summary needs
work/NAME/seed-N/                 its checkpoints, encoder and fine-tuned models; may be deleted when it is finished
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

from discern.compare.plan import CONVENTION, ComparisonPlan, PlannedRun, TaskFolder, as_overrides, plan_comparison
from discern.compare.summary import FORMAT, summarize
from discern.config.schema import flatten, plain
from discern.errors import ConfigError, DataError, DiscernError, NumericsError
from discern.finetuning.run import finetune
from discern.model_files.export import export
from discern.model_files.finetuned import MODEL_FILE
from discern.model_files.run import CHECKPOINTS, CONFIG_FILE, read_record, vocabulary_of
from discern.pretraining.estimate import estimate
from discern.pretraining.resume import MAY_CHANGE, meta_objective
from discern.pretraining.run import open_run, plan as plan_run, pretrain
from discern.progress import Progress
from discern.report.comparison import comparison_page
from discern.report.page import render_page
from discern.storage.checksums import Record, read_json, remove_recorded, write_json
from discern.storage.files import OutputFolder, alone_in, cannot_write, held, write_text
from discern.training import checkpoint
from discern.training.config import read_written_config, step_sizes
from discern.training.device import best_device, device_name, processor_name
from discern.training.distributed import join_ranks
from discern.training.flops import run_flops
from discern.training.metrics import held_out_metrics, read_metrics
from discern.training.process import require_single_process

COMPARISON_FILE, PAGE_FILE, RESULT_FILE = "comparison.json", "comparison.html", "result.json"
_POLL_SECONDS = 5.0  # between checks of a run that another process works on
_POINTS = 200  # approximate number of points of a stored curve
# How long a run trains and on which rows it is evaluated is the same in all rows of a table.
_MAY_CHANGE = (MAY_CHANGE | {"train.seed"}) - {"train.max_steps", "train.max_hours", "train.evaluate_sequences"}


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
    dry_run: bool = False,
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
        dry_run: write nothing, and return the runs with their steps, FLOPs and estimated hours.

    Raises:
        ConfigError, DataError: settings are not compatible, or the folder holds another comparison; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt, SystemExit(143): the comparison was interrupted, and has been saved.
    """
    require_single_process("a comparison")
    plan = plan_comparison(config, data, out, task_data, preset, overrides, device)
    units = list_units(plan)
    check_results(plan, units)
    if dry_run:
        return _estimates(plan, units)
    folder = OutputFolder(out)
    if not ((out / "results").is_dir() or (out / COMPARISON_FILE).is_file()):
        folder.refuse_others({"work"}, "comparison")
    folder.make(shared=True)
    try:
        _work(plan, units, progress)
    except (KeyboardInterrupt, SystemExit, DiscernError):
        with suppress(DiscernError):  # report the error that ended the work, not this one
            publish(plan, units)
        raise
    return publish(plan, units)


class Unit:
    """One seed of one row: its pre-training, and its fine-tuning on every task.

    Attributes:
        reference: the unit whose training time limits this one; None if it does not end by time.
        result: its record, as it was last read.
    """

    def __init__(self, plan: ComparisonPlan, run: PlannedRun, seed: int, reference: Unit | None) -> None:
        self.plan, self.run, self.seed, self.reference = plan, run, seed, reference
        path = Path(run.name) / f"seed-{seed}"
        self.label = f"{run.name}, seed {seed}"
        self.results, self.work = plan.out / "results" / path, plan.out / "work" / path
        self.checkpoints_of, self.encoder = self.work / "pretraining", self.work / "encoder"
        self.read()

    def read(self) -> None:
        """Read its record and that of its reference: another process may have written them."""
        self.result = read_result(self.results)
        if self.reference is not None:
            self.reference.read()

    def write(self, **values: Any) -> None:
        """Write values into its record."""
        self.result = {"format": FORMAT, "specification": self.specification, **self.result, **values}
        self.results.mkdir(parents=True, exist_ok=True)
        write_json(self.results / RESULT_FILE, self.result)

    @property
    def pretraining(self) -> dict[str, Any] | None:
        """The results of its pre-training, also if it diverged; None if it is not finished."""
        return self.result["pretraining"]  # type: ignore[no-any-return]

    @property
    def succeeded(self) -> dict[str, Any] | None:
        """The results of its pre-training; None if it is not finished, or diverged."""
        return None if self.failure is not None else self.pretraining

    @property
    def failure(self) -> str | None:
        """Why its pre-training diverged; None if it did not."""
        return (self.pretraining or {}).get("failure")

    @property
    def hours(self) -> float | None:
        """Its time limit, a fraction of the reference's time with the same seed; None if it has none, or none yet."""
        done = None if self.reference is None else self.reference.succeeded
        return None if done is None else float(done["seconds"]) * self.run.spec.budget / 3600

    @property
    def waits_for(self) -> Unit | None:
        """Its reference, if that must be pre-trained first."""
        return None if self.pretraining or (self.reference and self.reference.pretraining) else self.reference

    @property
    def why_left_out(self) -> str | None:
        """Why it cannot be pre-trained: the reference with its seed diverged. None if it can."""
        if self.reference is None or self.pretraining is not None or self.reference.failure is None:
            return None
        return f"{self.label} is left out: the reference diverged with seed {self.seed}, so the time limit is unknown"

    @property
    def tasks_left(self) -> list[TaskFolder]:
        """The tasks on which it has not been fine-tuned with as many seeds as the comparison asks for."""
        done, seeds = self.result["tasks"], self.plan.config.finetune.seeds
        return [task for task in self.plan.tasks if task.name not in done or len(done[task.name]["seeds"]) < seeds]

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do. A run that diverged is not fine-tuned."""
        if self.pretraining is None:
            return self.why_left_out is not None
        return self.failure is not None or not self.tasks_left

    @property
    def specification(self) -> dict[str, Any]:
        """What determines its pre-training, besides the seed."""
        specification = {key: plain(value) for key, value in flatten(self.run.config).items() if key not in _MAY_CHANGE}
        specification |= {"equal": self.plan.config.equal, "budget": self.run.spec.budget, "network": self.run.network}
        specification["fingerprint of the data set"] = self.plan.data.fingerprint
        return specification if self.reference is None else specification | {"train.max_hours": self.hours}

    def task_specification(self, task: TaskFolder) -> dict[str, Any]:
        """What determines its scores on a task, besides the encoder and the number of seeds."""
        settings = {key: plain(value) for key, value in task.overrides.items()}
        return {"recipe": self.plan.config.finetune.recipe, "set": settings, "files": dict(task.files)}

    def changes(self) -> list[str]:
        """The differences between what its record was made with and what the comparison asks for, one per line."""
        now = self.specification
        compared = [(self.label, self.result.get("specification", now), now)]
        for task in self.plan.tasks:
            if scores := self.result["tasks"].get(task.name):
                compared.append((f"{self.label}, {task.name}", scores["specification"], self.task_specification(task)))
        return [
            f"{label}: {key} was {before.get(key)}, is {now.get(key)}"
            for label, before, now in compared
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]


def list_units(plan: ComparisonPlan) -> list[Unit]:
    """All seeds of all rows, in the order of the work: all rows with the first seed, then all with the second.

    The rows of an interrupted comparison can therefore be compared.
    """
    units: list[Unit] = []
    for seed in plan.seeds:
        first = Unit(plan, plan.reference, seed, None)
        timed = plan.config.equal == "seconds"
        units += [first, *(Unit(plan, run, seed, first if timed and run.trained else None) for run in plan.runs[1:])]
    return units


def check_results(plan: ComparisonPlan, units: Sequence[Unit]) -> None:
    """Check that the results in the folder belong to this comparison and that the missing ones can be computed.

    Raises:
        ConfigError: settings or data have changed; the message lists all changes.
        DataError: an encoder that still has to be fine-tuned has been deleted.
    """
    if changed := [line for unit in units for line in unit.changes()]:
        raise ConfigError(
            "\n".join([f"{plan.out} contains results of runs with other settings:", *(f"- {line}" for line in changed)]),
            hint="give a run with changed settings another name, choose another --out, "
            f"or remove its folder in {plan.out / 'results'} and in {plan.out / 'work'}",
        )
    for unit in units:
        if unit.succeeded and not unit.encoder.is_dir() and not (unit.checkpoints_of / CHECKPOINTS).is_dir() and unit.tasks_left:
            raise DataError(
                f"{unit.label} is pre-trained, but its encoder is gone (keep = 'results', or only the results were copied), "
                f"and {', '.join(task.name for task in unit.tasks_left)} needs it",
                hint=f"remove the task or the additional seeds from the file, or remove {unit.results} to pre-train it again",
            )


def _estimates(plan: ComparisonPlan, units: Sequence[Unit]) -> dict[str, Any]:
    """What the comparison would do, and how long that would take."""
    rows: list[dict[str, Any]] = []
    for run in plan.runs:
        left = [unit for unit in units if unit.run is run and not unit.is_finished]
        if not run.trained:
            hours = 0.0
        elif plan.config.equal == "seconds" and rows:
            hours = rows[0]["estimated_hours"] * run.spec.budget
        else:
            planned = plan_run(**run.settings_of(plan.seeds[0]), data=plan.data.folder, out=plan.out, warn=lambda _: None)
            hours = estimate(planned, device=plan.device).values["estimated_seconds"] / 3600
        rows.append(
            {
                "name": run.name,
                "objective": run.config.objective.name,
                "network": run.network,
                **run.cost,
                "parameters": run.parameters,
                "estimated_hours": hours,
                "seeds_left": sum(unit.pretraining is None for unit in left),
                "tasks_left": sum(len(unit.tasks_left) for unit in left),
            }
        )
    return {
        "equal": plan.config.equal,
        "convention": CONVENTION,
        "budget": plan.budget,
        "reference": plan.reference.name,
        "seeds": list(plan.seeds),
        "tasks": {task.name: str(task.folder) for task in plan.tasks},
        "runs": rows,
        "estimated_hours_left": sum(row["estimated_hours"] * row["seeds_left"] for row in rows),
        "finetunings_left": plan.config.finetune.seeds * sum(row["tasks_left"] for row in rows),
        "notes": [reason for unit in units if (reason := unit.why_left_out)],
    }


def publish(plan: ComparisonPlan, units: Sequence[Unit]) -> dict[str, Any]:
    """Write comparison.json and the page from the existing results."""
    try:
        with alone_in(plan.out):  # if several processes end together, the last one to write has also read last
            for unit in units:
                unit.read()
            summary = summarize(plan, units)
            write_json(plan.out / COMPARISON_FILE, summary)
            write_text(plan.out / PAGE_FILE, render_page(comparison_page(summary)))
    except OSError as problem:
        raise cannot_write(plan.out, problem) from problem
    return summary


def _work(plan: ComparisonPlan, units: Sequence[Unit], progress: Progress) -> None:
    """Take one unit after another; those that wait for a reference run of another process come last."""
    left: list[tuple[Unit, str]] = []
    for number, unit in enumerate(units, 1):
        label = f"{number} of {len(units)}: {unit.label}"
        if not _take(units, unit, label, progress):
            progress.note(f"{label}: {'waiting for its reference' if unit.waits_for else 'in progress'} in another process")
            left.append((unit, label))
        if number % len(plan.runs) == 0 and number < len(units):
            publish(plan, units)  # one seed of all runs is done: a first result
    for unit, label in left:
        while not _take(units, unit, label, progress) and unit.waits_for:
            time.sleep(_POLL_SECONDS)


def _take(units: Sequence[Unit], unit: Unit, label: str, progress: Progress) -> bool:
    """Finish a unit and delete what is not to be kept; False if another process works on it, or on its reference."""
    unit.read()
    # If the other process has been stopped, this one trains the reference.
    if (reference := unit.waits_for) and not _take(units, reference, reference.label, progress):
        return False
    if (reason := unit.why_left_out) is not None:
        progress.note(reason)
        return True
    if unit.is_finished and not unit.work.is_dir():
        return True
    with held(unit.work.with_name(f".{unit.work.name}.lock")) as mine:
        if mine:
            unit.read()  # what another process has done before it released the lock
            if not unit.is_finished:
                progress.note(label)
                _do(units, unit, progress)
            # Delete what is not to be kept
            keep = unit.plan.config.keep
            if keep == "results" and unit.work.is_dir():
                shutil.rmtree(unit.work)
            elif keep == "encoder":
                for weights in unit.work.glob(f"tasks/*/seed-*/{MODEL_FILE}"):
                    remove_recorded([weights])
                if unit.encoder.is_dir():
                    shutil.rmtree(unit.checkpoints_of, ignore_errors=True)
        return mine


def _do(units: Sequence[Unit], unit: Unit, progress: Progress) -> None:
    """Do what is left of a unit: pre-train it, and fine-tune it on every task."""
    unit.write()
    if unit.pretraining is None:
        unit.write(pretraining=_pretrain(units, unit, progress))
    if unit.failure is not None:
        progress.note(f"{unit.label} failed: {unit.failure}; remove {unit.results} and {unit.work} to try it again")
        return
    model, network = unit.encoder, unit.run.spec.network
    if unit.tasks_left and not model.is_dir():
        try:
            export(unit.checkpoints_of, out=model, network=network, progress=progress, warn=progress.note)
        except ConfigError:
            if network is not None:
                raise
            model = unit.checkpoints_of  # the network has no equivalent in transformers
    for task in unit.tasks_left:
        progress.note(f"{unit.label}: {task.name}")
        results = finetune(
            str(model),
            out=unit.work / "tasks" / task.name,
            progress=progress,
            tasks=[(task.name, task.folder)],
            overrides=as_overrides(task.overrides),
            recipe=unit.plan.config.finetune.recipe,
            seeds=unit.plan.config.finetune.seeds,
            device=unit.plan.device,
            baselines=False,
        )
        # Without paths, so that the results can be published
        published = "task metric split train_examples examples median scores metrics failed_seeds seeds seconds discern".split()
        scores = {key: results[key] for key in published if key in results}
        scores["settings"] = {key: value for key, value in results["settings"].items() if not key.startswith("files.")}
        unit.write(tasks={**unit.result["tasks"], task.name: {"specification": unit.task_specification(task), **scores}})


def _pretrain(units: Sequence[Unit], unit: Unit, progress: Progress) -> dict[str, Any]:
    """Pre-train to the end, or keep the weights of step 0; divergence is a result too."""
    plan, run, folder, failure = unit.plan, unit.run, unit.checkpoints_of, {}
    # All seeds of a run are trained in the precision of the first one on such a machine.
    for other in units:
        other.read()
    machines = (other.succeeded["machine"] for other in units if other.run is run and other.succeeded)
    like = next((machine for machine in machines if machine["processor"] == processor_name()), None)
    options = {**run.settings_of(unit.seed, unit.hours), "data": plan.data.folder, "out": folder}
    if run.trained:
        try:
            pretrain(**options, device=plan.device, same_precision_as=like, progress=progress)
        except NumericsError as problem:
            failure = {"failure": problem.message}
    else:
        planned = plan_run(**options, warn=progress.note)
        with join_ranks(plan.device) as ranks, OutputFolder(folder) as output:
            objective = open_run(planned, ranks, output, progress, like).objective
            state = {"step": 0, "tokens": 0, "seconds": 0.0, "updates": 0}
            tensors = checkpoint.model_tensors(objective)
            checkpoint.save(folder / CHECKPOINTS, checkpoint.Contents(tensors, {}, objective.carry_state(), state), 2)

    # Cost, metrics, and what they were made with, without paths and host names
    records, record, config = read_metrics(folder), read_record(folder), read_written_config(folder / CONFIG_FILE)
    last = records[-1] if records else {"step": 0}
    sizes = step_sizes(config.train, config.data)
    spent = run_flops(meta_objective(config, vocabulary_of(plan.data)), config.train.max_steps, sizes).after(last["step"])
    accelerator = {"accelerator": device_name(torch.device(best))} if (best := best_device()) != "cpu" else {}
    # What the page draws of the metrics log: about 200 records at most, and those with held-out metrics
    interval, drawn = max(1, len(records) // _POINTS), ("step", "tokens", "seconds", "flops", "loss", "_accuracy", "_auc")
    curve = [record for number, record in enumerate(records) if number % interval == 0 or held_out_metrics(record)]
    return {
        **failure,
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), **record["arithmetic"], **accelerator},
        "versions": {"discern": record["discern"], **record["versions"]},
        "steps": last["step"],
        "tokens": last.get("tokens", 0),
        "positions": sizes.positions_before(last["step"]),
        "seconds": last.get("seconds", 0.0),
        "flops": spent.executed,
        "flops_paper_convention": spent.paper,
        "held_out": held_out_metrics(last),
        "curve": [{key: value for key, value in record.items() if key.endswith(drawn)} for record in curve],
    }


def read_result(folder: Path) -> dict[str, Any]:
    """The record of a unit; without a specification if there is none."""
    path = folder / RESULT_FILE
    if not path.exists():
        return {"pretraining": None, "tasks": {}}
    return read_json(path, _Result, hint="remove it, and run the same command to repeat that part", version=FORMAT)


class _Result(Record):
    format: int
    specification: dict[str, Any]
    pretraining: dict[str, Any] | None
    tasks: dict[str, dict[str, Any]]
