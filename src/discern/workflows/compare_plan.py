"""What a comparison will do, before it does anything: the settings, steps and cost of every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.guard import check_folder
from discern.config.layers import read_file
from discern.config.resolve import Resolved
from discern.config.tree import flatten
from discern.data.shards import TokenData
from discern.errors import ConfigError, did_you_mean
from discern.objectives.base import Vocabulary
from discern.training.config import NO_STEP_LIMIT
from discern.training.flops import Flops, run_flops
from discern.workflows.compare_settings import UNTRAINED, CompareConfig, RunSpec, as_overrides, load_compare_config
from discern.workflows.compare_tasks import TaskFolder, find_task_folders
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.pretrain import PretrainRequest
from discern.workflows.runs import build_objective, vocabulary_of
from discern.workflows.settings import PretrainConfig

CONVENTION = "executed: multiplications and additions of the matrix products that run, forward and backward"
_NOTICEABLE = 0.03


@dataclass(frozen=True)
class CompareRequest:
    """What to compare.

    Attributes:
        config: TOML file of the comparison.
        task_data: folder that holds the folders of the tasks, or None.
        preset: recipe that all runs start from, unless they name one; None: the file's.
        overrides: "section.key=value" for all runs.
    """

    config: Path
    data: Path
    out: Path
    task_data: Path | None = None
    preset: str | None = None
    overrides: Sequence[str] = ()
    device: str = "auto"


@dataclass(frozen=True)
class PlannedRun:
    """A row of the comparison.

    Attributes:
        overrides: all that goes over preset and file, but the seed and the time.
        config: resolved, with the seed of the first pre-training.
        steps: how many it will do; None: the clock ends it.
        flops: of all steps; None where the number of steps isn't known.
        tokens: positions that all steps read, padding included; None likewise.
        parameters: shared ones once.
        own: settings that name a step and that it sets itself, in its `set` or in its file.
        network: the network that is fine-tuned.
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
    own: frozenset[str] = frozenset()
    trained: bool = True

    @property
    def name(self) -> str:
        """Of the row and of its folders."""
        return self.spec.name

    def request(self, seed: int, out: Path, data: Path, device: str, hours: float | None = None) -> PretrainRequest:
        """One pre-training of the row; with `hours` it ends when they are over."""
        limit = () if hours is None else (f"train.max_hours={hours!r}",)
        overrides = (*self.overrides, f"train.seed={seed}", *limit)
        return PretrainRequest(data, out, self.file, self.preset, overrides, "auto", device)


@dataclass(frozen=True)
class ComparePlan:
    """Everything that is known before the first step.

    Attributes:
        runs: the reference first, the baseline (if any) last.
        seeds: of the pre-trainings.
        budget: of a whole share, in FLOPs or positions; None: the reference's seconds, known when it has run.
        notes: what the reader should know.
    """

    request: CompareRequest
    config: CompareConfig
    data: TokenData
    runs: tuple[PlannedRun, ...]
    seeds: range
    tasks: Sequence[TaskFolder]
    budget: float | None
    notes: tuple[str, ...]

    @property
    def reference(self) -> PlannedRun:
        """The row that sets the budget."""
        return self.runs[0]


def plan_comparison(request: CompareRequest) -> ComparePlan:
    """Resolve every run and find its steps. Writes nothing.

    Raises:
        ConfigError, DataError: anything that one of the runs would trip over.
    """
    check_folder("--out", request.out, request.data, request.task_data)
    config = load_compare_config(request.config)
    data = TokenData.open(request.data)
    tasks = find_task_folders(config.tasks, request.task_data, config.task_data)
    planner = _Planner(request, config, vocabulary_of(data))
    reference = planner.reference(config.run[0])
    others = [planner.run(spec, reference) for spec in config.run[1:]]
    baseline = [_baseline(reference)] if config.baseline else []
    first = reference.config.train.seed
    return ComparePlan(
        request=request,
        config=config,
        data=data,
        runs=(reference, *others, *baseline),
        seeds=range(first, first + config.seeds),
        tasks=tasks,
        budget=planner.amount(reference),
        notes=tuple(planner.notes),
    )


class _Planner:
    """The steps of `plan_comparison`, with what all runs share."""

    def __init__(self, request: CompareRequest, config: CompareConfig, vocabulary: Vocabulary) -> None:
        self._request, self._config, self._vocabulary = request, config, vocabulary
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
        """A further run, with as many steps as the budget pays for."""
        self._refuse_set_by_file(spec, reference)
        own = self._resolve(spec, [], None)
        self._refuse_hours(spec.name, own.config.train.max_hours)
        whole = self.amount(reference)
        if whole is None:
            return self._by_the_clock(spec, own)
        target = whole * spec.budget

        def at(steps: int) -> PlannedRun:
            return self._resolve(spec, _scaled(own, steps), steps)

        found = at(_nearest_steps(lambda steps: self.amount(at(steps)) or 0.0, target, own.config.train.max_steps))
        off = (self.amount(found) or 0.0) / target - 1
        if abs(off) > _NOTICEABLE:
            self.notes.append(
                f"run '{spec.name}': {found.steps} steps are {off:+.1%} off its budget, as steps are whole; "
                "a larger train.max_steps comes nearer"
            )
        return found

    def amount(self, run: PlannedRun) -> float | None:
        """What is kept equal, of one run; None where only the clock will tell."""
        if self._config.equal == "flops":
            return None if run.flops is None else run.flops.executed
        return run.tokens if self._config.equal == "tokens" else None

    def _by_the_clock(self, spec: RunSpec, own: PlannedRun) -> PlannedRun:
        self._refuse_phases(spec, own)
        found = self._resolve(spec, [], NO_STEP_LIMIT)
        return replace(found, steps=None, flops=None, tokens=None)

    def _refuse_phases(self, spec: RunSpec, own: PlannedRun) -> None:
        if len(self._phases(own.config)) > 1:
            raise ConfigError(
                f"run '{spec.name}' has several phases, which go by steps; a run that the clock ends doesn't know its steps",
                hint='equal = "flops" or "tokens"',
            )

    def _resolve(self, spec: RunSpec, scaled: Sequence[str], steps: int | None) -> PlannedRun:
        shared = (*as_overrides(self._config.set), *self._request.overrides)
        limit = [] if steps is None else [f"train.max_steps={steps}"]
        overrides = (*shared, *as_overrides(spec.set), *scaled, *limit)
        preset = spec.preset or self._request.preset or self._config.preset
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
        train, length = config.train, config.data.sequence_length
        return PlannedRun(
            spec=spec,
            preset=preset,
            file=file,
            overrides=overrides,
            config=config,
            steps=train.max_steps,
            flops=run_flops(objective, train.max_steps, length, train.sequences_per_step).total,
            tokens=train.max_steps * length * train.sequences_per_step,
            parameters=sum(parameter.numel() for parameter in objective.parameters()),
            network=spec.network or next(iter(networks)),
            own=frozenset({*spec.set} | (_set_by_file(resolved) if spec.config is not None else set())),
        )

    def _objective(self, config: PretrainConfig) -> Any:
        with torch.device("meta"):
            return build_objective(config, self._vocabulary)

    def _phases(self, config: PretrainConfig) -> list[Any]:
        return list(self._objective(config).phases(config.train.max_steps))

    def _refuse_set_by_file(self, spec: RunSpec, reference: PlannedRun) -> None:
        """What `set` may not say, the run's own file may not either."""
        given = {} if spec.config is None else read_file(spec.config)
        seed, found = given.get("train.seed"), given.get("train.max_steps")
        if seed is not None and seed.origin.by_user:
            raise ConfigError(
                f"run '{spec.name}': {seed.origin.where} sets train.seed, but all rows have the seeds of '{reference.name}'",
                hint="take the line out",
            )
        if found is not None and found.origin.by_user:
            raise ConfigError(
                f"run '{spec.name}': {found.origin.where} sets train.max_steps, which follows from the budget of "
                f"'{reference.name}'",
                hint="take the line out, or give the run a share: budget = 0.5",
            )

    def _refuse_hours(self, name: str, hours: float | None) -> None:
        if hours is not None:
            raise ConfigError(
                f"run '{name}' has train.max_hours = {hours:g}, which would end it before its budget is used up",
                hint='--set train.max_hours=none; with equal = "seconds" the first run alone may have it',
            )


def _baseline(reference: PlannedRun) -> PlannedRun:
    """The reference's networks at step 0."""
    spec = RunSpec(name=UNTRAINED, network=reference.spec.network)
    return replace(reference, spec=spec, steps=0, flops=Flops(), tokens=0, trained=False)


def _scaled(run: PlannedRun, steps: int) -> list[str]:
    """Settings that name steps (warm-up, phases, freezing, schedules), stretched with the run, unless it sets them itself."""
    factor = steps / run.config.train.max_steps
    own = flatten(run.config)
    keys = [key for key in own if key.startswith(("optimizer.", "objective.")) and key not in run.own]
    stretched = {key: _stretched(key, own[key], factor) for key in keys}
    return as_overrides({key: value for key, value in stretched.items() if value is not None and value != own[key]})


def _stretched(key: str, value: Any, factor: float) -> Any:
    """A setting of a run that is `factor` times as long; None where it says nothing of steps."""
    if key.endswith("_schedule") and isinstance(value, tuple):
        return _rising([(round(step * factor), weight) for step, weight in value]) or None
    counts = key.endswith(("_steps", "_at")) and isinstance(value, int | float)
    # Below 1 it is a share of the run, which needs no stretching.
    return max(1, round(value * factor)) if counts and value >= 1 else None


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A schedule whose steps may have come to be the same by rounding, each at least one after the one before."""
    found: list[tuple[int, float]] = []
    for step, weight in points:
        found.append((max(step, found[-1][0] + 1) if found else step, weight))
    return found


def _set_by_file(resolved: Resolved[PretrainConfig]) -> set[str]:
    """The settings that a file gave, and nothing that goes over it."""
    return {key for key in resolved.user_set if resolved.origins.get(key) != "--set"}


def _nearest_steps(cost: Callable[[int], float], target: float, start: int) -> int:
    """The number of steps whose cost is nearest to the target; cost grows with steps, nearly in proportion."""
    tried: dict[int, float] = {}
    steps = start
    while steps not in tried and len(tried) < 20:
        tried[steps] = cost(steps)
        steps = max(1, round(steps * target / tried[steps]))
    return min(tried, key=lambda number: abs(tried[number] - target))
