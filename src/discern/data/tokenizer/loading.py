"""Loads tokenizers, and tells which of their tokens are the special ones.

The special tokens are recognized by the names of BERT, XLNet, Gemma or RoBERTa, unless the files beside a tokenizer state others.
The post-processor records names that differ from BERT's, so that a tokenizer.json without these files keeps them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from discern.data.tokenizer.sentencepiece import from_sentencepiece
from discern.errors import ConfigError, DataError
from discern.parsing import json_value
from discern.storage.checksums import read_object, verify

if TYPE_CHECKING:
    import discern.types

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
END_OF_DOCUMENT = "<eod>"  # as in XLNet's vocabulary; of tokenizers trained here, only Unigram ones have it
TOKENIZER_NAMES = "tokenizer.json", "vocab.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"
"""Files that hold a tokenizer, in the order in which a folder is searched for them."""

_OTHER_NAMES = {"cls": ("<cls>", "<bos>", "<s>"), "sep": ("<sep>", "<eos>", "</s>")}
_INSTEAD = {"cls": "bos", "sep": "eos"}
"""Roles by which tokenizers of language models name the first and the last token of a text."""
_BESIDE = "special_tokens_map.json", "tokenizer_config.json"
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
    with the special tokens that the files beside it name, such as `<s>` and `</s>`. A "[MASK]" written in the text is ordinary
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
    settings: dict[str, Any] = {}
    for beside in (file.parent / name for name in _BESIDE):
        if beside.is_file():
            settings |= read_object(beside, hint="copy it again from where the model came from, or remove it")

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

    contradicted = []
    if lowercase not in (None, lowercases(tokenizer)):
        contradicted.append("--lowercase" if lowercase else "--cased")
    if keep_accents and strips_accents(tokenizer):
        contradicted.append("--keep-accents")
    if contradicted:
        raise ConfigError(
            f"{file} contradicts {contradicted[0]}",
            hint=f"leave out {contradicted[0]}; only a vocab.txt leaves the normalization open",
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
    if strips is None:
        # A tokenizer that strips accents never produces entries with them.
        accented = stated is None and any(normalize("NFD", entry) != entry for entry in vocabulary)
        strips = lowercase and not accented
    return bert_wordpiece(
        vocabulary, lowercase, strips and not keep_accents, chinese=settings.get("tokenize_chinese_chars") is not False
    )


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
    strip = lowercase if strip_accents is None else strip_accents
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip, lowercase=lowercase
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
    missing = [SPECIAL_TOKENS[role] for role, token in names.items() if tokenizer.token_to_id(token) is None]
    if missing:
        raise DataError(
            f"{name}: the vocabulary has no {' and no '.join(missing)}; discern needs {' '.join(SPECIAL_TOKENS.values())}, or "
            "other tokens that tokenizer_config.json names for these roles",
            hint=f"add to the vocabulary, one token per line: {' '.join(missing)}; or {_ADVICE}",
        )
    if len(set(names.values())) < len(names):
        raise DataError(
            f"{name}: one token has two roles, as in language models: {names}; discern needs another token for each role",
            hint="use the tokenizer of a model that fills in masked words, such as BERT or ELECTRA",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    if names != SPECIAL_TOKENS or not _frames_correctly(tokenizer):
        tokenizer.post_processor = framing(tokenizer, names=names)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _frames_correctly(tokenizer: Tokenizer) -> bool:
    ids = special_ids(tokenizer)
    single, pair = tokenizer.encode("a"), tokenizer.encode("a", "b")
    a, b = (tokenizer.encode(text, add_special_tokens=False).ids for text in "ab")
    left, right = [ids["cls"], *a, ids["sep"]], [*b, ids["sep"]]
    return single.ids == left and pair.ids == left + right and pair.type_ids == [0] * len(left) + [1] * len(right)


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
        recorded = json.loads(tokenizer.post_processor.__getstate__()).get("special_tokens", {})
        if recorded.keys() >= set(SPECIAL_TOKENS.values()):
            return {role: recorded[token]["tokens"][0] for role, token in SPECIAL_TOKENS.items()}
    names = {}
    for role, usual in SPECIAL_TOKENS.items():
        stated = [(settings or {}).get(f"{each}_token") for each in (role, _INSTEAD.get(role))]
        others = _OTHER_NAMES.get(role, (f"<{role}>",))
        candidates = [*(each["content"] if isinstance(each, dict) else each for each in stated), usual, *others]
        present = (each for each in candidates if isinstance(each, str) and tokenizer.token_to_id(each) is not None)
        names[role] = next(present, usual)
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
    return _treats_alike(tokenizer, "A", "a")


def strips_accents(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer removes accents from text."""
    return _treats_alike(tokenizer, "é", "e")


def _treats_alike(tokenizer: Tokenizer, *texts: str) -> bool:
    return tokenizer.normalizer is not None and len(set(map(tokenizer.normalizer.normalize_str, texts))) == 1


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
