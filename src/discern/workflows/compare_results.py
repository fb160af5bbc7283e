"""The result files of a comparison: small, enough to count a run as done, refused where the settings have changed.

OUT/results/NAME/seed-N/config.toml        the whole configuration, written before the run starts
OUT/results/NAME/seed-N/pretraining.json   steps, cost, held-out figures and curve, written when it is over
OUT/results/NAME/seed-N/TASK.json          the scores of its fine-tunings on a task
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from discern.artifacts.files import write_text
from discern.config.tree import flatten, plain, to_toml
from discern.errors import ConfigError, DataError
from discern.records import Record, read_record
from discern.training.journal import held_out_figures
from discern.workflows.compare_plan import ComparePlan, PlannedRun
from discern.workflows.compare_tasks import TaskFolder
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.finetuned import write_json
from discern.workflows.run_folder import MAY_CHANGE
from discern.workflows.runs import CONFIG_FILE

FORMAT = 1
_CONFIG, _PRETRAINING = "config.toml", "pretraining.json"
_POINTS = 200  # of a curve that is kept


@dataclass(frozen=True)
class Unit:
    """One pre-training of one row, with the fine-tunings that judge it.

    Attributes:
        results: folder of its result files.
        work: folder of its checkpoints, encoder and fine-tunings; may go when it is finished.
    """

    run: PlannedRun
    seed: int
    results: Path
    work: Path

    @property
    def label(self) -> str:
        """As messages call it."""
        return f"{self.run.name}, seed {self.seed}"

    @property
    def checkpoints_of(self) -> Path:
        """Folder of the pre-training."""
        return self.work / "pretraining"

    @property
    def lock(self) -> Path:
        """File that the process holds which works on it."""
        return self.work.with_name(f".{self.work.name}.lock")

    @property
    def retry(self) -> str:
        """What to do so that a run that diverged is made once more."""
        return f"remove {self.results} and {self.work} to try it again"

    @property
    def encoder(self) -> Path:
        """The exported network that is fine-tuned."""
        return self.work / "encoder"

    def finetuning(self, task: TaskFolder) -> Path:
        """Folder of its fine-tunings on a task."""
        return self.work / "tasks" / task.name

    def pretraining(self) -> dict[str, Any] | None:
        """What came of the pre-training; None where it is not over."""
        return _read(self.results / _PRETRAINING, _Pretraining)

    def scores(self, task: TaskFolder) -> dict[str, Any] | None:
        """What came of its fine-tunings on a task; None where there is nothing yet."""
        return _read(self.results / f"{task.name}.json", _Scores)

    def is_judged(self, plan: ComparePlan, task: TaskFolder) -> bool:
        """Whether it has been fine-tuned on a task as often as is asked."""
        found = self.scores(task)
        return found is not None and len(found["seeds"]) >= plan.config.finetune.seeds

    def is_finished(self, plan: ComparePlan) -> bool:
        """Whether nothing is left to do; a run that diverged is not fine-tuned, one that has no time to go by not made."""
        done = self.pretraining()
        if done is None:
            return why_left_out(plan, self) is not None
        return "failure" in done or all(self.is_judged(plan, task) for task in plan.tasks)

    def has_succeeded(self, plan: ComparePlan) -> bool:
        """Whether it is pre-trained to its end and judged on every task."""
        return self.is_finished(plan) and "failure" not in (self.pretraining() or {"failure": ""})

    def begin(self) -> None:
        """Write down what it is."""
        self.results.mkdir(parents=True, exist_ok=True)
        config = self.run.config.model_copy(update={"train": self.run.config.train.model_copy(update={"seed": self.seed})})
        write_text(self.results / _CONFIG, to_toml(config))

    def end(self, record: Mapping[str, Any]) -> None:
        """Keep what came of the pre-training."""
        write_json(self.results / _PRETRAINING, {"format": FORMAT, "name": self.run.name, "seed": self.seed, **record})

    def keep_scores(self, plan: ComparePlan, task: TaskFolder, results: Mapping[str, Any]) -> None:
        """Keep what came of the fine-tunings on a task; no path, so that the files can be shown around."""
        figures = ("task", "metric", "split", "train_examples", "examples", "median", "scores", "metrics", "failed_seeds")
        kept = {key: results[key] for key in (*figures, "seeds", "seconds", "discern", "settings") if key in results}
        kept["settings"] = {key: value for key, value in results["settings"].items() if not key.startswith("files.")}
        write_json(self.results / f"{task.name}.json", {"format": FORMAT, "asked": asked(plan, task), **kept})


def units(plan: ComparePlan) -> list[Unit]:
    """All pre-trainings, in the order they are done: all rows with the first seed, then with the second.

    An interrupted comparison then has rows that can be compared.
    """
    return [_unit(plan, run, seed) for seed in plan.seeds for run in plan.runs]


def _unit(plan: ComparePlan, run: PlannedRun, seed: int) -> Unit:
    place = Path(run.name) / f"seed-{seed}"
    return Unit(run, seed, plan.request.out / "results" / place, plan.request.out / "work" / place)


def reference_of(plan: ComparePlan, unit: Unit) -> Unit | None:
    """The pre-training whose time a unit gets a share of; None where something else than the clock ends it."""
    by_the_clock = plan.config.equal == "seconds" and unit.run.trained and unit.run is not plan.reference
    return _unit(plan, plan.reference, unit.seed) if by_the_clock else None


def hours_of(plan: ComparePlan, unit: Unit) -> float | None:
    """The time that a unit has, its share of the reference's with the same seed; None where it goes by none, or has none yet."""
    reference = reference_of(plan, unit)
    done = None if reference is None else reference.pretraining()
    if done is None or "failure" in done:
        return None
    return float(done["seconds"]) * unit.run.spec.budget / 3600


def waits_for(plan: ComparePlan, unit: Unit) -> Unit | None:
    """The reference whose time a unit needs that is not pre-trained, and which isn't pre-trained itself yet."""
    reference = reference_of(plan, unit)
    return reference if reference and unit.pretraining() is None and reference.pretraining() is None else None


def why_left_out(plan: ComparePlan, unit: Unit) -> str | None:
    """Why a unit can't be pre-trained, where the reference with its seed diverged: nobody knows how long it would have."""
    reference = reference_of(plan, unit)
    if reference is None or unit.pretraining() is not None or "failure" not in (reference.pretraining() or {}):
        return None
    return f"{unit.label} is left out: the reference's seed {unit.seed} diverged, so there is no time to go by"


def asked(plan: ComparePlan, task: TaskFolder) -> dict[str, Any]:
    """What decides the outcome of a fine-tuning, besides the encoder and the number of seeds."""
    finetune = plan.config.finetune
    settings = {**finetune.set, **finetune.task_set.get(task.name, {})}
    return {"recipe": finetune.recipe, "set": {k: plain(v) for k, v in settings.items()}, "files": dict(task.files)}


def check_results(plan: ComparePlan, all_units: Sequence[Unit]) -> None:
    """Raise where the folder has results of something else under these names, or of something that can't go on.

    Raises:
        ConfigError: settings or data have changed; all of them are named.
        DataError: a task is to be judged whose encoder is gone.
    """
    changed = [line for unit in all_units for line in _changes(plan, unit)]
    if changed:
        raise ConfigError(
            "\n".join([f"{plan.request.out} holds results of other settings:", *(f"- {line}" for line in changed)]),
            hint="a changed setting is another run: give the run another name, choose another --out, "
            f"or remove its folder in {plan.request.out / 'results'} and in {plan.request.out / 'work'}",
        )
    for unit in all_units:
        done = unit.pretraining()
        if done is None or "failure" in done or unit.encoder.is_dir() or (unit.checkpoints_of / "checkpoints").is_dir():
            continue
        missing = [task.name for task in plan.tasks if not unit.is_judged(plan, task)]
        if missing:
            raise DataError(
                f"{unit.label} is pre-trained, but its encoder is gone (keep = 'results', or a copy of the results alone), "
                f"and {', '.join(missing)} needs it",
                hint=f"take the task or the further seeds out, or remove {unit.results} to pre-train it again",
            )


def _changes(plan: ComparePlan, unit: Unit) -> list[str]:
    """What differs from the results that are there."""
    if not (unit.results / _CONFIG).is_file():
        return []
    there, now = flatten(load_pretrain_config(unit.results / _CONFIG, None).config), flatten(unit.run.config)
    # These decide how long it runs, and on which rows it is held out: rows of one table have them alike.
    ignored = (MAY_CHANGE | {"train.seed"}) - {"train.max_steps", "train.max_hours", "train.evaluate_sequences"}
    lines = [
        f"{unit.label}: {key} was {there.get(key)}, is {now.get(key)}"
        for key in sorted(there.keys() | now.keys())
        if there.get(key) != now.get(key) and key not in ignored
    ]
    done = unit.pretraining()
    if done is not None and done["data_fingerprint"] != plan.data.fingerprint:
        lines.append(f"{unit.label}: pre-trained on another data set than {plan.data.folder}")
    if done is not None and done["network"] != unit.run.network:
        lines.append(f"{unit.label}: network was {done['network']}, is {unit.run.network}")
    lines += _other_budget(plan, unit, done)
    for task in plan.tasks:
        scores = unit.scores(task)
        before, wanted = (scores or {}).get("asked"), asked(plan, task)
        if scores is not None and before != wanted:
            differing = [key for key in wanted if before is None or before.get(key) != wanted[key]]
            lines.append(f"{unit.label}: fine-tuned on {task.name} with other {' and '.join(differing)}")
    return lines


def _other_budget(plan: ComparePlan, unit: Unit, done: Mapping[str, Any] | None) -> list[str]:
    """What differs in that which ended a run, as far as it was written down: early versions did not."""
    asked_for = {"equal": plan.config.equal, "budget": unit.run.spec.budget}
    lines = [
        f"{unit.label}: {key} was {done[key]}, is {now}"
        for key, now in asked_for.items()
        if done is not None and done.get(key, now) != now
    ]
    begun, now = unit.checkpoints_of / CONFIG_FILE, hours_of(plan, unit)
    if now is None or lines:
        return lines
    before = done.get("max_hours", now) if done is not None else now
    if done is None and begun.is_file():
        before = load_pretrain_config(begun, None).config.train.max_hours
    return [] if before == now else [f"{unit.label}: its share of the reference's time was {before} hours, is {now}"]


def curve(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the page draws of a journal: at most some 200 lines, those with held-out figures among them."""
    every = max(1, len(records) // _POINTS)
    dropped = ("tokens_per_second", "learning_rate", "grad_norm", "peak_memory_bytes")
    return [
        {key: value for key, value in record.items() if key not in dropped}
        for number, record in enumerate(records)
        if number % every == 0 or number == len(records) - 1 or held_out_figures(record)
    ]


def _read(path: Path, form: type[Record]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return read_record(path, form, hint="remove it, and that part is repeated", version=FORMAT)


class _Pretraining(Record):
    """What came of a pre-training."""

    format: int
    data_fingerprint: str
    network: str | None
    statistics: dict[str, Any] = Field(default_factory=dict)
    failure: str | None = None
    steps: int
    seconds: Annotated[float, Field(ge=0)]
    tokens: int
    held_out: dict[str, float | None]
    curve: list[dict[str, Any]]


class _Scores(Record):
    """What came of the fine-tunings on a task."""

    format: int
    seeds: list[int]
    scores: list[float | None]
    failed_seeds: dict[str, str]
    asked: dict[str, Any] | None = None
