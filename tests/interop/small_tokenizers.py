"""Small tokenizers of every kind, trained in a moment, and text that is hard on them."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece, prepared

CORPUS = [
    "The chef cooked the meal, and Café Zürich's naïve guests ate 3,141 purple elephants.",
    "hello world, double  spaces and\ttabs; don't stop me now!",
    "中文字符 テスト 한국어 ελληνικά русский",
    "Straße İstanbul ﬁancée coöperate 1,000,000.50",
] * 20

HARD = [
    "The chef cooked the meal, and Café Zürich's naïve guests ate 3,141 purple elephants.",
    "e\u0301clair vs éclair; ﬁancé ﬁnds İstanbul STRASSE Straße",
    "中文 字符,テスト。한국어 mixed中文text",
    "😀👩‍👩‍👧 emoji 🏳️‍🌈!",
    "3,141.59 $1,000,000.00 −5 ½ x²",
    "double  spaces   and\ttabs\n newline\r\n ",
    " leading and trailing ",
    "a literal [MASK] and [SEP] in text[MASK]",
    "[MASK]",
    "<s> </s> ▁ ## ##ing [unused1] Ġ",
    "zero\u200bwidth \ufeff bom \u00a0nbsp \u00ad soft",
    "don't won't it's O'Neill's",
    "a" * 300,
    "x",
]


def wordpiece(*, lowercase: bool) -> Tokenizer:
    """As BERT's, over a vocabulary learned here."""
    seed = bert_wordpiece({token: number for number, token in enumerate(SPECIAL_TOKENS.values())}, lowercase)
    seed.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=220, special_tokens=_special(), show_progress=False))
    return seed


def bpe() -> Tokenizer:
    """On bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=_special(), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """As SentencePiece's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=_special(), unk_token="[UNK]", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece, lower-cased": lambda: wordpiece(lowercase=True),
    "wordpiece, cased": lambda: wordpiece(lowercase=False),
    "bpe": bpe,
    "unigram": unigram,
}


def small_tokenizer(kind: str) -> Tokenizer:
    """One of `KINDS`, framed and checked as discern's are."""
    return prepared(KINDS[kind](), kind)


def _special() -> list[str]:
    return list(SPECIAL_TOKENS.values())
