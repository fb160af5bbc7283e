"""How a folder of the library sentence-transformers makes the vector of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.errors import CheckpointError, ConfigError
from discern.interop.names import CONFIG_NAME
from discern.parsing import json_value
from discern.storage.checksums import read_object, verify

MODULES_FILE = "modules.json"
_SETTINGS_FILE = "sentence_bert_config.json"
_POOLINGS = {"mean_tokens": "mean-all", "cls_token": "cls", "lasttoken": "cls"}


@dataclass(frozen=True)
class StoredPooling:
    """The pooling that a folder names.

    Attributes:
        pooling: 'mean-all', 'mean' or 'cls'.
        normalize: whether vectors are scaled to length 1.
        max_length: number of tokens that are read at a time, including [CLS] and [SEP]; None: as many as the encoder takes.
    """

    pooling: str
    normalize: bool
    max_length: int | None = None


def read_pooling(folder: Path) -> StoredPooling | None:
    """The pooling of a folder; None if sentence-transformers did not write it.

    Raises:
        CheckpointError: its files are damaged.
        ConfigError: it has a pooling or a layer that discern does not have.
    """
    if not (folder / MODULES_FILE).is_file():
        return None
    try:
        kinds = [(str(each["type"]).rpartition(".")[2], folder / each["path"]) for each in _json(folder / MODULES_FILE)]
        unknown = [kind for kind, _ in kinds if kind not in ("Transformer", "WordWeights", "Pooling", "Normalize")]
        pooled: dict[str, Any] = next((_json(path / "config.json") for kind, path in kinds if kind == "Pooling"), {})
        modes = [
            name.removeprefix("pooling_mode_") for name, on in pooled.items() if name.startswith("pooling_mode_") and on is True
        ]
        if "lasttoken" in modes and _json(folder / CONFIG_NAME).get("model_type") != "xlnet":
            modes = ["the last token"]  # only XLNet has [CLS] there
        modes = modes or [{"mean": "mean_tokens", "cls": "cls_token"}.get(str(pooled.get("pooling_mode")), "")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(
            f"{folder / MODULES_FILE} or the pooling that it names cannot be read ({problem!r:.80})",
            hint="export the model again",
        ) from problem
    if unknown or len(modes) != 1 or modes[0] not in _POOLINGS:
        what = f"the module {unknown[0]}" if unknown else f"pooling by {', '.join(modes) or 'nothing'}"
        raise ConfigError(
            f"{folder} is a model of sentence-transformers with {what}, which discern does not have",
            hint="use it with sentence-transformers; for its encoder alone, remove modules.json from a copy",
        )
    named = {kind for kind, _ in kinds}
    # discern writes WordWeights only to leave out [CLS] and [SEP].
    pooling = "mean" if "WordWeights" in named else _POOLINGS[modes[0]]
    return StoredPooling(pooling, "Normalize" in named, _max_length(folder / _SETTINGS_FILE))


def _max_length(path: Path) -> int | None:
    """The length that the settings of the encoder state, if they do.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.is_file():
        return None
    stated = read_object(path, hint="export the model again", error=CheckpointError).get("max_seq_length")
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or stated < 3):
        raise CheckpointError(
            f"{path}: max_seq_length is {stated!r}, expected a number of tokens of at least 3", hint="export the model again"
        )
    return stated


def _json(path: Path) -> Any:
    content = path.read_bytes()
    verify(path, content, CheckpointError)
    return json_value(content)
