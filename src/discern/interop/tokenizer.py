"""Our tokenizer as the two files from which transformers makes one that gives the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from discern.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, lowercases
from discern.errors import DataError

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """What a Hugging Face folder holds of a tokenizer.

    Attributes:
        tokenizer: content of tokenizer.json.
        config: content of tokenizer_config.json.
    """

    tokenizer: bytes
    config: bytes


def to_huggingface_tokenizer(path: Path, max_length: int) -> TokenizerFiles:
    """The tokenizer of a run, framing a text as the model saw it: `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`.

    For model type electra, transformers 5 rebuilds BPE and Unigram from their vocabulary with a normaliser of its own;
    class `PreTrainedTokenizerFast` makes it take tokenizer.json as it stands, and `token_type_ids` among the inputs makes
    that class return the segments, which it leaves out otherwise.

    Differs: in training "[MASK]" written in a text is text; here it is the mask, so that a reader of the model can ask
    for a word. Pass `split_special_tokens=True` to transformers for the other.

    Args:
        path: tokenizer.json of the run.
        max_length: positions that the model was trained on; `truncation=True` cuts to it.

    Raises:
        DataError: the file is missing or damaged, or lacks one of the special tokens.
    """
    tokenizer = load_tokenizer(path)
    # transformers declares these special by itself; so must tokenizer.json, or a "[MASK]" would have other ids there.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS.values()])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": max_length,
        **{f"{role}_token": token for role, token in SPECIAL_TOKENS.items()},
        "do_lower_case": lowercases(tokenizer),
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "truncation_side": "right",
    }
    settings = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return TokenizerFiles((tokenizer.to_str(pretty=True) + "\n").encode(), settings.encode())


def read_max_length(folder: Path, max_positions: int) -> int:
    """The longest sequence, in tokens, that the model of a Hugging Face folder takes.

    Args:
        max_positions: rows of the model's position table; no more than that, whatever tokenizer_config.json says.

    Raises:
        DataError: tokenizer_config.json is damaged.
    """
    stated = _read_settings(folder / TOKENIZER_CONFIG_NAME).get("model_max_length")
    return min(int(stated), max_positions) if isinstance(stated, int | float) and stated > 2 else max_positions


def _read_settings(path: Path) -> Mapping[str, Any]:
    """A JSON object; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} cannot be read: {problem}", hint="export or download the model again") from problem
    return settings if isinstance(settings, dict) else {}
