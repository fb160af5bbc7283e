"""Folders with a config.json: what `discern export` and `discern import` write, and any ELECTRA, BERT, XLNet or ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, final

from torch import Tensor

from discern.artifacts.encoder import LoadedEncoder, check_rows, loaded_encoder
from discern.artifacts.export_folder import SETTINGS_NAME
from discern.artifacts.model_folder import TEXT_LICENSE, ModelFolder
from discern.artifacts.run import build_objective
from discern.artifacts.task_model import TASK_HEAD, TaskModel, head_kind, task_model_of
from discern.data.language_names import LANGUAGES
from discern.data.tokenizer import special_tokens
from discern.errors import CheckpointError, ConfigError, DataError
from discern.interop.config_json import read_huggingface_config, read_mark
from discern.interop.families import ENCODER_TYPES, NETWORK_TYPES, family_in, family_of, name_of
from discern.interop.hub import hub_name
from discern.interop.names import CONFIG_NAME
from discern.interop.tokenizer import read_max_length
from discern.models.base import Network
from discern.models.embeddings import Disentangled
from discern.objectives.base import Objective, Vocabulary
from discern.training.pretrain_config import PretrainConfig, read_written_config


@final
class HuggingFaceFolder(ModelFolder):
    """A folder in the format of transformers.

    `mark` records its origin: an export of a run has the key `objective`, an import has `imported`, and an export of a
    fine-tuned model has `task`. For a model that discern did not write, it is empty.
    """

    kind = "Hugging Face model"

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """Content of config.json.

        Raises:
            CheckpointError: it cannot be read, or is that of another architecture.
        """
        return read_huggingface_config(self.folder, NETWORK_TYPES)

    @property
    def mark(self) -> dict[str, Any]:
        """The entry of discern in config.json; empty for a model that discern did not write."""
        return read_mark(self.config_json)

    @property
    def description(self) -> str:
        mark, step = self.mark, self.step
        if (name := hub_name(self.folder)) is not None:
            return name
        if mark and not mark.keys() & {"objective", "task", "form"}:
            return f"import {self.folder}" + ("" if step is None else f" of step {step:,}")
        if step is not None:
            return f"export {self.folder} of step {step:,}"
        return f"Hugging Face {self.config_json['model_type']} folder {self.folder}"

    @property
    def step(self) -> int | None:
        return self.mark.get("step")

    @property
    def config(self) -> PretrainConfig | None:
        """Configuration of the run that was exported; None for other models, including imports, whose settings are derived."""
        return self.evaluation_config if "objective" in self.mark else None

    @cached_property
    def evaluation_config(self) -> PretrainConfig | None:
        path = self.folder / SETTINGS_NAME
        return read_written_config(path) if self.mark and path.is_file() else None

    @property
    def language(self) -> str | None:
        code = self.mark.get("language")
        return code if code in LANGUAGES else None

    @property
    def text_license(self) -> str | None:
        license = self.mark.get(TEXT_LICENSE)
        return license if isinstance(license, str) and license.isprintable() else None

    @property
    def tokenizer_path(self) -> Path:
        return self.folder

    @property
    def trained_with(self) -> str | None:
        return self.mark.get("tokenizer_fingerprint")

    @property
    def max_length(self) -> int:
        return read_max_length(self.folder, self._root.encoder.config.max_positions)

    def networks(self, *, beside: bool = True) -> Mapping[str, Network]:
        root = {self._name_of_root(self._root): self._root}
        return root | self._beside if beside else root

    @cached_property
    def networks_to_train(self) -> Mapping[str, Network]:
        if self.config_json["model_type"] not in ENCODER_TYPES:
            raise ConfigError(
                f"{self.folder} has only the two towers, from which training cannot be continued",
                hint="give the run itself, or an ELECTRA, BERT, XLNet or ModernBERT folder",
            )
        if "objective" in self.mark:
            return self.networks()
        # A model that discern did not write may have any head, and weights in any format.
        root = family_in(self.folder).with_head(self.folder)
        check_rows(self.tokenizer, root.encoder.embeddings.vocab_size, self.folder)
        return {self._name_of_root(root): root} | self._beside

    @cached_property
    def encoder(self) -> LoadedEncoder:
        read_huggingface_config(self.folder, ENCODER_TYPES)  # refuses two towers, which cannot be fine-tuned
        # If the pre-trained network has been read, its encoder has the same weights.
        found = self._root.encoder if "_root" in vars(self) else family_in(self.folder).encoder_from(self.folder)
        began = None if self.config is None else getattr(self.config.model, "initialization", None)
        if began is not None:  # config.json has only the scale of the initialization
            found.config = found.config.model_copy(update={"initialization": began})
        return loaded_encoder(
            found,
            self.folder,
            read_max_length(self.folder, found.config.max_positions),
            self.description,
            language=self.language,
            text_license=self.text_license,
        )

    @cached_property
    def objective(self) -> Objective:
        config = self.evaluation_config
        if config is None:
            judges = not self.mark and "discriminator" in self.networks(beside=False)
            missing = "the generator and the settings" if judges else "the settings"
            raise ConfigError(
                f"{self.folder} lacks {missing} that it was trained with ({SETTINGS_NAME}), so it cannot be evaluated",
                hint="give a run, or what `discern export RUN --out DIR --all-networks` writes",
            )
        objective = build_objective(config, Vocabulary(self.config_json["vocab_size"], special_tokens(self.tokenizer)))
        self._fill(objective)
        return objective.eval()

    @property
    def has_task_head(self) -> bool:
        try:
            config = read_huggingface_config(self.folder, ENCODER_TYPES)
        except CheckpointError:  # reported when the folder is read for another purpose
            return False
        return head_kind(config) is not None or TASK_HEAD in read_mark(config)

    def task_model(self, seed: int | None = None) -> TaskModel:
        if seed is not None:
            raise ConfigError(
                f"{self.folder} is a Hugging Face model, which has a single set of weights", hint="leave out --seed"
            )
        config = read_huggingface_config(self.folder, ENCODER_TYPES)
        if not self.has_task_head:
            named = ", ".join(config.get("architectures") or ()) or "nothing"
            raise DataError(
                f"{self.folder} has no task head (config.json names {named})",
                hint=f"fine-tune it first: discern finetune {self.folder} --train FILE --out OUT",
            )
        return task_model_of(self.folder, config, self.encoder.encoder, self.tokenizer)

    @cached_property
    def _root(self) -> Network:
        """The network at the root of the folder."""
        network = family_in(self.folder).network(self.folder)
        check_rows(self.tokenizer, network.encoder.embeddings.vocab_size, self.folder)
        return network

    def _name_of_root(self, root: Network) -> str:
        names: list[str] = self.mark.get("networks") or [name_of(root, self.config_json["model_type"])]
        return names[0]

    @cached_property
    def _beside(self) -> dict[str, Network]:
        """The networks in subfolders: those that an export or an import names; otherwise a generator, if there is one.

        Raises:
            CheckpointError: the weights of one are missing or damaged.
        """
        named = self.mark.get("networks")
        if named is None:
            named = ["", "generator"] if (self.folder / "generator" / CONFIG_NAME).is_file() else [""]
        for name in named[1:]:
            if not (self.folder / name).is_dir():
                raise CheckpointError(
                    f"{self.folder} lacks the folder '{name}', which its {CONFIG_NAME} names",
                    hint=f"a copy of an export needs all its files; discern export {self.folder} --out DIR exports the "
                    f"{named[0]} alone",
                )
        return {name: family_in(self.folder / name).network(self.folder / name) for name in named[1:]}

    def _fill(self, objective: Objective) -> None:
        """Load each of the objective's networks from the root of the folder or from the subfolder of its name."""
        networks, present = objective.networks(), self.mark["networks"]
        missing = [name for name in networks if name not in present]
        if missing:
            raise ConfigError(
                f"{self.folder} contains only the {present[0]}, but evaluation also requires the {' and the '.join(missing)}",
                hint="export the run again: discern export RUN --out DIR --all-networks",
            )
        lost = weights_outside_networks(objective)
        if lost:
            raise ConfigError(
                f"{self.folder} is an export, which lacks weights that this objective needs: {', '.join(lost[:3])}",
                hint="give the run itself: discern evaluate RUN",
            )
        # Networks that read another's embeddings come last.
        for name in sorted(networks, key=lambda name: isinstance(networks[name].encoder.embeddings, Disentangled)):
            family_of(networks[name].encoder).fill(networks[name], self.folder if name == present[0] else self.folder / name)


def weights_outside_networks(objective: Objective) -> list[str]:
    """Parameters and buffers of an objective that no export of its networks contains, such as the baseline of an adversary."""
    held = {id(tensor) for network in objective.networks().values() for tensor in _tensors(network)}
    return [name for name, tensor in [*objective.named_parameters(), *objective.named_buffers()] if id(tensor) not in held]


def _tensors(network: Network) -> Iterator[Tensor]:
    """Parameters and buffers of a network that an export contains."""
    for part in (network.encoder, network.head, network.bilinear):
        if part is not None:
            yield from part.parameters()
            yield from part.buffers()
