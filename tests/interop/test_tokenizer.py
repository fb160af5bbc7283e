"""transformers gives the ids that tokenizers gives, for every kind of tokenizer, on text that is hard on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from discern.data.tokenizer import SPECIAL_TOKENS, special_ids
from discern.errors import DataError
from discern.interop.tokenizer import read_max_length, to_huggingface_tokenizer
from tests.interop.small_tokenizers import CORPUS, HARD, KINDS, reading_special, small_tokenizer

MAX_LENGTH = 512


def write(folder: Path, tokenizer: Tokenizer, max_length: int = MAX_LENGTH) -> Path:
    """The tokenizer as an export has it; `folder/source.json` is what it was."""
    source = folder / "source.json"
    tokenizer.save(str(source))
    files = to_huggingface_tokenizer(source, max_length)
    out = folder / "export"
    out.mkdir()
    (out / "tokenizer.json").write_bytes(files.tokenizer)
    (out / "tokenizer_config.json").write_bytes(files.config)
    (out / "config.json").write_text(json.dumps({"model_type": "electra", "vocab_size": tokenizer.get_vocab_size()}))
    return out


def load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(params=KINDS, scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """The source with special tokens read from text, as transformers does, and the export there."""
    folder = tmp_path_factory.mktemp("tokenizer")
    out = write(folder, small_tokenizer(request.param))
    return reading_special(Tokenizer.from_file(str(folder / "source.json"))), load(out)


@pytest.mark.parametrize("text", [*HARD, "", "  "])
def test_same_ids(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = both[0].encode(text), both[1](text)
    assert theirs["input_ids"] == ours.ids
    assert theirs["token_type_ids"] == ours.type_ids


@pytest.mark.parametrize("second", HARD)
def test_same_ids_and_segments_of_a_pair(both: tuple[Tokenizer, Any], second: str) -> None:
    ours, theirs = both[0].encode(HARD[0], second), both[1](HARD[0], second)
    assert theirs["input_ids"] == ours.ids
    assert theirs["token_type_ids"] == ours.type_ids
    assert sorted(set(ours.type_ids)) == [0, 1]


def test_frame(both: tuple[Tokenizer, Any]) -> None:
    tokenizer = both[1]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", "x")["input_ids"])
    assert [tokens[0], tokens[-1], tokens.count("[SEP]")] == ["[CLS]", "[SEP]", 2]


def test_roles_and_lengths(both: tuple[Tokenizer, Any]) -> None:
    source, tokenizer = both
    roles = {role: getattr(tokenizer, f"{role}_token") for role in SPECIAL_TOKENS}
    assert roles == SPECIAL_TOKENS
    assert tokenizer.pad_token_id == 0
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token is None
    assert len(tokenizer) == source.get_vocab_size(), "a token was added"
    assert tokenizer.model_max_length == MAX_LENGTH
    assert tokenizer.model_input_names == ["input_ids", "token_type_ids", "attention_mask"]


def test_padding_and_cutting(both: tuple[Tokenizer, Any]) -> None:
    batch = both[1](["x", HARD[0]], padding=True, truncation=True, max_length=10)
    assert {len(row) for row in batch["input_ids"]} == {10}
    assert batch["input_ids"][0][-1] == 0
    assert batch["attention_mask"][0] == [1] * sum(batch["attention_mask"][0]) + [0] * (10 - sum(batch["attention_mask"][0]))
    assert batch["input_ids"][1][-1] == both[1].sep_token_id


def test_text_that_must_stay_text(both: tuple[Tokenizer, Any]) -> None:
    """How training reads a "[MASK]" in a text."""
    source, tokenizer = both
    source.encode_special_tokens = True
    try:
        assert tokenizer("a [MASK]", split_special_tokens=True)["input_ids"] == source.encode("a [MASK]").ids
    finally:
        source.encode_special_tokens = False


@pytest.mark.parametrize(("kind", "lowers"), [("wordpiece, lower-cased", True), ("wordpiece, cased", False), ("bpe", False)])
def test_says_whether_it_lower_cases(kind: str, lowers: bool, tmp_path: Path) -> None:
    small_tokenizer(kind).save(str(tmp_path / "source.json"))
    config = json.loads(to_huggingface_tokenizer(tmp_path / "source.json", 8).config)
    assert config["do_lower_case"] is lowers


def test_special_tokens_that_the_source_does_not_declare(tmp_path: Path) -> None:
    """A vocabulary may hold "[MASK]" as an ordinary entry; transformers makes it special all the same."""
    entries = [*SPECIAL_TOKENS.values(), "a", "mask", "[", "]"]
    tokenizer = Tokenizer(models.WordPiece({entry: number for number, entry in enumerate(entries)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    out = write(tmp_path, tokenizer)
    exported = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert load(out)("a [MASK]")["input_ids"] == exported.encode("a [MASK]").ids == [2, 5, 4, 3]
    assert exported.get_vocab_size() == len(entries)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece, cased"])
def test_a_mask_stands_for_a_whole_token(kind: str, tmp_path: Path) -> None:
    """Tokens of BPE and Unigram include the space before them. A separate space before a mask would never occur in training."""
    source = small_tokenizer(kind)
    before, after = (source.encode(text, add_special_tokens=False).ids for text in ("the", " x"))
    ids = load(write(tmp_path, source))("the [MASK] x")["input_ids"]
    special = special_ids(source)
    assert ids == [special["cls"], *before, special["mask"], *after, special["sep"]]


def test_declared_treatment_of_spaces_is_kept(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("wordpiece, cased")
    tokenizer.add_special_tokens(
        [AddedToken("[SEP]", special=True, normalized=False, lstrip=True, rstrip=True, single_word=True)]
    )
    exported = Tokenizer.from_file(str(write(tmp_path, tokenizer) / "tokenizer.json"))
    (sep,) = (each for each in exported.get_added_tokens_decoder().values() if each.content == "[SEP]")
    assert (sep.lstrip, sep.rstrip, sep.single_word) == (True, True, True)


def test_what_the_source_cuts_and_pads_is_left_out(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("bpe")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    theirs = load(write(tmp_path, tokenizer))(CORPUS[0])
    assert 4 < len(theirs["input_ids"]) != 64


def test_the_same_tokenizer_gives_the_same_bytes(tmp_path: Path) -> None:
    small_tokenizer("unigram").save(str(tmp_path / "source.json"))
    first, second = (to_huggingface_tokenizer(tmp_path / "source.json", 8) for _ in range(2))
    assert first == second
    assert str(tmp_path).encode() not in first.tokenizer + first.config


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        to_huggingface_tokenizer(tmp_path / "tokenizer.json", 8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model_max_length": 128}, 128),
        ({"model_max_length": 1e30}, 512),
        ({"model_max_length": None}, 512),
        ({}, 512),
    ],
)
def test_longest_sequence_of_a_folder(content: dict[str, object], expected: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert read_max_length(tmp_path, 512) == expected


def test_longest_sequence_without_settings(tmp_path: Path) -> None:
    assert read_max_length(tmp_path, 512) == 512
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config"):
        read_max_length(tmp_path, 512)
