"""Folders in the format of transformers: what `discern export` and `discern import` write, and models of Hugging Face.

Nothing here imports transformers: the format consists of two files, and it is stable. What differs between architectures is in
`discern.models.architecture` and its subclasses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, final, get_args

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from discern.data.tokenizer import special_tokens
from discern.errors import CheckpointError, ConfigError, DataError, MissingHeadError
from discern.model_files.finetuned import FORMAT, task_of
from discern.model_files.folder import LoadedEncoder, ModelFolder, Provenance, TaskModel, check_rows
from discern.model_files.hub import CALIBRATION_NAME, CONFIG_NAME, HEAD_NAME, WEIGHTS_NAME, hub_name
from discern.model_files.run import build_objective
from discern.model_files.tokenizer import read_max_length
from discern.model_files.weight_files import and_more, check_shape, open_weight_files, read_tensors, weights_path
from discern.models.architecture import AGAIN, MARK, WORDS, Architecture, Predicts, renamed
from discern.models.base import (
    Encoder,
    Network,
    build_head,
    encoders_by_type,
    load_networks,
    load_parameters,
    named_parameters,
)
from discern.models.config import ModelConfig
from discern.models.heads import BilinearTerm
from discern.objectives.base import Objective, Vocabulary
from discern.storage.checksums import (
    CHECKSUMS_NAME,
    Record,
    lost_files,
    read_json,
    understood,
)
from discern.storage.files import sync_file, write_bytes
from discern.tasks import families
from discern.tasks.supervised import FrameName, supervised
from discern.tasks.tags import detect_scheme
from discern.training.config import PretrainConfig, read_written_config
from discern.types import SpecialTokens

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Data types in which weights can be stored, by their names in config.json."""
SETTINGS_NAME = "discern.toml"
TASK_HEAD, TASK_RECORD = "task_head", "record"
"""Keys of the mark of an exported task: the file with its head if it is separate ("" if it has no weights), and its record."""
# For a model of which only the head is known. Every question has an answer, as is the default in transformers.
_FAMILIES = {"classification": "classification", "tagging": "tagging", "span": "squad1"}
_METRICS = {"classification": ("accuracy",), "tagging": ("f1", "precision", "recall", "accuracy"), "span": ("exact_match", "f1")}
PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "number": "regression"}
"""`problem_type` in config.json, by our kinds of labels."""


class _Mark(Record):
    """The record of an export. Names of networks are also names of folders."""

    networks: Annotated[list[Annotated[str, Field(pattern=r"^[\w-]+$")]], Field(min_length=1)] | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    tokenizer_fingerprint: str | None = None
    objective: str | None = None
    imported: str | None = None
    task: str | None = None
    seed: int | None = None
    record: dict[str, Any] | None = None
    provenance: dict[str, list[str]] = Field(default_factory=dict)


class _Config(Record):
    """Types of the keys of config.json that are read here."""

    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    architectures: list[str] | None = None
    id2label: dict[str, Any] | None = None
    discern: _Mark | None = None


def config_path(folder: Path, part: str = "") -> Path:
    """The file with the configuration of a network, see `open_weight_files`."""
    return folder / (f"{part}_{CONFIG_NAME}" if part else CONFIG_NAME)


def read_huggingface_config(folder: Path, part: str = "") -> dict[str, Any]:
    """Read config.json of a Hugging Face folder, or that of a second network in it.

    Raises:
        CheckpointError: the file is missing or damaged, or no encoder is known for this type of model.
    """
    path = config_path(folder, part)
    config = read_json(path, hint=AGAIN, error=CheckpointError)
    for name in lost_files(folder):
        if "/" not in name and not name.endswith((CALIBRATION_NAME, ".onnx")):  # other networks and these may be removed
            hint = f"copy it back, or accept that: discern doctor --accept {folder}"
            raise CheckpointError(f"{folder / name} is missing, which {CHECKSUMS_NAME} lists", hint=hint)
    with understood(path, hint=AGAIN, error=CheckpointError):
        _encoder_class(config, path)
        _Config.model_validate(config)
    return config


def _encoder_class(config: Mapping[str, Any], path: Path) -> type[Encoder]:
    known, model_type = encoders_by_type(), config.get("model_type")
    if model_type not in known:
        expected = " or ".join(map(repr, known))
        raise CheckpointError(
            f"{path}: model_type is {model_type!r}, expected {expected}", hint=f"give a model of type {expected}"
        )
    return known[model_type]


def read_mark(config: Mapping[str, Any]) -> dict[str, Any]:
    """The record that discern wrote into config.json of an export; empty for other models."""
    mark = config.get(MARK)
    return mark if isinstance(mark, dict) else {}


# Writing


@dataclass(frozen=True)
class HuggingFaceModel:
    """The files of a network in a Hugging Face folder.

    Attributes:
        config: content of config.json.
        tensors: content of model.safetensors, on the CPU.
        head: content of discern_head.safetensors; usually empty, and then the file does not exist.
        factors: names in `head` of the matrices of which a matrix in `tensors` is the product.
        output: what its class of transformers outputs: "nothing" if the head has no place there.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: dict[str, Tensor] = field(default_factory=dict)
    factors: tuple[str, ...] = ()
    output: Predicts = "nothing"

    @property
    def loads_as(self) -> str:
        """Class of transformers."""
        return str(self.config["architectures"][0])

    @property
    def kind(self) -> type[Encoder]:
        """Its encoder."""
        return _encoder_class(self.config, Path(CONFIG_NAME))

    @property
    def sizes(self) -> ModelConfig:
        """The settings of its encoder."""
        return self.kind.architecture.read_config(self.config, Path(CONFIG_NAME))

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied matrix is counted once, and a product of matrices as its factors."""
        total = sum(tensor.numel() for tensor in (*self.tensors.values(), *self.head.values()))
        product = self.tensors[self.kind.architecture.named(WORDS)].numel() if self.factors else 0
        return total - product

    def in_form(self, form: str | None) -> HuggingFaceModel:
        """The same weights as another `model_type`, which more servers support; None: as it is.

        Raises:
            ConfigError: that type cannot express the model, with the reason.
        """
        if form in (None, self.config["model_type"]):
            return self
        config, tensors = self.kind.architecture.as_form(self.config, self.tensors, str(form), head_beside=bool(self.head))
        fills = self.output in ("words", "words or copies")
        return HuggingFaceModel(config, tensors, output="words" if fills else "nothing")

    def write(self, folder: Path) -> None:
        """Write the files of the network. The same weights result in the same bytes."""
        write_bytes(folder / CONFIG_NAME, (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode())
        for name, tensors in ((WEIGHTS_NAME, self.tensors), (HEAD_NAME, self.head)):
            if tensors:
                save_file(tensors, folder / name, metadata={"format": "pt"})
                # safetensors creates files that only their owner can read.
                (folder / name).chmod((folder / CONFIG_NAME).stat().st_mode)
                with (folder / name).open("rb") as file:
                    sync_file(file)


def network_to_huggingface(network: Network, special: SpecialTokens, precision: str = "float32") -> HuggingFaceModel:
    """Convert a network to the files of a Hugging Face folder.

    A head that no class of transformers has is stored in a file of its own, for discern, beside the encoder alone.

    Args:
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: the architecture cannot represent the network.
    """
    encoder, ours = network.encoder, named_parameters(network)
    architecture = encoder.architecture
    sizes = encoder.config.model_copy(update={"embedding_size": encoder.embeddings.embedding_size})
    architecture.check(sizes, network.predicts, bilinear=network.bilinear is not None)
    tensors = architecture.to_huggingface(ours, sizes)
    apart = {
        name: tensor
        for name, tensor in ours.items()
        if name.startswith("head.copy_gate" if network.bilinear is None else ("head.", "bilinear."))
    }
    factors = {name: ours[name] for name in architecture.factors if {*architecture.factors} <= ours.keys()}
    beside = architecture.to_huggingface(apart, sizes)
    held = {name: tensor for name, tensor in tensors.items() if name not in beside}
    output: Predicts = network.predicts if network.bilinear is None else "nothing"
    config = architecture.config_json(sizes, encoder.embeddings.vocab_size, output, special, precision)
    mark = ({"head": HEAD_NAME} if beside or factors else {}) | ({"gives": "energy"} if network.predicts == "energy" else {})
    return HuggingFaceModel(
        config | ({MARK: mark} if mark else {}),
        as_stored(held, precision),
        as_stored(beside | factors, precision),
        tuple(factors),
        output,
    )


def as_stored(tensors: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Tensors on the CPU, in the data type of the stored weights."""
    return {name: each.detach().to("cpu", PRECISIONS[precision]).contiguous() for name, each in tensors.items()}


# Reading


@dataclass(frozen=True)
class StoredNetwork:
    """The network of a folder, in float32, on the CPU and in evaluation mode.

    Attributes:
        network: encoder and head; the head is an `nn.Identity` if the folder has no pre-training head.
        left_out: layers of the folder that are no part of it, such as poolers and heads of tasks.
        head_problem: why its head cannot be used; None: it can.
    """

    network: Network
    left_out: Sequence[str] = ()
    head_problem: CheckpointError | None = None

    def with_head(self) -> Network:
        """The network.

        Raises:
            CheckpointError: its head cannot be used.
        """
        if self.head_problem is not None:
            raise self.head_problem
        return self.network


def read_network(folder: Path, part: str = "") -> StoredNetwork:
    """Read the network of a folder in any of the file formats of transformers.

    Args:
        part: a second network of the folder, see `open_weight_files`.

    Raises:
        CheckpointError: a file is missing or damaged, the model uses an unsupported option, or a weight is missing, unexpected,
            or differs in shape from config.json.
        NumericsError: a weight is not finite.
    """
    config, path = read_huggingface_config(folder, part), config_path(folder, part)
    kind, mark = _encoder_class(config, path), read_mark(config)
    architecture, rows = kind.architecture, config["vocab_size"]
    sizes = architecture.read_config(config, path)
    beside = read_tensors(folder / HEAD_NAME) if mark.get("head") == HEAD_NAME and "task" not in mark else {}
    with open_weight_files(folder, part) as stored:
        stored = replace(stored, tensors=architecture.stored(stored.tensors, config))
        names = architecture.canonical(stored.tensors)
        present = names.keys() | beside.keys()
        predicts, words = architecture.predicts(present, config), architecture.named(WORDS)
        if predicts in ("words", "words or copies"):
            sizes = architecture.shown(sizes, present)

        def built() -> Network:
            width = beside[WORDS].shape[1] if WORDS in beside else sizes.embedding_size
            encoder = kind(kind.embeddings_class(rows, width, sizes), sizes)
            head = build_head(encoder, predicts)
            has_term = f"{architecture.layers.get('bilinear.context', 'bilinear.context')}.weight" in present
            return Network(encoder, head, BilinearTerm(sizes, width) if has_term else None)

        with torch.device("meta"):
            network = built()
        expected = architecture.to_huggingface(named_parameters(network), sizes)
        zeros = {name for name, key in architecture.zeros.items() if config.get(key) is False}
        missing = sorted(expected.keys() - present - zeros)
        known = {*expected, *architecture.tied}
        others = sorted(name for name in names if name not in known and not name.endswith(architecture.redundant or ("\0",)))
        own = tuple(prefix + part for prefix in architecture.prefixes for part in architecture.parts)
        foreign = [names[name] for name in others if name.startswith(own)]
        for tensors, problem_of in ((missing, "'{}' is missing"), (foreign, "unexpected tensor '{}'")):
            if tensors:
                raise CheckpointError(
                    f"{stored.path}: {problem_of.format(tensors[0])}{and_more(tensors)}",
                    hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model",
                )
        values: dict[str, Tensor] = {}
        for name, like in expected.items():
            if name in beside or name in names:
                values[name] = (beside[name] if name in beside else stored.read(names[name])).float()
                check_shape(names.get(name, name), values[name].shape, like, stored.path)
            else:
                values[name] = torch.zeros(like.shape)
        if names.get(words, "").endswith("word_embeddings._weight"):  # DeBERTaV3's discriminator
            with open_weight_files(folder, "generator") as generator:
                if words not in generator.tensors:
                    raise CheckpointError(
                        f"{stored.path}: '{names[words]}' is the difference from the word embeddings of the generator, which "
                        f"{generator.path.name} does not have",
                        hint="download the files of the generator into the same folder",
                    )
                values[words] = values[words] + generator.read(words).float()
        problem = None
        for copy in architecture.tied if network.predicts_words else ():
            if copy in names and not torch.equal(stored.read(names[copy]).float(), values[words]):
                problem = CheckpointError(
                    f"{stored.path}: '{names[copy]}' differs from the word embeddings, but only tied embeddings are supported",
                    hint="its encoder alone can be used: save that with save_pretrained()",
                )
        left_out = sorted({names[name].rpartition(".")[0] for name in others})
    # Memory is taken after every size was compared with the files. Only building computes buffers, which no file contains.
    if next(nn.ModuleList(network.parts()).buffers(), None) is None:
        nn.ModuleList(network.parts()).to_empty(device="cpu")
    else:
        network = built()
    nn.ModuleList(network.parts()).eval()
    ours = architecture.from_huggingface(values)
    load_parameters(network, ours | {name: beside[name] for name in named_parameters(network) if name in beside})
    return StoredNetwork(network, left_out, problem)


@final
class HuggingFaceFolder(ModelFolder):
    """A folder in the format of transformers.

    `mark` records its origin: an export of a run has the key `objective`, an import has `imported`, and an export of a
    fine-tuned model has `task`. For a model that discern did not write, it is empty.
    """

    kind = "Hugging Face model"

    def __init__(self, folder: Path, part: str = "") -> None:
        super().__init__(folder)
        self.part = part

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """Content of config.json.

        Raises:
            CheckpointError: it cannot be read, or no encoder is known for this type of model.
        """
        return read_huggingface_config(self.folder, self.part)

    @property
    def architecture(self) -> Architecture:
        """Its architecture."""
        return _encoder_class(self.config_json, self.folder / CONFIG_NAME).architecture

    @property
    def mark(self) -> dict[str, Any]:
        """The entry of discern in config.json; empty for a model that discern did not write."""
        return read_mark(self.config_json)

    record = mark

    @property
    def provenance(self) -> Provenance:
        name = hub_name(self.folder)
        return super().provenance if name is None else {**super().provenance, "base_models": [name]}

    @property
    def description(self) -> str:
        mark, step = self.mark, self.step
        if (name := hub_name(self.folder)) is not None:
            return f"{name} (Hugging Face Hub, revision {self.folder.absolute().name[:7]})"
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

    @cached_property
    def sizes(self) -> ModelConfig:
        """The settings of its encoder."""
        return self.architecture.read_config(self.config_json, self.folder / CONFIG_NAME)

    @property
    def max_length(self) -> int:
        return read_max_length(self.folder, self.sizes.max_positions)

    @cached_property
    def stored(self) -> StoredNetwork:
        """The network at the root of the folder."""
        found = read_network(self.folder, self.part)
        check_rows(self.tokenizer, found.network.encoder.embeddings.vocab_size, self.folder)
        return found

    @cached_property
    def names(self) -> list[str]:
        """Names of the networks, that of the root first: as an export or an import states them, or by what it predicts."""
        if (stated := self.mark.get("networks")) is not None:
            return list(stated)
        words = "generator" if self.config_json["model_type"] == "electra" else "encoder"
        predicts = self.stored.network.predicts
        root = {"replaced": "discriminator", "energy": "discriminator", "words": words}.get(predicts, "encoder")
        generator = config_path(self.folder / "generator").is_file() or weights_path(self.folder, "generator").is_file()
        return [root, *(["generator"] if generator else [])]

    @cached_property
    def beside(self) -> dict[str, HuggingFaceFolder]:
        """The networks in subfolders."""
        folders = {}
        for name in self.names[1:]:
            # Beside the first network, as Microsoft's DeBERTaV3 has it; or in a folder of its own.
            is_beside = weights_path(self.folder, name).is_file()
            folders[name] = HuggingFaceFolder(self.folder, name) if is_beside else HuggingFaceFolder(self.folder / name)
            folders[name].tokenizer = self.tokenizer
        return folders

    @property
    def folders(self) -> Mapping[str, HuggingFaceFolder]:
        """The folder of each network."""
        return {self.names[0]: self} | self.beside

    def networks(self, *, beside: bool = True) -> Mapping[str, Network]:
        folders = self.folders if beside else {self.names[0]: self}
        found = {name: each.stored.with_head() for name, each in folders.items()}
        for name, network in found.items():
            if network.predicts == "nothing":
                raise MissingHeadError(
                    f"{folders[name].folder} has no pre-training head: it is a bare encoder or a fine-tuned model",
                    hint=f"use a model with its pre-training head; for a fine-tuned model: discern predict {self.folder} INPUT",
                )
        return found

    @cached_property
    def networks_to_train(self) -> Mapping[str, Network]:
        _ = self.encoder  # refuses what cannot be trained
        networks = {name: each.stored.with_head() for name, each in self.folders.items()}
        if "generator" in self.beside:
            encoder = networks[self.names[0]].encoder
            # Only the weights of the generator show whether DeBERTa predicts words through the mask decoder.
            shown = networks["generator"].encoder.config.model_dump(include={"mask_decoder"})
            encoder.config = encoder.config.model_copy(update=shown)
        return networks

    @cached_property
    def encoder(self) -> LoadedEncoder:
        if self.architecture.beside_only:
            raise ConfigError(
                f"{self.folder} has only the generator of another model, which cannot be trained further",
                hint="give the run itself, or a folder with its discriminator",
            )
        encoder = self.stored.network.encoder
        began = None if self.config is None else getattr(self.config.model, "initialization", None)
        if began is not None:  # config.json has only the scale of the initialization
            encoder.config = encoder.config.model_copy(update={"initialization": began})
        return self._loaded(encoder, self.max_length, self.description)

    @cached_property
    def objective(self) -> Objective:
        config = self.evaluation_config
        if config is None:
            raise ConfigError(
                f"{self.folder} lacks the settings that it was trained with ({SETTINGS_NAME}), so it cannot be evaluated",
                hint="give a run, or what `discern export RUN --out DIR --all-networks` writes",
            )
        objective = build_objective(config, Vocabulary(self.config_json["vocab_size"], special_tokens(self.tokenizer)))
        missing_networks = [name for name in objective.networks() if name not in self.names]
        if missing_networks:
            raise ConfigError(
                f"{self.folder} contains only the {self.names[0]}, but evaluation also requires the "
                f"{' and the '.join(missing_networks)}",
                hint="export the run again: discern export RUN --out DIR --all-networks",
            )
        lost = weights_outside_networks(objective)
        if lost:
            raise ConfigError(
                f"{self.folder} is an export, which lacks weights that this objective needs: {', '.join(lost[:3])}",
                hint="give the run itself: discern evaluate RUN",
            )
        networks = objective.networks()
        values = {name: named_parameters(network) for name, network in self.networks().items() if name in networks}
        for name, network in networks.items():
            shapes = [{key: tensor.shape for key, tensor in each.items()} for each in (named_parameters(network), values[name])]
            if shapes[0] != shapes[1]:
                raise CheckpointError(f"{self.folder}: the {name} differs from what {SETTINGS_NAME} describes", hint=AGAIN)
        if (overwritten := load_networks(networks, values)) is not None:
            raise CheckpointError(
                f"{self.folder}: the {overwritten[0]} has '{overwritten[1]}' of its own, which it should share",
                hint="use both networks of the same run, or set objective.tying=none",
            )
        return objective.eval()

    @property
    def has_task_head(self) -> bool:
        try:
            config = self.config_json
        except CheckpointError:  # reported when the folder is read for another purpose
            return False
        return self.architecture.task_kind(config) is not None or TASK_HEAD in self.mark

    def task_model(self, seed: int | None = None) -> TaskModel:
        if seed is not None:
            raise ConfigError(
                f"{self.folder} is a Hugging Face model, which has a single set of weights", hint="leave out --seed"
            )
        return self._task_model

    @cached_property
    def _task_model(self) -> TaskModel:
        """The encoder with the task head that config.json names.

        An export of a fine-tuned model records its task in config.json, so it reads files in the same way as that model.
        """
        config, path = self.config_json, self.folder / CONFIG_NAME
        if not self.has_task_head:
            named = ", ".join(config.get("architectures") or ()) or "nothing"
            raise DataError(
                f"{self.folder} has no task head ({CONFIG_NAME} names {named})",
                hint=f"fine-tune it first: discern finetune {self.folder} --train FILE --out OUT",
            )
        with understood(path, hint=AGAIN, error=CheckpointError):
            record = self._task_record()
            tasks = {name: task_of(name, each) for name, each in record["tasks"].items()}
            (own,) = tasks
            if record["frame"] not in get_args(FrameName):
                raise ValueError(f"frame {record['frame']!r}")
            objective = supervised(self.encoder.encoder, tasks, frame=record["frame"])
        self._fill_head(objective.heads[own])
        return TaskModel(self.folder, objective.eval(), self.tokenizer, self.mark.get("seed", 0), record)

    def _task_record(self) -> dict[str, Any]:
        """A record in the form of finetuned.json: the one stored in an export, or else one derived from the head."""
        config, said = self.config_json, self.mark.get(TASK_RECORD)
        kind = self.architecture.task_kind(config)
        if said is not None:
            if said.get("format") != FORMAT:
                raise DataError(
                    f"{self.folder}: the export has format {said.get('format')}; this version of discern reads {FORMAT}"
                )
            return {"model": str(self.folder), "files": {}, **said}
        assert kind is not None  # only an export of discern stores its head in a separate file
        count = config.get("num_labels", 2)
        named = config.get("id2label") or {str(number): f"LABEL_{number}" for number in range(min(count, 100_000))}
        names = [str(named[str(number)]) for number in range(len(named))]
        kinds = {"tagging": "tags", "span": "spans"}
        if kind == "classification":
            problem = config.get("problem_type") or PROBLEMS["number" if len(names) == 1 else "single"]
            kinds[kind] = {theirs: ours for ours, theirs in PROBLEMS.items()}[problem]
        labels: dict[str, Any] = {"names": [] if kinds[kind] in ("number", "spans") else names, "kind": kinds[kind]}
        if kind == "tagging":
            labels["scheme"] = "iob2" if (scheme := detect_scheme([names])) == "iob1" else scheme
        family: Any = families.load(_FAMILIES[kind])
        settings = family.Config(sequence_length=self.max_length, **self.architecture.task_settings(config, kind))
        task = {"family": _FAMILIES[kind], "metrics": list(_METRICS[kind]), "labels": labels, "layout": {}}
        task["config"] = settings.model_dump(mode="json")
        return {"model": str(self.folder), "files": {}, "frame": self.architecture.frame, "tasks": {"own": task}}

    @torch.no_grad()
    def _fill_head(self, head: nn.Module) -> None:
        """Fill the head of the task with the weights in the folder.

        Raises:
            CheckpointError: the weights are missing, damaged, or of another shape.
        """
        parameters, path = head.state_dict(), self.folder / HEAD_NAME
        if not parameters:
            return
        kind = self.architecture.task_kind(self.config_json)
        if kind is None:
            tensors = read_tensors(path)
        else:
            layers = self.architecture.task_layers(kind, self.config_json["model_type"])
            with open_weight_files(self.folder) as stored:
                names, path = self.architecture.canonical(stored.tensors), stored.path
                theirs = {ours: renamed(ours, layers) for ours in parameters}
                tensors = {ours: stored.read(names[name]) for ours, name in theirs.items() if name in names}
        for name, parameter in parameters.items():
            if name not in tensors:
                raise CheckpointError(f"{path} has no '{name}' of the head", hint=AGAIN)
            check_shape(name, tensors[name].shape, parameter, path)
            parameter.copy_(tensors[name])


def weights_outside_networks(objective: Objective) -> list[str]:
    """Parameters and buffers of an objective that no export of its networks contains, such as the baseline of an adversary."""
    networks = objective.networks().values()  # their companions are not exported
    parts = nn.ModuleList(part for each in networks for part in (each.encoder, each.head, each.bilinear) if part is not None)
    held = {id(tensor) for tensor in (*parts.parameters(), *parts.buffers())}
    return [name for name, tensor in [*objective.named_parameters(), *objective.named_buffers()] if id(tensor) not in held]
