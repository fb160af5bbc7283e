"""The shortcut for BERT's WordPiece gives what the library gives, on any text."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer

from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, ProblemLog
from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece, encoding as module, load_tokenizer, prepared
from discern.data.tokenizer.encoding import WordCache

LETTERS = [*"abcdefghijklmnopqrstuvwxyzàéïßΣσς中文漢0123456789!?'-[]._", "the", "cat", "mask", "MASK", "ä", "i̇"]
HARD = (
    "aAéÉe\u0301ΣßİK中文한\u0301 \t\u00a0\u3000\u200b\u00ad\u2028!?'-[].,_«»—。…\x07\x0c\x7f\x85\ufffd"
    "\U0001f600\ufb01，、“”’·（）：\uf900\u3400\u4dbf"
)


def tokenizer_of(**options: bool) -> Tokenizer:
    entries = [*SPECIAL_TOKENS.values(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return prepared(bert_wordpiece({entry: number for number, entry in enumerate(entries)}, **options), "t")  # type: ignore[arg-type]


def same(tokenizer: Tokenizer, cache: WordCache, sentences: list[str]) -> bool:
    """Asserts equality where the cache answers; says whether it did."""
    found = cache.encode(sentences)
    if found is None:
        return False
    expected = [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    assert found[0] == [number for ids in expected for number in ids]
    assert found[1].tolist() == list(map(len, expected))
    return True


VARIANTS = [
    tokenizer_of(lowercase=True),
    tokenizer_of(lowercase=False),
    tokenizer_of(lowercase=True, strip_accents=False),
    tokenizer_of(lowercase=False, strip_accents=True, chinese=False),
]


@pytest.mark.parametrize("number", range(len(VARIANTS)))
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from(HARD), st.characters(exclude_categories=["Cs"])), max_size=40))
def test_any_text(number: int, text: str) -> None:
    cache = WordCache(VARIANTS[number])
    # Twice the text makes the new pieces few enough for the cache to answer.
    assert same(VARIANTS[number], cache, [text, f"{text} {text}", text, "", *[f"{text} {text}"] * 4]) or not text
    assert not any(" " in piece for piece in cache._ids)


def test_special_tokens_are_text() -> None:
    assert same(VARIANTS[0], WordCache(VARIANTS[0]), ["the [MASK] cat[SEP]"] * 3)


def test_words_without_end() -> None:
    assert same(VARIANTS[0], WordCache(VARIANTS[0]), ["a" * 200, "a" * 201, "a" * 200, "a" * 201])


def test_a_full_cache_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", 5)
    cache = WordCache(VARIANTS[0])
    for sentence in ("a b c", "c d e", "e f g h", "a b c d e f g h"):
        assert same(VARIANTS[0], cache, [sentence] * 3)
        assert len(cache._ids) <= max(5, len(sentence.split()))


def test_new_pieces_are_left_to_the_library() -> None:
    cache = WordCache(VARIANTS[0])
    assert cache.encode(["ßßß", "ΣςΣ"]) is None
    assert same(VARIANTS[0], cache, ["a\x07 c", *["a b c d"] * 5])
    assert set(cache._ids) == {"a", "b", "c", "d"}


def test_only_for_what_is_as_in_bert() -> None:
    assert WordCache.applies(VARIANTS[0])
    added = tokenizer_of(lowercase=True)
    added.add_tokens([AddedToken("new york")])
    assert not WordCache.applies(added)


@pytest.mark.parametrize(("vocabulary", "archive"), [("bert-uncased-en", "wikipedia-en/AB"), ("bert-zh", "zh/laws")])
def test_real_text(vocabulary: str, archive: str) -> None:
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    tokenizer = load_tokenizer(Path(folder, "vocab", f"{vocabulary}.txt"))
    cache, corpus = WordCache(tokenizer), Corpus([f"{folder}/{archive}.tar.xz"], CorpusOptions("file"))
    answers = [same(tokenizer, cache, document) for document in islice(corpus.documents(ProblemLog()), 100)]
    assert sum(answers) > 60
