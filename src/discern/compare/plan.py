"""The plan of a comparison: its TOML file, and settings, steps and cost of every run, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from discern.config.resolve import parse_overrides, parse_toml, read_file
from discern.config.schema import Section, flatten, leaves, toml_value
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError, DataError, did_you_mean
from discern.finetuning.plan import find_files, find_splits
from discern.finetuning.settings import Recipe, given_settings, load_finetune_config
from discern.model_files.run import vocabulary_of
from discern.models import encoders
from discern.models.config import ModelConfig
from discern.objectives.base import Vocabulary
from discern.pretraining.resume import meta_objective
from discern.storage.checksums import checksum, read_text
from discern.tasks import tasks as registry
from discern.training.config import NO_STEP_LIMIT, RUN_POINTS, PretrainConfig, load_pretrain_config, step_sizes
from discern.training.flops import run_flops

CONVENTION = "executed: multiplications and additions of the matrix products that run, forward and backward"
# Names of task folders besides the task's own; case and characters other than letters and digits are ignored.
_USUAL_NAMES = {
    "sst2": ("sst",),
    "stsb": ("sts",),
    "chunk": ("conll2000", "conll00", "chunking"),
    "ner": ("conll2003", "conll03"),
    "weibo-ner": ("weibo",),
    "squad1": ("squad11", "squadv11", "squadv1", "squad"),
    "squad2": ("squad20", "squadv20", "squadv2"),
    "cmrc2018": ("cmrc",),
    "naturalqs": ("naturalquestions", "naturalquestionsshort"),
    "squad-mrqa": ("mrqasquad",),
}


UNTRAINED = "untrained"
"""The name of the baseline's row."""

# Settings by dotted key, whether they were written with dotted names or as nested tables.
FlatSettings = Annotated[dict[str, Any], AfterValidator(lambda tree: dict(leaves(tree)))]


def _beside(path: Path, file: ValidationInfo) -> Path:
    return file.context / path if file.context else path


# A path in the file of a comparison, relative to its folder.
Beside = Annotated[Path, AfterValidator(_beside)]


class RunSpec(Section):
    """One row of the comparison: its differences from the settings that all rows share."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.+-]*$", description="Name of the run: of its row in the results, and of its folders."
    )
    preset: str | None = Field(None, description="Preset to start from (default: the one that all runs share).")
    config: Beside | None = Field(
        None, description="TOML file over the preset, relative to this file (default: the one that all runs share)."
    )
    set: FlatSettings = Field(default_factory=dict, description="Settings of this run; they override all others.")
    budget: float = Field(1.0, gt=0, description="Fraction of the comparison's budget that this run gets.")
    network: str | None = Field(None, description="Network to fine-tune (default: the one that `discern export` exports).")


class FinetuneSpec(Section):
    """Settings of the fine-tuning of every encoder."""

    seeds: int = Field(1, ge=1, description="Number of fine-tuning seeds per encoder and task; the score is their median.")
    recipe: Recipe = Field("paper", description="Recipe, as for `discern finetune --recipe`.")
    set: FlatSettings = Field(default_factory=dict, description="Settings of all fine-tuning runs.")
    task_set: dict[str, FlatSettings] = Field(default_factory=dict, description="Further settings by task name.")


class CompareConfig(Section):
    """A comparison. The first run is the reference: it sets the budget, and the other runs are tested against it."""

    equal: Literal["flops", "seconds", "tokens"] = Field(
        "flops",
        description="The cost that is equal for all runs. 'flops': executed FLOPs of the matrix products; 'seconds': training "
        "time; 'tokens': positions read.",
    )
    seeds: int = Field(3, ge=1, description="Number of pre-training seeds per run.")
    tasks: tuple[str, ...] = Field((), description="Task names, as for `discern finetune --task`.")
    task_data: dict[str, Beside] = Field(default_factory=dict, description="Folder of each task by name, relative to this file.")
    preset: str | None = Field(None, description="Preset that all runs start from; --preset overrides it.")
    config: Beside | None = Field(None, description="TOML file over the preset, relative to this file.")
    set: FlatSettings = Field(default_factory=dict, description="Settings of all runs; --set overrides them.")
    run: tuple[RunSpec, ...] = Field(min_length=1, description="The runs, the reference first.")
    finetune: FinetuneSpec = Field(default_factory=FinetuneSpec)
    baseline: bool = Field(False, description="Also evaluate the reference's networks at step 0.")
    keep: Literal["results", "encoder", "all"] = Field(
        "encoder",
        description="What to keep of a finished run besides its result files: nothing, the exported encoder, or everything.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CompareConfig:
        names = [run.name for run in self.run] + [UNTRAINED] * self.baseline
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"several rows are called {repeated.pop()}; names must differ ('{UNTRAINED}' is the baseline's)")
        if self.run[0].budget != 1:
            raise ValueError(f"run '{names[0]}' is the reference, whose budget is always 1; set budget for the other runs")
        if stray := {*self.finetune.task_set, *self.task_data} - {*self.tasks}:
            raise ValueError(f"settings or folders are given for {', '.join(sorted(stray))}, which the list of tasks lacks")
        return self


def load_compare_config(path: Path) -> CompareConfig:
    """Read the TOML file of a comparison; the paths in it become relative to the working directory.

    Raises:
        ConfigError: the file cannot be read or is invalid; the message lists all problems.
    """
    text = read_text(path, hint="give the TOML file of a comparison; docs/howto/compare.md shows one", error=ConfigError)
    try:
        return CompareConfig.model_validate(parse_toml(text.removeprefix("\ufeff"), str(path)), context=path.parent)
    except ValidationError as problem:
        lines = [f"{path} does not describe a comparison:"]
        for error in problem.errors(include_url=False):
            place, told = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
            lines.append(f"- {place}: {told}" if place else f"- {told}")
        example = 'a run is:  [[run]]  name = "mlm"  set = { "objective.name" = "mlm" };  docs/howto/compare.md has all keys'
        raise ConfigError("\n".join(lines), hint=example) from problem


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings in the form that `--set` takes."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]


@dataclass(frozen=True)
class TaskFolder:
    """A task and its files.

    Attributes:
        files: sha256 of each file by split; scores are valid for these files only.
        overrides: settings with which every encoder is fine-tuned on it.
    """

    name: str
    folder: Path
    files: Mapping[str, str]
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """A row of the comparison.

    Attributes:
        overrides: all settings that override preset and file, except seed and time limit.
        config: the resolved configuration, with the first seed.
        cost: `steps`, `flops` and `flops_paper_convention` of all steps, and `tokens`: positions read, padding included; each is
            None if the run ends by time.
        parameters: number of parameters, shared ones counted once.
        network: the network to fine-tune.
        encoder: sizes of its encoder.
        trained: False for the baseline.
    """

    spec: RunSpec
    preset: str | None
    file: Path | None
    overrides: tuple[str, ...]
    config: PretrainConfig
    cost: Mapping[str, Any]
    parameters: int
    network: str
    encoder: ModelConfig
    trained: bool = True

    @property
    def name(self) -> str:
        """Name of the row and of its folders."""
        return self.spec.name

    def settings_of(self, seed: int, hours: float | None = None) -> dict[str, Any]:
        """The settings of the row's pre-training with one seed, limited to `hours` if given, as `pretrain` takes them."""
        limit = () if hours is None else (f"train.max_hours={hours!r}",)
        return {"config": self.file, "preset": self.preset, "overrides": (*self.overrides, f"train.seed={seed}", *limit)}


@dataclass(frozen=True)
class ComparisonPlan:
    """Everything that is known before the first step.

    Attributes:
        out: folder of the results.
        data: data set for pre-training.
        runs: the reference first, the baseline (if any) last.
        seeds: pre-training seeds.
        budget: the full budget in FLOPs or positions; None if it is the reference's training time, which is not known yet.
    """

    out: Path
    device: str
    config: CompareConfig
    data: TokenData
    runs: tuple[PlannedRun, ...]
    seeds: range
    tasks: Sequence[TaskFolder]
    budget: float | None

    @property
    def reference(self) -> PlannedRun:
        """The run that sets the budget."""
        return self.runs[0]


def plan_comparison(
    config: Path,
    data: Path,
    out: Path,
    task_data: Path | None,
    preset: str | None,
    overrides: Sequence[str],
    device: str,
) -> ComparisonPlan:
    """Resolve every run and find its number of steps; nothing is written. The arguments are those of `compare`.

    Raises:
        ConfigError, DataError: anything that would stop one of the runs.
    """
    settings = load_compare_config(config)
    tokens = TokenData.open(data)
    tasks = find_task_folders(settings, task_data)
    shared = (*as_overrides(settings.set), *overrides)
    planner = _Planner(settings.equal, vocabulary_of(tokens), preset or settings.preset, settings.config, shared)
    runs: list[PlannedRun] = []
    for spec in settings.run:
        run = planner.resolve(spec)
        if (hours := run.config.train.max_hours) is not None:
            if runs or settings.equal != "seconds":
                raise ConfigError(
                    f"run '{run.name}' has train.max_hours = {hours:g}, which could end it before it reaches its budget",
                    hint='--set train.max_hours=none; with equal = "seconds", only the first run may have it',
                )
            run = replace(run, cost=dict.fromkeys(run.cost))
        runs.append(planner.within_budget(run, runs[0]) if runs else run)

    # Resolve the settings of the fine-tuning, so that a mistake in them shows before any training
    for run in runs:
        for task in tasks:
            with _naming(f"fine-tuning on '{task.name}'"):
                given, encoder = given_settings(None, as_overrides(task.overrides)), encoders.load(run.encoder.encoder)
                definitions = [registry.load(task.name)]
                load_finetune_config(definitions, run.encoder, given, recipe=settings.finetune.recipe, encoder=encoder)

    if settings.baseline:  # the reference's networks at step 0
        spec = RunSpec(name=UNTRAINED, network=runs[0].spec.network)
        runs.append(replace(runs[0], spec=spec, cost=dict.fromkeys(runs[0].cost, 0), trained=False))
    first = runs[0].config.train.seed
    seeds, budget = range(first, first + settings.seeds), runs[0].cost.get(settings.equal)
    return ComparisonPlan(out, device, settings, tokens, tuple(runs), seeds, tasks, budget)


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """Say in errors which part of the comparison they are about."""
    try:
        yield
    except ConfigError as problem:
        raise ConfigError(f"{part}: {problem.message}", hint=problem.hint) from problem


@dataclass(frozen=True)
class _Planner:
    """Resolves the runs of a comparison, with what all of them share."""

    equal: str
    vocabulary: Vocabulary
    preset: str | None
    file: Path | None
    overrides: Sequence[str]

    def within_budget(self, start: PlannedRun, reference: PlannedRun) -> PlannedRun:
        """A further run, with as many steps as its budget allows."""
        # The run's own settings; those of all runs override its file.
        spec = start.spec
        file = {} if spec.config is None else read_file(spec.config)
        own = {key for key, setting in file.items() if setting.origin.by_user} - parse_overrides(self.overrides).keys()
        own |= spec.set.keys()
        if given := own & {"train.seed", "train.max_steps"}:
            raise ConfigError(
                f"run '{spec.name}' sets {', '.join(sorted(given))}, but seeds and budget are those of '{reference.name}'",
                hint="remove the setting; for fewer steps, set a fraction of the budget: budget = 0.5",
            )

        whole = reference.cost.get(self.equal)
        if whole is None:
            self.resolve(spec, ["train.max_hours=1"], NO_STEP_LIMIT)  # the limit is not known yet, but what it rules out is
            # Evaluations and checkpoints count as time of the run: without a time limit, the clock schedules none of the
            # reference's, so it must not schedule more for the others.
            now, pinned = flatten(start.config), reference.config.train.max_hours is None
            intervals = [f"train.{kind}_every_steps" for kind in ("log", "evaluate", "checkpoint") if pinned]
            run = self.resolve(spec, as_overrides({key: now[key] for key in intervals}), NO_STEP_LIMIT)
            return replace(run, cost=dict.fromkeys(run.cost))

        # The number of steps whose cost is nearest to the budget; cost grows with steps, nearly in proportion
        tried: dict[int, PlannedRun] = {}
        steps, target = start.config.train.max_steps, whole * spec.budget
        while steps not in tried and len(tried) < 20:
            tried[steps] = run = self.resolve(spec, _rescaled(start.config, steps, own), steps)
            steps = max(1, round(steps * target / run.cost[self.equal]))
        return min(tried.values(), key=lambda run: abs(run.cost[self.equal] - target))

    def resolve(self, spec: RunSpec, scaled: Sequence[str] = (), steps: int | None = None) -> PlannedRun:
        """The run with these settings in addition to its own."""
        limit = [] if steps is None else [f"train.max_steps={steps}"]
        overrides = (*self.overrides, *as_overrides(spec.set), *scaled, *limit)
        preset, file = spec.preset or self.preset, spec.config or self.file
        with _naming(f"run '{spec.name}'"):
            config = load_pretrain_config(file, preset, overrides).config
            objective = meta_objective(config, self.vocabulary)
        networks, sizes, max_steps = objective.networks(), step_sizes(config.train, config.data), config.train.max_steps
        network, flops = spec.network or next(iter(networks)), run_flops(objective, max_steps, sizes).total
        if network not in networks:
            raise ConfigError(f"run '{spec.name}' has no network '{network}'", hint=did_you_mean(network, networks))
        return PlannedRun(
            spec=spec,
            preset=preset,
            file=file,
            overrides=overrides,
            config=config,
            cost={
                "steps": max_steps,
                "flops": flops.executed,
                "flops_paper_convention": flops.paper,
                "tokens": sizes.positions_before(max_steps),
            },
            parameters=sum(parameter.numel() for parameter in objective.parameters()),
            network=network,
            encoder=networks[network].encoder.config,
        )


def _rescaled(config: PretrainConfig, steps: int, fixed: set[str]) -> list[str]:
    """The points of a run (warm-up, phases, freezing, schedules), rescaled to `steps`, except those in `fixed`."""
    factor, settings = steps / config.train.max_steps, flatten(config)
    scaled: dict[str, Any] = {}
    for key in RUN_POINTS:
        value = settings.get(key)
        if key in fixed or not value:
            continue
        if isinstance(value, tuple):
            # Of segments that begin at the same step, only the last one has any steps.
            scaled[key] = tuple({round(step * factor): other for step, other in value}.items())
        elif value >= 1:  # not a fraction of the run
            scaled[key] = max(1, round(value * factor))
    return as_overrides(scaled)


def find_task_folders(config: CompareConfig, root: Path | None) -> list[TaskFolder]:
    """The folder of each task: the given one, or the first below `root` that has its name and its files.

    Raises:
        DataError: a folder is missing; the message lists the names searched for.
    """
    root = root and root.resolve()
    below = [] if root is None else [root, *sorted(root.glob("*/")), *sorted(root.glob("*/*/"))]
    tasks, missing = [], []
    for task in config.tasks:
        definition, names = registry.load(task), (task, *_USUAL_NAMES.get(task, ()))
        usual = {_letters(name) for name in names}
        folders = (path for path in below if _letters(path.name) in usual and "train" in find_splits(definition, path))
        if folder := config.task_data.get(task) or next(folders, None):
            files = {split: checksum(path) for split, path in find_files(definition, folder).paths.items()}
            tasks.append(TaskFolder(task, folder, files, config.finetune.set | config.finetune.task_set.get(task, {})))
        else:
            missing.append(f"- {task}: a folder called {' or '.join(names)}, in any case, with or without - and _")
    if missing:
        where = f"no folder below --task-data ({root or 'not given'}) has a training file of these tasks:"
        raise DataError(
            "\n".join([where, *missing]),
            hint="--task-data FOLDER, which holds one folder per task; or in the TOML file: [task_data] rte = 'path/to/RTE'",
        )
    return tasks


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
