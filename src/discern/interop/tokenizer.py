"""Converts a tokenizer to the two files from which transformers loads one that produces the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, models, processors

from discern.data.tokenizer import framing, load_tokenizer, lowercases, special_names
from discern.errors import DataError
from discern.interop.names import UNLIMITED_POSITIONS
from discern.storage.checksums import read_object

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
Frame = Literal["cls-first", "cls-last"]
"""`[CLS] A [SEP] B [SEP]`, padded on the right; or XLNet's `A [SEP] B [SEP] [CLS]`, padded on the left."""
_USUAL_LENGTH = 512


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer in a Hugging Face folder.

    Attributes:
        tokenizer: content of tokenizer.json.
        config: content of tokenizer_config.json.
    """

    tokenizer: bytes
    config: bytes


def to_huggingface_tokenizer(
    path: Path, max_length: int, frame: Frame = "cls-first", *, has_segments: bool = True
) -> TokenizerFiles:
    """Convert the tokenizer of a run, so that it adds the special tokens as the model expects them.

    For model types electra and xlnet, transformers 5 rebuilds BPE and Unigram tokenizers from their vocabulary, with a normalizer
    of its own. The class `PreTrainedTokenizerFast` makes it use tokenizer.json unchanged. It returns segment ids only if
    `token_type_ids` is among the inputs of the model.

    Differs: in training, "[MASK]" in a text is ordinary text; here it is the mask token, so that users of the model can mask
    words. Pass `split_special_tokens=True` to transformers for the behavior of training.

    Args:
        path: tokenizer.json of the run.
        max_length: sequence length that the model was trained on; `truncation=True` truncates to it.
        frame: position of [CLS] in a text or a pair.
        has_segments: whether the model takes segment ids.

    Raises:
        DataError: the file is missing or damaged, or lacks one of the special tokens.
    """
    return tokenizer_files(load_tokenizer(path), max_length, frame, has_segments=has_segments)


def tokenizer_files(
    tokenizer: Tokenizer, max_length: int, frame: Frame = "cls-first", *, has_segments: bool = True
) -> TokenizerFiles:
    """Convert a loaded tokenizer like `to_huggingface_tokenizer`. Its special tokens are marked as special, in place."""
    names, last = special_names(tokenizer), frame == "cls-last"
    if last:
        tokenizer.post_processor = _cls_last(tokenizer)
    # transformers marks these as special itself. So must tokenizer.json, or "[MASK]" would be tokenized differently.
    tokenizer.add_special_tokens([_declared(tokenizer, token, is_mask=role == "mask") for role, token in names.items()])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *(["token_type_ids"] if has_segments else []), "attention_mask"],
        "model_max_length": max_length,
        **{f"{role}_token": token for role, token in names.items()},
        "do_lower_case": lowercases(tokenizer),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left" if last else "right",
        "truncation_side": "right",
    }
    settings = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return TokenizerFiles((tokenizer.to_str(pretty=True) + "\n").encode(), settings.encode())


def _declared(tokenizer: Tokenizer, token: str, *, is_mask: bool) -> AddedToken:
    """A special token with the treatment of spaces that the tokenizer declares.

    A mask includes the space before it, unless the model is WordPiece: tokens of BPE and Unigram include theirs, and so did the
    masks in training. A separate space before the mask would ask for the rest of a word.
    """
    found = next((each for each in tokenizer.get_added_tokens_decoder().values() if each.content == token), AddedToken(token))
    lstrip = found.lstrip or (is_mask and not isinstance(tokenizer.model, models.WordPiece))
    return AddedToken(token, special=True, normalized=False, lstrip=lstrip, rstrip=found.rstrip, single_word=found.single_word)


def _cls_last(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """The input framing of XLNet, with [CLS] at the end and in a segment of its own."""
    return framing(tokenizer, "$A:0 {sep}:0 {cls}:2", "$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2")


def read_max_length(folder: Path, max_positions: int) -> int:
    """The maximum sequence length of the model in a Hugging Face folder, in tokens.

    It is 512, as for the published models, if the folder does not state it and the model has no position embeddings.

    Args:
        max_positions: number of position embeddings, which limits what tokenizer_config.json states.

    Raises:
        DataError: tokenizer_config.json is damaged.
    """
    path = folder / TOKENIZER_CONFIG_NAME
    stated = _read_settings(path).get("model_max_length")
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int | float) or not stated > 2):
        raise DataError(
            f"{path}: model_max_length is {stated!r}, expected a number of tokens above 2",
            hint="set it to the length that the model was trained on, or remove the key",
        )
    if stated is not None and stated < max_positions:
        return int(stated)
    return max_positions if max_positions < UNLIMITED_POSITIONS else _USUAL_LENGTH


def _read_settings(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    return read_object(path, hint="export or download the model again") if path.is_file() else {}
