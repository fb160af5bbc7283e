"""Trains tokenizers on a bounded sample of the text, and extends them. The same text gives the same tokenizer, byte for byte."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from discern.data.tokenizer.loading import END_OF_DOCUMENT, SPECIAL_TOKENS, bert_wordpiece, prepared, special_ids, vocab_size
from discern.data.tokenizer.words import word_forms
from discern.errors import ConfigError, DataError

TokenizerKind = Literal["wordpiece", "bpe", "unigram"]

# Memory that the sample may take. Unigram's trainer takes some two minutes over 10 MB of English on two cores.
SAMPLE_BYTES: dict[TokenizerKind, int] = {"wordpiece": 128 << 20, "bpe": 128 << 20, "unigram": 16 << 20}
_ENTRY = 200  # what a sentence of the sample takes besides its text
_SPECIALS = list(SPECIAL_TOKENS.values())
SMALLEST_SIZES: dict[TokenizerKind, int] = {"wordpiece": 32, "bpe": 261, "unigram": 33}
"""Numbers of entries that hold the special tokens and the smallest alphabet."""


def sample(sentences: Iterable[str], seed: int, limit: int) -> list[str]:
    """A uniform sample of the sentences of a stream, in their order. The same seed and stream give the same sample.

    Each sentence draws a number, and those with the smallest are kept.

    Args:
        limit: characters of the sentences, each of which counts as 200 more; about the bytes of memory that they take.
    """
    draw, bound, size = random.Random(seed), 1.0, 0
    kept: list[tuple[float, str]] = []
    for sentence in sentences:
        if (number := draw.random()) < bound:
            kept.append((number, sentence))
            size += len(sentence) + _ENTRY
        while size > limit and len(kept) > 1:
            bound *= 0.95
            kept = [entry for entry in kept if entry[0] < bound]
            size = sum(len(sentence) + _ENTRY for _, sentence in kept)
    return [sentence for _, sentence in kept]


def train_tokenizer(
    kind: TokenizerKind, size: int, lowercase: bool, texts: Sequence[str], keep_accents: bool = False
) -> Tokenizer:
    """A tokenizer with `size` entries, or fewer if the text does not yield as many.

    Args:
        kind: WordPiece as in BERT, byte-level BPE, or Unigram as in SentencePiece.
        size: number of entries, including the special tokens; at least that of `SMALLEST_SIZES`.
        lowercase: whether to lower-case text.
        texts: sentences to train on.
        keep_accents: whether a WordPiece that lower-cases keeps accents, which BERT's removes; the other kinds always do.

    Raises:
        DataError: there is no text.
    """
    if not texts:
        raise DataError(
            "there is no text to train a tokenizer on",
            hint="check the input, and what filters leave out, with: discern prepare INPUT --check",
        )
    if kind == "wordpiece":
        tokenizer = _wordpiece(size, lowercase, lowercase and not keep_accents, texts)
    elif kind == "bpe":
        tokenizer = _bpe(size, lowercase, texts)
    else:
        tokenizer = _unigram(size, lowercase, texts)
    return prepared(tokenizer, f"the trained {kind} tokenizer")


def _wordpiece(size: int, lowercase: bool, strip_accents: bool, texts: Sequence[str]) -> Tokenizer:
    """BERT's WordPiece.

    The library numbers the continuations of the alphabet ("##a") in the order of a hash table and breaks ties between merges
    by those numbers. To be reproducible, a first pass finds the continuations, and the second gets them sorted, as special
    tokens.
    """
    vocabulary: dict[str, int] = {}
    specials, normalizer = _SPECIALS, bert_wordpiece({}, lowercase, strip_accents).normalizer
    alphabet, _ = _alphabet(normalizer, texts, limit=(size - len(_SPECIALS)) // 2)
    for entries in (0, size):
        learner = bert_wordpiece({}, lowercase, strip_accents)
        trainer = trainers.WordPieceTrainer(
            vocab_size=entries,
            special_tokens=specials,
            initial_alphabet=sorted(alphabet),
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        learner.train_from_iterator(texts, trainer)
        vocabulary = learner.get_vocab()
        specials = _SPECIALS + sorted(token for token in vocabulary if token.startswith("##"))
    return bert_wordpiece(vocabulary, lowercase, strip_accents)


def _bpe(size: int, lowercase: bool, texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and decoding restores it. The ids of a word do not depend on its position."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    # Remove the space that was added before the first word.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _unigram(size: int, lowercase: bool, texts: Sequence[str]) -> Tokenizer:
    """Unigram with spaces as in SentencePiece and the end-of-document token of XLNet.

    Differs: the special tokens are [CLS], [SEP], ..., as in every tokenizer trained here, not <cls>, <sep>, ... as in XLNet.
    """
    specials = [*_SPECIALS, END_OF_DOCUMENT]
    tokenizer = Tokenizer(models.Unigram())
    case = [normalizers.Lowercase()] if lowercase else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), *case])
    # Without spaces between words, the sample need not contain the piece that begins every text.
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=specials, unk_token="[UNK]", initial_alphabet=["▁"], show_progress=False
    )
    alphabet, others = _alphabet(tokenizer.normalizer, texts, limit=(size - len(specials)) // 2)
    # As in SentencePiece, no piece mixes scripts, or letters with punctuation. Shorter words also train faster.
    scripts, spaces = pre_tokenizers.UnicodeScripts(), pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([scripts, spaces])
    tokenizer.train_from_iterator((f" {text.translate(others)}" for text in texts), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    scores = reproducible({piece: score for piece, score in pieces if piece not in specials}, alphabet)
    tokenizer.model = models.Unigram([(token, 0.0) for token in specials] + scores, unk_id=1, byte_fallback=False)
    return tokenizer


def reproducible(scores: dict[str, float], alphabet: Mapping[str, int]) -> list[tuple[str, float]]:
    """The pieces of a Unigram model, best first, without what differs between runs of the library.

    The library adds floating-point numbers in the order of a hash table, so scores are rounded. Characters too rare to be
    pieces of their own get the lowest score, raised by 0.0001 each in that order, which also decides between equally frequent
    ones. These scores are assigned again, the highest to the most frequent character.

    Args:
        alphabet: number of occurrences of the characters of the text; normalization may have composed others.
    """
    characters = sorted((piece for piece in scores if len(piece) == 1), key=lambda piece: (alphabet.get(piece, 0), piece))
    highest = min(scores.values()) + 0.0001 * (len(characters) + 1)
    groups = {alphabet.get(piece, piece) for piece in characters if scores[piece] < highest}
    rare = [piece for piece in characters if alphabet.get(piece, piece) in groups]
    scores |= zip(rare, sorted(scores[piece] for piece in rare), strict=True)
    rounded = {piece: round(score, 4) for piece, score in scores.items()}
    return sorted(rounded.items(), key=lambda entry: (-entry[1], entry[0]))


def _alphabet(normalizer: normalizers.Normalizer, texts: Iterable[str], limit: int) -> tuple[dict[str, int], dict[int, str]]:
    """How often the most frequent characters occur after normalization, and a translation table from all others to a space.

    Args:
        limit: number of characters; of equally frequent ones, the first in Unicode order.
    """
    raw = Counter(chain.from_iterable(texts))
    normal = {character: set(normalizer.normalize_str(character)) for character in raw}
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        counts.update({letter: count for letter in normal[character] if not letter.isspace()})
    kept = dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:limit])
    return kept, {ord(character): " " for character in raw if not normal[character] <= kept.keys()}


# Extension by new tokens with new ids; existing ids do not change

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
        ConfigError: this tokenizer cannot be extended, or a word cannot be added.
    """
    whole = json.loads(tokenizer.to_str())
    model, vocabulary = whole["model"], whole["model"]["vocab"]
    new = [form for form in dict.fromkeys(forms) if tokenizer.token_to_id(form) is None]
    if isinstance(tokenizer.model, models.Unigram):
        scores = [score for _, score in vocabulary]
        # An unknown character costs ten more than the rarest piece, in the library and in SentencePiece.
        scores[model["unk_id"]] = min(scores) - 10
        vocabulary += [[form, sum(scores[n] for n in pieces_of(tokenizer, form)) + _UNIGRAM_BONUS] for form in new]
    else:
        # The library numbers tokens outside of the model from the size of its vocabulary, which is about to grow.
        vocabulary |= {token["content"]: token["id"] for token in whole["added_tokens"]}
        entries = _with_merges(tokenizer, model, new) if isinstance(tokenizer.model, models.BPE) else new
        vocabulary |= {entry: number for number, entry in enumerate(entries, vocab_size(tokenizer))}
    extended = prepared(Tokenizer.from_str(json.dumps(whole)), "the extended tokenizer")
    if pieces_of_added(tokenizer, extended) is None:
        raise ConfigError(
            "this tokenizer cannot be extended: it has tokens outside of its model, whose ids would change",
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
    same_rules = all(rules[key] == others[key] for key in _SAME)
    number = vocab_size(after) - vocab_size(before)
    if not (same_rules and old.items() <= new.items() and len(new) - len(old) == number):
        return None
    return [pieces_of(before, token) for token in sorted(new.keys() - old.keys(), key=new.__getitem__)]


def pieces_of(tokenizer: Tokenizer, token: str) -> list[int]:
    """Ids of the pieces of a word that is not a token; [UNK] if the tokenizer cannot spell it or it is too long."""
    found = [piece.id for piece in tokenizer.model.tokenize(token)]
    return found or [special_ids(tokenizer)["unk"]]


def word_form(tokenizer: Tokenizer, word: str) -> str:
    """The form of a word that the model gets: normalized, and with the marker of a word's beginning if there is one.

    Raises:
        ConfigError: the text is not a single word.
    """
    found = word_forms(tokenizer, word)
    if len(found) != 1:
        raise ConfigError(
            f"'{word}' cannot be added as a token: the tokenizer splits it into {len(found)} words ({' '.join(found)})",
            hint="give one word per line, without spaces or punctuation inside, and leave this one out",
        )
    return found[0]


def frequent_splits(counts: Mapping[str, int], tokenizer: Tokenizer, number: int) -> list[str]:
    """The words for which a dedicated token saves the most tokens: occurrences times the number of pieces beyond the first.

    In a word that the tokenizer cannot spell, each character counts as a piece. Words without a letter and words
    that occur fewer than three times are left out. Ties are sorted by their characters.

    Args:
        counts: number of occurrences of each word, in the form that the model gets.
        number: maximum number of words.
    """
    unknown = special_ids(tokenizer)["unk"]
    is_byte_level = isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    saved: dict[str, int] = {}
    for form, count in counts.items():
        if count < _FEWEST or tokenizer.token_to_id(form) is not None:
            continue
        text = decoders.ByteLevel().decode([form]) if is_byte_level else form
        pieces = pieces_of(tokenizer, form)
        length = max(len(text), 2) if unknown in pieces else len(pieces)
        if length > 1 and any(letter.isalpha() for letter in text):
            saved[form] = count * (length - 1)
    return sorted(saved, key=lambda form: (-saved[form], form))[:number]
