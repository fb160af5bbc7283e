"""The folder of a fine-tuned model: its files, its records, and the weights of its seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, final

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from discern import __version__
from discern.artifacts.encoder import LoadedEncoder, loaded_encoder
from discern.artifacts.model_folder import TEXT_LICENSE, ModelFolder
from discern.artifacts.run import FINETUNED_FILE
from discern.artifacts.task_model import FORMAT, TaskModel, task_of
from discern.errors import CheckpointError, ConfigError, DataError
from discern.models.base import Encoder, Network, build_embeddings, build_encoder
from discern.models.config import read_config
from discern.objectives.base import Objective
from discern.storage.checksums import Record, read_record, understood, verify, write_recorded
from discern.storage.files import utf8_name
from discern.tasks import families
from discern.tasks import tasks as registry
from discern.tasks.base import Source, Task
from discern.tasks.frames import FrameName
from discern.tasks.supervised import SupervisedObjective, supervised
from discern.training.checkpoint import check_finite, load_model_tensors, model_tensors

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, RESULTS_FILE = "config.toml", FINETUNED_FILE, "tokenizer.json", "results.json"
MODEL_FILE, SCORES_FILE = "model.safetensors", "scores.json"
_RECORD_HINT = "copy the file back, or fine-tune again with another --out"


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


def make_record(
    loaded: LoadedEncoder,
    tasks: dict[str, Task[Any]],
    files: dict[str, Any],
    sources: dict[str, Source[Any]],
    frame: FrameName = "cls-first",
) -> dict[str, Any]:
    """The content of finetuned.json: the model, its sizes, and its tasks with labels, files and how they are read.

    Raises:
        ConfigError: the class of a task could not be found from the record.
    """
    for name, task in tasks.items():
        _check_found_again(name, task, sources[name])
    said = {"language": loaded.language, TEXT_LICENSE: loaded.text_license}
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
                "source": sources[name].record(),
            }
            for name, task in tasks.items()
        },
        "versions": {"torch": torch.__version__},
    } | {name: value for name, value in said.items() if value is not None}


def write_weights(folder: Path, objective: SupervisedObjective) -> None:
    """Write the weights of a seed, whole or not at all. The same weights give the same bytes."""
    try:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in model_tensors(objective).items()}
        content = save(tensors, {"format": "pt"})
        write_recorded(folder, {MODEL_FILE: content})
    except OSError as problem:
        raise CheckpointError(
            f"cannot write to {folder}: {problem.strerror or problem}", hint="free some space, then run the same command"
        ) from problem


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all, and record its checksum."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_recorded(path.parent, {path.name: text})


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, whole or not at all, and record its checksum."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_recorded(path.parent, {path.name: text})


@final
class FinetunedFolder(ModelFolder):
    """The folder of a fine-tuned model, which `discern finetune` wrote; it has the weights of one or several seeds."""

    kind = "fine-tuned model"

    @cached_property
    def record(self) -> dict[str, Any]:
        """Content of finetuned.json."""
        return read_finetuned(self.folder)

    @property
    def description(self) -> str:
        return f"fine-tuned model {self.folder}"

    @property
    def step(self) -> None:
        return None

    @property
    def config(self) -> None:
        return None

    @property
    def language(self) -> str | None:
        return self.record.get("language")

    @property
    def text_license(self) -> str | None:
        return self.record.get(TEXT_LICENSE)

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE

    @property
    def trained_with(self) -> str:
        fingerprint: str = self.record["tokenizer_fingerprint"]
        return fingerprint

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
        return loaded_encoder(
            tuned.objective.encoder,
            self.tokenizer_path,
            self.record["max_length"],
            f"{self.description}, seed {tuned.seed}",
            language=self.language,
            text_license=self.text_license,
        )

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
        seed = _best_seed(folder) if seed is None else seed
        path = seed_folder(folder, seed) / MODEL_FILE
        _refuse_failed(folder, seed)
        weights = _weights(path)
        # Checked first, because a damaged record could ask for a table that does not fit into memory.
        if all(tensor.shape != (record["vocab_size"], record["embedding_size"]) for tensor in weights.values()):
            raise CheckpointError(
                f"{folder / RECORD_FILE} describes a table of {record['vocab_size']:,} by {record['embedding_size']:,} "
                f"embeddings, which {path} does not have",
                hint=_RECORD_HINT,
            )
        with understood(folder / RECORD_FILE, hint=_RECORD_HINT):
            tasks = {name: task_of(name, each) for name, each in record["tasks"].items()}
            objective = supervised(_encoder(record), tasks, frame=record["frame"])
        load_model_tensors(objective, weights, str(path))
        return TaskModel(folder, objective.eval(), self.tokenizer, seed, record)

    def _not_pretrained(self) -> DataError:
        return DataError(
            f"{self.folder} is a fine-tuned model; it outputs task predictions",
            hint=f"discern predict {self.folder} INPUT, or give the model that it was fine-tuned from",
        )


def _weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a seed, and compare the file with its checksum.

    Raises:
        CheckpointError: the weights are missing or damaged.
        NumericsError: a weight is not finite.
    """
    hint = f"remove {path.parent}, then run the same `discern finetune` command"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint=hint)
    verify(path, error=CheckpointError)
    try:
        with utf8_name(path) as readable:
            tensors = load_file(readable)
    except (OSError, SafetensorError, ValueError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint=hint) from problem
    check_finite(tensors, path)
    return tensors


class _TaskRecord(Record):
    family: str
    metrics: Annotated[list[str], Field(min_length=1)]
    labels: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, Any]
    source: dict[str, Any]
    digests: dict[str, str]


class _Finetuned(Record):
    """Required content of finetuned.json."""

    format: int
    model: str
    encoder_fingerprint: str
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    embedding_size: Annotated[int, Field(ge=1, lt=2**31)]
    encoder: dict[str, Any]
    frame: FrameName
    max_length: Annotated[int, Field(ge=1)]
    tokenizer_fingerprint: str
    tasks: Annotated[dict[str, _TaskRecord], Field(min_length=1)]
    debug: bool
    discern: str
    versions: dict[str, str]
    language: str | None = None
    text_license: str | None = None


def read_finetuned(folder: Path) -> dict[str, Any]:
    """Read finetuned.json.

    Raises:
        DataError: it is missing or damaged, or of another format.
    """
    return read_record(folder / RECORD_FILE, _Finetuned, hint=_RECORD_HINT, version=FORMAT)


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
    return read_record(folder / SCORES_FILE, _Scores, hint=hint)


class _Entry(Record):
    """The results of one task."""

    task: Annotated[str, Field(max_length=200)]
    metric: str
    scores: list[float | None]
    metrics: dict[str, float]
    median: float | None
    failed_seeds: dict[str, str]


class _Results(_Entry):
    """Required content of results.json. With several tasks, `tasks` has the results of each."""

    model: str
    seconds: float
    discern: str
    best_seed: Annotated[int, Field(ge=0)]
    seeds: Annotated[list[int], Field(min_length=1)]
    settings: dict[str, Any]
    tasks: dict[str, _Entry] = Field(default_factory=dict)


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
    return read_record(path, _Results, hint=f"remove {path}, then run the same `discern finetune` command, which writes it again")


def _refuse_failed(folder: Path, seed: int) -> None:
    """Raise a DataError for a seed that diverged: its scores record the failure, and it has no weights."""
    scores = seed_folder(folder, seed)
    failure = read_scores(scores).get("failure") if (scores / SCORES_FILE).is_file() else None
    if failure is not None:
        others = sorted(int(path.parent.name.removeprefix("seed-")) for path in folder.glob(f"seed-*/{MODEL_FILE}"))
        raise DataError(
            f"seed {seed} of {folder} {failure}; it left no weights",
            hint=f"use another seed: --seed {others[0]}"
            if others
            else "lower the learning rate: `discern finetune` with --set optimizer.learning_rate=..., in another --out",
        )


def _check_found_again(name: str, task: Task[Any], source: Source[Any]) -> None:
    """Raise a ConfigError, before any training, if the trained network could not be loaded again."""
    kind = type(task)
    if not isinstance(getattr(kind, "family", None), str):
        raise ConfigError(f"{kind.__name__}, the family of task '{name}', has no name", hint='give it one: family = "my-family"')
    if name in registry.names() and registry.load(name).family is kind:
        return
    if not source.record() or kind.family not in families.names() or families.load(kind.family) is not kind:
        raise ConfigError(
            f"task '{name}' of the family '{kind.family}' is not registered under its name, so the trained model could not be "
            "used",
            hint="register the definition under its own name",
        )


def _best_seed(folder: Path) -> int:
    return int(read_results(folder)["best_seed"])


def _encoder(record: dict[str, Any]) -> Encoder:
    config = read_config(record["encoder"])
    return build_encoder(build_embeddings(record["vocab_size"], record["embedding_size"], config), config)
