"""Word starts, for every kind of tokenizer and for text that a segmenter cuts."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece, framing
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.training import TokenizerKind
from discern.data.tokenizer.words import SegmenterName
from tests.data.tokenizer.test_training import TEXT, tokenizer_of


def words(tokenizer: Tokenizer, sentences: list[str], segmenter: SegmenterName = "none") -> list[list[str]]:
    """The tokens of each word, over all sentences."""
    block = DocumentEncoder(tokenizer.to_str(), segmenter).encode([sentences]).block
    found: list[list[str]] = []
    for number, begins in zip(block.tokens, block.word_starts, strict=True):
        if begins:
            found.append([])
        found[-1].append(tokenizer.id_to_token(int(number)) or "")
    return found


def characters(*entries: str) -> Tokenizer:
    vocabulary = {entry: number for number, entry in enumerate([*SPECIAL_TOKENS.values(), *entries])}
    return bert_wordpiece(vocabulary, lowercase=True)


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_words_of_trained_tokenizers(kind: TokenizerKind) -> None:
    tokenizer = tokenizer_of(kind)
    sentences = TEXT[:100]
    found = words(tokenizer, sentences)
    expected = [word for sentence in sentences for word in sentence.removesuffix(".").split()]
    ids = tokenizer.encode_batch(sentences, add_special_tokens=False)
    assert sum(map(len, found)) == sum(map(len, ids))
    if kind == "wordpiece":  # ideographs and full stops are words of their own
        assert len(found) > len(expected)
        assert all(not word[0].startswith("##") and all(piece.startswith("##") for piece in word[1:]) for word in found)
    elif kind == "unigram":  # a full stop belongs to its word
        assert len(found) == len(expected)
        assert all(word[0].startswith("▁") for word in found)
    else:
        assert len(found) == len(expected) + len(sentences)


def test_whole_words_by_hand() -> None:
    assert words(characters("un", "##want", "##ed", "dog", "s", "'", "中", "文"), ["Unwanted dog's 中文 x"]) == [
        ["un", "##want", "##ed"],
        ["dog"],
        ["'"],
        ["s"],
        ["中"],
        ["文"],
        ["[UNK]"],
    ]


def test_words_of_bytes_are_those_of_the_pre_tokenizer() -> None:
    tokenizer = tokenizer_of("bpe")
    sentences = [*TEXT[:200], "loba,ke (mi) 12 nu34 - x", "ke!? a-b", "да не. 字漢! é"]
    encodings = tokenizer.encode_batch(sentences, add_special_tokens=False)
    for sentence, encoding in zip(sentences, encodings, strict=True):
        expected = [word != before for before, word in pairwise([None, *encoding.word_ids])]
        assert DocumentEncoder(tokenizer.to_str(), "none").encode([[sentence]]).block.word_starts.tolist() == expected


def test_combining_marks_stay_with_their_letters() -> None:
    assert len(words(tokenizer_of("bpe"), ["हिन्दी भाषा"])) == 2


def test_without_a_pre_tokenizer_spaces_part_words() -> None:
    entries = [*SPECIAL_TOKENS.values(), "▁", "a", "b", " ", "ab", "b "]
    tokenizer = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, [("a", "b")], unk_token="[UNK]"))
    tokenizer.post_processor = framing(tokenizer)
    assert words(tokenizer, ["ab  bab", "a"]) == [["ab"], [" ", " ", "b", "ab"], ["a"]]


@pytest.mark.parametrize(
    "splitter",
    [pre_tokenizers.Split(" ", "merged_with_previous"), pre_tokenizers.Metaspace(split=False)],
    ids=["gemma", "metaspace"],
)
def test_a_pre_tokenizer_that_leaves_a_sentence_whole_is_not_asked(splitter: pre_tokenizers.PreTokenizer) -> None:
    """Gemma's normalizer writes spaces as "▁" before its pre-tokenizer looks for them: a sentence is one pre-token."""
    entries = [*SPECIAL_TOKENS.values(), "▁", "a", "b", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, merges, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = framing(tokenizer)
    begun = words(tokenizer, ["bab a bb"])
    assert ["".join(word).strip("▁") for word in begun] == ["bab", "a", "bb"]


def test_jieba_parts_words_and_leaves_the_ids() -> None:
    pytest.importorskip("jieba")
    tokenizer = characters(*"我来到北京清华大学", "ab", "##c")
    sentence = "我来到北京清华大学 abc"
    assert words(tokenizer, [sentence], "jieba") == [["我"], ["来", "到"], ["北", "京"], [*"清华大学"], ["ab", "##c"]]
    plain, cut = (DocumentEncoder(tokenizer.to_str(), segmenter).encode([[sentence]]).block for segmenter in ("none", "jieba"))
    assert plain.tokens.tolist() == cut.tokens.tolist()


def test_jieba_on_bytes() -> None:
    pytest.importorskip("jieba")
    tokenizer = tokenizer_of("bpe")
    found = words(tokenizer, ["我来到北京 loba"], "jieba")
    assert len(found) == 4
    assert tokenizer.decode([tokenizer.token_to_id(token) for token in found[2]]) == "北京"
