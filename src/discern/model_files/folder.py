"""`ModelFolder`: a folder that holds a model, whatever wrote it; and the encoder that it gives to fine-tuning."""

from __future__ import annotations

import abc
import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import nn

from discern.config.resolve import preset_names
from discern.corruption.randomness import key_of
from discern.data.dataset.shards import TokenData
from discern.data.tokenizer import fingerprint, load_tokenizer, special_tokens, vocab_size
from discern.errors import ConfigError, DataError, did_you_mean, nearest
from discern.model_files.hub import CONFIG_NAME, local_model
from discern.models.base import Encoder, Network, build_embeddings, build_encoder, initialize
from discern.models.config import ModelConfig
from discern.models.layers import Disentangled
from discern.objectives.base import Objective
from discern.objectives.config import ObjectiveConfig
from discern.storage.checksums import has_file
from discern.tasks.base import Task, TextEncoder
from discern.tasks.supervised import FrameName, SupervisedObjective
from discern.training.config import PretrainConfig, load_pretrain_config

RUN_RECORD, FINETUNED_RECORD = "run.json", "finetuned.json"
"""Files that identify a run and a fine-tuned model."""
PROVENANCE = "provenance"
"""Key, in records and in config.json of exports, of what is known about where a model comes from, see `Provenance`."""
Provenance: TypeAlias = Mapping[str, Sequence[str]]
"""The `languages` and `licenses` of the text that a model was pre-trained on, as stated by whoever prepared it, the `datasets` of
the Hugging Face Hub that the text is from, and the `base_models` of the Hub that training started from. All are optional."""


@dataclass(frozen=True, eq=False)
class LoadedEncoder:
    """An encoder to fine-tune, in evaluation mode, float32, on the CPU, with ordinary embeddings.

    Attributes:
        tokenizer_path: a file or folder that `load_tokenizer` accepts.
        max_length: the longest sequence it was trained on, in tokens, [CLS] and [SEP] included; if unknown, the longest that
            it can take.
        description: the origin of the weights, in words.
        trained: whether the encoder has been trained; if not, each fine-tuning seed draws its own weights.
        provenance: see `Provenance`.
        source_fingerprint: SHA-256 of the weights.

    Raises:
        DataError: the tokenizer is missing or damaged, or has more entries than the embedding table has rows.
    """

    encoder: Encoder
    tokenizer_path: Path
    max_length: int
    description: str
    trained: bool = True
    provenance: Provenance = field(default_factory=dict)
    source_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        check_rows(load_tokenizer(self.tokenizer_path), self.vocabulary_size, self.tokenizer_path)
        self.encoder.eval()
        object.__setattr__(self, "source_fingerprint", fingerprint_weights(self.encoder))

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the embedding table."""
        return self.encoder.embeddings.vocab_size


def encoder_alone(network: Network) -> Encoder:
    """The encoder of a network, with ordinary embeddings; it shares its other weights with the network."""
    encoder = network.encoder
    if isinstance(encoder.embeddings, Disentangled):
        merged = encoder.embeddings.merged()
        encoder = copy.copy(encoder)
        encoder._modules = dict(encoder._modules)  # otherwise the network's embeddings would be replaced as well
        encoder.embeddings = merged
    return encoder


def fingerprint_weights(*modules: nn.Module) -> str:
    """SHA-256 of the names, shapes and values of the parameters."""
    digest = hashlib.sha256()
    for module in modules:
        for name, value in sorted(module.named_parameters()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def check_rows(tokenizer: Tokenizer, rows: int, path: Path) -> None:
    """Make sure that the embedding table has a row for each id of the tokenizer.

    Args:
        rows: number of rows of the embedding table.
        path: path of the tokenizer, for the message.

    Raises:
        DataError: the table has fewer rows, so the tokenizer belongs to another model.
    """
    entries = vocab_size(tokenizer)
    if entries > rows:
        raise DataError(
            f"{path}: the tokenizer has {entries:,} entries, but the embeddings have only {rows:,} rows",
            hint="use the tokenizer that the model was trained with: tokenizer.json or vocab.txt of the same download",
        )


@dataclass(frozen=True, eq=False)
class TaskModel:
    """A fine-tuned model, in evaluation mode, float32, on the CPU.

    Attributes:
        folder: folder that the model was read from.
        objective: encoder and heads.
        seed: seed of the weights.
        record: content of finetuned.json; for a model without this file, an equivalent record of what is known.
    """

    folder: Path
    objective: SupervisedObjective
    tokenizer: Tokenizer
    seed: int
    record: dict[str, Any]

    @property
    def frame(self) -> FrameName:
        """Input framing of its texts."""
        frame: FrameName = self.record["frame"]
        return frame

    @property
    def text(self) -> TextEncoder:
        """Turns text into the ids that the model was trained on."""
        return TextEncoder(self.tokenizer, special_tokens(self.tokenizer))

    def task(self, name: str | None = None) -> Task[Any]:
        """The task with this name; without a name, the only task.

        Raises:
            ConfigError: there is no such task, or there are several and no name is given.
        """
        tasks = self.objective.tasks
        if name is None and len(tasks) == 1:
            return next(iter(tasks.values()))
        if name is None:
            raise ConfigError(
                f"{self.folder} was fine-tuned on several tasks: {', '.join(tasks)}",
                hint=f"specify the task: --task {next(iter(tasks))}",
            )
        if name not in tasks:
            raise ConfigError(f"{self.folder} was not fine-tuned on '{name}'", hint=did_you_mean(name, tasks))
        return tasks[name]


class ModelFolder(abc.ABC):
    """A folder that holds a model.

    Opening a folder reads nothing. Each property reads the files that it needs once, when it is first used. Weights are in
    float32, on the CPU, and in evaluation mode. All properties raise a DataError if a file of the folder is damaged, and a
    CheckpointError if weights are.

    Attributes:
        kind: kind of the folder, in words.
        folder: path of the folder.
    """

    kind: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """Kind, place and step of the model, in words."""

    @property
    def record(self) -> Mapping[str, Any]:
        """What was recorded about the model when it was written: provenance, fingerprints."""
        return {}

    @property
    def step(self) -> int | None:
        """Step of the weights; None if unknown."""
        return None

    @property
    def config(self) -> PretrainConfig | None:
        """Configuration that the model was pre-trained with; None if unknown."""
        return None

    @property
    def evaluation_config(self) -> PretrainConfig | None:
        """Configuration that `objective` is built from; that of an imported model follows from its shapes."""
        return self.config

    @property
    def pretraining_objective(self) -> ObjectiveConfig | None:
        """Configuration of the objective that the model was pre-trained with; None if unknown."""
        return None if self.config is None else self.config.objective

    def open_data(self) -> TokenData | None:
        """The data set, or the mixture, that the model was pre-trained on; None if unknown."""
        return None

    @property
    def provenance(self) -> Provenance:
        """Languages and licenses of the text that the model was pre-trained on, and where they come from."""
        provenance: Provenance = self.record.get(PROVENANCE, {})
        return provenance

    @property
    def tokenizer_path(self) -> Path:
        """A file or folder that `load_tokenizer` accepts."""
        return self.folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return load_tokenizer(self.tokenizer_path)

    @property
    def num_entries(self) -> int:
        """Number of entries of the tokenizer; the word embeddings may have more rows, which no id refers to."""
        return vocab_size(self.tokenizer)

    @property
    def tokenizer_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the tokenizers that give the model's ids, the one it was pre-trained with first.

        An export marks tokens as special that may be ordinary entries of the original; the ids are the same.
        """
        found = (self.record.get("tokenizer_fingerprint"), fingerprint(self.tokenizer))
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    @abc.abstractmethod
    def max_length(self) -> int:
        """Number of positions that the model was trained on, [CLS] and [SEP] included."""

    @abc.abstractmethod
    def networks(self, *, beside: bool = True) -> Mapping[str, Network]:
        """The networks by name, the one to fine-tune first; each has its pre-training head.

        Args:
            beside: include the networks in subfolders of an export; otherwise only the one at its root.

        Raises:
            DataError: the folder has no pre-trained model, or no tokenizer that fits it.
            CheckpointError: weights are missing or damaged, or have no pre-training head.
        """

    @property
    def masked_language_model(self) -> Network:
        """The network that predicts words; of several, the generator.

        Raises:
            ConfigError: there is none.
            DataError, CheckpointError: as `networks`.
        """
        networks = self.networks()
        candidates = [networks[name] for name in sorted(networks, key=lambda name: name != "generator")]
        language_model = next((network for network in candidates if network.predicts == "words"), None)
        if language_model is None:
            raise ConfigError(
                f"{self.folder} has no masked language model: its {' and '.join(networks)} cannot predict words",
                hint="give a run of objective 'rtd' or 'mlm', or what `discern export RUN --out DIR --network generator` writes",
            )
        return language_model

    @property
    def networks_to_train(self) -> Mapping[str, Network]:
        """The networks to continue training; one without a pre-training head has an `nn.Identity` in its place.

        Raises:
            ConfigError: training cannot be continued from this model.
        """
        return self.networks()

    @property
    @abc.abstractmethod
    def encoder(self) -> LoadedEncoder:
        """The encoder to fine-tune: that of the first network, with any head; it shares weights with `networks`.

        Raises:
            DataError: the folder has no pre-trained model, or no tokenizer that fits it.
        """

    def _loaded(self, encoder: Encoder, max_length: int, description: str) -> LoadedEncoder:
        return LoadedEncoder(encoder.for_tasks(), self.tokenizer_path, max_length, description, provenance=self.provenance)

    @property
    @abc.abstractmethod
    def objective(self) -> Objective:
        """The objective with its weights, for evaluation.

        Raises:
            ConfigError: the folder lacks a part of the objective.
        """

    @property
    def whole_objective(self) -> Objective | None:
        """The objective with every parameter that it was trained with; None if the folder has only some of its networks."""
        return None

    @cached_property
    def weights_fingerprint(self) -> str:
        """SHA-256 of all weights that training is continued from."""
        if self.whole_objective is not None:
            return fingerprint_weights(self.whole_objective)
        return fingerprint_weights(*(nn.ModuleList(network.parts()) for network in self.networks_to_train.values()))

    @property
    def has_task_head(self) -> bool:
        """Whether the model was fine-tuned for a task."""
        return False

    def task_model(self, seed: int | None = None) -> TaskModel:
        """The fine-tuned model.

        Args:
            seed: seed whose weights are loaded; None: the seed with the best score.

        Raises:
            ConfigError: that seed was not trained, or the folder has the weights of a single seed.
            DataError: the folder has no task head.
        """
        raise DataError(
            f"{self.folder} is a {self.kind} without a task head",
            hint=f"fine-tune it first: discern finetune {self.folder} --train FILE --out OUT",
        )


def holds_model(folder: Path) -> bool:
    """Whether `open_model` can open a folder."""
    return any(has_file(folder, name) for name in (RUN_RECORD, FINETUNED_RECORD, CONFIG_NAME))


def open_model(folder: Path | ModelFolder, *, warn: Callable[[str], None]) -> ModelFolder:
    """Open a run, an export, an import, a fine-tuned model or a Hugging Face folder; an open one is returned as it is.

    Args:
        warn: called with a message about each damaged checkpoint that is skipped.

    Raises:
        DataError: the folder does not exist or holds no model.
    """
    from discern.model_files.finetuned import FinetunedFolder
    from discern.model_files.huggingface import HuggingFaceFolder
    from discern.model_files.run import RunFolder

    if isinstance(folder, ModelFolder):
        return folder
    if has_file(folder, RUN_RECORD):
        return RunFolder(folder, warn=warn)
    if has_file(folder, FINETUNED_RECORD):
        return FinetunedFolder(folder)
    if has_file(folder, CONFIG_NAME):
        return HuggingFaceFolder(folder)
    state = "does not exist" if not folder.exists() else f"holds neither a run nor a {CONFIG_NAME}"
    raise DataError(
        f"{folder} {state}",
        hint="give a run, a fine-tuned model (made by `discern finetune MODEL --out OUT`), an export (made by `discern export "
        "RUN --out DIR`), or a Hugging Face model",
    )


def choose_encoder(model: str, tokenizer: Path | None, *, untrained: bool, warn: Callable[[str], None]) -> LoadedEncoder:
    """Load the encoder to fine-tune.

    Args:
        model: folder of a run, an export, a fine-tuned model (of its best seed) or a Hugging Face model, the name of one on the
            Hub, or the name of a preset.
        tokenizer: tokenizer of a preset, which has none of its own.
        untrained: use the sizes and the tokenizer of the model, but random weights.

    Raises:
        ConfigError: a preset has no tokenizer, or one is given for a model.
        DataError: the model does not exist or cannot be read.
        CheckpointError: its weights are missing or damaged.
    """
    folder = Path(model) if model in preset_names() else local_model(model, warn)
    if folder.exists():
        if tokenizer is not None:
            raise ConfigError("--tokenizer is for presets; a model has its own", hint="leave out --tokenizer")
        loaded = open_model(folder, warn=warn).encoder
        if not untrained:
            return loaded
        encoder = _fresh(loaded.encoder.config, loaded.vocabulary_size, loaded.encoder.embeddings.embedding_size)
        return LoadedEncoder(
            encoder, loaded.tokenizer_path, loaded.max_length, f"untrained, as {loaded.description}", trained=False
        )
    if model not in preset_names():
        match = nearest(model, preset_names())
        near = f"did you mean the preset '{match}'?" if match else f"presets: {', '.join(preset_names())}"
        raise DataError(
            f"there is no folder {model}, and no preset of that name", hint=f"give a run, an export or a model folder; {near}"
        )
    if tokenizer is None:
        raise ConfigError(
            f"preset {model} has no tokenizer", hint="--tokenizer PATH: a tokenizer.json, a vocab.txt or a model folder"
        )
    preset = load_pretrain_config(None, model).config
    encoder = _fresh(preset.model, vocab_size(load_tokenizer(tokenizer)), preset.model.embedding_size)
    return LoadedEncoder(encoder, tokenizer, preset.data.sequence_length, f"untrained, preset {model}", trained=False)


def _fresh(config: ModelConfig, vocabulary_size: int, embedding_size: int) -> Encoder:
    encoder = build_encoder(build_embeddings(vocabulary_size, embedding_size, config), config)
    draw_weights(encoder, 0)
    return encoder


def draw_weights(encoder: Encoder, seed: int) -> None:
    """Give an encoder the weights of step 0, as a function of the seed alone."""
    initialize(encoder, torch.Generator().manual_seed(key_of(seed, "weights")), encoder.config)


def first_layers(loaded: LoadedEncoder, count: int) -> LoadedEncoder:
    """The encoder without the layers after the first `count`."""
    whole = loaded.encoder
    config = whole.config.model_copy(update={"num_layers": count})
    encoder = _fresh(config, loaded.vocabulary_size, whole.embeddings.embedding_size)
    weights = whole.state_dict()
    encoder.load_state_dict({name: weights[name] for name in encoder.state_dict()})
    described = f"the first {count} of {whole.config.num_layers} layers of {loaded.description}"
    return replace(loaded, encoder=encoder, description=described)
