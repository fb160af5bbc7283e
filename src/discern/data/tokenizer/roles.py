"""Which tokens of a vocabulary are the special ones.

They are recognized by the names of BERT or of XLNet. Of a tokenizer with other names, the files beside it say which token has
which role, and its post-processor then records them, so that a tokenizer.json without these files keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from discern.errors import DataError
from discern.storage.records import read_object

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_XLNET_NAMES = {role: token.lower().replace("[", "<").replace("]", ">") for role, token in SPECIAL_TOKENS.items()}
_STATED_IN = ("tokenizer_config.json", "special_tokens_map.json")
TRAIN_HINT = "or train one on your text: --train-tokenizer wordpiece --vocab-size 8000"
_INSTEAD = {"cls": "bos", "sep": "eos"}
"""Roles by which tokenizers of language models name the first and the last token of a text."""


def special_names(tokenizer: Tokenizer) -> Mapping[str, str]:
    """The special tokens by role: in BERT's spelling, in XLNet's if the vocabulary has only those, or as recorded."""
    if _has(tokenizer, SPECIAL_TOKENS):
        return SPECIAL_TOKENS
    if tokenizer.token_to_id(SPECIAL_TOKENS["cls"]) is None and _has(tokenizer, _XLNET_NAMES):
        return _XLNET_NAMES
    return SPECIAL_TOKENS | _recorded(tokenizer)


def framing(tokenizer: Tokenizer, single: str, pair: str) -> processors.TemplateProcessing:
    """A post-processor that frames texts, and records the special tokens if their names are neither BERT's nor XLNet's.

    Args:
        single: how a text is framed, with {cls} and {sep} in place of the tokens: "{cls}:0 $A:0 {sep}:0".
        pair: how two texts are framed.
    """
    return _framing(tokenizer, special_names(tokenizer), single, pair)


def record_names(tokenizer: Tokenizer, file: Path, single: str, pair: str) -> None:
    """Find the special tokens if their names are neither BERT's nor XLNet's, and record them in the post-processor, in place.

    Roles are taken from tokenizer_config.json and special_tokens_map.json, otherwise from the present post-processor and the
    model. The tokens that begin and end a text stand in for cls and sep.

    Args:
        file: the tokenizer.json, in whose folder the other files are.
        single: how a text is framed, see `framing`.
        pair: how two texts are framed.

    Raises:
        DataError: a file is damaged, a role has no token, or one token has two roles.
    """
    if _has(tokenizer, special_names(tokenizer)):
        return
    names: dict[str, str] = {}
    for stated in (*(_stated(file.parent / name) for name in _STATED_IN), _implied(tokenizer), SPECIAL_TOKENS):
        known = {role: token for role, token in stated.items() if tokenizer.token_to_id(token) is not None}
        found = {role: known.get(role, known.get(_INSTEAD.get(role, role))) for role in SPECIAL_TOKENS}
        names = {role: token for role, token in found.items() if token is not None} | names
    if missing := [token for role, token in SPECIAL_TOKENS.items() if role not in names]:
        raise lacking(missing, str(file), f'name {_them(missing)} in {_STATED_IN[0]}, as in "mask_token": "<mask>"')
    for role, other in combinations(names, 2):
        if names[role] == names[other]:
            raise DataError(
                f"{file}: {names[role]} is both the {role} and the {other} token, as in language models; discern needs another "
                "token for each role",
                hint="use the tokenizer of a BERT, an ELECTRA, a ModernBERT or an XLNet",
            )
    tokenizer.post_processor = _framing(tokenizer, names, single, pair)


def lacking(missing: Sequence[str], name: str, advice: str = "") -> DataError:
    """The error that a tokenizer has no token for some roles.

    Args:
        missing: the roles, in BERT's spelling.
        name: name of the tokenizer.
        advice: what to do; by default to extend a vocab.txt.
    """
    return DataError(
        f"{name}: the vocabulary has no {' and no '.join(missing)}; discern needs {' '.join(SPECIAL_TOKENS.values())}, or other "
        f"tokens that {_STATED_IN[0]} names for these roles",
        hint=f"{advice or f'add {_them(missing)} to the vocabulary, one token per line'}, {TRAIN_HINT}",
    )


def _them(tokens: Sequence[str]) -> str:
    return "it" if len(tokens) == 1 else "them"


def _framing(tokenizer: Tokenizer, names: Mapping[str, str], single: str, pair: str) -> processors.TemplateProcessing:
    known = names in (SPECIAL_TOKENS, _XLNET_NAMES)
    # The library keeps tokens that the templates do not use. Their ids in the templates are then the roles, in BERT's spelling.
    written = names if known else SPECIAL_TOKENS
    roles = ("cls", "sep") if known else tuple(SPECIAL_TOKENS)
    return processors.TemplateProcessing(
        single=single.format(**written),
        pair=pair.format(**written),
        special_tokens=[
            {"id": written[role], "ids": [tokenizer.token_to_id(names[role])], "tokens": [names[role]]} for role in roles
        ],
    )


def _has(tokenizer: Tokenizer, names: Mapping[str, str]) -> bool:
    return all(tokenizer.token_to_id(token) is not None for token in names.values())


def _recorded(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that `framing` recorded, by role."""
    found: dict[str, str] = {}
    for step in _steps(tokenizer):
        tokens = step.get("special_tokens", {})
        if SPECIAL_TOKENS["mask"] in tokens:
            found |= {role: tokens[token]["tokens"][0] for role, token in SPECIAL_TOKENS.items() if token in tokens}
    return found


def _implied(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that follow from how the tokenizer frames a text, and from its model."""
    found: dict[str, str] = {}
    for step in _steps(tokenizer):
        if "cls" in step and "sep" in step:  # those of BERT and RoBERTa
            found |= {role: step[role][0] for role in ("cls", "sep")}
        if step.get("type") == "TemplateProcessing":
            parts = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in step["single"]]
            edges = {"cls": parts[0], "sep": parts[-1]} if parts else {}
            found |= {role: token for role, token in edges.items() if token is not None}
    unknown = getattr(tokenizer.model, "unk_token", None)
    return found if unknown is None else found | {"unk": unknown}


def _steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The post-processor as the library writes it, or those that it is a sequence of."""
    if tokenizer.post_processor is not None:
        whole = json.loads(tokenizer.post_processor.__getstate__())
        yield from whole["processors"] if whole["type"] == "Sequence" else [whole]


def _stated(path: Path) -> dict[str, str]:
    """The special tokens that a file of transformers names, by role."""
    if not path.is_file():
        return {}
    settings = read_object(path, hint="copy it again from where the model came from, or remove it")
    found = {key.removesuffix("_token"): value for key, value in settings.items() if key.endswith("_token")}
    tokens = {role: value.get("content") if isinstance(value, dict) else value for role, value in found.items()}
    return {role: token for role, token in tokens.items() if isinstance(token, str)}
