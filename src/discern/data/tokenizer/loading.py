"""Which tokens of a vocabulary are the special ones.

They are recognized by the names of BERT or of XLNet. Of a tokenizer with other names, the files beside it say which token has
which role, and its post-processor then records them, so that a tokenizer.json without these files keeps them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
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
_ANGLE_NAMES = {role: token.lower().replace("[", "<").replace("]", ">") for role, token in SPECIAL_TOKENS.items()}
_STATED_IN = ("tokenizer_config.json", "special_tokens_map.json")
TRAIN_HINT = "or train one on your text: --train-tokenizer wordpiece --vocab-size 8000"
_INSTEAD = {"cls": "bos", "sep": "eos"}
"""Roles by which tokenizers of language models name the first and the last token of a text."""


def special_names(tokenizer: Tokenizer) -> Mapping[str, str]:
    """The special tokens by role: in BERT's spelling, in XLNet's if the vocabulary has only those, or as recorded."""
    if _has(tokenizer, SPECIAL_TOKENS):
        return SPECIAL_TOKENS
    if tokenizer.token_to_id(SPECIAL_TOKENS["cls"]) is None and _has(tokenizer, _ANGLE_NAMES):
        return _ANGLE_NAMES
    return SPECIAL_TOKENS | _recorded(tokenizer)


def framing(tokenizer: Tokenizer, single: str, pair: str) -> processors.TemplateProcessing:
    """A post-processor that frames texts, and records the special tokens if their names are neither BERT's nor XLNet's.

    Args:
        single: how a text is framed, with {cls} and {sep} in place of the tokens: "{cls}:0 $A:0 {sep}:0".
        pair: how two texts are framed.
    """
    return _framing(tokenizer, special_names(tokenizer), single, pair)


def record_names(tokenizer: Tokenizer, file: Path, single: str, pair: str, *, extend: bool = False) -> None:
    """Find the special tokens if their names are neither BERT's nor XLNet's, and record them in the post-processor, in place.

    Roles are taken from tokenizer_config.json and special_tokens_map.json, otherwise from the present post-processor, the model
    and the usual names. The tokens that begin and end a text stand in for cls and sep.

    Args:
        file: the tokenizer.json, in whose folder the other files are.
        single: how a text is framed, see `framing`.
        pair: how two texts are framed.
        extend: add a token for a role that has none, after all others.

    Raises:
        DataError: a file is damaged, a role has no token, or one token has two roles.
    """
    if _has(tokenizer, special_names(tokenizer)):
        return
    names: dict[str, str] = {}
    usual = SPECIAL_TOKENS, _ANGLE_NAMES, {"bos": "<s>", "eos": "</s>"}
    for stated in (*(_stated(file.parent / name) for name in _STATED_IN), _implied(tokenizer), *usual):
        known = {role: token for role, token in stated.items() if tokenizer.token_to_id(token) is not None}
        found = {role: known.get(role, known.get(_INSTEAD.get(role, role))) for role in SPECIAL_TOKENS}
        names = {role: token for role, token in found.items() if token is not None} | names
    missing = [token for role, token in SPECIAL_TOKENS.items() if role not in names]
    if extend:
        tokenizer.add_special_tokens(missing)
        names = SPECIAL_TOKENS | names
    elif missing:
        raise lacking(missing, str(file), f'name {_them(missing)} in {_STATED_IN[0]}, as in "mask_token": "<mask>"')
    for role, other in combinations(names, 2):
        if names[role] == names[other]:
            raise DataError(
                f"{file}: {names[role]} is both the {role} and the {other} token, as in language models; discern needs another "
                "token for each role",
                hint="use the tokenizer of a model that fills in masked words, such as BERT or ELECTRA",
            )
    tokenizer.post_processor = _framing(tokenizer, names, single, pair)


def lacking(missing: Sequence[str], name: str, advice: str = "") -> DataError:
    """The error that a tokenizer has no token for some roles.

    Args:
        missing: the roles, in BERT's spelling.
        name: name of the tokenizer.
        advice: what to do; by default to extend a vocab.txt.
    """
    return DataError(
        f"{name}: the vocabulary has no {' and no '.join(missing)}; discern needs {' '.join(SPECIAL_TOKENS.values())}, or other "
        f"tokens that {_STATED_IN[0]} names for these roles",
        hint=f"{advice or f'add {_them(missing)} to the vocabulary, one token per line'}, {TRAIN_HINT}",
    )


def _them(tokens: Sequence[str]) -> str:
    return "it" if len(tokens) == 1 else "them"


def _framing(tokenizer: Tokenizer, names: Mapping[str, str], single: str, pair: str) -> processors.TemplateProcessing:
    known = names in (SPECIAL_TOKENS, _ANGLE_NAMES)
    # The library keeps tokens that the templates do not use. Their ids in the templates are then the roles, in BERT's spelling.
    written = names if known else SPECIAL_TOKENS
    roles = ("cls", "sep") if known else tuple(SPECIAL_TOKENS)
    return processors.TemplateProcessing(
        single=single.format(**written),
        pair=pair.format(**written),
        special_tokens=[
            {"id": written[role], "ids": [tokenizer.token_to_id(names[role])], "tokens": [names[role]]} for role in roles
        ],
    )


def _has(tokenizer: Tokenizer, names: Mapping[str, str]) -> bool:
    return all(tokenizer.token_to_id(token) is not None for token in names.values())


def _recorded(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that `framing` recorded, by role."""
    found: dict[str, str] = {}
    for step in _steps(tokenizer):
        tokens = step.get("special_tokens", {})
        if SPECIAL_TOKENS["mask"] in tokens:
            found |= {role: tokens[token]["tokens"][0] for role, token in SPECIAL_TOKENS.items() if token in tokens}
    return found


def _implied(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that follow from how the tokenizer frames a text, and from its model."""
    found: dict[str, str] = {}
    for step in _steps(tokenizer):
        if "cls" in step and "sep" in step:  # those of BERT and RoBERTa
            found |= {role: step[role][0] for role in ("cls", "sep")}
        if step.get("type") == "TemplateProcessing":
            parts = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in step["single"]]
            edges = {"cls": parts[0], "sep": parts[-1]} if parts else {}
            found |= {role: token for role, token in edges.items() if token is not None}
    unknown = getattr(tokenizer.model, "unk_token", None)
    return found if unknown is None else found | {"unk": unknown}


def _steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The post-processor as the library writes it, or those that it is a sequence of."""
    if tokenizer.post_processor is not None:
        whole = json.loads(tokenizer.post_processor.__getstate__())
        yield from whole["processors"] if whole["type"] == "Sequence" else [whole]


def _stated(path: Path) -> dict[str, str]:
    """The special tokens that a file of transformers names, by role."""
    if not path.is_file():
        return {}
    settings = read_object(path, hint="copy it again from where the model came from, or remove it")
    found = {key.removesuffix("_token"): value for key, value in settings.items() if key.endswith("_token")}
    tokens = {role: value.get("content") if isinstance(value, dict) else value for role, value in found.items()}
    return {role: token for role, token in tokens.items() if isinstance(token, str)}


_FRAME = "{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"
END_OF_DOCUMENT = "<eod>"  # as in XLNet's vocabulary; of tokenizers trained here, only Unigram ones have it
PANIC = "PanicException"
"""Name of the class that Rust code raises when it panics. It cannot be imported from pyo3."""
_DECIDES_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
_CONVERT = (
    "give the tokenizer.json of the same model; where there is none, this writes it: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
)
# What models come with that is no tokenizer by itself, by how the file begins.
_OTHER_FILES = {
    rb"\s*\Z": ("empty", "copy it again from where the model came from"),
    rb"[^\t\n]+\t-?\d": ("a SentencePiece vocabulary (word, tab, score)", _CONVERT),
    rb"#version|\S+ \S+\r?\n\S+ \S+\r?\n": ("pairs of words, such as the merges.txt that is a part of a BPE", _CONVERT),
    rb'\s*\{(?!.*"model"\s*:\s*\{)': ("JSON without a model, such as vocab.json or tokenizer_config.json", _CONVERT),
}

_SENTENCEPIECE = rb"\n.{1,2}\n.[^\n\x15]+\x15"  # the first piece, and the mark of its score
TOKENIZER_NAMES = "tokenizer.json", "vocab.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"
"""Files that hold a tokenizer, in the order in which a folder is searched for them."""


def load_tokenizer(path: Path, lowercase: bool | None = None) -> Tokenizer:
    """The tokenizer in a tokenizer.json, a vocab.txt of BERT's kind, a model of SentencePiece, or a folder that holds one.

    The tokenizer is set up for use: no truncation, no padding, no dropout, and input framed as `[CLS] A [SEP] B [SEP]`, or
    with the special tokens that the files beside it name, such as `<s>` and `</s>`. A "[MASK]" written in the text is ordinary
    text.

    Args:
        path: file or folder.
        lowercase: whether to lower-case, for a vocab.txt. If None, the settings of the model or the entries decide.

    Raises:
        DataError: the path does not exist, is not a tokenizer, or lacks one of the special tokens.
        ConfigError: `lowercase` contradicts a tokenizer.json or a model of SentencePiece.
    """
    file = _tokenizer_file(path)
    content = _read(file)
    if isinstance(content, bytes) or file.suffix == ".json" or content.lstrip().startswith("{"):
        tokenizer = _parsed(content, file)
        record_names(tokenizer, file, *_FRAME, extend=isinstance(content, bytes))
        if lowercase is not None and lowercases(tokenizer) != lowercase:
            found, asked = ("lower-cases", "--cased") if not lowercase else ("keeps case", "--lowercase")
            raise ConfigError(
                f"{file} {found}, which contradicts {asked}",
                hint=f"leave out {asked}; only a vocab.txt leaves the normalization open",
            )
    else:
        tokenizer = _from_vocabulary(content, file, lowercase)
    return prepared(tokenizer, str(file))


def prepared(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """The same tokenizer, checked and set up for use.

    Args:
        name: name of the tokenizer, for messages.

    Raises:
        DataError: a special token is missing.
    """
    special_ids(tokenizer, name)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    with naming_panics(name):
        if not _frames_correctly(tokenizer):
            tokenizer.post_processor = frame(tokenizer)
    tokenizer.encode_special_tokens = True
    if tokenizer.decoder is None:
        tokenizer.decoder = _decoder(tokenizer)
    return tokenizer


def _decoder(tokenizer: Tokenizer) -> decoders.Decoder | None:
    """The decoder that undoes the marks of a vocabulary; None if it has none that are known."""
    model, splitter = tokenizer.model, tokenizer.pre_tokenizer
    if isinstance(model, models.WordPiece):
        return decoders.WordPiece(prefix=model.continuing_subword_prefix)
    if isinstance(splitter, pre_tokenizers.ByteLevel):
        return decoders.ByteLevel()
    if isinstance(splitter, pre_tokenizers.Metaspace):
        return decoders.Metaspace(splitter.replacement, splitter.prepend_scheme, splitter.split)
    suffix = getattr(model, "end_of_word_suffix", None)
    return decoders.BPEDecoder(suffix) if suffix else None


def special_ids(tokenizer: Tokenizer, name: str = "the tokenizer") -> dict[str, int]:
    """Ids of the special tokens by role: pad, unk, cls, sep, mask, and eod if the vocabulary has an end-of-document token.

    Raises:
        DataError: a special token is missing.
    """
    names = special_names(tokenizer)
    ids = {role: tokenizer.token_to_id(token) for role, token in names.items()}
    missing = [SPECIAL_TOKENS[role] for role, number in ids.items() if number is None]
    if missing:
        raise lacking(missing, name)
    ids["eod"] = tokenizer.token_to_id(END_OF_DOCUMENT)
    return {role: int(number) for role, number in ids.items() if number is not None}


def special_tokens(tokenizer: Tokenizer) -> discern.types.SpecialTokens:
    """Ids of the special tokens.

    Raises:
        DataError: a special token is missing.
    """
    from discern.types import SpecialTokens  # imports torch

    return SpecialTokens(**special_ids(tokenizer))


def vocab_size(tokenizer: Tokenizer) -> int:
    """Number of rows that an embedding table needs: the largest id plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def lowercases(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer lower-cases text."""
    normalizer = tokenizer.normalizer
    return normalizer is not None and "a" in normalizer.normalize_str("A")


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of everything that decides the ids: vocabulary, merges, normalization, splitting and framing, not the decoder."""
    whole = json_value(tokenizer.to_str())
    decisive = {key: whole.get(key) for key in _DECIDES_IDS}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def frame(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """The post-processor that frames input as `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with type ids 0 and 1."""
    return framing(tokenizer, *_FRAME)


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


def _tokenizer_file(path: Path) -> Path:
    """The file to read: `path` itself, or the tokenizer in a model folder."""
    if not path.exists():
        raise DataError(
            f"tokenizer {path} does not exist", hint=f"give a tokenizer.json, a vocab.txt or a model folder, {TRAIN_HINT}"
        )
    if not path.is_dir():
        return path
    for name in TOKENIZER_NAMES:
        if (path / name).is_file():
            return path / name
    others = sorted(file.name for file in path.iterdir() if file.name in ("merges.txt", "vocab.json"))
    raise DataError(
        f"tokenizer folder {path} has neither {' nor '.join(TOKENIZER_NAMES)}{f', but {others[0]}' if others else ''}",
        hint=_CONVERT if others else f"give the path of the tokenizer file, {TRAIN_HINT}",
    )


def _read(file: Path) -> str | bytes:
    """The text of a file, or the bytes of a model of SentencePiece."""
    try:
        content = file.read_bytes()
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(f"tokenizer {file} cannot be read: {reason}", hint="check its permissions") from problem
    verify(file, content)
    if re.match(_SENTENCEPIECE, content, re.DOTALL):
        return content
    for beginning, (kind, hint) in _OTHER_FILES.items():
        if re.match(beginning, content, re.DOTALL):
            raise DataError(f"{file} is not a tokenizer.json or a vocab.txt, but {kind}", hint=hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"tokenizer {file} is not UTF-8 text", hint=f"give a tokenizer.json or a vocab.txt, {TRAIN_HINT}"
        ) from problem


@contextmanager
def naming_panics(name: str) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is not an `Exception`, into a DataError that names the tokenizer."""
    try:
        yield
    except BaseException as problem:
        if type(problem).__name__ != PANIC:
            raise
        raise DataError(
            f"{name}: the tokenizers library cannot use it: {problem}",
            hint="a pattern or a table in tokenizer.json is damaged, or takes too long on this text; use another tokenizer",
        ) from problem


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard output on stderr: Rust announces a panic there before Python can report it."""
    try:
        before = os.dup(2)
    except OSError:  # closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _parsed(content: str | bytes, file: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json or, if it is bytes, in a model of SentencePiece."""
    try:
        with naming_panics(str(file)), _without_stderr():
            return Tokenizer.from_str(content) if isinstance(content, str) else from_sentencepiece(content)
    except DataError:
        raise
    except Exception as problem:  # the library raises bare Exception
        kind = "tokenizer.json" if isinstance(content, str) else "sound model of SentencePiece"
        raise DataError(
            f"{file} is not a {kind}: {problem}", hint=f"copy it again from where the model came from, or {_CONVERT}"
        ) from problem


def _from_vocabulary(content: str, file: Path, lowercase: bool | None) -> Tokenizer:
    """The tokenizer of a vocab.txt, with the settings of a tokenizer_config.json beside it.

    As in BERT, the last of equal entries counts.
    """
    entries = [line.strip("\r") for line in content.split("\n")]
    while entries and not entries[-1].strip():
        entries.pop()
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    settings = _settings(file.parent / "tokenizer_config.json")
    if lowercase is None:
        lowercase = settings.get("do_lower_case")
    if lowercase is None:
        # Special tokens ([CLS], <S>, [unused1]) are upper-case in every vocabulary.
        lowercase = not any(entry != entry.lower() for entry in entries if entry[:1] not in ("[", "<"))
    strips, stated = settings.get("strip_accents"), settings.get("do_lower_case") is not None
    if strips is None and lowercase and not stated and any(normalize("NFD", entry) != entry for entry in entries):
        strips = False  # a tokenizer that strips accents never produces such entries
    return bert_wordpiece(vocabulary, lowercase, strips, chinese=settings.get("tokenize_chinese_chars") is not False)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    settings = read_object(path, hint="copy it again from where the model came from, or remove it")
    for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        if not isinstance(settings.get(key), bool | None):
            raise DataError(f"{path}: {key} is {settings[key]!r}", hint=f"{key} is true, false or left out")
    return settings


def _frames_correctly(tokenizer: Tokenizer) -> bool:
    ids = special_ids(tokenizer)
    single, pair = tokenizer.encode("a"), tokenizer.encode("a", "b")
    a = tokenizer.encode("a", add_special_tokens=False).ids
    b = tokenizer.encode("b", add_special_tokens=False).ids
    left, right = [ids["cls"], *a, ids["sep"]], [*b, ids["sep"]]
    return single.ids == left and pair.ids == left + right and pair.type_ids == [0] * len(left) + [1] * len(right)
