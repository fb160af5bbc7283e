"""Extends tokenizers by new tokens with new ids; existing ids do not change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from discern.data.tokenizer import prepared, special_ids, vocab_size
from discern.errors import ConfigError

_SAME = ("normalizer", "pre_tokenizer", "post_processor")
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
    new = [form for form in dict.fromkeys(forms) if tokenizer.token_to_id(form) is None]
    first = vocab_size(tokenizer)
    if isinstance(tokenizer.model, models.WordPiece):
        _take_in_outside_tokens(tokenizer, whole)
        whole["model"]["vocab"] |= {form: first + place for place, form in enumerate(new)}
    elif isinstance(tokenizer.model, models.Unigram):
        _add_pieces(tokenizer, whole["model"], new, first)
    elif isinstance(tokenizer.model, models.BPE):
        _take_in_outside_tokens(tokenizer, whole)
        _add_merges(tokenizer, whole["model"], new, first)
    else:
        raise ConfigError(
            f"a tokenizer of type {type(tokenizer.model).__name__} cannot be extended",
            hint="WordPiece, Unigram and BPE tokenizers can; otherwise leave out --add-tokens",
        )
    extended = prepared(Tokenizer.from_str(json.dumps(whole)), "the extended tokenizer")
    if pieces_of_added(tokenizer, extended) is None:
        raise ConfigError("this tokenizer cannot be extended: its tokens would get other ids", hint="leave out --add-tokens")
    return extended


def pieces_of_added(before: Tokenizer, after: Tokenizer) -> list[list[int]] | None:
    """The ids of each added token in the tokenizer before, in the order of the new ids.

    None if `after` is not an extension of `before`, so that the ids of the two are unrelated.
    """
    old, new = before.get_vocab(with_added_tokens=True), after.get_vocab(with_added_tokens=True)
    first = vocab_size(before)
    added = {number: token for token, number in new.items() if number >= first}
    same = all(new.get(token) == number for token, number in old.items())
    wholes = [json.loads(tokenizer.to_str()) for tokenizer in (before, after)]
    alike = all(wholes[0].get(key) == wholes[1].get(key) for key in _SAME)
    kinds = type(before.model) is type(after.model)
    if not (same and alike and kinds) or sorted(added) != list(range(first, first + len(added))):
        return None
    if len(new) != len(old) + len(added):
        return None
    return [pieces_of(before, added[number]) for number in sorted(added)]


def word_form(tokenizer: Tokenizer, word: str) -> str:
    """The form of a word that the model gets: normalized, and with the marker of a word's beginning if there is one.

    Raises:
        ConfigError: the text is not a single word, or the word is longer than the tokenizer accepts.
    """
    found = word_forms(tokenizer, word)
    if len(found) != 1:
        parts = " ".join(found) or "nothing"
        raise ConfigError(
            f"'{word}' cannot be added as a token: the tokenizer splits it into {len(found)} words ({parts})",
            hint="give one word per line, without spaces or punctuation inside",
        )
    if is_too_long(tokenizer, found[0]):
        raise ConfigError(
            f"'{word[:40]}{'...' if len(word) > 40 else ''}' cannot be added as a token: it has {len(found[0])} characters, and "
            f"this tokenizer encodes words with more than {tokenizer.model.max_input_chars_per_word} as [UNK]",
            hint="leave it out",
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


def frequent_splits(counts: Mapping[str, int], tokenizer: Tokenizer, number: int) -> list[str]:
    """The words for which a dedicated token saves the most tokens: occurrences times the number of pieces beyond the first.

    In a word that the tokenizer cannot spell, each character counts as a piece. Words without a letter, words that occur fewer
    than three times, and words longer than WordPiece accepts are left out. Ties are sorted by their characters.

    Args:
        counts: number of occurrences of each word, in the form that the model gets.
        number: maximum number of words.
    """
    unknown = special_ids(tokenizer)["unk"]
    decoder = decoders.ByteLevel() if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel) else None
    saved: dict[str, int] = {}
    for form, count in counts.items():
        shown = form if decoder is None else decoder.decode([form])
        if count < _FEWEST or not any(letter.isalpha() for letter in shown) or tokenizer.token_to_id(form) is not None:
            continue
        if is_too_long(tokenizer, form):
            continue
        pieces = pieces_of(tokenizer, form)
        number_of_pieces = len(shown) if unknown in pieces else len(pieces)
        if number_of_pieces > 1 or unknown in pieces:
            saved[form] = count * max(number_of_pieces - 1, 1)
    return sorted(saved, key=lambda form: (-saved[form], form))[:number]


def pieces_of(tokenizer: Tokenizer, token: str) -> list[int]:
    """Ids of the pieces of a word that is not a token; [UNK] if the tokenizer cannot spell it or it is too long."""
    model = tokenizer.model
    if isinstance(model, models.WordPiece):
        return _longest_first(tokenizer, token, model.continuing_subword_prefix)
    found = [piece.id for piece in model.tokenize(token)]
    return found or [special_ids(tokenizer)["unk"]]


def is_too_long(tokenizer: Tokenizer, form: str) -> bool:
    """Whether WordPiece encodes a word as [UNK] because of its length."""
    model = tokenizer.model
    return isinstance(model, models.WordPiece) and len(form) > model.max_input_chars_per_word


def _longest_first(tokenizer: Tokenizer, token: str, prefix: str) -> list[int]:
    """Pieces by WordPiece's rule, longest match first. Unlike in the library, the token may be a continuation of a word."""
    continues = token.startswith(prefix) and token != prefix
    rest, ids = (token.removeprefix(prefix) if continues else token), list[int]()
    if is_too_long(tokenizer, rest):
        return [special_ids(tokenizer)["unk"]]
    while rest:
        sign = prefix if ids or continues else ""
        lengths = (n for n in range(len(rest), 0, -1) if tokenizer.token_to_id(sign + rest[:n]) is not None)
        length = next(lengths, None)
        if length is None:
            return [special_ids(tokenizer)["unk"]]
        ids.append(int(tokenizer.token_to_id(sign + rest[:length]) or 0))
        rest = rest[length:]
    return ids


def _take_in_outside_tokens(tokenizer: Tokenizer, whole: dict[str, Any]) -> None:
    """Enter the added tokens that the model does not have into its vocabulary, under their ids.

    The library numbers tokens outside of the model from the size of the vocabulary, which is about to grow.

    Raises:
        ConfigError: the model could then find one of them in words, where it does not now.
    """
    vocabulary = whole["model"]["vocab"]
    outside = [token["content"] for token in whole["added_tokens"] if token["content"] not in vocabulary]
    if any(_is_found_in_words(tokenizer, whole["model"], token) for token in outside):
        raise _tokens_outside(len(outside))
    vocabulary |= {token: tokenizer.token_to_id(token) for token in outside}


def _is_found_in_words(tokenizer: Tokenizer, model: Mapping[str, Any], token: str) -> bool:
    """Whether the model finds an entry of its vocabulary without merges that lead to it."""
    if isinstance(tokenizer.model, models.BPE):
        return len(token) == 1 or bool(model.get("ignore_merges"))
    return word_forms(tokenizer, token) == [token] or token.startswith(model["continuing_subword_prefix"])


def _tokens_outside(number: int) -> ConfigError:
    tokens = f"{number} token{'s' if number > 1 else ''}"
    return ConfigError(
        f"this tokenizer has {tokens} outside of its model, after which no piece can be added", hint="leave out --add-tokens"
    )


def _add_pieces(tokenizer: Tokenizer, model: dict[str, Any], forms: Sequence[str], first: int) -> None:
    """Add pieces that are slightly more likely than the pieces that each form consists of."""
    vocabulary = model["vocab"]
    if first != len(vocabulary):
        raise _tokens_outside(first - len(vocabulary))
    scores = [score for _, score in vocabulary]
    # An unknown character costs ten more than the rarest piece, in the library and in SentencePiece.
    scores[model["unk_id"]] = min(scores) - 10
    for form in forms:
        vocabulary.append([form, sum(scores[number] for number in pieces_of(tokenizer, form)) + _UNIGRAM_BONUS])


def _add_merges(tokenizer: Tokenizer, model: dict[str, Any], forms: Sequence[str], first: int) -> None:
    """Add merges that join the pieces of each form, left to right."""
    ranks: dict[tuple[str, str], int] = {}
    for form in forms:
        pieces = _merged([piece.value for piece in tokenizer.model.tokenize(form)], ranks)
        if "".join(pieces) != form:
            raise ConfigError(f"'{form}' cannot be added as a token: the tokenizer cannot spell a part of it", hint="omit it")
        joined = pieces[0]
        for piece in pieces[1:]:
            ranks[joined, piece] = len(ranks)
            model["merges"].append([joined, piece])
            joined += piece
            if joined not in model["vocab"]:
                model["vocab"][joined] = first
                first += 1


def _merged(pieces: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """The pieces after applying the merges, lowest rank first, as in BPE."""
    while found := [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks]:
        _, place = min(found)
        pieces = [*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :]]
    return pieces
