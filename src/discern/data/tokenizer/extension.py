"""Extends tokenizers by new tokens with new ids; existing ids do not change."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from discern.data.tokenizer.loading import prepared, special_ids, vocab_size
from discern.errors import ConfigError

_SAME = "normalizer", "pre_tokenizer", "post_processor"
# Log-probability by which a new piece is preferred to the pieces that it consists of.
_UNIGRAM_BONUS = 1e-3
_FEWEST = 3


def extend_tokenizer(tokenizer: Tokenizer, forms: Sequence[str]) -> Tokenizer:
    """The tokenizer with an additional token for each of the words that is not a token yet. Other words keep their tokens.

    WordPiece gets the word as an entry, Unigram a piece slightly more likely than its current pieces, and BPE the merges that
    join its pieces, after all others; intermediate results of these merges become tokens, too. A word that *contains* a new
    token, such as a longer word that begins with it, may be split differently.

    Args:
        forms: words in the form that the model gets; see `word_form`.

    Raises:
        ConfigError: this tokenizer, or tokenizers of its kind, cannot be extended.
    """
    whole = json.loads(tokenizer.to_str())
    model, vocabulary = whole["model"], whole["model"]["vocab"]
    new = [form for form in dict.fromkeys(forms) if tokenizer.token_to_id(form) is None]
    outside: list[str] = []
    if isinstance(tokenizer.model, models.Unigram):
        scores = [score for _, score in vocabulary]
        # An unknown character costs ten more than the rarest piece, in the library and in SentencePiece.
        scores[model["unk_id"]] = min(scores) - 10
        vocabulary += [[form, sum(scores[n] for n in pieces_of(tokenizer, form)) + _UNIGRAM_BONUS] for form in new]
    elif isinstance(tokenizer.model, models.WordPiece | models.BPE):
        # The library numbers tokens outside of the model from the size of its vocabulary, which is about to grow.
        outside = [token["content"] for token in whole["added_tokens"] if token["content"] not in vocabulary]
        vocabulary |= {token: tokenizer.token_to_id(token) for token in outside}
        entries = _with_merges(tokenizer, model, new) if isinstance(tokenizer.model, models.BPE) else new
        vocabulary |= {entry: number for number, entry in enumerate(entries, vocab_size(tokenizer))}
    else:
        raise ConfigError(
            f"a tokenizer of type {type(tokenizer.model).__name__} cannot be extended",
            hint="WordPiece, Unigram and BPE tokenizers can; otherwise leave out --add-tokens",
        )
    extended = prepared(Tokenizer.from_str(json.dumps(whole)), "the extended tokenizer")
    # The model must not find in words what was outside of it.
    spelled = [text for token in outside for text in (token, token.upper(), f"a {token} a", f"a{token}a")]
    before, after = ([each.ids for each in it.encode_batch(spelled)] for it in (tokenizer, extended))
    if before != after or pieces_of_added(tokenizer, extended) is None:
        raise ConfigError(
            "this tokenizer cannot be extended: it has tokens outside of its model, and texts would get other ids",
            hint="leave out --add-tokens",
        )
    return extended


def _with_merges(tokenizer: Tokenizer, model: dict[str, Any], forms: Sequence[str]) -> list[str]:
    """Add merges to a BPE model that join the pieces of each form, left to right; the entries that they lead to, in order."""
    ranks: dict[tuple[str, str], int] = {}
    entries: dict[str, None] = {}
    for form in forms:
        pieces = [piece.value for piece in tokenizer.model.tokenize(form)]
        if "".join(pieces) != form:
            raise ConfigError(f"'{form}' cannot be added as a token: the tokenizer cannot spell a part of it", hint="omit it")
        # The merges that earlier forms brought apply first, lowest rank first, as in BPE.
        while found := [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks]:
            _, place = min(found)
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
        joined = pieces[0]
        for piece in pieces[1:]:
            ranks[joined, piece] = len(ranks)
            model["merges"].append([joined, piece])
            joined += piece
            entries[joined] = None
    return [entry for entry in entries if entry not in model["vocab"]]


def pieces_of_added(before: Tokenizer, after: Tokenizer) -> list[list[int]] | None:
    """The ids of each added token in the tokenizer before, in the order of the new ids.

    None if `after` is not an extension of `before`, so that the ids of the two are unrelated.
    """
    old, new = (tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (before, after))
    rules, others = (json.loads(tokenizer.to_str()) for tokenizer in (before, after))
    added = sorted(new.keys() - old.keys(), key=new.__getitem__)
    follows = [new[token] for token in added] == list(range(vocab_size(before), vocab_size(before) + len(added)))
    same = type(before.model) is type(after.model) and all(rules.get(key) == others.get(key) for key in _SAME)
    if not (same and follows and old.items() <= new.items()):
        return None
    return [pieces_of(before, token) for token in added]


def pieces_of(tokenizer: Tokenizer, token: str) -> list[int]:
    """Ids of the pieces of a word that is not a token; [UNK] if the tokenizer cannot spell it or it is too long."""
    inside = getattr(tokenizer.model, "continuing_subword_prefix", None) or ""
    found = [piece.id for piece in tokenizer.model.tokenize(token.removeprefix(inside))]
    return found or [special_ids(tokenizer)["unk"]]


def word_form(tokenizer: Tokenizer, word: str) -> str:
    """The form of a word that the model gets: normalized, and with the marker of a word's beginning if there is one.

    Raises:
        ConfigError: the text is not a single word, or the word is longer than the tokenizer accepts.
    """
    found = word_forms(tokenizer, word)
    problem = ""
    if len(found) != 1:
        problem = f"the tokenizer splits it into {len(found)} words ({' '.join(found) or 'nothing'})"
    elif is_too_long(tokenizer, found[0]):
        problem = f"it has {len(found[0])} characters, and this tokenizer encodes more than {_longest(tokenizer)} as [UNK]"
    if problem:
        shown = f"{word[:40]}{'...' if len(word) > 40 else ''}"
        raise ConfigError(
            f"'{shown}' cannot be added as a token: {problem}",
            hint="give one word per line, without spaces or punctuation inside, and leave this one out",
        )
    return found[0]


def word_forms(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words of a text in the form that the model gets, in order."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    text = text.strip()
    if isinstance(splitter, pre_tokenizers.ByteLevel) and not splitter.add_prefix_space:
        text = f" {text}"  # within a text, a word follows a space, which this kind keeps with the word
    text = text if normalizer is None else normalizer.normalize_str(text)
    pieces = [(text, (0, 0))] if splitter is None else splitter.pre_tokenize_str(text)
    return [piece for piece, _ in pieces if piece]


def is_too_long(tokenizer: Tokenizer, form: str) -> bool:
    """Whether WordPiece encodes a word as [UNK] because of its length."""
    return len(form) > _longest(tokenizer)


def _longest(tokenizer: Tokenizer) -> float:
    return getattr(tokenizer.model, "max_input_chars_per_word", math.inf)


def frequent_splits(counts: Mapping[str, int], tokenizer: Tokenizer, number: int) -> list[str]:
    """The words for which a dedicated token saves the most tokens: occurrences times the number of pieces beyond the first.

    In a word that the tokenizer cannot spell, each character counts as a piece. Words without a letter, words that occur fewer
    than three times, and words longer than WordPiece accepts are left out. Ties are sorted by their characters.

    Args:
        counts: number of occurrences of each word, in the form that the model gets.
        number: maximum number of words.
    """
    unknown = special_ids(tokenizer)["unk"]
    is_byte_level = isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    saved: dict[str, int] = {}
    for form, count in counts.items():
        if count < _FEWEST or tokenizer.token_to_id(form) is not None or is_too_long(tokenizer, form):
            continue
        text = decoders.ByteLevel().decode([form]) if is_byte_level else form
        pieces = pieces_of(tokenizer, form)
        length = max(len(text), 2) if unknown in pieces else len(pieces)
        if length > 1 and any(letter.isalpha() for letter in text):
            saved[form] = count * (length - 1)
    return sorted(saved, key=lambda form: (-saved[form], form))[:number]
