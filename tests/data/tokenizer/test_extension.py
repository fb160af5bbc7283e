"""Tokens added behind a vocabulary: what they are, what they were, and what stays as it was."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from discern.data.tokenizer import bert_wordpiece, fingerprint, load_tokenizer, prepared, vocab_size
from discern.data.tokenizer.training import extend_tokenizer, frequent_splits, pieces_of, pieces_of_added, word_form
from discern.data.tokenizer.words import word_forms
from discern.errors import ConfigError
from tests.small.tokenizers import HARD, KINDS, small_tokenizer

WORDS = ["elephants", "purples", "meals", "guestsx", "fibrillation"]
KNOWN = ["hello world, double  spaces", "the chef cooked", "don't stop me now!", "中文字符"]


def extended(kind: str, words: list[str]) -> tuple[Tokenizer, Tokenizer]:
    tokenizer = small_tokenizer(kind)
    return tokenizer, extend_tokenizer(tokenizer, [word_form(tokenizer, word) for word in words])


@pytest.mark.parametrize("kind", KINDS)
def test_each_word_is_one_token_and_other_words_are_what_they_were(kind: str) -> None:
    before, after = extended(kind, WORDS)
    for word in WORDS:
        ids = after.encode(f"cooked {word}", add_special_tokens=False).ids
        assert ids[:-1] == before.encode("cooked", add_special_tokens=False).ids, word
        assert after.id_to_token(ids[-1]) == word_form(before, word)
    assert [after.encode(text).ids for text in KNOWN] == [before.encode(text).ids for text in KNOWN]
    assert all(after.token_to_id(token) == number for token, number in before.get_vocab().items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_are_what_the_word_was_before(kind: str) -> None:
    before, after = extended(kind, WORDS)
    pieces = pieces_of_added(before, after)
    assert pieces is not None
    assert len(pieces) == vocab_size(after) - vocab_size(before)
    added = {after.id_to_token(vocab_size(before) + place): ids for place, ids in enumerate(pieces)}
    for word in WORDS:
        form = word_form(before, word)
        cooked = before.encode("cooked", add_special_tokens=False).ids
        whole = before.encode(f"cooked {word}", add_special_tokens=False).ids[len(cooked) :]
        assert added.get(form, [before.token_to_id(form)]) == whole, word


@pytest.mark.parametrize("kind", KINDS)
def test_the_extension_survives_its_file(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, after = extended(kind, WORDS)
    path = tmp_path_factory.mktemp("extension") / "tokenizer.json"
    after.save(str(path))
    read = load_tokenizer(path)
    assert fingerprint(read) == fingerprint(after)
    assert [read.encode(text).ids for text in HARD] == [after.encode(text).ids for text in HARD]


@pytest.mark.parametrize("kind", ["wordpiece, lower-cased", "bpe"])
def test_tokens_outside_of_the_model_keep_their_ids(kind: str) -> None:
    before = small_tokenizer(kind)
    before.add_tokens([AddedToken("@url", normalized=False), AddedToken("   ")])
    before.add_special_tokens([AddedToken("<user>")])
    after = extend_tokenizer(before, [word_form(before, "fibrillation")])
    assert pieces_of_added(before, after)
    assert before.get_vocab().items() <= after.get_vocab().items()
    texts = [*HARD, "the chef cooked @url   <user> @urls"]
    assert [after.encode(text).ids for text in texts] == [before.encode(text).ids for text in texts]


@pytest.mark.parametrize(("kind", "token"), [("wordpiece, lower-cased", "quagga"), ("bpe", "☃"), ("unigram", "<user>")])
def test_a_token_outside_that_the_model_would_find_in_words_is_refused(kind: str, token: str) -> None:
    before = small_tokenizer(kind)
    before.add_tokens([token])
    with pytest.raises(ConfigError, match="has 1 token outside of its model"):
        extend_tokenizer(before, [word_form(before, "fibrillation")])


def test_nothing_added_is_no_change() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    assert fingerprint(extend_tokenizer(tokenizer, ["the", "chef"])) == fingerprint(tokenizer)
    assert pieces_of_added(tokenizer, tokenizer) == []


def test_an_unknown_word_was_unknown() -> None:
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##do", "a"])}
    before = prepared(bert_wordpiece(vocabulary, True), "it")
    after = extend_tokenizer(before, ["undo", "zebra", "undoa"])
    # "undoa" has no piece for its end: WordPiece gives up on the whole word.
    assert pieces_of_added(before, after) == [[5, 6], [1], [1]]


def test_a_token_that_continues_a_word_has_pieces_too() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##a", "##b", "b"]
    before = prepared(bert_wordpiece({token: number for number, token in enumerate(tokens)}, True), "it")
    assert pieces_of_added(before, extend_tokenizer(before, ["##ab", "ab"])) == [[6, 7], [5, 7]]


def test_words_joined_by_earlier_merges() -> None:
    """The second word's pieces are already joined by the merges that the first one brought."""
    before, after = extended("bpe", ["pqrs", "xqrs", "qrsx"])
    for word in ("pqrs", "xqrs", "qrsx"):
        assert len(after.encode(f"cooked {word}", add_special_tokens=False).ids) == (
            len(before.encode("cooked", add_special_tokens=False).ids) + 1
        )


@pytest.mark.parametrize("change", ["other words", "fewer", "other case", "other kind"])
def test_what_is_no_extension(change: str) -> None:
    before = small_tokenizer("wordpiece, lower-cased")
    whole = json.loads(before.to_str())
    vocabulary = whole["model"]["vocab"]
    if change == "other words":
        vocabulary["zzz"] = vocabulary.pop("the")
    elif change == "fewer":
        del vocabulary[max(vocabulary, key=vocabulary.__getitem__)]
    elif change == "other case":
        whole["normalizer"]["lowercase"] = False
    after = small_tokenizer("bpe") if change == "other kind" else Tokenizer.from_str(json.dumps(whole))
    assert pieces_of_added(before, after) is None


def test_several_words_are_refused() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    with pytest.raises(ConfigError, match=r"2 words \(atrial flutter\)") as caught:
        word_form(tokenizer, "Atrial flutter")
    assert "one word per line" in (caught.value.hint or "")


def test_a_kind_without_pieces_is_refused() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="WordLevel"):
        extend_tokenizer(tokenizer, ["b"])


def test_the_words_that_save_most() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##do", "##ne", "a", "##b", "1", "##2"]
    tokenizer = prepared(bert_wordpiece({token: number for number, token in enumerate(tokens)}, True), "it")
    # Saved: undo 4 x 1, undone 3 x 2, zebra (unknown, five characters) 3 x 4, ab 5 x 1; a and un are tokens, 12 has no
    # letter, undob is too rare.
    counts = {"undo": 4, "undone": 3, "zebra": 3, "ab": 5, "a": 90, "un": 90, "12": 90, "undob": 2}
    assert frequent_splits(counts, tokenizer, 9) == ["zebra", "undone", "ab", "undo"]
    assert frequent_splits(counts, tokenizer, 2) == ["zebra", "undone"]


def test_words_that_wordpiece_gives_up_on_are_not_proposed() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##a"]
    tokenizer = prepared(bert_wordpiece({token: number for number, token in enumerate(tokens)}, True), "it")
    assert frequent_splits({"a" * 201: 90, "a" * 200: 3, "aa": 3}, tokenizer, 9) == ["a" * 200, "aa"]
    shorter = json.loads(tokenizer.to_str())
    shorter["model"]["max_input_chars_per_word"] = 3
    tokenizer = Tokenizer.from_str(json.dumps(shorter))
    assert frequent_splits({"aaaa": 90, "aaa": 3}, tokenizer, 9) == ["aaa"]
    assert pieces_of(tokenizer, "aaa") == [5, 6, 6]
    for form in ("aaaa", "##aaaa"):  # what a text gives for it
        assert pieces_of(tokenizer, form) == [1]
    assert tokenizer.encode("aaaa", add_special_tokens=False).ids == [1]


def test_a_word_that_wordpiece_gives_up_on_is_refused() -> None:
    tokenizer = small_tokenizer("wordpiece, lower-cased")
    limit = tokenizer.model.max_input_chars_per_word
    assert word_form(tokenizer, "A" * limit) == "a" * limit
    said = rf"'{'a' * 40}\.\.\.' cannot be added as a token: it has {limit + 1} characters"
    with pytest.raises(ConfigError, match=said) as caught:
        word_form(tokenizer, "a" * (limit + 1))
    assert "leave it out" in (caught.value.hint or "")
    assert len(word_form(small_tokenizer("bpe"), "a" * (limit + 1))) > limit


def test_words_as_the_model_gets_them() -> None:
    assert word_forms(small_tokenizer("wordpiece, lower-cased"), "A Café, twice") == ["a", "cafe", ",", "twice"]
    assert word_forms(small_tokenizer("bpe"), "a cat") == ["Ġa", "Ġcat"]
    assert word_forms(small_tokenizer("unigram"), "a cat") == ["▁a", "▁cat"]
