"""A tokenizer with further tokens behind its own: every id that it had stays what it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from discern.data.tokenizer import prepared, special_ids, vocab_size
from discern.errors import ConfigError

_SAME = ("normalizer", "pre_tokenizer", "post_processor")
# A new piece is preferred to those that it consists of by this much of log-probability.
_UNIGRAM_BONUS = 1e-3
_FEWEST = 3


def extend_tokenizer(tokenizer: Tokenizer, forms: Sequence[str]) -> Tokenizer:
    """The tokenizer with a token for each of the words that it has none for; other words keep their tokens.

    WordPiece gets the word as an entry, Unigram a piece just likelier than what it is split into today, BPE the merges that
    join its pieces, behind all others; what such merges make on the way becomes a token too. A word that *contains* a new
    token, as one that is longer and begins with it, may be split anew.

    Args:
        forms: words as the model gets them, see `word_form`.

    Raises:
        ConfigError: the tokenizer is of a kind that cannot be extended.
    """
    whole = json.loads(tokenizer.to_str())
    new = [form for form in dict.fromkeys(forms) if tokenizer.token_to_id(form) is None]
    first = vocab_size(tokenizer)
    if isinstance(tokenizer.model, models.WordPiece):
        whole["model"]["vocab"] |= {form: first + place for place, form in enumerate(new)}
    elif isinstance(tokenizer.model, models.Unigram):
        _add_pieces(tokenizer, whole["model"], new, first)
    elif isinstance(tokenizer.model, models.BPE):
        _add_merges(tokenizer, whole["model"], new, first)
    else:
        raise ConfigError(
            f"a tokenizer of kind {type(tokenizer.model).__name__} cannot be extended",
            hint="those of kind WordPiece, Unigram and BPE can; or leave out --add-tokens",
        )
    return prepared(Tokenizer.from_str(json.dumps(whole)), "the extended tokenizer")


def pieces_of_added(before: Tokenizer, after: Tokenizer) -> list[list[int]] | None:
    """What each added token was to the tokenizer before: its ids there, in the order of the new ids.

    None where `after` is not `before` with tokens added behind: then ids of the one mean nothing to the other.
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
    """How the model sees a word: normalised, and with the sign of a beginning word where it has one.

    Raises:
        ConfigError: it is not one word, or longer than the tokenizer takes one to be.
    """
    found = word_forms(tokenizer, word)
    if len(found) != 1:
        parts = " ".join(found) or "nothing"
        raise ConfigError(
            f"'{word}' cannot be added as a token: to the tokenizer it is {len(found)} words ({parts})",
            hint="one word a line, without spaces and punctuation inside",
        )
    if _is_too_long(tokenizer, found[0]):
        raise ConfigError(
            f"'{word[:40]}{'...' if len(word) > 40 else ''}' cannot be added as a token: it has {len(found[0])} characters, and "
            f"this tokenizer makes [UNK] of every word of more than {tokenizer.model.max_input_chars_per_word}",
            hint="leave it out",
        )
    return found[0]


def word_forms(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words of a text as the model gets them, in order."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    text = text.strip()
    if isinstance(splitter, pre_tokenizers.ByteLevel) and not splitter.add_prefix_space:
        text = f" {text}"  # within a text a word has a space before it, and this kind keeps it with the word
    text = text if normalizer is None else normalizer.normalize_str(text)
    pieces = [(text, (0, 0))] if splitter is None else splitter.pre_tokenize_str(text)
    return [piece for piece, _ in pieces if piece]


def frequent_splits(counts: Mapping[str, int], tokenizer: Tokenizer, number: int) -> list[str]:
    """The words for which a token of their own would save the most tokens: occurrences times pieces beyond the first.

    One that the tokenizer cannot spell counts as though each of its characters were a piece. Words without a letter, such as
    occur fewer than three times, and such as are longer than WordPiece takes a word to be are left out; of equals the first in
    the order of characters is taken.

    Args:
        counts: occurrences of the words of a text, by the form that the model gets.
    """
    unknown = special_ids(tokenizer)["unk"]
    decoder = decoders.ByteLevel() if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel) else None
    saved: dict[str, int] = {}
    for form, count in counts.items():
        shown = form if decoder is None else decoder.decode([form])
        if count < _FEWEST or not any(letter.isalpha() for letter in shown) or tokenizer.token_to_id(form) is not None:
            continue
        if _is_too_long(tokenizer, form):
            continue
        pieces = pieces_of(tokenizer, form)
        number_of_pieces = len(shown) if unknown in pieces else len(pieces)
        if number_of_pieces > 1 or unknown in pieces:
            saved[form] = count * max(number_of_pieces - 1, 1)
    return sorted(saved, key=lambda form: (-saved[form], form))[:number]


def pieces_of(tokenizer: Tokenizer, token: str) -> list[int]:
    """Ids of the pieces of a token that the tokenizer has not; [UNK] where it cannot spell it, or gives up on its length."""
    model = tokenizer.model
    if isinstance(model, models.WordPiece):
        return _longest_first(tokenizer, token, model.continuing_subword_prefix)
    found = [piece.id for piece in model.tokenize(token)]
    return found or [special_ids(tokenizer)["unk"]]


def _is_too_long(tokenizer: Tokenizer, form: str) -> bool:
    """Whether it is a word that WordPiece makes [UNK] of by its length, whatever the vocabulary holds."""
    model = tokenizer.model
    return isinstance(model, models.WordPiece) and len(form) > model.max_input_chars_per_word


def _longest_first(tokenizer: Tokenizer, token: str, prefix: str) -> list[int]:
    """WordPiece's way, also for a token that continues a word, which the library's model does not take."""
    continues = token.startswith(prefix) and token != prefix
    rest, ids = (token.removeprefix(prefix) if continues else token), list[int]()
    if _is_too_long(tokenizer, rest):
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


def _add_pieces(tokenizer: Tokenizer, model: dict[str, Any], forms: Sequence[str], first: int) -> None:
    """Pieces as likely as what each form is split into, and a little more."""
    vocabulary = model["vocab"]
    if first != len(vocabulary):
        raise ConfigError(
            f"this tokenizer has {first - len(vocabulary)} tokens outside of its model, behind which no piece can be added",
            hint="leave out --add-tokens",
        )
    scores = [score for _, score in vocabulary]
    # What the model cannot spell costs ten more than its rarest piece, in the library and in SentencePiece.
    scores[model["unk_id"]] = min(scores) - 10
    for form in forms:
        vocabulary.append([form, sum(scores[number] for number in pieces_of(tokenizer, form)) + _UNIGRAM_BONUS])


def _add_merges(tokenizer: Tokenizer, model: dict[str, Any], forms: Sequence[str], first: int) -> None:
    """Merges that join what each form is split into, left to right."""
    ranks: dict[tuple[str, str], int] = {}
    for form in forms:
        pieces = _merged([piece.value for piece in tokenizer.model.tokenize(form)], ranks)
        if "".join(pieces) != form:
            raise ConfigError(
                f"'{form}' cannot be added as a token: the tokenizer has no sign for a part of it", hint="leave it out"
            )
        joined = pieces[0]
        for piece in pieces[1:]:
            ranks[joined, piece] = len(ranks)
            model["merges"].append([joined, piece])
            joined += piece
            if joined not in model["vocab"]:
                model["vocab"][joined] = first
                first += 1


def _merged(pieces: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """The pieces after the merges of these ranks, lowest first, as BPE applies them."""
    while found := [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks]:
        _, place = min(found)
        pieces = [*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :]]
    return pieces
