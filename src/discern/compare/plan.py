"""The plan of a comparison: settings, number of steps and cost of every run, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from discern.compare.settings import UNTRAINED, CompareConfig, RunSpec, as_overrides, finetune_overrides, load_compare_config
from discern.compare.tasks import TaskFolder, find_task_folders
from discern.config.layers import read_file
from discern.config.resolve import Resolved
from discern.config.schema import flatten
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError, did_you_mean
from discern.finetuning.settings import given_settings, load_finetune_config
from discern.model_files.run import build_objective, vocabulary_of
from discern.models import encoders
from discern.models.config import ModelConfig
from discern.objectives.base import Vocabulary
from discern.storage.output import check_apart
from discern.tasks import tasks as registry
from discern.training.config import NO_STEP_LIMIT
from discern.training.flops import Flops, run_flops
from discern.training.pretrain_config import PretrainConfig, load_pretrain_config
from discern.training.schedule import step_sizes

CONVENTION = "executed: multiplications and additions of the matrix products that run, forward and backward"
_NOTICEABLE = 0.03


@dataclass(frozen=True)
class PlannedRun:
    """A row of the comparison.

    Attributes:
        overrides: all settings that override preset and file, except seed and time limit.
        config: the resolved configuration, with the first seed.
        steps: number of steps; None if the run ends by time.
        flops: FLOPs of all steps; None if the number of steps is unknown.
        tokens: positions read in all steps, padding included; None if the number of steps is unknown.
        parameters: number of parameters, shared ones counted once.
        own: keys that the run sets itself, in its `set` or in its file; they are not rescaled.
        network: the network to fine-tune.
        encoder: sizes of its encoder.
        trained: False for the baseline.
    """

    spec: RunSpec
    preset: str | None
    file: Path | None
    overrides: tuple[str, ...]
    config: PretrainConfig
    steps: int | None
    flops: Flops | None
    tokens: int | None
    parameters: int
    network: str
    encoder: ModelConfig
    own: frozenset[str] = frozenset()
    trained: bool = True

    @property
    def name(self) -> str:
        """Name of the row and of its folders."""
        return self.spec.name

    def overrides_of(self, seed: int, hours: float | None = None) -> tuple[str, ...]:
        """The settings of the row's pre-training with one seed, limited to `hours` if given."""
        limit = () if hours is None else (f"train.max_hours={hours!r}",)
        return (*self.overrides, f"train.seed={seed}", *limit)


@dataclass(frozen=True)
class ComparisonPlan:
    """Everything that is known before the first step.

    Attributes:
        out: folder of the results.
        data: data set for pre-training.
        runs: the reference first, the baseline (if any) last.
        seeds: pre-training seeds.
        budget: the full budget in FLOPs or positions; None if it is the reference's training time, which is not known yet.
        notes: remarks for the reader.
    """

    out: Path
    device: str
    config: CompareConfig
    data: TokenData
    runs: tuple[PlannedRun, ...]
    seeds: range
    tasks: Sequence[TaskFolder]
    budget: float | None
    notes: tuple[str, ...]

    @property
    def reference(self) -> PlannedRun:
        """The run that sets the budget."""
        return self.runs[0]


def plan_comparison(
    config: Path,
    *,
    data: Path,
    out: Path,
    task_data: Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
) -> ComparisonPlan:
    """Resolve every run and find its number of steps; nothing is written. The arguments are those of `compare`.

    Raises:
        ConfigError, DataError: anything that would stop one of the runs.
    """
    check_apart(out, data, task_data)
    settings = load_compare_config(config)
    tokens = TokenData.open(data)
    tasks = find_task_folders(settings.tasks, task_data, settings.task_data)
    planner = _Planner(settings, vocabulary_of(tokens), preset, overrides)
    reference = planner.reference(settings.run[0])
    others = [planner.run(spec, reference) for spec in settings.run[1:]]
    baseline = [_baseline(reference)] if settings.baseline else []
    for run in (reference, *others):
        _check_fine_tuning(settings, run, tasks)
    first = reference.config.train.seed
    return ComparisonPlan(
        out=out,
        device=device,
        config=settings,
        data=tokens,
        runs=(reference, *others, *baseline),
        seeds=range(first, first + settings.seeds),
        tasks=tasks,
        budget=planner.amount(reference),
        notes=tuple(planner.notes),
    )


def _check_fine_tuning(config: CompareConfig, run: PlannedRun, tasks: Sequence[TaskFolder]) -> None:
    """Resolve the settings with which a run is fine-tuned, so that a mistake in them shows before any training."""
    for task in tasks:
        given = given_settings(None, finetune_overrides(config, task.name))
        try:
            load_finetune_config(
                [registry.load(task.name)],
                run.encoder,
                given,
                recipe=config.finetune.recipe,
                encoder=encoders.load(run.encoder.encoder),
            )
        except ConfigError as problem:
            raise ConfigError(f"fine-tuning on '{task.name}': {problem.message}", hint=problem.hint) from problem


class _Planner:
    """Resolves the runs of a comparison, with the settings that all of them share."""

    def __init__(self, config: CompareConfig, vocabulary: Vocabulary, preset: str | None, overrides: Sequence[str]) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._preset, self._overrides = preset, overrides
        self.notes: list[str] = []

    def reference(self, spec: RunSpec) -> PlannedRun:
        """The first run, at its own train.max_steps."""
        found = self._resolve(spec, [], None)
        hours = found.config.train.max_hours
        if self._config.equal == "seconds" and hours is not None:
            self._refuse_phases(spec, found)
            return replace(found, steps=None, flops=None, tokens=None)
        self._refuse_hours(spec.name, hours)
        return found

    def run(self, spec: RunSpec, reference: PlannedRun) -> PlannedRun:
        """A further run, with as many steps as its budget allows."""
        self._refuse_set_by_file(spec, reference)
        own = self._resolve(spec, [], None)
        self._refuse_hours(spec.name, own.config.train.max_hours)
        whole = self.amount(reference)
        if whole is None:
            return self._by_the_clock(spec, own, reference)
        target = whole * spec.budget

        def at(steps: int) -> PlannedRun:
            return self._resolve(spec, _scaled(own, steps), steps)

        found = at(_nearest_steps(lambda steps: self.amount(at(steps)) or 0.0, target, own.config.train.max_steps))
        off = (self.amount(found) or 0.0) / target - 1
        if abs(off) > _NOTICEABLE:
            self.notes.append(
                f"run '{spec.name}': {found.steps} whole steps differ from its budget by {off:+.1%}; "
                "a larger train.max_steps reduces the difference"
            )
        return found

    def amount(self, run: PlannedRun) -> float | None:
        """The cost of a run in the unit that is kept equal; None if it is time, which is not known yet."""
        if self._config.equal == "flops":
            return None if run.flops is None else run.flops.executed
        return run.tokens if self._config.equal == "tokens" else None

    def _by_the_clock(self, spec: RunSpec, own: PlannedRun, reference: PlannedRun) -> PlannedRun:
        self._refuse_phases(spec, own)
        self._resolve(spec, ["train.max_hours=1"], NO_STEP_LIMIT)  # the limit is not known yet, but what it rules out is
        found = self._resolve(spec, self._intervals(own, reference), NO_STEP_LIMIT)
        return replace(found, steps=None, flops=None, tokens=None)

    @staticmethod
    def _intervals(own: PlannedRun, reference: PlannedRun) -> list[str]:
        """The settings that keep the clock from scheduling work of a run if it does not schedule that of the reference.

        Evaluations and checkpoints count as time of the run, so a run with more of them would train less.
        """
        if reference.config.train.max_hours is not None:
            return []
        keys = (f"{kind}_every_steps" for kind in ("log", "evaluate", "checkpoint"))
        return [f"train.{key}={getattr(own.config.train, key)}" for key in keys]

    def _refuse_phases(self, spec: RunSpec, own: PlannedRun) -> None:
        if len(self._phases(own.config)) > 1:
            raise ConfigError(
                f"run '{spec.name}' has several phases, which are set in steps; a run that ends by time has no fixed steps",
                hint='equal = "flops" or "tokens"',
            )

    def _resolve(self, spec: RunSpec, scaled: Sequence[str], steps: int | None) -> PlannedRun:
        shared = (*as_overrides(self._config.set), *self._overrides)
        limit = [] if steps is None else [f"train.max_steps={steps}"]
        overrides = (*shared, *as_overrides(spec.set), *scaled, *limit)
        preset = spec.preset or self._preset or self._config.preset
        file = spec.config or self._config.config
        try:
            resolved = load_pretrain_config(file, preset, overrides)
            config = resolved.config
            objective = self._objective(config)
        except ConfigError as problem:
            raise ConfigError(f"run '{spec.name}': {problem.message}", hint=problem.hint) from problem
        networks = objective.networks()
        if spec.network is not None and spec.network not in networks:
            raise ConfigError(f"run '{spec.name}' has no network '{spec.network}'", hint=did_you_mean(spec.network, networks))
        train, sizes = config.train, step_sizes(config.train, config.data)
        network = spec.network or next(iter(networks))
        return PlannedRun(
            spec=spec,
            preset=preset,
            file=file,
            overrides=overrides,
            config=config,
            steps=train.max_steps,
            flops=run_flops(objective, train.max_steps, sizes).total,
            tokens=sizes.positions_before(train.max_steps),
            parameters=sum(parameter.numel() for parameter in objective.parameters()),
            network=network,
            encoder=networks[network].encoder.config,
            own=frozenset({*spec.set} | (_set_by_file(resolved) if spec.config is not None else set())),
        )

    def _objective(self, config: PretrainConfig) -> Any:
        with torch.device("meta"):
            return build_objective(config, self._vocabulary)

    def _phases(self, config: PretrainConfig) -> list[Any]:
        return list(self._objective(config).phases(config.train.max_steps))

    def _refuse_set_by_file(self, spec: RunSpec, reference: PlannedRun) -> None:
        """Refuse settings in the run's own file that its `set` may not contain."""
        given = {} if spec.config is None else read_file(spec.config)
        seed, found = given.get("train.seed"), given.get("train.max_steps")
        if seed is not None and seed.origin.by_user:
            raise ConfigError(
                f"run '{spec.name}': {seed.origin.where} sets train.seed, but all runs have the seeds of '{reference.name}'",
                hint="remove the line",
            )
        if found is not None and found.origin.by_user:
            raise ConfigError(
                f"run '{spec.name}': {found.origin.where} sets train.max_steps, which follows from the budget of "
                f"'{reference.name}'",
                hint="remove the line, or give the run a fraction of the budget: budget = 0.5",
            )

    def _refuse_hours(self, name: str, hours: float | None) -> None:
        if hours is not None:
            raise ConfigError(
                f"run '{name}' has train.max_hours = {hours:g}, which could end it before it reaches its budget",
                hint='--set train.max_hours=none; with equal = "seconds", only the first run may have it',
            )


def _baseline(reference: PlannedRun) -> PlannedRun:
    """The reference's networks at step 0."""
    spec = RunSpec(name=UNTRAINED, network=reference.spec.network)
    return replace(reference, spec=spec, steps=0, flops=Flops(), tokens=0, trained=False)


def _scaled(run: PlannedRun, steps: int) -> list[str]:
    """The settings that name steps (warm-up, phases, freezing, schedules), rescaled to the run's length unless it sets them."""
    factor = steps / run.config.train.max_steps
    own = flatten(run.config)
    named = ("optimizer.", "objective.", "train.batch_schedule", "data.length_schedule")
    keys = [key for key in own if key.startswith(named) and key not in run.own]
    stretched = {key: _rescaled(key, own[key], factor) for key in keys}
    return as_overrides({key: value for key, value in stretched.items() if value is not None and value != own[key]})


def _rescaled(key: str, value: Any, factor: float) -> Any:
    """A setting rescaled for a run that is `factor` times as long; None if it does not name steps."""
    if key.endswith("_schedule") and isinstance(value, tuple):
        steps: list[int] = []
        for step, _ in value:
            steps.append(max(round(step * factor), steps[-1] + 1 if steps else 0))
        # Steps that rounding makes equal move to before the last one.
        last = round(value[-1][0] * factor) if value else 0
        steps = [min(step, last - after) for after, step in zip(reversed(range(len(steps))), steps, strict=True)]
        return tuple((step, other) for step, (_, other) in zip(steps, value, strict=True)) or None
    counts = key.endswith(("_steps", "_at")) and isinstance(value, int | float)
    # Below 1 it is a fraction of the run, which needs no rescaling.
    return max(1, round(value * factor)) if counts and value >= 1 else None


def _set_by_file(resolved: Resolved[PretrainConfig]) -> set[str]:
    """The keys that a file sets, without those that `--set` overrides."""
    return {key for key in resolved.user_set if resolved.origins.get(key) != "--set"}


def _nearest_steps(cost: Callable[[int], float], target: float, start: int) -> int:
    """The number of steps whose cost is nearest to the target; cost grows with steps, nearly in proportion."""
    tried: dict[int, float] = {}
    steps = start
    while steps not in tried and len(tried) < 20:
        tried[steps] = cost(steps)
        steps = max(1, round(steps * target / tried[steps]))
    return min(tried, key=lambda number: abs(tried[number] - target))
