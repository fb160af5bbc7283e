"""Names of the files of a model, and models by their names on the Hugging Face Hub, which are downloaded once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from discern.data.tokenizer.loading import TOKENIZER_NAMES
from discern.errors import ConfigError, DataError
from discern.storage.checksums import CHECKSUMS_NAME

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
HEAD_NAME = "discern_head.safetensors"
"""Weights without a place in the classes of transformers: the head of a discriminator with a bilinear term, the gate of a head
that copies, the factors of a word table, or the head of a task."""
CALIBRATION_NAME = "detection.json"
"""File that `discern detect --calibrate` writes beside a discriminator."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = (
    *(CONFIG_NAME, "generator_config.json", *TOKENIZER_NAMES, "tokenizer_config.json", "special_tokens_map.json"),
    *("discern.toml", CALIBRATION_NAME, CHECKSUMS_NAME, "README.md"),
    *("modules.json", "*sentence_*.json", "[0-9]_*/config.json", f"[0-9]_*/{CHECKSUMS_NAME}"),  # of sentence-transformers
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model.generator.bin")
_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_CACHED = re.compile(r"models--(.+)")


def local_model(name: str | Path, note: Callable[[str], None]) -> Path:
    """The folder of a model, which is downloaded if it is given by its name on the Hub.

    An existing file or folder is returned unchanged. Otherwise, if the name has the form of a name on the Hub and its first part
    is not an existing folder (then it is a mistyped path), the model is downloaded to the cache of huggingface_hub, where later
    calls find it without a network connection. Anything else is returned unchanged.

    Args:
        note: called with a message about where a downloaded model is.

    Raises:
        ConfigError: huggingface_hub is not installed.
        DataError: there is no such model, or it cannot be downloaded.
    """
    path = Path(name)
    repository = str(name)
    if path.exists() or path.parent.is_dir() or not _NAME.fullmatch(repository) or ".." in repository:
        return path
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"there is no folder {repository}, and downloading it from the Hugging Face Hub needs huggingface_hub",
            hint=f"pip install 'discern-nlp[hf]'; or {_by_hand(repository)}",
        ) from None
    try:
        folder = _download(repository)
    except huggingface_hub.errors.RepositoryNotFoundError as problem:  # or one whose terms have to be accepted first
        raise DataError(
            f"there is no folder {repository}, and no public model of that name on the Hugging Face Hub",
            hint="check the name, or give the folder of a model; for a private or gated model, accept its terms at "
            f"https://huggingface.co/{repository} and run: hf auth login",
        ) from problem
    except Exception as problem:  # network, proxies, certificates and disk raise errors of many types
        cause = problem.__cause__ or problem  # where huggingface_hub reports problems of the network
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise DataError(
            f"there is no folder {repository}, and it cannot be downloaded from the Hugging Face Hub: {reason}",
            hint=_by_hand(repository),
        ) from problem
    note(f"{repository}: {folder}")
    return folder


def hub_name(folder: Path) -> str | None:
    """The name on the Hub of a folder in the cache of huggingface_hub; None for any other folder."""
    parts = folder.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not (found := _CACHED.fullmatch(parts[-3])):
        return None
    return found[1].replace("--", "/")


def _download(repository: str) -> Path:
    """Download config, tokenizer and weights, including those of a generator subfolder; pickles only without safetensors."""
    from huggingface_hub import snapshot_download

    def fetched(*patterns: str) -> Path:
        return Path(
            snapshot_download(
                repository,
                allow_patterns=[*patterns, *(f"generator/{pattern}" for pattern in patterns)],
                cache_dir=os.environ.get("HF_HUB_CACHE") or None,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
            )
        )

    folder = fetched(*_SMALL, HEAD_NAME, *_WEIGHTS)
    return folder if any(folder.glob("*.safetensors")) else fetched(*_SMALL, *_PICKLES)


def _by_hand(repository: str) -> str:
    return (
        f"on a machine with a network, run: hf download {repository} --local-dir {repository}; then copy the folder here, "
        f"so that {repository}/{CONFIG_NAME} exists"
    )
