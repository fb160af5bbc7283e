"""Open a folder that holds a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from discern.artifacts.finetuned import FinetunedFolder
from discern.artifacts.huggingface import HuggingFaceFolder
from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.run import RunFolder, is_finetuned, is_run
from discern.errors import DataError
from discern.interop.names import CONFIG_NAME
from discern.storage.checksums import has_file


def holds_model(folder: Path) -> bool:
    """Whether `open_model` can open a folder."""
    return is_run(folder) or is_finetuned(folder) or has_file(folder, CONFIG_NAME)


def open_model(folder: Path | ModelFolder, *, warn: Callable[[str], None]) -> ModelFolder:
    """Open a run, an export, an import, a fine-tuned model, or a Hugging Face folder of transformers; one that is open stays so.

    Args:
        warn: called with a message about each damaged checkpoint that is skipped.

    Raises:
        DataError: the folder does not exist or holds no model.
    """
    if isinstance(folder, ModelFolder):
        return folder
    if is_run(folder):
        return RunFolder(folder, warn=warn)
    if is_finetuned(folder):
        return FinetunedFolder(folder)
    if has_file(folder, CONFIG_NAME):
        return HuggingFaceFolder(folder)
    state = "does not exist" if not folder.exists() else f"holds neither a run nor a {CONFIG_NAME}"
    raise DataError(
        f"{folder} {state}",
        hint="give a run, a fine-tuned model (made by `discern finetune MODEL --out OUT`), an export (made by `discern export "
        "RUN --out DIR`), or a Hugging Face model",
    )
