"""Special tokens with other names than BERT's: found in the files of a folder, and kept without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from discern.data.tokenizer import fingerprint, load_tokenizer, special_names, special_tokens
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.training import extend_tokenizer, pieces_of_added
from discern.errors import DataError
from discern.types import SpecialTokens
from tests.small.tokenizers import GEMMA_NAMES, ROBERTA_NAMES, gemma, roberta, stated, written


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_tokens_that_begin_and_end_a_text_stand_in_for_cls_and_sep(tmp_path: Path, name: str) -> None:
    settings = stated(GEMMA_NAMES) | {"mask_token": {"content": "<mask>", "special": True}, "model_max_length": 8}
    tokenizer = load_tokenizer(written(tmp_path, gemma(), name, **settings))
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unk=3, cls=2, sep=1, mask=4)
    pair = tokenizer.encode("hello world", "x")
    assert (pair.tokens[0], pair.tokens.count("<eos>"), pair.type_ids[-1]) == ("<bos>", 2, 1)
    assert tokenizer.encode("hello world").ids == gemma().encode("hello world").ids


def test_the_post_processor_says_which_token_begins_a_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path, roberta(), pad_token="<pad>", mask_token="<mask>"))
    assert special_names(tokenizer) == ROBERTA_NAMES
    assert tokenizer.encode("hello").ids == roberta().encode("hello").ids
    short = stated({role: token for role, token in GEMMA_NAMES.items() if role in ("pad", "mask")})
    assert special_tokens(load_tokenizer(written(tmp_path, gemma(), **short))).cls == 2


def test_the_names_stay_without_the_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path / "theirs", gemma(), **stated(GEMMA_NAMES)))
    again = load_tokenizer(written(tmp_path / "ours", tokenizer))
    assert special_names(again) == special_names(tokenizer)
    assert fingerprint(again) == fingerprint(tokenizer)
    extended = extend_tokenizer(again, ["▁purplish"])
    assert special_names(extended) == special_names(tokenizer)
    assert pieces_of_added(tokenizer, extended)
    # Text yields no special token.
    ids = DocumentEncoder(tokenizer.to_str(), "none").encode([["a <mask> or <bos> or [MASK]"]]).block.tokens
    assert not {0, 1, 2, 4} & set(ids.tolist())


def test_a_role_without_a_token_is_named(tmp_path: Path) -> None:
    assert special_names(load_tokenizer(written(tmp_path, roberta()))) == ROBERTA_NAMES
    without = Tokenizer.from_str(roberta().to_str().replace('"<mask>"', '"<other>"'))
    with pytest.raises(DataError, match=r"has no \[MASK\]; .* or other tokens that tokenizer_config.json names"):
        load_tokenizer(written(tmp_path, without, pad_token="<pad>", mask_token="<absent>"))


def test_one_token_of_two_roles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="</s> is both the sep and the pad token, as in language models"):
        load_tokenizer(written(tmp_path, roberta(), pad_token="</s>", mask_token="<mask>"))
