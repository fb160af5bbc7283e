"""Small tokenizers of every kind, trained in a moment, and text that is hard on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from discern.data.tokenizer import SPECIAL_TOKENS, prepared
from discern.data.tokenizer.training import train_tokenizer

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
    """As BERT's, over a vocabulary learned here. The library's own training would number its entries at random."""
    return train_tokenizer("wordpiece", 220, lowercase, CORPUS)


def bpe() -> Tokenizer:
    """On bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
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


GEMMA_NAMES = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>", "mask": "<mask>"}
ROBERTA_NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def gemma() -> Tokenizer:
    """As Gemma's, which mmBERT has: BPE with bytes for what is unknown, and other names of the special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    # Its vocabulary has RoBERTa's names as well, as tags of HTML.
    special = [*GEMMA_NAMES.values(), "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0 <eos>:0",
        pair="<bos>:0 $A:0 <eos>:0 $B:1 <eos>:1",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    return tokenizer


def roberta() -> Tokenizer:
    """As RoBERTa's: BPE on bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = list(ROBERTA_NAMES.values()), sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def written(folder: Path, tokenizer: Tokenizer, name: str = "tokenizer_config.json", **settings: Any) -> Path:
    """The folder, with the file of the tokenizer and one with these settings, if there are any."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / name).write_text(json.dumps(settings))
    return folder


def stated(names: Mapping[str, str]) -> dict[str, Any]:
    """The settings that name the tokens of these roles."""
    return {f"{role}_token": token for role, token in names.items()}


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece, lower-cased": lambda: wordpiece(lowercase=True),
    "wordpiece, cased": lambda: wordpiece(lowercase=False),
    "bpe": bpe,
    "unigram": unigram,
}


def small_tokenizer(kind: str) -> Tokenizer:
    """One of `KINDS`, framed and checked as discern's are."""
    return prepared(KINDS[kind](), kind)


def reading_special(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that reads special tokens in a text as such, and the mask with the spaces before it, as transformers does."""
    reading = Tokenizer.from_str(tokenizer.to_str())
    reading.add_special_tokens([AddedToken(SPECIAL_TOKENS["mask"], special=True, normalized=False, lstrip=True)])
    reading.encode_special_tokens = False
    return reading


def _special() -> list[str]:
    return list(SPECIAL_TOKENS.values())
