"""Word starts, for every kind of tokenizer and for text that a segmenter cuts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from discern.data.languages import SEGMENTERS, SegmenterName
from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece
from discern.data.tokenizer.encoding import DocumentEncoder
from discern.data.tokenizer.training import TokenizerKind
from discern.data.tokenizer.words import check_segmenter
from discern.errors import ConfigError
from tests.data.tokenizer.test_training import TEXT, tokenizer_of


def words(tokenizer: Tokenizer, sentences: list[str], segmenter: SegmenterName = "none") -> list[list[str]]:
    """The tokens of each word, over all sentences."""
    block = DocumentEncoder(tokenizer.to_str(), segmenter).encode([sentences])[0]
    found: list[list[str]] = []
    for number, begins in zip(block.tokens, block.word_starts, strict=True):
        if begins:
            found.append([])
        found[-1].append(tokenizer.id_to_token(int(number)) or "")
    return found


def characters(*entries: str) -> Tokenizer:
    vocabulary = {entry: number for number, entry in enumerate(dict.fromkeys([*SPECIAL_TOKENS.values(), *entries]))}
    return bert_wordpiece(vocabulary, lowercase=True, strip_accents=False)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_words_of_trained_tokenizers(kind: TokenizerKind) -> None:
    sentences = TEXT[:100]
    found = words(tokenizer_of(kind), sentences)
    if kind == "bpe":  # a full stop is a word of its own
        found = [word for word in found if word != ["."]]
    assert len(found) == sum(len(sentence.split()) for sentence in sentences)
    assert all(word[0][0] in "▁Ġ" for word in found)


def test_whole_words_by_hand() -> None:
    tokenizer = characters("un", "##want", "##ed", "dog", "s", "'", "中", "文")
    assert list(map(" ".join, words(tokenizer, ["Unwanted dog's 中文 x"]))) == (
        ["un ##want ##ed", "dog", "'", "s", "中", "文", "[UNK]"]
    )


def test_words_of_bytes_are_those_of_the_pre_tokenizer() -> None:
    tokenizer = tokenizer_of("bpe")
    for sentence in [*TEXT[:200], "loba,ke (mi) 12 nu34 - x", "ke!? a-b", "да не. 字漢! é"]:
        expected = [word != before for before, word in pairwise([None, *tokenizer.encode(sentence).word_ids[1:-1]])]
        assert DocumentEncoder(tokenizer.to_str(), "none").encode([[sentence]])[0].word_starts.tolist() == expected
    assert len(words(tokenizer, ["हिन्दी भाषा"])) == 2  # combining marks stay with their letters


@pytest.mark.parametrize(
    "splitter",
    [
        None,
        pre_tokenizers.Split(" ", "merged_with_previous"),
        pre_tokenizers.Metaspace(split=False),
        pre_tokenizers.Split("▁", "isolated"),
    ],
    ids=["none", "gemma", "metaspace", "words"],
)
def test_words_where_tokens_do_not_show_them(splitter: pre_tokenizers.PreTokenizer) -> None:
    """Gemma's normalizer writes spaces as "▁" before its pre-tokenizer looks for them: a sentence is one pre-token."""
    entries = [*SPECIAL_TOKENS.values(), "▁", "a", "b", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, merges, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = splitter
    begun = ["".join(word).strip("▁") for word in words(tokenizer, ["bab a bb", "a"])]
    assert list(filter(None, begun)) == ["bab", "a", "bb", "a"]


@pytest.mark.parametrize(
    ("segmenter", "text"),
    [
        ("jieba", "我|来到|北京|清华大学| abc"),
        ("fugashi", "今日|は|天気|が|いい|。| abc|です"),
        ("kiwipiepy", "나|는| 학교|에서| 밥|을| abc"),
        ("pythainlp", "ฉัน|กินข้าว|ที่|โรงเรียน| abc"),
    ],
)
def test_segmenters_part_words_and_leave_the_ids(segmenter: SegmenterName, text: str) -> None:
    pytest.importorskip(segmenter)
    sentences = [text.replace("|", ""), "", "a\0b \u3000😀"]
    tokenizer = characters(*text, *(f"##{letter}" for letter in text))
    plain, cut = (DocumentEncoder(tokenizer.to_str(), name).encode([sentences])[0] for name in ("none", segmenter))
    assert plain.tokens.tolist() == cut.tokens.tolist()
    assert len(words(tokenizer_of("bpe"), sentences[:1], segmenter)) == len(text.split("|"))
    parted = words(tokenizer, sentences[:1], segmenter)
    assert ["".join(word).replace("##", "") for word in parted] == text.replace(" ", "").split("|")


def test_a_segmenter_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.data.tokenizer.words.find_spec", lambda name: None)
    check_segmenter("none")
    for extra, name in SEGMENTERS.items():
        with pytest.raises(ConfigError, match=f"{name}, which is not installed") as refused:
            check_segmenter(name)
        assert f"discern-nlp[{extra}]" in str(refused.value.hint)
