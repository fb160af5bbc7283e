"""Training: sizes, reproducibility, what the trained tokenizers do, the sample. Extension: what is added, and what stays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer

from discern.data.executors import ProcessExecutor
from discern.data.tokenizer import (
    bert_wordpiece,
    fingerprint,
    load_tokenizer,
    lowercases,
    prepared,
    special_ids,
    strips_accents,
    vocab_size,
)
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.training import (
    TokenizerKind,
    extend_tokenizer,
    frequent_splits,
    pieces_of_added,
    reproducible,
    sample,
    train_tokenizer,
    word_form,
)
from discern.errors import ConfigError, DataError
from tests.small.tokenizers import HARD, KINDS, small_tokenizer

TRAINED = get_args(TokenizerKind)


def invented_text() -> list[str]:
    """Words of random syllables, in several alphabets, with a long tail of frequencies."""
    draw = random.Random(1)
    latin = "ba ke lo mi nu sha tri vo é ß ing er Qu su wer pon ät".split()
    alphabets = [latin, latin, latin, ["да", "не", "ко", "щи", "ло"], ["β", "λο", "ση"], ["字", "漢", "文"]]
    words = ["".join(draw.choices(draw.choice(alphabets), k=draw.randint(1, 4))) for _ in range(2000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(draw.choices(words, weights, k=12)) + "." for _ in range(1500)]


TEXT = invented_text()
trained: dict[str, Tokenizer] = {}


def tokenizer_of(kind: TokenizerKind) -> Tokenizer:
    if kind not in trained:
        trained[kind] = train_tokenizer(kind, 600, False, TEXT)
    return trained[kind]


@pytest.mark.parametrize("kind", TRAINED)
def test_size_and_specials(kind: TokenizerKind) -> None:
    tokenizer = tokenizer_of(kind)
    assert vocab_size(tokenizer) == len(tokenizer.get_vocab()) == 600
    specials = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4} | ({"eod": 5} if kind == "unigram" else {})
    assert special_ids(tokenizer) == specials
    written = DocumentEncoder(tokenizer.to_str(), "none").encode([["loba [MASK] ke[SEP]mi [PAD] <eod>"]])[0].tokens
    assert not set(written.tolist()) & {0, 2, 3, 4, specials.get("eod")}


@pytest.mark.parametrize("kind", TRAINED)
def test_training_again_gives_the_same(kind: TokenizerKind, tmp_path: Path) -> None:
    """In another process, since the library's hash tables are seeded by process, and with two threads."""
    with ProcessExecutor(1, threads=2) as executor:
        other = executor.submit(train_tokenizer, kind, 600, False, TEXT).result().to_str()
    assert other == tokenizer_of(kind).to_str()
    (tmp_path / "tokenizer.json").write_text(other)
    loaded, hard = load_tokenizer(tmp_path), [*TEXT[:50], "", " x ", "Naïve café 中文 [MASK] \u200b 1,000!"]
    assert fingerprint(loaded) == fingerprint(tokenizer_of(kind))
    assert [e.ids for e in loaded.encode_batch(hard)] == [e.ids for e in tokenizer_of(kind).encode_batch(hard)]


def test_chance_does_not_decide_which_of_equally_frequent_characters_is_likelier() -> None:
    for rare in ({"b": -14.0, "c": -15.0}, {"b": -15.0, "c": -14.0}):
        assert reproducible({"a": -1.0} | rare, {"a": 9, "b": 2, "c": 2}) == [("a", -1.0), ("c", -14.0), ("b", -15.0)]


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("keep_accents", [True, False])
def test_lower_case_and_accents(kind: TokenizerKind, *, keep_accents: bool) -> None:
    tokenizer = train_tokenizer(kind, 400, True, TEXT[:200], keep_accents)
    assert (lowercases(tokenizer), lowercases(tokenizer_of(kind))) == (True, False)
    assert tokenizer.encode("QUSHAÉ").ids == tokenizer.encode("qushaé").ids
    assert strips_accents(tokenizer) is (kind == "wordpiece" and not keep_accents)
    assert (tokenizer.encode("é").ids == tokenizer.encode("e").ids) is strips_accents(tokenizer)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text: str) -> None:
    tokenizer = tokenizer_of("bpe")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids).removeprefix(" ") == text.removeprefix(" ")
    assert text.startswith(" ") or tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", TRAINED)
def test_more_characters_than_entries_and_fewer(kind: TokenizerKind) -> None:
    text = ["".join(map(chr, range(0x4E00, 0x5200))) + " 一一 abc"] * 3
    tokenizer = train_tokenizer(kind, 300, False, text)
    assert vocab_size(tokenizer) <= 300
    assert tokenizer.encode("一", add_special_tokens=False).ids != [1]
    assert vocab_size(train_tokenizer(kind, 5000, False, ["a short text, and no more"])) < 500


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("text", ["今日は天気がいい。", "ดีมาก", "한국어 文 é", "½ ﬁne 👍🏽", "ပါတယ်"])
def test_the_text_it_was_trained_on_has_no_unknown_token(kind: TokenizerKind, text: str, *, lowercase: bool) -> None:
    """Not even the first one of a text without spaces."""
    tokenizer = train_tokenizer(kind, 300, lowercase, [text] * 20)
    assert special_ids(tokenizer)["unk"] not in tokenizer.encode(text).ids


def test_no_text() -> None:
    with pytest.raises(DataError, match="no text"):
        train_tokenizer("bpe", 1000, False, [])


def test_the_sample_is_bounded_uniform_and_reproducible() -> None:
    sentences = [f"{number:05d}" for number in range(20_000)]
    chosen = sample(iter(sentences), 3, limit=250 * 1000)
    numbers = list(map(int, chosen))
    assert sample(sentences, 3, limit=250 * 1000) == chosen
    assert numbers == sorted(numbers)
    assert 900 < len(numbers) < 1300
    assert all(0.28 < sum(number // 6667 == third for number in numbers) / len(numbers) < 0.39 for third in range(3))


# Extension

WORDS = ["elephants", "purples", "meals", "guestsx", "fibrillation", "pqrs", "xqrs"]  # later words share merges with earlier ones
KNOWN = ["hello world, double  spaces", "the chef cooked", "don't stop me now!", "中文字符"]


def wordpiece(*entries: str) -> Tokenizer:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *entries]
    return prepared(bert_wordpiece({token: number for number, token in enumerate(tokens)}, True), "it")


@pytest.mark.parametrize("kind", KINDS)
def test_each_added_word_is_one_token_and_other_words_are_what_they_were(kind: str, tmp_path: Path) -> None:
    before = small_tokenizer(kind)
    after = extend_tokenizer(before, [word_form(before, word) for word in WORDS])
    pieces = pieces_of_added(before, after)
    assert pieces is not None
    added = {after.id_to_token(vocab_size(before) + place): ids for place, ids in enumerate(pieces)}
    assert len(added) == vocab_size(after) - vocab_size(before)
    cooked = before.encode("cooked", add_special_tokens=False).ids
    for word in WORDS:
        form = word_form(before, word)
        assert after.encode(f"cooked {word}", add_special_tokens=False).ids == [*cooked, after.token_to_id(form)], word
        old = before.encode(f"cooked {word}", add_special_tokens=False).ids[len(cooked) :]
        assert added.get(form, [before.token_to_id(form)]) == old, word
    assert [after.encode(text).ids for text in KNOWN] == [before.encode(text).ids for text in KNOWN]
    assert before.get_vocab().items() <= after.get_vocab().items()
    # The extension survives its file.
    after.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path)
    assert fingerprint(read) == fingerprint(after)
    assert [read.encode(text).ids for text in HARD] == [after.encode(text).ids for text in HARD]


@pytest.mark.parametrize("kind", ["wordpiece, lower-cased", "bpe"])
def test_tokens_outside_of_the_model_keep_their_ids(kind: str) -> None:
    before = small_tokenizer(kind)
    before.add_tokens([AddedToken("@url", normalized=False), AddedToken("   ")])
    before.add_special_tokens([AddedToken("<user>")])
    after = extend_tokenizer(before, [word_form(before, "fibrillation")])
    assert pieces_of_added(before, after)
    texts = [*HARD, "the chef cooked @url   <user> @urls"]
    assert [after.encode(text).ids for text in texts] == [before.encode(text).ids for text in texts]


def test_what_cannot_be_extended() -> None:
    unigram = small_tokenizer("unigram")
    unigram.add_tokens(["<user>"])
    with pytest.raises(ConfigError, match="tokens outside of its model"):
        extend_tokenizer(unigram, [word_form(unigram, "fibrillation")])


def test_pieces_of_added_tokens() -> None:
    before = wordpiece("un", "##do", "a")
    assert fingerprint(extend_tokenizer(before, ["un", "a"])) == fingerprint(before)
    assert pieces_of_added(before, before) == []
    # "undoa" has no piece for its end: WordPiece gives up on the whole word.
    assert pieces_of_added(before, extend_tokenizer(before, ["undo", "zebra", "undoa"])) == [[5, 6], [1], [1]]


def test_what_is_no_extension() -> None:
    before = wordpiece("the", "a")
    others = [wordpiece("a", "the", "new"), wordpiece("the"), small_tokenizer("bpe")]
    cased = wordpiece("the", "a")
    cased.normalizer = None
    assert all(pieces_of_added(before, other) is None for other in [*others, cased])


def test_the_words_that_save_most() -> None:
    tokenizer = wordpiece("un", "##do", "##ne", "a", "##b", "1", "##2", "##a")
    # Saved: undo 4 x 1, undone 3 x 2, zebra (unknown, five characters) 3 x 4, ab 5 x 1; a and un are tokens, 12 has no
    # letter, and undob is too rare.
    counts = {"undo": 4, "undone": 3, "zebra": 3, "ab": 5, "a": 90, "un": 90, "12": 90, "undob": 2}
    assert frequent_splits(counts, tokenizer, 9) == ["zebra", "undone", "ab", "undo"]
    assert frequent_splits(counts, tokenizer, 2) == ["zebra", "undone"]
