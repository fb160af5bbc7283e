"""Loads tokenizers, and tells which of their tokens are the special ones.

The special tokens are recognized by the names of BERT, XLNet, Gemma or RoBERTa, unless tokenizer_config.json states others.
The post-processor records names that differ from BERT's, so that a tokenizer.json without that file keeps them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from re import escape
from struct import unpack
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from discern.errors import ConfigError, DataError
from discern.parsing import json_value
from discern.storage.checksums import read_json, verify

if TYPE_CHECKING:
    import discern.types

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
END_OF_DOCUMENT = "<eod>"  # as in XLNet's vocabulary; of tokenizers trained here, only Unigram ones have it
TOKENIZER_NAMES = "tokenizer.json", "vocab.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"
"""Files that hold a tokenizer, in the order in which a folder is searched for them."""

_OTHER_NAMES = {"cls": ("<cls>", "<bos>", "<s>"), "sep": ("<sep>", "<eos>", "</s>")}
_INSTEAD = {"cls": "bos", "sep": "eos"}
"""Roles by which tokenizers of language models name the first and the last token of a text."""
_SINGLE, _PAIR = "{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"
_DECIDES_IDS = "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model"
_ADVICE = (
    "give the tokenizer.json of the model; where there is none, this writes it: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER); "
    "or train a tokenizer on your text: --train-tokenizer wordpiece --vocab-size 8000"
)


def load_tokenizer(path: Path, lowercase: bool | None = None, keep_accents: bool = False) -> Tokenizer:
    """The tokenizer in a tokenizer.json, a vocab.txt of BERT's kind, a .model of SentencePiece, or a folder that holds one.

    The tokenizer is set up for use: no truncation, no padding, no dropout, and input framed as `[CLS] A [SEP] B [SEP]`, or
    with the special tokens that tokenizer_config.json names, such as `<s>` and `</s>`. A "[MASK]" written in the text is ordinary
    text.

    Args:
        path: file or folder.
        lowercase: whether to lower-case, for a vocab.txt. If None, the settings of the model or the entries decide.
        keep_accents: whether to keep accents in any case, for a vocab.txt.

    Raises:
        DataError: the path does not exist, is not a tokenizer, or lacks one of the special tokens.
        ConfigError: `lowercase` or `keep_accents` contradicts a tokenizer.json or a model of SentencePiece.
    """
    if not path.exists():
        raise DataError(f"tokenizer {path} does not exist", hint=_ADVICE)
    file = next((path / name for name in TOKENIZER_NAMES if (path / name).is_file()), path)
    if file.is_dir():
        raise DataError(f"tokenizer folder {path} has neither {' nor '.join(TOKENIZER_NAMES)}", hint=_ADVICE)
    content = file.read_bytes()
    verify(file, content)
    beside = file.parent / "tokenizer_config.json"
    hint = "copy it again from where the model came from, or remove it"
    settings = read_json(beside, hint=hint) if beside.is_file() else {}

    with naming_panics(str(file)):
        try:
            if file.suffix == ".model":
                tokenizer = from_sentencepiece(content)
                # Roles without a piece get one after the others.
                tokenizer.add_special_tokens(list(special_names(tokenizer, settings).values()))
            elif (text := content.decode("utf-8-sig")).lstrip().startswith("{"):
                tokenizer = Tokenizer.from_str(text)
            else:
                tokenizer = _from_entries(text, settings, lowercase, keep_accents)
        except Exception as problem:  # the library raises bare Exception
            raise DataError(
                f"{file} is not a tokenizer.json, a vocab.txt in UTF-8 or a .model of SentencePiece: {problem}", hint=_ADVICE
            ) from problem

    if lowercase not in (None, lowercases(tokenizer)) or (keep_accents and strips_accents(tokenizer)):
        raise ConfigError(
            f"the normalization of {file} contradicts --lowercase, --cased or --keep-accents",
            hint="leave them out; only a vocab.txt leaves the normalization open",
        )
    return prepared(tokenizer, str(file), settings)


def _from_entries(text: str, settings: Mapping[str, Any], lowercase: bool | None, keep_accents: bool) -> Tokenizer:
    """The tokenizer of a vocab.txt. As in BERT, the last of equal entries counts."""
    vocabulary = {entry.strip("\r"): number for number, entry in enumerate(text.rstrip().split("\n"))}
    stated, strips = settings.get("do_lower_case"), settings.get("strip_accents")
    if lowercase is None:
        # Special tokens ([CLS], <S>, [unused1]) are upper-case in every vocabulary.
        cased = any(entry != entry.lower() for entry in vocabulary if entry[:1] not in ("[", "<"))
        lowercase = not cased if stated is None else stated
    if strips is None:  # a tokenizer that strips accents has no entries with accents
        strips = lowercase and (stated is not None or all(normalize("NFD", entry) == entry for entry in vocabulary))
    chinese = settings.get("tokenize_chinese_chars", True)
    return bert_wordpiece(vocabulary, lowercase, strips and not keep_accents, chinese)


def bert_wordpiece(
    vocabulary: dict[str, int], lowercase: bool, strip_accents: bool | None = None, chinese: bool = True
) -> Tokenizer:
    """BERT's tokenizer over a vocabulary.

    Args:
        vocabulary: token to id.
        lowercase: whether text is lower-cased.
        strip_accents: whether accents are removed; if None, only when lower-casing, as in BERT.
        chinese: whether each CJK ideograph is a word.

    Words of more than 200 characters become [UNK], as in the released ELECTRA code.
    """
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=200))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS.values() if token in vocabulary])
    return tokenizer


def prepared(tokenizer: Tokenizer, name: str, settings: Mapping[str, Any] | None = None) -> Tokenizer:
    """The same tokenizer, checked and set up for use.

    Args:
        name: name of the tokenizer, for messages.
        settings: what tokenizer_config.json states, see `special_names`.

    Raises:
        DataError: a special token is missing, or one token has two roles.
    """
    names = special_names(tokenizer, settings)
    uses = Counter(names.values())
    missing = [SPECIAL_TOKENS[role] for role, each in names.items() if tokenizer.token_to_id(each) is None or uses[each] > 1]
    if missing:
        raise DataError(
            f"{name}: the vocabulary has no {' and no '.join(missing)}; discern needs {' '.join(SPECIAL_TOKENS.values())}, or "
            f"another token for each of these roles that tokenizer_config.json names; found are {names}",
            hint=f"add to the vocabulary, one token per line: {' '.join(missing)}; or {_ADVICE}",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    tokenizer.post_processor = framing(tokenizer, names=names)
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        trimming = processors.ByteLevel(trim_offsets=True)
        tokenizer.post_processor = processors.Sequence([trimming, tokenizer.post_processor])
    tokenizer.encode_special_tokens = True
    return tokenizer


def framing(
    tokenizer: Tokenizer, single: str = _SINGLE, pair: str = _PAIR, names: Mapping[str, str] | None = None
) -> processors.TemplateProcessing:
    """A post-processor that frames texts, and records the special tokens if their names are not BERT's.

    Args:
        single: how a text is framed, with {cls} and {sep} in place of the tokens; by default `[CLS] A [SEP]`.
        pair: how two texts are framed; by default `[CLS] A [SEP] B [SEP]`, with type ids 0 and 1.
        names: the special tokens by role; None: those of the tokenizer.
    """
    names = names or special_names(tokenizer)
    # The library keeps tokens that the templates do not use. Their ids in the templates are the roles, in BERT's spelling.
    roles = ("cls", "sep") if names == SPECIAL_TOKENS else tuple(SPECIAL_TOKENS)
    return processors.TemplateProcessing(
        single=single.format(**SPECIAL_TOKENS),
        pair=pair.format(**SPECIAL_TOKENS),
        special_tokens=[
            {"id": SPECIAL_TOKENS[role], "ids": [tokenizer.token_to_id(names[role])], "tokens": [names[role]]} for role in roles
        ],
    )


def special_names(tokenizer: Tokenizer, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The special tokens by role: as `framing` recorded them, as stated, or by their usual names; BERT's if there is none.

    Args:
        settings: what tokenizer_config.json states: "mask_token", ...; the tokens that begin and end a text stand in for cls
            and sep.
    """
    if tokenizer.post_processor is not None:
        state = json.loads(tokenizer.post_processor.__getstate__())
        recorded = state.get("processors", [state])[-1].get("special_tokens", {})
        if recorded.keys() >= set(SPECIAL_TOKENS.values()):
            return {role: recorded[token]["tokens"][0] for role, token in SPECIAL_TOKENS.items()}
    names = {}
    stated = {key: value.get("content") if isinstance(value, dict) else value for key, value in (settings or {}).items() if value}
    for role, usual in SPECIAL_TOKENS.items():
        own, instead = (stated.get(f"{each}_token", usual) for each in (role, _INSTEAD.get(role)))
        candidates = (own, usual, instead, *_OTHER_NAMES.get(role, (f"<{role}>",)))
        names[role] = next((each for each in candidates if tokenizer.token_to_id(each) is not None), usual)
    return names


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens by role: pad, unk, cls, sep, mask, and eod if the vocabulary has an end-of-document token."""
    names = special_names(tokenizer) | {"eod": END_OF_DOCUMENT}
    ids = {role: tokenizer.token_to_id(token) for role, token in names.items()}
    return {role: int(number) for role, number in ids.items() if number is not None}


def special_tokens(tokenizer: Tokenizer) -> discern.types.SpecialTokens:
    """Ids of the special tokens."""
    from discern.types import SpecialTokens  # imports torch

    return SpecialTokens(**special_ids(tokenizer))


def vocab_size(tokenizer: Tokenizer) -> int:
    """Number of rows that an embedding table needs: the largest id plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def lowercases(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer lower-cases text."""
    return normalized(tokenizer, "A") == normalized(tokenizer, "a")


def strips_accents(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer removes accents from text."""
    return normalized(tokenizer, "é") == normalized(tokenizer, "e")


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """A text as the tokenizer normalizes it."""
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of everything that decides the ids: vocabulary, merges, normalization, splitting and framing, not the decoder."""
    whole = json_value(tokenizer.to_str())
    decisive = {key: whole.get(key) for key in _DECIDES_IDS}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@contextmanager
def naming_panics(name: str) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is not an `Exception`, into a DataError that names the tokenizer."""
    try:
        yield
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":  # it cannot be imported from pyo3
            raise
        raise DataError(
            f"{name}: the tokenizers library cannot use it: {problem}",
            hint="a pattern or a table in tokenizer.json is damaged, or takes too long on this text; use another tokenizer",
        ) from problem


# Models of SentencePiece

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = _KINDS = range(1, 7)
_UNIGRAM, _BPE = range(1, 3)


def from_sentencepiece(content: bytes) -> Tokenizer:
    """The tokenizer that gives the same ids as a model of SentencePiece, without its library.

    Reference: SentencePiece 0.2.3, sentencepiece_model.proto, normalizer.cc, unigram_model.cc, bpe_model.cc.

    Differs: where two ways to split a text are equally likely, which SentencePiece decides by rounding; where NFKC changes a
    character before a mark that stays apart, as in "½" with an accent; where a text spells a special token or a byte; and in BPE
    where a user-defined piece is the whole text.

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
    if algorithm == _BPE:
        merges = sorted(
            (-score, ids[left], ids[right], (left, right))
            for text, score, kind in pieces
            for left, right in ((text[:at], text[at:]) for at in range(1, len(text)))
            if kind == _NORMAL and left in ids and right in ids
        )
        model = models.BPE(ids, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
        tokenizer = Tokenizer(model)
    else:
        # The library reads numbers of more than 15 digits back with another last bit, and the fingerprint would change.
        scores = [
            (text, round(0.1 * (len(text.encode()) - 1) if kind == _USER_DEFINED else score, 10)) for text, score, kind in pieces
        ]
        tokenizer = Tokenizer(models.Unigram(scores, ids[unknown], fallback))
    # Pieces have a space inside if texts were not split at spaces in training.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", all("▁" not in text[1:] for text in ids))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if rules.get(4, 1):
        steps.insert(0, normalizers.Replace(Regex(r"\A +|[ ▁]+\z| +(?= )"), ""))
    if rules.get(2):
        # The library applies the rules to single characters, or nearly so.
        steps = [normalizers.NFC(), normalizers.Precompiled(rules[2]), normalizers.NFC(), *steps]
    if rules.get(3, 1):
        # Not where a user-defined piece is the whole text: the library finds it in others only so.
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{'|'.join(map(escape, own))})\z)"), "▁"))
    tokenizer.normalizer = normalizer = normalizers.Sequence(steps)
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
