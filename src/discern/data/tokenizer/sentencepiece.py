"""Reads models of SentencePiece, without its library.

Reference: SentencePiece 0.2.3, sentencepiece_model.proto, normalizer.cc, unigram_model.cc, bpe_model.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from re import escape
from struct import unpack
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC, Precompiled, Replace, Sequence

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = _KINDS = range(1, 7)
_UNIGRAM, _BPE = range(1, 3)


def from_sentencepiece(content: bytes) -> Tokenizer:
    """The tokenizer that gives the same ids as a model of SentencePiece.

    Ids differ where two ways to split a text are equally likely, which SentencePiece decides by rounding; where NFKC changes a
    character before a mark that stays apart, as in "½" with an accent; where a text spells a special token, all of whose letters
    are unknown; and in BPE where a user-defined piece is the whole text.

    Raises:
        ValueError: the model is incomplete, or is of another kind.
    """
    fields = list(protobuf_fields(content))
    training, rules = (dict(protobuf_fields(dict(fields).get(number, b""))) for number in (2, 3))
    algorithm, fallback = training.get(3, _UNIGRAM), bool(training.get(35))
    if not rules or algorithm > _BPE or training.get(24):
        raise ValueError("it is incomplete, neither Unigram nor BPE, or marks where words end")
    read = (dict(protobuf_fields(value)) for number, value in fields if number == 1)
    pieces = [(piece[1].decode(), *unpack("<f", piece[2]), piece.get(3, _NORMAL)) for piece in read]
    ids = {text: number for number, (text, *_) in enumerate(pieces)}
    named = {kind: [text for text, _, each in pieces if each == kind] for kind in _KINDS}
    (unknown,), own = named[_UNKNOWN], named[_USER_DEFINED] if algorithm == _BPE else []
    special = [unknown, *named[_CONTROL]]
    # Pieces have a space inside if texts were not split at spaces in training.
    spaces = pre_tokenizers.Metaspace("▁", "never", all("▁" not in text[1:] for text in ids))
    if algorithm == _BPE:
        found = sorted(
            (-score, ids[left], ids[right], (left, right))
            for text, score, kind in pieces
            for left, right in ((text[:at], text[at:]) for at in range(1, len(text)))
            if kind == _NORMAL and left in ids and right in ids
        )
        merges = [pair for *_, pair in found]
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
        tokenizer.pre_tokenizer = spaces
    else:
        scores = [(text, 0.1 * (len(text.encode()) - 1) if kind == _USER_DEFINED else score) for text, score, kind in pieces]
        # The library reads numbers of more than 15 digits back with another last bit, and the fingerprint would change.
        scores = [(text, round(score, 10)) for text, score in scores]
        tokenizer = Tokenizer(models.Unigram(scores, ids[unknown], fallback))
        # Text must not spell special tokens and bytes, which this model finds like any piece.
        names = Regex("|".join(f"{escape(text[0])}(?={escape(text[1:])})" for text in special + named[_BYTE]))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(names, "merged_with_previous"), spaces])
    steps: list[Any] = [Replace(" ", "▁")]
    if rules.get(4, 1):
        steps.insert(0, Replace(Regex(r"\A +|[ ▁]+\z| +(?= )"), ""))
    if rules.get(2):
        # The library applies the rules to single characters, or nearly so.
        steps = [NFC(), Precompiled(rules[2]), NFC(), *steps]
    if rules.get(3, 1):
        # Not where a user-defined piece is the whole text: the library finds it in others only so.
        steps.append(Replace(Regex(rf"\A(?!(?:{'|'.join(map(escape, own))})\z)"), "▁"))
    tokenizer.normalizer = normalizer = Sequence(steps)
    spaced, added = decoders.Metaspace(prepend_scheme="never"), decoders.Strip(" ", rules.get(3, 1), 0)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), spaced, decoders.Fuse(), added])
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, normalized=normalizer.normalize_str(text) == text) for text in own])
    return tokenizer


def protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a message of protocol buffers."""
    rest = BytesIO(message)
    while key := read_varint(rest):
        size = 4 if key % 8 == 5 else read_varint(rest)
        yield key >> 3, unpack(f"{size}s", rest.read(size))[0] if key % 8 else size


def read_varint(rest: BytesIO) -> int:
    """The next number, 0 at the end."""
    (byte,) = rest.read(1) or b"\0"
    return byte if byte < 128 else byte - 128 + (read_varint(rest) << 7)
