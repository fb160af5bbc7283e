"""Loading: every form of tokenizer, the special tokens by any name, the frame, the fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from discern.data.tokenizer import (
    SPECIAL_TOKENS,
    fingerprint,
    load_tokenizer,
    lowercases,
    special_names,
    special_tokens,
    strips_accents,
    vocab_size,
)
from discern.data.tokenizer.tokens import encode_texts
from discern.data.tokenizer.training import extend_tokenizer, pieces_of_added
from discern.errors import ConfigError, DataError
from discern.types import SpecialTokens
from tests.data.small_text import write_vocabulary
from tests.small.tokenizers import CORPUS, GEMMA_NAMES, HARD, ROBERTA_NAMES, gemma, roberta, stated, written


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_a_bare_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    assert pieces(tokenizer, "The CAT xy, naïvé") == ["the", "cat", "x", "##y", ",", "n", "##a", "##i", "##v", "##e"]
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
    assert vocab_size(tokenizer) == len((tmp_path / "vocab.txt").read_text().splitlines())
    assert tokenizer.decode(tokenizer.encode("the xyz.").ids) == "the xyz."
    # Text yields no special token.
    encoding = tokenizer.encode("the [MASK] cat[SEP]", add_special_tokens=False)
    assert not set(encoding.ids) & {0, 1, 2, 3, 4}
    assert encoding.tokens[1:4] == ["[", "m", "##a"]


@pytest.mark.parametrize(
    ("entry", "settings", "options", "expected"),
    [
        ("", {}, {}, (True, True)),
        ("Paris", {}, {}, (False, False)),
        ("Paris", {}, {"lowercase": True}, (True, True)),
        ("", {"do_lower_case": False}, {}, (False, False)),
        ("café", {"do_lower_case": True}, {}, (True, True)),
        ("", {"do_lower_case": False}, {"lowercase": True, "keep_accents": True}, (True, False)),
        ("", {"strip_accents": False}, {}, (True, False)),
    ],
)
def test_case_and_accents_come_from_options_settings_and_entries_in_this_order(
    tmp_path: Path, entry: str, settings: dict[str, bool], options: dict[str, bool], expected: tuple[bool, bool]
) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    vocabulary.write_text(f"{vocabulary.read_text()}{entry}\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path, **options)
    assert (lowercases(tokenizer), strips_accents(tokenizer)) == expected
    # A tokenizer.json comes first, and leaves nothing open.
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert fingerprint(load_tokenizer(tmp_path, lowercase=expected[0])) == fingerprint(tokenizer)
    for contradicting in ({"lowercase": not expected[0]}, *([{"keep_accents": True}] if expected[1] else [])):
        with pytest.raises(ConfigError, match="contradicts --lowercase, --cased or --keep-accents"):
            load_tokenizer(tmp_path, **contradicting)


@pytest.mark.parametrize("token", SPECIAL_TOKENS.values())
def test_a_missing_special_token_is_named(tmp_path: Path, token: str) -> None:
    with pytest.raises(DataError, match=rf"has no \{token};.*or another token for each of these roles") as error:
        load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", leave_out=token))
    assert "--train-tokenizer" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t", b'{"model": {"type": "BPE"}}', r"t is not a tokenizer\.json[\s\S]*save_pretrained"),
        ("t", b"\x80\x81", "a vocab.txt in UTF-8"),
        ("t", b"", r"has no \[PAD\] and no"),
        ("t", None, "does not exist"),
        ("t", b"#version: 0.2\nt h\nth e\n", r"has no \[PAD\] and no[\s\S]*save_pretrained"),
        ("t", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("merges.txt", b"", r"neither tokenizer\.json nor vocab\.txt nor [\s\S]*save_pretrained"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        load_tokenizer(tmp_path if name == "merges.txt" else tmp_path / name)


def test_what_a_file_sets_up_otherwise_is_replaced(tmp_path: Path) -> None:
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), "a", "b", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.5))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert {tuple(tokenizer.encode("ab b").tokens) for _ in range(50)} == {("[CLS]", "ab", "b", "[SEP]")}
    pair = tokenizer.encode("ab b", "a")
    assert (pair.tokens, pair.type_ids) == (["[CLS]", "ab", "b", "[SEP]", "a", "[SEP]"], [0, 0, 0, 0, 1, 1])


def test_the_fingerprint_covers_what_decides_the_ids(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.txt")
    tokenizer, digest = load_tokenizer(path), fingerprint(load_tokenizer(path))
    tokenizer.decoder = None
    assert fingerprint(tokenizer) == digest
    tokenizer.normalizer = normalizers.Lowercase()
    path.write_text(path.read_text() + "more\n")
    assert len({digest, fingerprint(tokenizer), fingerprint(load_tokenizer(path))}) == 3


@pytest.mark.parametrize(("name", "lower"), [("bert-uncased-en", True), ("bert-cased-en", False), ("bert-zh", True)])
def test_released_vocabularies(name: str, lower: bool) -> None:
    """Reference: electra.md section 2.4."""
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    tokenizer = load_tokenizer(Path(folder) / "vocab" / f"{name}.txt")
    assert lowercases(tokenizer) is lower
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unk=100, cls=101, sep=102, mask=103)
    if name == "bert-uncased-en":
        assert pieces(tokenizer, "Café\x00 na\u0308ive\u00a0x\ufffdy 中文 $3,141.5 don't") == (
            "cafe naive x ##y 中 文 $ 3 , 141 . 5 don ' t".split()
        )
        assert pieces(tokenizer, "a" * 201) == ["[UNK]"]
        assert "[UNK]" not in pieces(tokenizer, "a" * 200)


# Special tokens with other names than BERT's


def test_tokens_that_begin_and_end_a_text_stand_in_for_cls_and_sep(tmp_path: Path) -> None:
    settings = stated(GEMMA_NAMES) | {"mask_token": {"content": "<mask>", "special": True}, "model_max_length": 8}
    tokenizer = load_tokenizer(written(tmp_path, gemma(), **settings))
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unk=3, cls=2, sep=1, mask=4)
    pair = tokenizer.encode("hello world", "x")
    assert (pair.tokens[0], pair.tokens.count("<eos>"), pair.type_ids[-1]) == ("<bos>", 2, 1)
    assert tokenizer.encode("hello world").ids == gemma().encode("hello world").ids


def test_usual_names_need_no_settings(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path / "roberta", roberta(), pad_token="<pad>", mask_token="<absent>"))
    assert special_names(tokenizer) == ROBERTA_NAMES
    assert tokenizer.encode("hello").ids == roberta().encode("hello").ids
    assert special_tokens(load_tokenizer(written(tmp_path / "gemma", gemma()))).cls == 2


def test_stated_names_stay_without_the_files(tmp_path: Path) -> None:
    renamed = Tokenizer.from_str(gemma().to_str().replace('"<mask>"', '"<hole>"'))
    tokenizer = load_tokenizer(written(tmp_path / "theirs", renamed, **stated(GEMMA_NAMES | {"mask": "<hole>"})))
    again = load_tokenizer(written(tmp_path / "ours", tokenizer))
    assert special_names(again) == special_names(tokenizer)
    assert fingerprint(again) == fingerprint(tokenizer)
    extended = extend_tokenizer(again, ["▁purplish"])
    assert special_names(extended)["mask"] == "<hole>"
    assert pieces_of_added(tokenizer, extended)


def test_one_token_of_two_roles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no .PAD. and no .SEP.;.*'pad': '</s>'"):
        load_tokenizer(written(tmp_path, roberta(), pad_token="</s>", mask_token="<mask>"))


# Models of SentencePiece

NAMES = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
KEPT = {"remove_extra_whitespaces": False, "add_dummy_prefix": False}
TEXTS = [*HARD, "", "  ", "\u3000", "▁", "ｆｕｌｌ ｶﾞ", "A\u0301 が", "don't (1.5) stop.", "[CLS]a", "purple " * 999]


def sentencepiece_model(folder: Path, names: dict[str, str] = NAMES, **settings: Any) -> Any:
    """The library, with a model in the folder that was trained in a moment."""
    sentencepiece = pytest.importorskip("sentencepiece")
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
def test_sentencepiece_gives_the_ids_of_its_library(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    reference = sentencepiece_model(tmp_path, model_type=kind, control_symbols="[MASK]", **settings)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the chef").ids) == "the chef"
    for text in TEXTS:
        assert encode_texts(tokenizer, [text])[0].ids == reference.encode(text), text


@pytest.mark.parametrize(("names", "added"), [(NAMES, ["[MASK]"]), ({}, ["[PAD]", "[MASK]"])])
def test_roles_without_a_piece_get_one_after_the_others(tmp_path: Path, names: dict[str, str], added: list[str]) -> None:
    count = sentencepiece_model(tmp_path, names).get_piece_size()
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.id_to_token(number) for number in range(count, vocab_size(tokenizer))] == added
    tokens = tokenizer.encode("the chef").tokens
    assert (tokens[0], tokens[-1]) == (("[CLS]", "[SEP]") if names else ("<s>", "</s>"))


def test_a_model_of_sentencepiece_that_is_cut_off(tmp_path: Path) -> None:
    sentencepiece_model(tmp_path)
    path = tmp_path / "spm.model"
    for end in (-1, 800):
        path.write_bytes(path.read_bytes()[:end])
        with pytest.raises(DataError, match=r"is not a tokenizer\.json, a vocab.txt in UTF-8 or a \.model of SentencePiece"):
            load_tokenizer(path)
