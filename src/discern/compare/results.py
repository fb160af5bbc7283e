"""The result files of a comparison. They are small, mark a run as finished, and are refused if settings have changed.

OUT/results/NAME/seed-N/config.toml        the whole configuration, written before the run starts
OUT/results/NAME/seed-N/pretraining.json   steps, cost, held-out metrics and curve, written when it is finished
OUT/results/NAME/seed-N/TASK.json          its fine-tuning scores on a task
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from discern.compare.plan import ComparisonPlan, PlannedRun
from discern.compare.tasks import TaskFolder
from discern.config.schema import flatten, plain, to_toml
from discern.errors import ConfigError, DataError
from discern.model_files.run import CONFIG_FILE
from discern.pretraining.resume import MAY_CHANGE
from discern.storage.checksums import Record, read_json, write_json, write_recorded
from discern.training.metrics_log import held_out_metrics
from discern.training.pretrain_config import read_written_config

FORMAT = 1
_CONFIG, _PRETRAINING = "config.toml", "pretraining.json"
_POINTS = 200  # approximate number of points of a stored curve


@dataclass(frozen=True)
class Unit:
    """One seed of one row: its pre-training, and its fine-tuning on every task.

    Attributes:
        results: folder of its result files.
        work: folder of its checkpoints, encoder and fine-tuned models; may be deleted when it is finished.
    """

    run: PlannedRun
    seed: int
    results: Path
    work: Path

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.run.name}, seed {self.seed}"

    @property
    def checkpoints_of(self) -> Path:
        """Folder of the pre-training run."""
        return self.work / "pretraining"

    @property
    def lock(self) -> Path:
        """Lock file of the process that works on it."""
        return self.work.with_name(f".{self.work.name}.lock")

    @property
    def retry(self) -> str:
        """How to repeat a run that diverged."""
        return f"remove {self.results} and {self.work} to try it again"

    @property
    def encoder(self) -> Path:
        """Folder of the exported network that is fine-tuned."""
        return self.work / "encoder"

    def finetuning(self, task: TaskFolder) -> Path:
        """Folder of its fine-tuned models for a task."""
        return self.work / "tasks" / task.name

    def pretraining(self) -> dict[str, Any] | None:
        """The results of the pre-training; None if it is not finished."""
        return _read(self.results / _PRETRAINING, _Pretraining)

    def scores(self, task: TaskFolder) -> dict[str, Any] | None:
        """The results of fine-tuning on a task; None if there are none yet."""
        return _read(self.results / f"{task.name}.json", _Scores)

    def is_finetuned(self, plan: ComparisonPlan, task: TaskFolder) -> bool:
        """Whether it has been fine-tuned on a task with as many seeds as the comparison asks for."""
        found = self.scores(task)
        return found is not None and len(found["seeds"]) >= plan.config.finetune.seeds

    def is_finished(self, plan: ComparisonPlan) -> bool:
        """Whether nothing is left to do. A run that diverged is not fine-tuned; one without a time limit to use is left out."""
        done = self.pretraining()
        if done is None:
            return why_left_out(plan, self) is not None
        return "failure" in done or all(self.is_finetuned(plan, task) for task in plan.tasks)

    def has_succeeded(self, plan: ComparisonPlan) -> bool:
        """Whether it is pre-trained to its end and fine-tuned on every task."""
        return self.is_finished(plan) and "failure" not in (self.pretraining() or {"failure": ""})

    def begin(self) -> None:
        """Write its configuration."""
        self.results.mkdir(parents=True, exist_ok=True)
        config = self.run.config.model_copy(update={"train": self.run.config.train.model_copy(update={"seed": self.seed})})
        write_recorded(self.results, {_CONFIG: to_toml(config)})

    def end(self, record: Mapping[str, Any]) -> None:
        """Write the results of the pre-training."""
        write_json(self.results / _PRETRAINING, {"format": FORMAT, "name": self.run.name, "seed": self.seed, **record})

    def keep_scores(self, plan: ComparisonPlan, task: TaskFolder, results: Mapping[str, Any]) -> None:
        """Write the results of fine-tuning on a task, without paths, so that the files can be published."""
        metrics = ("task", "metric", "split", "train_examples", "examples", "median", "scores", "metrics", "failed_seeds")
        kept = {key: results[key] for key in (*metrics, "seeds", "seconds", "discern", "settings") if key in results}
        kept["settings"] = {key: value for key, value in results["settings"].items() if not key.startswith("files.")}
        write_json(self.results / f"{task.name}.json", {"format": FORMAT, "asked": asked(plan, task), **kept})


def units(plan: ComparisonPlan) -> list[Unit]:
    """All seeds of all rows, in the order of the work: all rows with the first seed, then all with the second.

    The rows of an interrupted comparison can therefore be compared.
    """
    return [_unit(plan, run, seed) for seed in plan.seeds for run in plan.runs]


def _unit(plan: ComparisonPlan, run: PlannedRun, seed: int) -> Unit:
    place = Path(run.name) / f"seed-{seed}"
    return Unit(run, seed, plan.out / "results" / place, plan.out / "work" / place)


def reference_of(plan: ComparisonPlan, unit: Unit) -> Unit | None:
    """The reference run whose training time limits a unit; None if the unit does not end by time."""
    by_the_clock = plan.config.equal == "seconds" and unit.run.trained and unit.run is not plan.reference
    return _unit(plan, plan.reference, unit.seed) if by_the_clock else None


def hours_of(plan: ComparisonPlan, unit: Unit) -> float | None:
    """A unit's time limit, its fraction of the reference's time with the same seed; None if it has none, or none yet."""
    reference = reference_of(plan, unit)
    done = None if reference is None else reference.pretraining()
    if done is None or "failure" in done:
        return None
    return float(done["seconds"]) * unit.run.spec.budget / 3600


def waits_for(plan: ComparisonPlan, unit: Unit) -> Unit | None:
    """The reference run that must be pre-trained before a unit can be; None if there is none."""
    reference = reference_of(plan, unit)
    return reference if reference and unit.pretraining() is None and reference.pretraining() is None else None


def why_left_out(plan: ComparisonPlan, unit: Unit) -> str | None:
    """Why a unit cannot be pre-trained: the reference with its seed diverged, so its time limit is unknown. None if it can."""
    reference = reference_of(plan, unit)
    if reference is None or unit.pretraining() is not None or "failure" not in (reference.pretraining() or {}):
        return None
    return f"{unit.label} is left out: the reference diverged with seed {unit.seed}, so the time limit is unknown"


def asked(plan: ComparisonPlan, task: TaskFolder) -> dict[str, Any]:
    """What determines the scores on a task, besides the encoder and the number of seeds."""
    finetune = plan.config.finetune
    settings = {**finetune.set, **finetune.task_set.get(task.name, {})}
    return {"recipe": finetune.recipe, "set": {k: plain(v) for k, v in settings.items()}, "files": dict(task.files)}


def check_results(plan: ComparisonPlan, all_units: Sequence[Unit]) -> None:
    """Check that the results in the folder belong to this comparison and that the missing ones can be computed.

    Raises:
        ConfigError: settings or data have changed; the message lists all changes.
        DataError: an encoder that still has to be fine-tuned has been deleted.
    """
    changed = [line for unit in all_units for line in _changes(plan, unit)]
    if changed:
        raise ConfigError(
            "\n".join([f"{plan.out} contains results of runs with other settings:", *(f"- {line}" for line in changed)]),
            hint="give a run with changed settings another name, choose another --out, "
            f"or remove its folder in {plan.out / 'results'} and in {plan.out / 'work'}",
        )
    for unit in all_units:
        done = unit.pretraining()
        if done is None or "failure" in done or unit.encoder.is_dir() or (unit.checkpoints_of / "checkpoints").is_dir():
            continue
        missing = [task.name for task in plan.tasks if not unit.is_finetuned(plan, task)]
        if missing:
            raise DataError(
                f"{unit.label} is pre-trained, but its encoder is gone (keep = 'results', or only the results were copied), "
                f"and {', '.join(missing)} needs it",
                hint=f"remove the task or the additional seeds from the file, or remove {unit.results} to pre-train it again",
            )


def _changes(plan: ComparisonPlan, unit: Unit) -> list[str]:
    """The differences from the existing results, one per line."""
    if not (unit.results / _CONFIG).is_file():
        return []
    there, now = flatten(read_written_config(unit.results / _CONFIG)), flatten(unit.run.config)
    # The excepted settings decide how long a run trains and on which rows it is evaluated: all rows of a table share them.
    ignored = (MAY_CHANGE | {"train.seed"}) - {"train.max_steps", "train.max_hours", "train.evaluate_sequences"}
    lines = [
        f"{unit.label}: {key} was {there.get(key)}, is {now.get(key)}"
        for key in sorted(there.keys() | now.keys())
        if there.get(key) != now.get(key) and key not in ignored
    ]
    done = unit.pretraining()
    if done is not None and done["data_fingerprint"] != plan.data.fingerprint:
        lines.append(f"{unit.label}: pre-trained on a data set other than {plan.data.folder}")
    if done is not None and done["network"] != unit.run.network:
        lines.append(f"{unit.label}: network was {done['network']}, is {unit.run.network}")
    lines += _other_budget(plan, unit, done)
    for task in plan.tasks:
        scores = unit.scores(task)
        wanted = asked(plan, task)
        if scores is not None and scores["asked"] != wanted:
            differing = [key for key in wanted if scores["asked"].get(key) != wanted[key]]
            lines.append(f"{unit.label}: fine-tuned on {task.name} with other {' and '.join(differing)}")
    return lines


def _other_budget(plan: ComparisonPlan, unit: Unit, done: Mapping[str, Any] | None) -> list[str]:
    """The differences in a run's limit."""
    asked_for = {"equal": plan.config.equal, "budget": unit.run.spec.budget}
    lines = [
        f"{unit.label}: {key} was {done[key]}, is {now}"
        for key, now in asked_for.items()
        if done is not None and done[key] != now
    ]
    begun, now = unit.checkpoints_of / CONFIG_FILE, hours_of(plan, unit)
    if now is None or lines:
        return lines
    before = done.get("max_hours", now) if done is not None else now
    if done is None and begun.is_file():
        before = read_written_config(begun).train.max_hours
    return [] if before == now else [f"{unit.label}: its time limit was {before} hours, is {now}"]


def curve(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of a metrics log that the page draws: about 200 at most, including those with held-out metrics."""
    every = max(1, len(records) // _POINTS)
    dropped = ("tokens_per_second", "data_share", "host_share", "device_share", "learning_rate", "grad_norm", "peak_memory_bytes")
    return [
        {key: value for key, value in record.items() if key not in dropped}
        for number, record in enumerate(records)
        if number % every == 0 or number == len(records) - 1 or held_out_metrics(record)
    ]


def _read(path: Path, form: type[Record]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return read_json(path, form, hint="remove it, and run the same command to repeat that part", version=FORMAT)


class _Pretraining(Record):
    """Contents of pretraining.json."""

    format: int
    equal: str
    budget: float
    data_fingerprint: str
    network: str | None
    statistics: dict[str, Any]
    failure: str | None = None
    steps: int
    seconds: Annotated[float, Field(ge=0)]
    tokens: int
    held_out: dict[str, float | None]
    curve: list[dict[str, Any]]


class _Scores(Record):
    """Contents of TASK.json."""

    format: int
    seeds: list[int]
    scores: list[float | None]
    failed_seeds: dict[str, str]
    asked: dict[str, Any]
