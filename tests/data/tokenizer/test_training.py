"""Training: sizes, reproducibility, what the trained tokenizers do, the sample."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from discern.data.executors import WorkerProcess
from discern.data.tokenizer import fingerprint, load_tokenizer, lowercases, prepared, special_ids, vocab_size
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.training import (
    SAMPLE_BYTES,
    SentenceSample,
    TokenizerKind,
    check_vocab_size,
    train_tokenizer,
    training_service,
)
from discern.errors import ConfigError, DataError

KINDS = get_args(TokenizerKind)


def invented_text(sentences: int = 1500) -> list[str]:
    """Words of random syllables, in several alphabets, with a long tail of frequencies."""
    draw = random.Random(1)
    latin = ["ba", "ke", "lo", "mi", "nu", "sha", "tri", "vo", "é", "ß", "ing", "er", "Qu", "su", "wer", "pon", "ät"]
    alphabets = [latin, latin, latin, ["да", "не", "ко", "щи", "ло"], ["β", "λο", "ση"], ["字", "漢", "文"]]
    words = ["".join(draw.choices(draw.choice(alphabets), k=draw.randint(1, 4))) for _ in range(2000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(draw.choices(words, weights, k=12)) + "." for _ in range(sentences)]


TEXT = invented_text()
trained: dict[str, Tokenizer] = {}


def tokenizer_of(kind: TokenizerKind) -> Tokenizer:
    if kind not in trained:
        trained[kind] = train_tokenizer(kind, 600, False, TEXT)
    return trained[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_size_specials_and_frame(kind: TokenizerKind) -> None:
    tokenizer = tokenizer_of(kind)
    assert vocab_size(tokenizer) == len(tokenizer.get_vocab()) == 600
    assert [tokenizer.id_to_token(number) for number in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pair = tokenizer.encode("loba ke", "mi")
    assert pair.tokens[0] == "[CLS]"
    assert [token for token in pair.tokens if token == "[SEP]"] == ["[SEP]"] * 2
    assert pair.type_ids == sorted(pair.type_ids)
    written = DocumentEncoder(tokenizer.to_str(), "none").encode([["loba [MASK] ke[SEP]mi [PAD]"]]).block.tokens
    assert not set(written.tolist()) & {0, 2, 3, 4}


def test_unigram_has_an_end_of_document_that_no_text_spells() -> None:
    tokenizer = tokenizer_of("unigram")
    assert tokenizer.token_to_id("<eod>") == 5
    assert special_ids(tokenizer) == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "eod": 5}
    assert "eod" not in special_ids(tokenizer_of("bpe"))
    written = DocumentEncoder(tokenizer.to_str(), "none").encode([["loba <eod> ke"]]).block.tokens
    assert 5 not in written.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_after_saving(kind: TokenizerKind, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    hard = [*TEXT[:50], "", " x ", "Naïve café 中文 [MASK] \u200b 1,000!"]
    assert [e.ids for e in loaded.encode_batch(hard)] == [e.ids for e in tokenizer.encode_batch(hard)]
    assert fingerprint(loaded) == fingerprint(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_training_again_gives_the_same(kind: TokenizerKind) -> None:
    """In another process, since the library's hash tables are seeded by process, and with two threads."""
    with WorkerProcess(training_service, (kind, 600, False), threads=2) as process:
        other = process.ask(TEXT)
    assert other == tokenizer_of(kind).to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_lower_case(kind: TokenizerKind) -> None:
    tokenizer = train_tokenizer(kind, 400, True, TEXT[:200])
    assert lowercases(tokenizer)
    assert not lowercases(tokenizer_of(kind))
    assert tokenizer.encode("QUSHA").ids == tokenizer.encode("qusha").ids


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text: str) -> None:
    tokenizer = tokenizer_of("bpe")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids).removeprefix(" ") == text.removeprefix(" ")
    if not text.startswith(" "):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_decoding_is_readable(kind: TokenizerKind) -> None:
    tokenizer = tokenizer_of(kind)
    sentence = TEXT[0]
    assert tokenizer.decode(tokenizer.encode(sentence).ids).replace("字", "").replace(" ", "") == (
        sentence.replace("字", "").replace(" ", "")
    )
    assert "##" not in tokenizer.decode(tokenizer.encode(sentence).ids)


def test_a_word_has_the_same_ids_wherever_it_stands() -> None:
    tokenizer = tokenizer_of("bpe")
    alone = tokenizer.encode("loba", add_special_tokens=False).ids
    assert tokenizer.encode("ke loba", add_special_tokens=False).ids[-len(alone) :] == alone


def test_more_characters_than_entries() -> None:
    text = ["".join(map(chr, range(0x4E00, 0x5200))) + " 一一 abc"] * 3
    for kind in KINDS:
        tokenizer = train_tokenizer(kind, 300, False, text)
        assert vocab_size(tokenizer) <= 300
        assert tokenizer.encode("一", add_special_tokens=False).ids != [1]


def test_less_text_than_entries() -> None:
    for kind in KINDS:
        assert vocab_size(train_tokenizer(kind, 5000, False, ["a short text, and no more"])) < 500


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["今日は天気がいい。", "ดีมาก", "한국어 文 é", "½ ﬁne 👍🏽", "ပါတယ်"])
def test_the_text_it_was_trained_on_has_no_unknown_token(kind: TokenizerKind, text: str, *, lowercase: bool) -> None:
    """Not even the first one of a text without spaces."""
    tokenizer = train_tokenizer(kind, 300, lowercase, [text] * 20)
    assert special_ids(tokenizer)["unk"] not in tokenizer.encode(text).ids


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="at least 261"):
        check_vocab_size("bpe", 260)
    with pytest.raises(DataError, match="no text"):
        train_tokenizer("bpe", 1000, False, [])


def test_the_sample_is_bounded_uniform_and_reproducible() -> None:
    def sample() -> list[str]:
        chosen = SentenceSample(seed=3, limit=250 * 1000)
        for start in range(0, 20_000, 100):
            chosen.add(f"{number:05d}" for number in range(start, start + 100))
        return chosen.sentences()

    numbers = list(map(int, sample()))
    assert 900 < len(numbers) < 1300
    assert numbers == sorted(numbers)
    thirds = [sum(low <= number < low + 6667 for number in numbers) / len(numbers) for low in (0, 6667, 13334)]
    assert all(0.28 < share < 0.39 for share in thirds)
    assert sample() == list(map("{:05d}".format, numbers))


def test_a_small_text_is_sampled_whole() -> None:
    chosen = SentenceSample(seed=0, limit=SAMPLE_BYTES["unigram"])
    chosen.add(TEXT)
    assert chosen.sentences() == TEXT


def test_the_trained_tokenizer_can_be_prepared_again() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("unigram").to_str())
    assert fingerprint(prepared(tokenizer, "t")) == fingerprint(tokenizer_of("unigram"))
