"""The result files of a comparison: small, enough to count a run as done, refused where the settings have changed.

OUT/results/NAME/seed-N/config.toml        the whole configuration, written before the run starts
OUT/results/NAME/seed-N/pretraining.json   steps, cost, held-out figures and curve, written when it is over
OUT/results/NAME/seed-N/TASK.json          the scores of its fine-tunings on a task
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.config.tree import flatten, plain, to_toml
from discern.errors import ConfigError, DataError
from discern.training import checkpoint
from discern.workflows.compare_plan import ComparePlan, PlannedRun
from discern.workflows.compare_tasks import TaskFolder
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.finetuned import write_json
from discern.workflows.run_folder import MAY_CHANGE

FORMAT = 1
_CONFIG, _PRETRAINING = "config.toml", "pretraining.json"
_POINTS = 200  # of a curve that is kept
# Lines of the journal have these besides losses and held-out figures.
_BOOKKEEPING = ("step", "tokens", "seconds", "tokens_per_second", "learning_rate", "grad_norm", "flops", "peak_memory_bytes")


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
    def encoder(self) -> Path:
        """The exported network that is fine-tuned."""
        return self.work / "encoder"

    def finetuning(self, task: TaskFolder) -> Path:
        """Folder of its fine-tunings on a task."""
        return self.work / "tasks" / task.name

    def pretraining(self) -> dict[str, Any] | None:
        """What came of the pre-training; None where it is not over."""
        return _read(self.results / _PRETRAINING)

    def scores(self, task: TaskFolder) -> dict[str, Any] | None:
        """What came of its fine-tunings on a task; None where there is nothing yet."""
        return _read(self.results / f"{task.name}.json")

    def is_judged(self, plan: ComparePlan, task: TaskFolder) -> bool:
        """Whether it has been fine-tuned on a task as often as is asked."""
        found = self.scores(task)
        return found is not None and len(found["seeds"]) >= plan.config.finetune.seeds

    def is_finished(self, plan: ComparePlan) -> bool:
        """Whether nothing is left to do; a run that diverged is not fine-tuned."""
        done = self.pretraining()
        return done is not None and ("failure" in done or all(self.is_judged(plan, task) for task in plan.tasks))

    def begin(self) -> None:
        """Write down what it is."""
        self.results.mkdir(parents=True, exist_ok=True)
        config = self.run.config.model_copy(update={"train": self.run.config.train.model_copy(update={"seed": self.seed})})
        checkpoint.write_text(self.results / _CONFIG, to_toml(config))

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
    out = plan.request.out
    return [
        Unit(run, seed, out / "results" / run.name / f"seed-{seed}", out / "work" / run.name / f"seed-{seed}")
        for seed in plan.seeds
        for run in plan.runs
    ]


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
    ignored = (MAY_CHANGE | {"train.seed"}) - {"train.max_steps"}
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
    for task in plan.tasks:
        scores = unit.scores(task)
        before, wanted = (scores or {}).get("asked"), asked(plan, task)
        if scores is not None and before != wanted:
            differing = [key for key in wanted if before is None or before.get(key) != wanted[key]]
            lines.append(f"{unit.label}: fine-tuned on {task.name} with other {' and '.join(differing)}")
    return lines


def held_out(record: Mapping[str, Any]) -> dict[str, float]:
    """The held-out figures in a line of the journal, by name."""
    training = {key.removeprefix("heldout_") for key in record if key.startswith("heldout_")} | {*_BOOKKEEPING}
    evaluated = any(key.startswith("heldout_") for key in record)
    return {key: value for key, value in record.items() if evaluated and key not in training and _is_number(value)}


def curve(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the page draws of a journal: at most some 200 lines, those with held-out figures among them."""
    every = max(1, len(records) // _POINTS)
    dropped = ("tokens_per_second", "learning_rate", "grad_norm", "peak_memory_bytes")
    return [
        {key: value for key, value in record.items() if key not in dropped}
        for number, record in enumerate(records)
        if number % every == 0 or number == len(records) - 1 or held_out(record)
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} cannot be read: {problem}", hint="remove it, and that part is done again") from problem
    if found.get("format") != FORMAT:
        raise DataError(f"{path} has format {found.get('format')}; this version of discern reads {FORMAT}")
    return found
