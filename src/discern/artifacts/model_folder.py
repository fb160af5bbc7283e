"""`ModelFolder`: a folder that holds a model, whatever wrote it. `discern.artifacts.opening.open_model` opens one."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tokenizers import Tokenizer
from torch import nn

from discern.artifacts.encoder import LoadedEncoder
from discern.data.tokenizer import fingerprint, load_tokenizer, vocab_size
from discern.errors import DataError
from discern.models.base import Network
from discern.objectives.base import Objective
from discern.objectives.config import ObjectiveConfig
from discern.training.pretrain_config import PretrainConfig

if TYPE_CHECKING:
    from discern.artifacts.task_model import TaskModel

TEXT_LICENSE = "text_license"
"""Key, in records and in config.json of exports, of the license of the text that a model was pre-trained on."""


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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """Kind, place and step of the model, in words."""

    @property
    @abc.abstractmethod
    def step(self) -> int | None:
        """Step of the weights; None if unknown."""

    @property
    @abc.abstractmethod
    def config(self) -> PretrainConfig | None:
        """Configuration that the model was pre-trained with; None if unknown."""

    @property
    def evaluation_config(self) -> PretrainConfig | None:
        """Configuration that `objective` is built from; that of an imported model follows from its shapes."""
        return self.config

    @property
    def pretraining_objective(self) -> ObjectiveConfig | None:
        """Configuration of the objective that the model was pre-trained with; None if unknown."""
        return None if self.config is None else self.config.objective

    @property
    def data(self) -> Path | None:
        """Data set that the model was pre-trained on; None if unknown."""
        return None

    @property
    @abc.abstractmethod
    def language(self) -> str | None:
        """Code of the language of the text that the model was pre-trained on; None if unknown."""

    @property
    @abc.abstractmethod
    def text_license(self) -> str | None:
        """License of that text, as stated by whoever prepared it; None if unknown."""

    @property
    @abc.abstractmethod
    def tokenizer_path(self) -> Path:
        """A file or folder that `load_tokenizer` accepts."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return load_tokenizer(self.tokenizer_path)

    @property
    def num_entries(self) -> int:
        """Number of entries of the tokenizer; the word embeddings may have more rows, which no id refers to."""
        return vocab_size(self.tokenizer)

    @property
    @abc.abstractmethod
    def trained_with(self) -> str | None:
        """Fingerprint of the tokenizer that the model was pre-trained with; None if unknown."""

    @property
    def tokenizer_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the tokenizers that give the model's ids, the one it was pre-trained with first.

        An export marks tokens as special that may be ordinary entries of the original; the ids are the same.
        """
        found = (self.trained_with, fingerprint(self.tokenizer))
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
    def networks_to_train(self) -> Mapping[str, Network]:
        """The networks to continue training; one without a pre-training head has an `nn.Identity` in its place.

        Raises:
            ConfigError: training cannot be continued from this model.
        """
        return self.networks()

    @property
    @abc.abstractmethod
    def encoder(self) -> LoadedEncoder:
        """The encoder to fine-tune: that of the first network, with any head. Its parameters are not shared.

        Raises:
            DataError: the folder has no pre-trained model, or no tokenizer that fits it.
        """

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
        whole = self.whole_objective
        networks = {name: nn.ModuleList(network.parts()) for name, network in self.networks_to_train.items()}
        modules: Mapping[str, nn.Module] = networks if whole is None else {"objective": whole}
        digest = hashlib.sha256()
        for name, module in modules.items():
            for key, value in module.named_parameters():
                digest.update(f"{name}.{key} {value.dtype} {tuple(value.shape)}\n".encode())
                digest.update(value.detach().contiguous().numpy().data)
        return digest.hexdigest()

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
