"""The folder of a fine-tuned model: its files, its records, and the weights of its seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, final

import torch
from pydantic import Field

from discern import __version__
from discern.errors import ConfigError, DataError
from discern.model_files.folder import FINETUNED_RECORD, PROVENANCE, LoadedEncoder, ModelFolder, TaskModel
from discern.model_files.weight_files import read_tensors
from discern.models.base import Network, build_embeddings, build_encoder
from discern.models.config import build_config
from discern.objectives.base import Objective
from discern.storage.checksums import Record, has_file, read_json, understood
from discern.tasks import families, tasks as registry
from discern.tasks.base import Definition, Labels, Task
from discern.tasks.supervised import FrameName, supervised
from discern.training.checkpoint import load_model_tensors

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, RESULTS_FILE = "config.toml", FINETUNED_RECORD, "tokenizer.json", "results.json"
MODEL_FILE, SCORES_FILE = "model.safetensors", "scores.json"
FORMAT = 1
"""Version of the records of fine-tuned models."""
_RECORD_HINT = "copy the file back, or fine-tune again with another --out"


def is_finetuned(folder: Path) -> bool:
    """Whether a folder holds a fine-tuned model, possibly without its record."""
    return has_file(folder, RECORD_FILE)


def seed_folder(folder: Path, seed: int) -> Path:
    """Folder of one seed."""
    return folder / f"seed-{seed}"


def predictions_file(folder: Path, task: str, split: str | None = None) -> Path:
    """File with the predictions of a seed for a split, one line per example.

    Args:
        folder: folder of the seed.
        split: name of the split; None: the one that is evaluated.
    """
    return folder / (f"predictions-{task}.jsonl" if split is None else f"predictions-{task}-{split}.jsonl")


@final
class FinetunedFolder(ModelFolder):
    """The folder of a fine-tuned model, which `discern finetune` wrote; it has the weights of one or several seeds."""

    kind = "fine-tuned model"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._task_models: dict[int, TaskModel] = {}

    @cached_property
    def record(self) -> dict[str, Any]:
        """Content of finetuned.json."""
        return read_finetuned(self.folder)

    @cached_property
    def best_seed(self) -> int:
        """The seed with the best score."""
        return int(read_results(self.folder)["best_seed"])

    @property
    def description(self) -> str:
        return f"fine-tuned model {self.folder}"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE

    @property
    def max_length(self) -> int:
        """The longest sequence of its tasks, in tokens."""
        return max(int(task["config"]["sequence_length"]) for task in self.record["tasks"].values())

    def networks(self, *, beside: bool = True) -> Mapping[str, Network]:
        raise self._not_pretrained()

    @cached_property
    def encoder(self) -> LoadedEncoder:
        """The encoder of the best seed, without the heads of its tasks, from which further fine-tuning starts."""
        tuned = self.task_model()
        described = f"{self.description}, seed {tuned.seed}"
        return self._loaded(tuned.objective.encoder, self.record["max_length"], described)

    @property
    def objective(self) -> Objective:
        raise self._not_pretrained()

    @property
    def has_task_head(self) -> bool:
        return True

    def task_model(self, seed: int | None = None) -> TaskModel:
        """The fine-tuned model of a seed.

        Args:
            seed: seed whose weights are loaded; None: the seed with the best score.

        Raises:
            ConfigError: that seed was not trained.
            DataError: the fine-tuning is not finished, a file is damaged, or the seed diverged.
            CheckpointError: the weights are missing or damaged.
            NumericsError: a weight is not finite.
        """
        folder, record = self.folder, self.record
        if seed is not None and not seed_folder(folder, seed).is_dir():
            trained = sorted(int(path.name.removeprefix("seed-")) for path in folder.glob("seed-*"))
            raise ConfigError(f"{folder} has no seed {seed}", hint=f"trained: {', '.join(map(str, trained)) or 'none'}")
        seed = self.best_seed if seed is None else seed
        if seed in self._task_models:
            return self._task_models[seed]
        path = seed_folder(folder, seed) / MODEL_FILE
        # The scores of a seed that diverged record the failure, and it has no weights.
        if (path.parent / SCORES_FILE).is_file() and (failure := read_scores(path.parent).get("failure")) is not None:
            raise DataError(
                f"seed {seed} of {folder} {failure}; it left no weights",
                hint="use another --seed; or lower the learning rate: `discern finetune` with --set "
                "optimizer.learning_rate=..., in another --out",
            )
        weights = read_tensors(path, hint=f"remove {path.parent}, then run the same `discern finetune` command")
        with understood(folder / RECORD_FILE, hint=_RECORD_HINT):
            tasks = {name: task_of(name, each) for name, each in record["tasks"].items()}
            config = build_config(record["encoder"])
            encoder = build_encoder(build_embeddings(record["vocab_size"], record["embedding_size"], config), config)
            objective = supervised(encoder, tasks, frame=record["frame"])
        load_model_tensors(objective, weights, str(path))
        self._task_models[seed] = TaskModel(folder, objective.eval(), self.tokenizer, seed, record)
        return self._task_models[seed]

    def _not_pretrained(self) -> DataError:
        return DataError(
            f"{self.folder} is a fine-tuned model; it outputs task predictions",
            hint=f"discern predict {self.folder} INPUT, or give the model that it was fine-tuned from",
        )


def task_of(name: str, record: dict[str, Any]) -> Task[Any]:
    """Build the task that a record describes: of the registered task's class if the task is of this family.

    Raises:
        ConfigError: its family is not installed.
    """
    family: Any = registry.load(name).family if name in registry.names() else None
    if getattr(family, "family", None) != record["family"]:
        if record["family"] not in families.names():
            raise ConfigError(
                f"task '{name}' is of the family '{record['family']}', which is not installed here",
                hint="install the package that registers the task",
            )
        family = families.load(record["family"])
    known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record["labels"].items()}
    config = family.Config.model_validate(record["config"])
    return family(name, config, tuple(record["metrics"]), Labels(**known))  # type: ignore[no-any-return]


def make_record(
    loaded: LoadedEncoder,
    tasks: Mapping[str, Task[Any]],
    definitions: Mapping[str, Definition[Any]],
    files: Mapping[str, Any],
    frame: FrameName = "cls-first",
) -> dict[str, Any]:
    """The content of finetuned.json: the model, its sizes, and its tasks with labels, files and how they are read.

    Raises:
        ConfigError: the class of a task could not be found from the record.
    """
    for name, task in tasks.items():
        family = getattr(type(task), "family", None)
        if name in registry.names():
            known = registry.load(name).family is type(task)
        else:
            known = definitions[name].reader is None and family in families.names() and families.load(family) is type(task)
        if not isinstance(family, str) or not known:
            raise ConfigError(
                f"task '{name}' of the family '{family or type(task).__name__}' is not registered under its name, so the trained "
                "model could not be used",
                hint='register the definition under its own name, and name the family: family = "my-family"',
            )
    return {
        "format": FORMAT,
        "discern": __version__,
        "model": loaded.description,
        "encoder_fingerprint": loaded.source_fingerprint,
        "vocab_size": loaded.vocabulary_size,
        "embedding_size": loaded.encoder.embeddings.embedding_size,
        "encoder": loaded.encoder.config.model_dump(),
        "frame": frame,
        "max_length": loaded.max_length,
        "tasks": {
            name: {
                "family": type(task).family,
                "metrics": list(task.metrics),
                "labels": asdict(task.labels),
                "config": task.config.model_dump(mode="json"),
                "files": files[name],
                "layout": asdict(definitions[name].layout),
            }
            for name, task in tasks.items()
        },
        PROVENANCE: loaded.provenance,
        "versions": {"torch": torch.__version__},
    }


class _TaskRecord(Record):
    family: str
    metrics: Annotated[list[str], Field(min_length=1)]
    labels: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, Any]
    layout: dict[str, Any]


class _Finetuned(Record):
    """Required content of finetuned.json."""

    format: int
    model: str
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    embedding_size: Annotated[int, Field(ge=1, lt=2**31)]
    encoder: dict[str, Any]
    frame: FrameName
    max_length: Annotated[int, Field(ge=1)]
    tokenizer_fingerprint: str
    tasks: Annotated[dict[str, _TaskRecord], Field(min_length=1)]
    debug: bool
    provenance: dict[str, list[str]]


def read_finetuned(folder: Path) -> dict[str, Any]:
    """Read finetuned.json.

    Raises:
        DataError: it is missing or damaged, or of another format.
    """
    return read_json(folder / RECORD_FILE, _Finetuned, hint=_RECORD_HINT, version=FORMAT)


class _Scores(Record):
    """Required content of scores.json."""

    tasks: dict[str, dict[str, float]]
    failure: str | None = None
    failures: dict[str, str] = Field(default_factory=dict)
    seconds: float
    padding_fraction: float | None


def read_scores(folder: Path) -> dict[str, Any]:
    """Read scores.json of a seed.

    Args:
        folder: the folder of the seed.

    Raises:
        DataError: it is missing or damaged.
    """
    hint = f"remove {folder}, then run the same `discern finetune` command to train this seed again"
    return read_json(folder / SCORES_FILE, _Scores, hint=hint)


class _Results(Record):
    """Required content of results.json. With several tasks, `tasks` has the results of each."""

    task: Annotated[str, Field(max_length=200)]
    model: str
    metrics: dict[str, float]
    seconds: float
    best_seed: Annotated[int, Field(ge=0)]
    seeds: Annotated[list[int], Field(min_length=1)]
    settings: dict[str, Any]
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)


def read_results(folder: Path) -> dict[str, Any]:
    """Read results.json.

    Raises:
        DataError: the file is damaged, or the fine-tuning is not finished.
    """
    path = folder / RESULTS_FILE
    if not path.exists():
        raise DataError(
            f"{folder} is not finished: it has no {RESULTS_FILE}", hint="run the same `discern finetune` command to continue"
        )
    return read_json(path, _Results, hint=f"remove {path}, then run the same `discern finetune` command, which writes it again")
