"""Makes an exported encoder a model of the library sentence-transformers: texts in, vectors out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tokenizers import Tokenizer

from discern.artifacts.export_folder import MODULES_NAME, TRANSFORMER_NAME, VERSIONS_NAME
from discern.data.tokenizer import load_tokenizer, special_tokens, vocab_size
from discern.errors import ConfigError, did_you_mean
from discern.interop.config_json import read_huggingface_config
from discern.interop.families import ENCODER_TYPES, family_of_type
from discern.interop.names import UNLIMITED_POSITIONS
from discern.interop.tokenizer import read_max_length
from discern.storage.files import sync_folder, write_file

VectorPooling: TypeAlias = Literal["mean", "mean-all", "cls"]
"""What the vector of a text is. 'mean': the mean of the states of its tokens without [CLS] and [SEP], as in `Model.encode`.
'mean-all': the mean of all of its states, the only mean that other servers have. 'cls': the state of [CLS]; in `Model.encode`,
`pooling="first"`."""
VECTOR_POOLINGS: tuple[str, ...] = get_args(VectorPooling)
# The names that every version of sentence-transformers reads. Other servers read them too, in 1_Pooling.
_MODULES = "sentence_transformers.models."
_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def check_pooling(pooling: str) -> None:
    """Raise a ConfigError if there is no such pooling."""
    if pooling not in VECTOR_POOLINGS:
        raise ConfigError(f"unknown pooling '{pooling}'", hint=did_you_mean(pooling, VECTOR_POOLINGS))


def write_sentence_transformers(
    folder: Path, pooling: str = "mean", *, normalize: bool = False, max_length: int | None = None
) -> None:
    """Add what `SentenceTransformer(folder)` needs to a folder that has an encoder and its tokenizer.

    sentence-transformers truncates a text to `max_length` tokens, where `Model.encode` reads all of it in windows.

    Args:
        folder: an export that is being written: config.json and the files of the tokenizer are there.
        pooling: one of `VECTOR_POOLINGS`.
        normalize: scale the vectors to length 1.
        max_length: number of tokens that are read of a text, including [CLS] and [SEP]; None: that of the tokenizer.

    Raises:
        ConfigError: there is no such pooling.
        CheckpointError: config.json is missing or damaged.
    """
    check_pooling(pooling)
    config = read_huggingface_config(folder, ENCODER_TYPES)
    tokenizer, width = load_tokenizer(folder), config.get("hidden_size", config.get("d_model"))
    modules: list[tuple[str, dict[str, Any] | None]] = []
    if pooling == "mean":
        modules.append(("WordWeights", _without_frame(tokenizer)))
    summary = "lasttoken" if family_of_type(config["model_type"]).frame == "cls-last" else "cls_token"
    mode = summary if pooling == "cls" else "mean_tokens"
    sizes = {"word_embedding_dimension": width}
    modules.append(("Pooling", sizes | {f"pooling_mode_{name}": name == mode for name in _MODES} | {"include_prompt": True}))
    if normalize:
        modules.append(("Normalize", None))

    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}Transformer"}]
    for number, (kind, settings) in enumerate(modules, 1):
        place = f"{number}_{kind}"
        listed.append({"idx": number, "name": str(number), "path": place, "type": f"{_MODULES}{kind}"})
        if settings is not None:  # Normalize has none, and then no folder either
            (folder / place).mkdir()
            _write(folder / place / "config.json", settings)
            sync_folder(folder / place)
    length = max_length or read_max_length(folder, config.get("max_position_embeddings", UNLIMITED_POSITIONS))
    _write(folder / MODULES_NAME, listed)
    _write(folder / TRANSFORMER_NAME, {"max_seq_length": length, "do_lower_case": False})
    _write(folder / VERSIONS_NAME, {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"})


def _without_frame(tokenizer: Tokenizer) -> dict[str, Any]:
    """Settings of the module that weights the states of tokens: 0 for [CLS] and [SEP], 1 for others."""
    special = special_tokens(tokenizer)
    # A module for idf weights, which looks up ids by their place in this list.
    words = [tokenizer.id_to_token(number) or "" for number in range(vocab_size(tokenizer))]
    return {"vocab": words, "word_weights": {words[special.cls]: 0.0, words[special.sep]: 0.0}, "unknown_word_weight": 1.0}


def _write(path: Path, content: object) -> None:
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
