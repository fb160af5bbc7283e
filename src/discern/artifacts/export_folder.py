"""The folder of an export: its files, and the check before one is replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from discern.errors import DataError
from discern.interop.config_json import read_mark
from discern.interop.names import CALIBRATION_NAME, CONFIG_NAME, HEAD_NAME, WEIGHTS_NAME
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from discern.parsing import json_value
from discern.storage.checksums import CHECKSUMS_NAME, record_checksums
from discern.storage.files import cannot_write, sync_folder
from discern.storage.output import OutputFolder, listed

CARD_NAME = "README.md"
SETTINGS_NAME = "discern.toml"
ONNX_NAME = "model.onnx"
FILES = (CONFIG_NAME, WEIGHTS_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, CARD_NAME, SETTINGS_NAME)
"""The files of every export. A head that ELECTRA cannot represent is stored in `HEAD_NAME`. If several networks are exported,
each but the first has a subfolder of its own. Each folder has the checksums of its files, except for the card, which users are
meant to edit."""
MODULES_NAME, TRANSFORMER_NAME, VERSIONS_NAME = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
"""The files of a sentence-transformers model, besides the folders of its modules."""
_SENTENCE_FILES = (MODULES_NAME, TRANSFORMER_NAME, VERSIONS_NAME)
_SENTENCE_FOLDERS = ("1_Pooling", "1_WordWeights", "2_Pooling")


def check_target(out: Path, *reads: Path | None) -> None:
    """Make sure that an export may be written to `out`: it is free, empty, or an earlier export and nothing else.

    Args:
        reads: the models that the export is made from.

    Raises:
        ConfigError: `out` is, contains or lies inside a model that is read.
        DataError: `out` holds something else, which would be lost.
    """
    folder = OutputFolder(out)
    folder.check(*reads)
    if folder.is_free and not (out.is_symlink() and not out.exists()):
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file", hint="choose another --out")
    mark = _mark(out)
    if not mark:
        raise DataError(
            f"{out} is not empty and not an earlier export (it holds {listed(folder.foreign(lambda name: False))})",
            hint="choose another --out, or empty it",
        )
    folders = [name for name in (*mark.get("networks", ()), *_SENTENCE_FOLDERS) if (out / name).is_dir()]
    files = (*FILES, *_SENTENCE_FILES, ONNX_NAME, HEAD_NAME, CALIBRATION_NAME, CHECKSUMS_NAME)
    others = folder.foreign((*files, *folders).__contains__)
    own = (CONFIG_NAME, WEIGHTS_NAME, HEAD_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, CHECKSUMS_NAME)
    others += [f"{name}/{other}" for name in folders for other in OutputFolder(out / name).foreign(own.__contains__)]
    if others:
        raise DataError(
            f"{out} is an earlier export, but also holds {listed(others)}, which would be lost",
            hint="choose another --out, or move these files away",
        )


def publish(out: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, then replace `out` with it; on failure `out` is unchanged.

    Raises:
        DataError: `out` cannot be written, is being written by another process, or has become something other than an export.
    """
    try:
        with OutputFolder(out).staged() as folder:
            check_target(out)
            write(folder.path)
            folders = sorted(path for path in folder.path.rglob("*") if path.is_dir())
            for each in (*reversed(folders), folder.path):  # a folder lists the checksums of those in it
                files = [path for path in each.iterdir() if path.is_file() and path.name not in (CARD_NAME, CHECKSUMS_NAME)]
                files += each.glob(f"*/{CHECKSUMS_NAME}")
                record_checksums(each, (str(path.relative_to(each)) for path in files))
                sync_folder(each)
            folder.publish(replace=True)
    except SafetensorError as problem:
        raise cannot_write(out, problem) from problem


def _mark(folder: Path) -> dict[str, Any]:
    """The entry of discern in config.json; empty if the folder is not an export."""
    try:
        config = json_value((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read_mark(config) if isinstance(config, dict) else {}
