"""Models of SentencePiece: the ids of its library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from discern.data.tokenizer import load_tokenizer
from discern.errors import DataError
from tests.small.tokenizers import CORPUS, HARD

sentencepiece = pytest.importorskip("sentencepiece")
NAMES = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
KEPT = {"remove_extra_whitespaces": False, "add_dummy_prefix": False}
TEXTS = [*HARD, "", "  ", "\u3000", "▁", "ｆｕｌｌ ｶﾞ", "A\u0301 が", "don't (1.5) stop.", "<0x41> [CLS]a", "purple " * 999]


def trained(folder: Path, names: dict[str, str] = NAMES, **settings: Any) -> Any:
    """The library, with a model in the folder that was trained in a moment."""
    path, text = folder / "spm.model", iter([*CORPUS, "[ADKLMSU]"])
    for number, (role, name) in enumerate(names.items()):
        settings |= {f"{role}_id": number, f"{role}_piece": name}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=path.with_suffix(""), vocab_size=430, hard_vocab_limit=False, **settings
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "settings",
    [
        {"byte_fallback": True},
        {"normalization_rule_name": "nmt_nfkc_cf", "split_by_whitespace": False, "user_defined_symbols": ".,(,don't"},
        {"normalization_rule_name": "identity", **KEPT, "user_defined_symbols": "\t,▁▁"},
    ],
)
def test_the_ids(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    reference = trained(tmp_path, model_type=kind, control_symbols="[MASK]", **settings)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the chef").ids) == "the chef"
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text), text


@pytest.mark.parametrize("names", [NAMES, {}])
def test_roles_without_a_piece_get_one_after_the_others(tmp_path: Path, names: dict[str, str]) -> None:
    reference = trained(tmp_path, names)
    tokenizer = load_tokenizer(tmp_path)
    added = ["[MASK]"] if names else ["[PAD]", "[MASK]"]
    count = reference.get_piece_size()
    assert [tokenizer.id_to_token(number) for number in range(count, count + 3)] == [*added, *[None] * (3 - len(added))]
    assert tokenizer.encode("the chef").tokens[:: len(tokenizer.encode("the chef")) - 1] == (
        ["[CLS]", "[SEP]"] if names else ["<s>", "</s>"]
    )


@pytest.mark.parametrize("end", [800, -1])
def test_what_is_cut_off(tmp_path: Path, end: int) -> None:
    trained(tmp_path)
    path = tmp_path / "spm.model"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(DataError, match="is not a sound"):
        load_tokenizer(path)
