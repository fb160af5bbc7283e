"""Reads and writes config.json of Hugging Face models: the sizes, and the record that discern adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from discern.config.problems import quoted
from discern.errors import CheckpointError
from discern.interop.names import CALIBRATION_NAME, CONFIG_NAME
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.electra.config import ElectraConfig
from discern.models.electra.huggingface import REQUIRED, SIZE_KEYS
from discern.objectives.base import Vocabulary
from discern.storage.checksums import CHECKSUMS_NAME, Record, has_file, lost_files, read_object, understood

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
MARK = "discern"
"""Key of config.json that identifies an export of discern."""
ENCODER_KEYS = frozenset(SIZE_KEYS.values()) | frozenset(
    "architectures model_type vocab_size hidden_act position_embedding_type pad_token_id tie_word_embeddings summary_type "
    "summary_use_proj summary_activation summary_last_dropout dtype".split()
)
"""Keys that `encoder_config` writes: all keys of an export that transformers reads."""
ENERGY, REPLACED = "energy", "replaced"
"""Outputs of a discriminator: the logit of *replaced*, or an energy; also the label of a ModernBERT that has this one output."""
_AGAIN = "export or download the model again"
SUPPORTED = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
"""The only supported values of some keys of config.json, such as the exact GELU."""


def read_huggingface_config(folder: Path, families: Sequence[str] = ("electra",)) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder.

    Args:
        families: accepted values of `model_type`.

    Raises:
        CheckpointError: the file is missing or damaged, or the model is of another family.
    """
    path = folder / CONFIG_NAME
    if not has_file(folder, CONFIG_NAME):
        raise CheckpointError(
            f"{folder} is not a Hugging Face folder: it has no {CONFIG_NAME}",
            hint="give the folder that `discern export RUN --out DIR` wrote, or one made by save_pretrained()",
        )
    config = read_object(path, hint=_AGAIN, error=CheckpointError)
    for name in lost_files(folder):
        if "/" not in name and not name.endswith((CALIBRATION_NAME, ".onnx")):  # other networks and these may be removed
            hint = f"copy it back, or accept that: discern doctor --accept {folder}"
            raise CheckpointError(f"{folder / name} is missing, which {CHECKSUMS_NAME} lists", hint=hint)
    kind = config.get("model_type")
    if kind not in families:
        expected = " or ".join(map(repr, families))
        raise CheckpointError(f"{path}: model_type is {kind!r}, expected {expected}", hint=f"give a model of type {expected}")
    with understood(path, hint=_AGAIN, error=CheckpointError):
        (_Export if MARK in config else _Model).model_validate(config)
    return config


class _Mark(Record):
    """The record of an export. Names of networks are also names of folders."""

    networks: Annotated[list[Annotated[str, Field(pattern=r"^[\w-]+$")]], Field(min_length=1)] | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    tokenizer_fingerprint: str | None = None
    objective: str | None = None
    imported: str | None = None
    task: str | None = None


class _Model(Record):
    """Types of the keys of config.json that are read here, if present."""

    architectures: list[str] | None = None
    id2label: dict[str, Any] | None = None


class _Export(Record):
    """Required keys of config.json of an export."""

    architectures: Annotated[list[str], Field(min_length=1)]
    vocab_size: Annotated[int, Field(ge=1)]
    id2label: dict[str, Any] | None = None
    discern: _Mark


def read_mark(config: Mapping[str, Any]) -> dict[str, Any]:
    """The record that discern wrote into config.json of an export; empty for other models."""
    mark = config.get(MARK)
    return mark if isinstance(mark, dict) else {}


def detector_label(config: Mapping[str, Any]) -> str | None:
    """The output of a discriminator that is stored as a tagger with one label, as ModernBERT's is; None for other models."""
    labels, names = config.get("id2label"), config.get("architectures") or [""]
    if not isinstance(labels, dict) or len(labels) != 1 or not str(names[0]).endswith("ForTokenClassification"):
        return None
    (label,) = labels.values()
    return label if label in (ENERGY, REPLACED) else None


def encoder_config(encoder: Encoder, vocabulary: Vocabulary, architecture: str, precision: str) -> dict[str, Any]:
    """The content of config.json for an ELECTRA. All fields are written, so that defaults of transformers do not matter.

    Args:
        architecture: class of transformers for the encoder and its head.
        precision: data type of the stored weights, one of `PRECISIONS`.
    """
    sizes = encoder.config
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": encoder.embeddings.vocab_size,
        **{key: getattr(sizes, name) for name, key in SIZE_KEYS.items()},
        "embedding_size": encoder.embeddings.embedding_size,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "pad_token_id": vocabulary.special.pad,
        "tie_word_embeddings": True,
        # How ElectraForMultipleChoice sums up a sequence: the state of [CLS], as when the released models are fine-tuned.
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
        "dtype": precision,
    }


def model_config(config: Mapping[str, Any], path: Path, supported: Mapping[str, Any]) -> ElectraConfig:
    """The sizes of an encoder, from config.json of an ELECTRA or a BERT. BERT's embeddings have the hidden size.

    Args:
        path: path of config.json, for messages.
        supported: required values of keys that are present.

    Raises:
        CheckpointError: a key has an unsupported value, or a size is missing or invalid.
    """
    family = config["model_type"]
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, but only {value!r} is supported",
                hint=f"give an ordinary {family.upper()} model",
            )
    # BERT does not factorize its embeddings.
    keys = SIZE_KEYS | ({"embedding_size": "hidden_size"} if family == "bert" else {})
    sizes = {name: whole_number(config, keys[name], path) for name in REQUIRED}
    sizes |= {name: config[key] for name, key in keys.items() if name not in REQUIRED and key in config}
    return validated_sizes(ElectraConfig, sizes, keys, path)


def validated_sizes(kind: type[ConfigT], sizes: Mapping[str, object], keys: Mapping[str, str], path: Path) -> ConfigT:
    """Validate the sizes of an encoder.

    Args:
        kind: the encoder's `Config`.
        sizes: the sizes, by our names.
        keys: their keys in config.json, if different from our names.
        path: path of config.json, for messages.

    Raises:
        CheckpointError: a size is invalid; the message names its key in config.json and its value.
    """
    try:
        return kind.model_validate(dict(sizes))
    except ValidationError as problem:
        said = []
        for error in problem.errors():
            name = ".".join(map(str, error["loc"]))
            found = f"{keys.get(name, name)} is {quoted(sizes.get(name))}; " if name in sizes else ""
            said.append(found + error["msg"].removeprefix("Value error, "))
        raise CheckpointError(f"{path}: {'; '.join(said)}", hint="export or download the model again") from problem


_LARGEST = 2**31 - 1


def whole_number(config: Mapping[str, Any], key: str, path: Path, least: int = 1) -> int:
    """Read a required size from config.json.

    Raises:
        CheckpointError: the size is missing, less than `least`, or larger than any tensor.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        expected = f"a whole number from {least:,} to {_LARGEST:,}"
        raise CheckpointError(f"{path}: {key} is {quoted(value)}, expected {expected}", hint="export or download it again")
    return value
