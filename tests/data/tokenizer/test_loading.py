"""Loading: every form of tokenizer, the special tokens, the frame, the fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from discern.data.tokenizer import (
    SPECIAL_TOKENS,
    fingerprint,
    load_tokenizer,
    lowercases,
    prepared,
    special_tokens,
    vocab_size,
)
from discern.errors import ConfigError, DataError
from discern.types import SpecialTokens
from tests.data.small_text import write_vocabulary


def ids(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_a_bare_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    assert ids(tokenizer, "The CAT xy, naïvé") == ["the", "cat", "x", "##y", ",", "n", "##a", "##i", "##v", "##e"]
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
    assert vocab_size(tokenizer) == len((tmp_path / "vocab.txt").read_text().splitlines())
    assert tokenizer.decode(tokenizer.encode("the xyz.").ids) == "the xyz."


def test_where_the_library_parts_from_bert_s_own_tokenizer(tmp_path: Path) -> None:
    """As docs/howto/import.md has it: final sigma, 256 ideographs, newer punctuation."""
    normalizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).normalizer
    assert (normalizer.normalize_str("ΟΔΟΣ"), "ΟΔΟΣ".lower()) == ("οδοσ", "οδος")
    for code, is_parted in ((0x2B81F, True), (0x2B820, False), (0x2B91F, False), (0x2B920, True)):
        assert (normalizer.normalize_str(f"a{chr(code)}b") == f"a {chr(code)} b") is is_parted
    assert len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str("a\u061db")) == 1  # Arabic end of text mark, Unicode 14


def test_case_comes_from_the_entries_unless_told(tmp_path: Path) -> None:
    lower = write_vocabulary(tmp_path / "lower.txt")
    cased = tmp_path / "cased.txt"
    cased.write_text(lower.read_text() + "Paris\n")
    assert lowercases(load_tokenizer(lower))
    assert not lowercases(load_tokenizer(cased))
    assert lowercases(load_tokenizer(cased, lowercase=True))
    assert ids(load_tokenizer(lower, lowercase=False), "the The é") == ["the", "[UNK]", "[UNK]"]


def test_a_model_folder(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "tokenize_chinese_chars": False}))
    tokenizer = load_tokenizer(tmp_path)
    assert not lowercases(tokenizer)
    assert lowercases(load_tokenizer(tmp_path, lowercase=True))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": "yes"}))
    with pytest.raises(DataError, match="do_lower_case is 'yes'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    other = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"), lowercase=True)
    other.save(str(tmp_path / "tokenizer.json"))
    assert lowercases(load_tokenizer(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "merges.txt").touch()
    with pytest.raises(DataError, match=r"neither tokenizer\.json nor vocab\.txt nor .* but merges\.txt[\s\S]*save_pretrained"):
        load_tokenizer(tmp_path / "empty")


def test_a_tokenizer_json_fixes_its_case(tmp_path: Path) -> None:
    load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")).save(str(tmp_path / "t.json"))
    assert lowercases(load_tokenizer(tmp_path / "t.json", lowercase=True))
    with pytest.raises(ConfigError, match="contradicts --cased"):
        load_tokenizer(tmp_path / "t.json", lowercase=False)


@pytest.mark.parametrize("token", SPECIAL_TOKENS.values())
def test_a_missing_special_token_is_named(tmp_path: Path, token: str) -> None:
    with pytest.raises(DataError) as error:
        load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", leave_out=token))
    assert f"has no {token};" in str(error.value)
    assert "--train-tokenizer" in str(error.value)


def test_padding_may_have_any_id(tmp_path: Path) -> None:
    """Released ModernBERTs have their special tokens behind the words."""
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    vocabulary.write_text("x\n" + vocabulary.read_text())
    assert special_tokens(load_tokenizer(vocabulary)).pad == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"model": {"type": "BPE"}}', "is not a tokenizer.json"),
        (b"\x80\x81", "is not UTF-8 text"),
        (b"", "empty"),
        (None, "does not exist"),
        (b"<unk>\t0\n<s>\t0\nthe\t-3.1\n", r"a SentencePiece vocabulary \(word, tab, score\)[\s\S]*tokenizer\.json"),
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x99", r"no.* model of SentencePiece[\s\S]*save_pretrained"),
        (b"#version: 0.2\nt h\nth e\n", r"merges\.txt"),
        (b'{"<s>": 0, "model": 1}', r"vocab\.json"),
        (b'{"do_lower_case": true}', r"tokenizer_config\.json"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(DataError, match=says):
        load_tokenizer(tmp_path / "t")


def test_special_tokens_in_text_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    encoding = tokenizer.encode("the [MASK] cat[SEP]", add_special_tokens=False)
    assert not set(encoding.ids) & {0, 1, 2, 3, 4}
    assert encoding.tokens[1:4] == ["[", "m", "##a"]


def test_the_frame_replaces_another(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    tokenizer.post_processor = None
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    pair = tokenizer.encode("the cat", "a dog sees")
    assert pair.tokens == ["[CLS]", "the", "cat", "[SEP]", "a", "dog", "sees", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 1, 1, 1, 1]
    assert tokenizer.encode("the cat").tokens == ["[CLS]", "the", "cat", "[SEP]"]


def test_dropout_is_switched_off() -> None:
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), "a", "b", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.5))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = prepared(tokenizer, "t")
    assert {tuple(tokenizer.encode("ab").ids) for _ in range(50)} == {(2, 7, 3)}


def test_the_fingerprint_covers_what_decides_the_ids(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.txt")
    first = load_tokenizer(path)
    first.save(str(tmp_path / "t.json"))
    assert fingerprint(load_tokenizer(tmp_path / "t.json")) == fingerprint(first)
    assert fingerprint(load_tokenizer(path, lowercase=False)) != fingerprint(first)
    first.decoder = None
    assert fingerprint(first) == fingerprint(load_tokenizer(path))
    first.normalizer = normalizers.Lowercase()
    assert fingerprint(first) != fingerprint(load_tokenizer(path))
    path.write_text(path.read_text() + "more\n")
    assert fingerprint(load_tokenizer(path)) != fingerprint(load_tokenizer(tmp_path / "t.json"))


@pytest.mark.parametrize(
    ("name", "size", "lower"), [("bert-uncased-en", 30522, True), ("bert-cased-en", 28996, False), ("bert-zh", 21128, True)]
)
def test_released_vocabularies(name: str, size: int, lower: bool) -> None:
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    tokenizer = load_tokenizer(Path(folder) / "vocab" / f"{name}.txt")
    assert (vocab_size(tokenizer), lowercases(tokenizer)) == (size, lower)
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unk=100, cls=101, sep=102, mask=103)


def test_difficult_text_as_in_bert() -> None:
    """Reference: electra.md section 2.4."""
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    tokenizer = load_tokenizer(Path(folder) / "vocab" / "bert-uncased-en.txt")
    assert ids(tokenizer, "Café\x00 na\u0308ive\u00a0x\ufffdy 中文 $3,141.5 don't") == (
        ["cafe", "naive", "x", "##y", "中", "文", "$", "3", ",", "141", ".", "5", "don", "'", "t"]
    )
    assert ids(tokenizer, "a" * 201) == ["[UNK]"]
    assert "[UNK]" not in ids(tokenizer, "a" * 200)
