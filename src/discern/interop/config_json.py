"""config.json of a Hugging Face ELECTRA or BERT: what it says of the sizes, and what discern wrote into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from discern.config.problems import quoted
from discern.errors import CheckpointError
from discern.interop.names import CONFIG_NAME
from discern.model.config import ModelConfig
from discern.model.encoder import Encoder
from discern.objectives.base import Vocabulary
from discern.records import Record, read_object, understood

MARK = "discern"
"""Key of config.json that tells an export of ours from somebody else's model."""
ENCODER_KEYS = frozenset(
    "architectures model_type vocab_size embedding_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "hidden_act hidden_dropout_prob attention_probs_dropout_prob max_position_embeddings position_embedding_type type_vocab_size "
    "initializer_range layer_norm_eps pad_token_id tie_word_embeddings summary_type summary_use_proj summary_activation "
    "summary_last_dropout dtype".split()
)
"""What `encoder_config` states: all that an export says of a network, in words of transformers."""
_AGAIN = "export or download the model again"
SUPPORTED = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
"""What our encoder computes, by the keys of config.json that could say otherwise: GELU by the error function, and so on."""


def read_huggingface_config(folder: Path, families: Sequence[str] = ("electra",)) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Args:
        families: values of `model_type` to accept.

    Raises:
        CheckpointError: it is missing, unreadable, or that of another family.
    """
    path = folder / CONFIG_NAME
    if not path.exists():
        raise CheckpointError(
            f"{folder} is not a Hugging Face folder: it has no {CONFIG_NAME}",
            hint="give the folder that `discern export RUN --out DIR` wrote, or one made by save_pretrained()",
        )
    config = read_object(path, hint=_AGAIN, error=CheckpointError)
    kind = config.get("model_type")
    if kind not in families:
        expected, wanted = " or ".join(map(repr, families)), " or ".join(map(str.upper, families))
        raise CheckpointError(f"{path}: model_type is {kind!r}, expected {expected}", hint=f"give an {wanted} model")
    with understood(path, hint=_AGAIN, error=CheckpointError):
        (_Export if MARK in config else _Model).model_validate(config)
    return config


class _Mark(Record):
    """What discern wrote of an export. The names of networks are names of folders too."""

    networks: Annotated[list[Annotated[str, Field(pattern=r"^[\w-]+$")]], Field(min_length=1)] | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    tokenizer_fingerprint: str | None = None
    objective: str | None = None
    imported: str | None = None
    task: str | None = None


class _Model(Record):
    """What config.json of a model must hold as it is read here, where it holds it."""

    architectures: list[str] | None = None
    id2label: dict[str, Any] | None = None


class _Export(Record):
    """What config.json of an export must hold."""

    architectures: Annotated[list[str], Field(min_length=1)]
    vocab_size: Annotated[int, Field(ge=1)]
    id2label: dict[str, Any] | None = None
    discern: _Mark


def read_mark(config: Mapping[str, Any]) -> dict[str, Any]:
    """What discern wrote in config.json about an export; empty for somebody else's model."""
    mark = config.get(MARK)
    return mark if isinstance(mark, dict) else {}


def encoder_config(encoder: Encoder, vocabulary: Vocabulary, architecture: str, precision: str) -> dict[str, Any]:
    """config.json, with every field that ELECTRA's readers look for, so that no version's default matters.

    Args:
        architecture: class of transformers that holds the encoder and its head.
        precision: type that the weights are stored in, one of `PRECISIONS`.
    """
    sizes = encoder.config
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": encoder.embeddings.vocab_size,
        "embedding_size": encoder.embeddings.embedding_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": sizes.feedforward_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": sizes.hidden_dropout,
        "attention_probs_dropout_prob": sizes.attention_dropout,
        "max_position_embeddings": sizes.max_positions,
        "position_embedding_type": "absolute",
        "type_vocab_size": sizes.num_token_types,
        "initializer_range": sizes.initializer_range,
        "layer_norm_eps": sizes.layer_norm_epsilon,
        "pad_token_id": vocabulary.special.pad,
        "tie_word_embeddings": True,
        # How ElectraForMultipleChoice sums up a sequence: the state of [CLS], as when the released models are fine-tuned.
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
        "dtype": precision,
    }


def model_config(config: Mapping[str, Any], path: Path, supported: Mapping[str, Any]) -> ModelConfig:
    """The sizes that config.json of an ELECTRA or a BERT states; BERT's embeddings are as wide as its hidden states.

    Args:
        path: of config.json.
        supported: what a key must be where it is stated.

    Raises:
        CheckpointError: a key asks for what our encoder cannot do, or a size is missing or impossible.
    """
    family = config["model_type"]
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, but only {value!r} is supported",
                hint=f"give an ordinary {family.upper()} model",
            )
    hidden = whole_number(config, "hidden_size", path)
    sizes = {
        "num_layers": whole_number(config, "num_hidden_layers", path),
        "hidden_size": hidden,
        "embedding_size": hidden if family == "bert" else whole_number(config, "embedding_size", path),
        "num_heads": whole_number(config, "num_attention_heads", path),
        "feedforward_size": whole_number(config, "intermediate_size", path),
    }
    return validated_sizes(sizes | {ours: config[key] for ours, key in _OPTIONAL.items() if key in config}, _KEYS, path)


_OPTIONAL = {
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys that config.json may leave out, by our names; the defaults of transformers are ours."""
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "feedforward_size": "intermediate_size",
    **_OPTIONAL,
}


def validated_sizes(sizes: Mapping[str, object], keys: Mapping[str, str], path: Path) -> ModelConfig:
    """The sizes of an encoder, once each of them can be.

    Args:
        sizes: by our names.
        keys: what config.json calls them, where it calls them something else.
        path: of config.json.

    Raises:
        CheckpointError: one cannot be; the message names its key in config.json, and what was found there.
    """
    try:
        return ModelConfig.model_validate(dict(sizes))
    except ValidationError as problem:
        said = []
        for error in problem.errors():
            name = ".".join(map(str, error["loc"]))
            found = f"{keys.get(name, name)} is {quoted(sizes.get(name))}; " if name in sizes else ""
            said.append(found + error["msg"].removeprefix("Value error, "))
        raise CheckpointError(f"{path}: {'; '.join(said)}", hint="export or download the model again") from problem


_LARGEST = 2**31 - 1


def whole_number(config: Mapping[str, Any], key: str, path: Path, least: int = 1) -> int:
    """A size that config.json must state.

    Raises:
        CheckpointError: it does not, or states less than `least`, or what no tensor could have.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        expected = f"a whole number from {least:,} to {_LARGEST:,}"
        raise CheckpointError(f"{path}: {key} is {quoted(value)}, expected {expected}", hint="export or download it again")
    return value
