"""The tokenizer of a Hugging Face folder: the two files from which transformers loads it, and the one of an imported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tokenizers import AddedToken, Tokenizer, models

from discern.data.tokenizer import framing, load_tokenizer, lowercases, special_names, strips_accents
from discern.models.architecture import AGAIN, UNLIMITED_POSITIONS, Architecture
from discern.storage.checksums import Record, read_json
from discern.tasks.supervised import FrameName

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
_USUAL_LENGTH = 512


def tokenizer_files(
    tokenizer: Tokenizer, max_length: int, architecture: Architecture, frame: FrameName | None = None
) -> dict[str, bytes]:
    """The files of a tokenizer, by name. Special tokens are where the model expects them, and are marked as special, in place.

    transformers 5 rebuilds BPE and Unigram tokenizers of some model types from their vocabulary, with a normalizer of its own.
    The class `PreTrainedTokenizerFast` makes it use tokenizer.json unchanged. It returns segment ids only if `token_type_ids` is
    among the inputs of the model.

    Differs: in training, "[MASK]" in a text is ordinary text; here it is the mask token, so that users of the model can mask
    words. Pass `split_special_tokens=True` to transformers for the behavior of training.

    Args:
        max_length: sequence length that the model was trained on; `truncation=True` truncates to it.
        frame: position of [CLS] in the input; None: that of the architecture.
    """
    names, last = special_names(tokenizer), (frame or architecture.frame) == "cls-last"
    if last:
        # [CLS] at the end and in a segment of its own.
        tokenizer.post_processor = framing(tokenizer, "$A:0 {sep}:0 {cls}:2", "$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2")
    # transformers marks these as special itself. So must tokenizer.json, or "[MASK]" would be tokenized differently. A mask
    # includes the space before it, unless the model is WordPiece: tokens of BPE and Unigram include theirs, and so did masks in
    # training. A separate space before the mask would ask for the rest of a word.
    added = {each.content: each for each in tokenizer.get_added_tokens_decoder().values()}
    strips, special = not isinstance(tokenizer.model, models.WordPiece), []
    for role, token in names.items():
        found = added.get(token, AddedToken(token))
        spaces = {"lstrip": found.lstrip or (role == "mask" and strips), "rstrip": found.rstrip}
        special.append(AddedToken(token, special=True, normalized=False, single_word=found.single_word, **spaces))
    tokenizer.add_special_tokens(special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *(["token_type_ids"] if architecture.has_segments else []), "attention_mask"],
        "model_max_length": max_length,
        **{f"{role}_token": token for role, token in names.items()},
        "do_lower_case": lowercases(tokenizer),
        "strip_accents": strips_accents(tokenizer),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left" if last else "right",
        "truncation_side": "right",
    }
    files = {
        TOKENIZER_NAME: tokenizer.to_str(pretty=True),
        TOKENIZER_CONFIG_NAME: json.dumps(config, indent=2, ensure_ascii=False),
    }
    return {name: f"{content}\n".encode() for name, content in files.items()}


class _TokenizerConfig(Record):
    model_max_length: Annotated[float, Field(gt=2)] | None = None


def read_max_length(folder: Path, max_positions: int) -> int:
    """The maximum sequence length of the model in a Hugging Face folder, in tokens.

    It is 512, as for the published models, if the folder does not state it and the model has no position embeddings.

    Args:
        max_positions: number of position embeddings, which limits what tokenizer_config.json states.

    Raises:
        DataError: tokenizer_config.json is damaged.
    """
    path = folder / TOKENIZER_CONFIG_NAME
    hint = "set it to the length that the model was trained on, or remove the key"
    stated = read_json(path, _TokenizerConfig, hint=hint).get("model_max_length") if path.is_file() else None
    if stated is not None and stated < max_positions:
        return int(stated)
    return max_positions if max_positions < UNLIMITED_POSITIONS else _USUAL_LENGTH


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer, ready for use; its casing and where that is from, in words; whether it was inferred from the vocabulary."""

    tokenizer: Tokenizer
    manner: str
    judged: bool = False


def find_tokenizer(source: Path, given: Path | None, lowercase: bool | None) -> FoundTokenizer:
    """The tokenizer of a model.

    Args:
        source: folder of the model, or a file in it.
        given: a path that `load_tokenizer` accepts, used instead of the files of the model; None: use those.
        lowercase: whether the tokenizer lower-cases; None: as the files state, otherwise inferred from the entries of the
            vocabulary.

    Raises:
        DataError: there is no tokenizer, or it lacks a special token.
        ConfigError: `lowercase` contradicts a tokenizer.json.
    """
    path = given or (source if source.is_dir() else source.parent)
    tokenizer = load_tokenizer(path, lowercase)
    manner, folder = "lower-cased" if lowercases(tokenizer) else "cased", path if path.is_dir() else path.parent
    beside = folder / TOKENIZER_CONFIG_NAME
    settings: Mapping[str, Any] = read_json(beside, hint=AGAIN) if beside.is_file() else {}
    bare = path.suffix == ".txt" or (path.is_dir() and not (path / TOKENIZER_NAME).is_file())
    judged = bare and lowercase is None and settings.get("do_lower_case") is None
    stated = "as asked for" if lowercase is not None else "as its files say"
    return FoundTokenizer(tokenizer, f"{manner}, {'by the entries of the vocabulary' if judged else stated}", judged)
