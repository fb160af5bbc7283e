"""How an encoder is stored in the format of transformers: classes, keys of config.json, names of weights, heads of tasks.

Each architecture describes itself in `huggingface.py` of its folder; nothing here or there reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from discern.errors import CheckpointError, ConfigError
from discern.models.config import ModelConfig, config_class
from discern.storage.checksums import understood
from discern.types import SpecialTokens

Predicts: TypeAlias = Literal["words", "words or copies", "replaced", "energy", "nothing"]
"""What a network's head outputs: logits of words, the same with a gate that copies, the logit of *replaced*, or an energy."""
TaskKind: TypeAlias = Literal["classification", "tagging", "span"]
MARK = "discern"
"""Key of config.json that identifies an export of discern."""
UNLIMITED_POSITIONS = 1_000_000
"""`max_positions` of an encoder without a table of positions."""
WORDS = "encoder.embeddings.word.weight"
"""Our name of the word table."""
AGAIN = "export or download the model again"
BERT_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "embedding_size": "embedding_size",
    "num_heads": "num_attention_heads",
    "feedforward_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of BERT's config.json, by the names of our settings."""
BERT_BLOCK = {
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
"""BERT's names of the layers of a block that follow its attention, by ours."""
_ENDINGS: dict[str, TaskKind] = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
    "ForQuestionAnsweringSimple": "span",
}
_SAME_CLASS: dict[str, Predicts] = {"words or copies": "words", "energy": "replaced"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Weights: TypeAlias = Mapping[str, Tensor]
Readers: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""Functions that read one stored tensor each, by its name."""


class Architecture:
    """One kind of encoder in the format of transformers. These defaults keep our names, which only discern reads.

    Attributes:
        encoder: its name in the registry; "": that of the model.
        titles: its values of `model_type`, each with its name in words; the first is written. Empty: transformers has none.
        beside_only: whether such networks are only stored beside another, and cannot be trained further.
        frame: position of [CLS] in the input.
        has_segments: whether it reads segment ids.
        positions: how it tells positions apart.
        classes: class of transformers by what the network predicts, or by kind of task.
        size_keys: keys of config.json by the names of our settings; empty: our names.
        required: settings that config.json must have; for the others, the defaults of transformers are ours.
        supported: the only supported values of some keys.
        layers: names in transformers of our layers or weights, "#" for the number of a block; empty: the same.
        discriminator_layers: the same for those of a discriminator's head that `layers` calls otherwise.
        prefixes: what may precede the names of the encoder, except in the folder of an encoder alone; the first is ours.
        parts: what the names of the encoder start with after the prefix.
        strips_prefix: whether an encoder that is exported beside the head of a task is written without the prefix.
        synonyms: beginnings of other names of the same weights.
        tied: names of copies of the word table.
        redundant: endings of names that may be present and say nothing.
        zeros: weights that a folder lacks, because they are zero, if a key of config.json is false.
        factors: our names of matrices that a network may have; their product is stored instead, and they beside it.
        marks: what the network predicts, by a weight that shows it; the first that is present decides.
        task_heads: values of `task.head` that its classes can represent, by kind of task.
        poolings: values of `task.pooling` that its classifier can represent.
        task_parts: layers of the heads of tasks, by ours.
        no_graph: why it cannot be exported to ONNX; None: it can.
        recipes: presets by hidden size, from which an imported model takes the settings that its weights do not show.
        objective: settings of an imported language model, by dotted key.
        detection: settings of objective 'rtd' for an imported discriminator: its generator, if it has none, and what two networks
            with different word tables share.
    """

    encoder: ClassVar[str] = ""
    titles: ClassVar[Mapping[str, str]] = {}
    beside_only: ClassVar[bool] = False
    frame: ClassVar[Literal["cls-first", "cls-last"]] = "cls-first"
    has_segments: ClassVar[bool] = True
    positions: ClassVar[Literal["learned", "rotary", "relative"]] = "learned"
    classes: ClassVar[Mapping[str, str]] = {}
    size_keys: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    supported: ClassVar[Mapping[str, Any]] = {}
    layers: ClassVar[Mapping[str, str]] = {}
    discriminator_layers: ClassVar[Mapping[str, str]] = {}
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    parts: ClassVar[tuple[str, ...]] = ("encoder.",)
    strips_prefix: ClassVar[bool] = False
    synonyms: ClassVar[Mapping[str, str]] = {}
    tied: ClassVar[tuple[str, ...]] = ()
    redundant: ClassVar[tuple[str, ...]] = ()
    zeros: ClassVar[Mapping[str, str]] = {}
    factors: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[Mapping[str, Predicts]] = {
        "head.copy_gate.weight": "words or copies",
        "head.output.weight": "replaced",
        "head.bias": "words",
    }
    task_heads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "classification": ("linear", "dense"),
        "tagging": ("linear",),
        "span": ("span",),
    }
    poolings: ClassVar[tuple[str, ...]] = ("cls",)
    task_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "classification": {"summary": "classifier.dense", "output": "classifier.out_proj"},
        "tagging": {"output": "classifier"},
        "span": {"output": "qa_outputs"},
    }
    no_graph: ClassVar[str | None] = None
    recipes: ClassVar[Mapping[int, str]] = {}
    objective: ClassVar[Mapping[str, object]] = {"objective.name": "mlm"}
    detection: ClassVar[Mapping[str, object]] = {}

    def check(self, sizes: ModelConfig, predicts: Predicts, *, bilinear: bool) -> None:
        """Raise a ConfigError if a network cannot be stored.

        Args:
            sizes: settings of the encoder, with the width of its own embeddings.
            bilinear: whether its head has a bilinear term.
        """

    def class_of(self, sizes: ModelConfig, output: Predicts | TaskKind) -> str:
        """The class of transformers for an encoder with such a head; for an architecture that it lacks, our own."""
        output = _SAME_CLASS.get(output, output)
        return self.classes.get(output, f"Discern{sizes.encoder.title()}")

    # config.json

    def config_json(
        self, sizes: ModelConfig, vocab_size: int, output: Predicts | TaskKind, special: SpecialTokens, precision: str
    ) -> dict[str, Any]:
        """The content of config.json. All fields are written, so that defaults of transformers do not matter.

        Args:
            sizes: settings of the encoder, with the width of its own embeddings.
            output: what the class of transformers predicts.
            precision: data type of the stored weights.
        """
        return {
            "architectures": [self.class_of(sizes, output)],
            "model_type": next(iter(self.titles), sizes.encoder),
            "vocab_size": vocab_size,
            **{key: getattr(sizes, name) for name, key in self._keys(sizes).items()},
            **self.constants(sizes, special),
            "dtype": precision,
        }

    def constants(self, sizes: ModelConfig, special: SpecialTokens) -> dict[str, Any]:
        """The keys of config.json that are no sizes."""
        return {"pad_token_id": special.pad}

    def read_config(self, config: Mapping[str, Any], path: Path) -> ModelConfig:
        """The settings of an encoder, from config.json.

        Args:
            path: path of config.json, for messages.

        Raises:
            CheckpointError: a key has an unsupported value, or a size is missing or invalid.
        """
        for key, value in self.supported.items():
            if config.get(key, value) != value:
                raise unsupported(path, f"{key} is {config[key]!r}, but only {value!r} is supported")
        name = self.encoder or config["model_type"]
        kind = config_class(name)
        with understood(path, hint=AGAIN, error=CheckpointError):
            keys = self._keys(kind.model_construct())
            sizes: dict[str, Any] = {name: config[keys[name]] for name in self.required}
            sizes |= {name: config[key] for name, key in keys.items() if config.get(key) is not None}
            return kind.model_validate({**sizes, "encoder": name, **self.derived(config, sizes, path)})

    def derived(self, config: Mapping[str, Any], sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Settings that config.json states in another form."""
        return {}

    def _keys(self, sizes: ModelConfig) -> Mapping[str, str]:
        return self.size_keys or {name: name for name in type(sizes).model_fields if name != "encoder"}

    # Weights

    def canonical(self, names: Collection[str]) -> dict[str, str]:
        """Names of weights in a folder, by their usual names in transformers: with the prefix, and without synonyms."""
        bare = not any(name.startswith(self.prefixes) for name in names)
        found = {}
        for name in names:
            usual = self.prefixes[0] + name if bare and name.startswith(self.parts) else name
            for synonym, ours in self.synonyms.items():
                if usual.startswith(synonym):
                    usual = ours + usual.removeprefix(synonym)
                    break
            found[usual] = name
        return found

    def predicts(self, names: Collection[str], config: Mapping[str, Any]) -> Predicts:
        """What the network of a folder predicts, by the usual names of its weights."""
        found: Predicts = next((kind for name, kind in self.marks.items() if name in names), "nothing")
        return "energy" if found == "replaced" and (config.get(MARK) or {}).get("gives") == "energy" else found

    def stored(self, tensors: Readers, config: Mapping[str, Any]) -> Readers:
        """The tensors of a folder in the format that is written today, each read on demand."""
        return tensors

    def shown(self, sizes: ModelConfig, names: Collection[str]) -> ModelConfig:
        """The settings of a network that predicts words, with those that only the names of its weights show."""
        return sizes

    def named(self, name: str) -> str:
        """The usual name of a weight that is stored as it is."""
        return renamed(name, self.layers)

    def to_huggingface(self, weights: Weights, sizes: ModelConfig) -> dict[str, Tensor]:
        """Weights of a network, or of a part, under the names and in the shapes of transformers.

        Args:
            weights: by our names, `encoder.*`, `head.*` and `bilinear.*`; a tied output matrix occurs once, as the word table.
        """
        table = self.layers | (self.discriminator_layers if "head.output.weight" in weights else {})  # type: ignore[operator]
        return {renamed(name, table): tensor for name, tensor in weights.items()}

    def from_huggingface(self, weights: Weights) -> dict[str, Tensor]:
        """The inverse of `to_huggingface`, by usual names."""
        table = {theirs: ours for ours, theirs in (*self.layers.items(), *self.discriminator_layers.items())}
        return {renamed(name, table): tensor for name, tensor in weights.items()}

    # Heads of tasks

    def task_kind(self, config: Mapping[str, Any]) -> TaskKind | None:
        """The kind of task that the class in config.json has a head for; None: none, or one of another kind."""
        name = next(iter(config.get("architectures") or ()), "")
        return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)

    def task_layers(self, kind: TaskKind, model_type: str) -> Mapping[str, str]:
        """The layers of the head of a task, ours -> theirs."""
        return self.task_parts[kind]

    def task_tensors(self, weights: Weights, kind: TaskKind, scale: float, shift: float) -> dict[str, Tensor]:
        """The weights of the head of a task in float32, whose outputs become `scale * output + shift`.

        Args:
            weights: by our names, such as "output.weight".

        Raises:
            ConfigError: the class of transformers cannot represent the head.
        """
        own = {name: tensor.detach().float().cpu() for name, tensor in weights.items()}
        own["output.weight"], own["output.bias"] = scale * own["output.weight"], scale * own["output.bias"] + shift
        table = self.task_layers(kind, next(iter(self.titles)))
        return {renamed(name, table): tensor for name, tensor in own.items()}

    def task_config(self, sizes: ModelConfig, head: str, pooling: str, frame: str) -> dict[str, Any]:
        """The keys of config.json about the head of a task, besides its labels."""
        return {"classifier_dropout": sizes.hidden_dropout}

    def task_settings(self, config: Mapping[str, Any], kind: TaskKind) -> dict[str, Any]:
        """The settings of a task that its class of transformers determines."""
        return {"head": self.task_heads[kind][-1]}

    def as_form(
        self, config: Mapping[str, Any], tensors: Weights, form: str, *, head_beside: bool
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The same weights as another `model_type`, which computes the same.

        Raises:
            ConfigError: that type cannot express the model, with the reason.
        """
        natural = config["model_type"]
        raise ConfigError(
            f"this model is of the type '{natural}', and as '{form}' its weights would compute something different",
            hint=f"use --as {natural}, which is the default",
        )


def unsupported(path: Path, problem: str) -> CheckpointError:
    """The error for a config.json that describes a model of which discern has no encoder."""
    return CheckpointError(f"{path}: {problem}", hint="give an ordinary model of this type")


def renamed(name: str, table: Mapping[str, str]) -> str:
    """The new name of a weight, by a table of layers or of single weights.

    Args:
        name: the old name, such as "blocks.3.expand.weight".
        table: new names by old ones, with "#" for the number of a block: {"blocks.#.expand": "layer.#.dense"}; empty: the same.

    Raises:
        KeyError: the table has no such layer.
    """
    if not table:
        return name
    number = _NUMBER.search(name)
    pattern = _NUMBER.sub("#", name, count=1)
    layer, _, kind = pattern.rpartition(".")
    new = table[pattern] if pattern in table else f"{table[layer]}.{kind}"
    return new.replace("#", number[0]) if number else new
