"""Words added to the vocabulary of a model: which ones, and the data set of the same text that has them as tokens."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import ADDED_NAME, Manifest
from discern.data.dataset.shards import TokenData
from discern.data.filters import Rules
from discern.data.prepare import prepare
from discern.data.processes import available_cores
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.problems import ProblemLog
from discern.data.sources.remote import is_remote, open_remote, remote_files
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.extension import extend_tokenizer, frequent_splits, word_form, word_forms
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.storage.checksums import write_recorded
from discern.storage.files import utf8_name
from discern.storage.records import read_object
from discern.tasks.readers.files import numbered_lines
from discern.training.rank_environment import rank_environment
from discern.wording import counted


@dataclass(frozen=True)
class AddedTokens:
    """Words to add to the vocabulary: either the words of a file, one per line, or a number of words of the text."""

    file: Path | None = None
    number: int | None = None

    @classmethod
    def of(cls, text: str) -> AddedTokens:
        """Parse the value of `--add-tokens`: a number or a path.

        Raises:
            ConfigError: it is neither.
        """
        if text.isdecimal() and int(text) > 0:
            return cls(number=int(text))
        if not Path(text).is_file():
            raise ConfigError(
                f"--add-tokens {text}: there is no such file, and it is not a number above 0",
                hint="give a file with one word per line, or a number of words of the text, for example --add-tokens 500",
            )
        return cls(file=Path(text))


def extended_data(folder: Path, out: Path, added: AddedTokens, progress: Progress) -> Path:
    """Data set beside `out` with the text of another one, tokenized by the extended tokenizer; it is created if missing.

    Args:
        folder: the current data set, whose inputs are read again.
        out: folder of the run; the data set becomes `<out>-data`.

    Raises:
        ConfigError: no token can be added, or the data set there was made with other added tokens.
        DataError: the text has moved, the file of words is not UTF-8, or a file of an earlier call is damaged.
    """
    data = TokenData.open(folder)
    target = out.resolve().with_name(f"{out.resolve().name}-data")
    asked = {"data_fingerprint": data.fingerprint, "number": added.number, "words": _digest(added.file)}
    if (target / ADDED_NAME).is_file():
        made = _made(target)
        if {key: made.get(key) for key in asked} != asked:
            raise ConfigError(
                f"{target} was made from another text or with other added tokens",
                hint="choose another --out, or remove that folder",
            )
        return target
    if rank_environment().world_size > 1:
        raise ConfigError(
            "--add-tokens first prepares a data set, which needs a single process",
            hint="use --nproc, or run the command once without torchrun",
        )
    _check_rereadable(data.manifest, folder)
    tokenizer = data.tokenizer()
    forms = _forms(data, tokenizer, added, target, progress)
    progress.note(f"adding {counted(len(forms), 'token')}: {', '.join(forms[:8])}{', ...' if len(forms) > 8 else ''}")
    told: dict[str, Any] = data.manifest.configuration
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        with utf8_name(path.parent) as folder:
            extend_tokenizer(tokenizer, forms).save(str(folder / path.name))
        prepare(
            data.manifest.inputs,
            out=target,
            tokenizer=TokenizerChoice(path=path),
            corpus=_corpus_options(data.manifest),
            build=_build_options(data.manifest),
            language=told.get("language"),
            license=told.get("license"),
            progress=progress,
        )
    write_recorded(target, {ADDED_NAME: json.dumps({**asked, "added": forms}, indent=1, ensure_ascii=False) + "\n"})
    return target


def _made(target: Path) -> dict[str, Any]:
    """The record of what the data set was made from."""
    path = target / ADDED_NAME
    return read_object(path, hint=f"remove {target}, which is then prepared again; or choose another --out")


def _forms(data: TokenData, tokenizer: Tokenizer, added: AddedTokens, target: Path, progress: Progress) -> list[str]:
    """The words to add, in the form that the tokenizer's model gets."""
    if added.file is not None:
        lines = [line.strip() for _, line in numbered_lines(added.file)]
        forms = list(dict.fromkeys(word_form(tokenizer, line) for line in lines if line))
        found = [form for form in forms if tokenizer.token_to_id(form) is None]
        reason = (
            f"the vocabulary already has all {len(forms):,} words of {added.file}" if forms else f"{added.file} contains no words"
        )
    else:
        assert added.number is not None
        found = frequent_splits(_count_words(data.manifest, tokenizer, target, progress), tokenizer, added.number)
        reason = f"no word that occurs at least three times in the text of {data.folder} is split or unknown"
    if not found:
        raise ConfigError(f"there are no tokens to add: {reason}", hint="leave out --add-tokens")
    return found


def _count_words(manifest: Manifest, tokenizer: Tokenizer, target: Path, progress: Progress) -> Counter[str]:
    """How often each word occurs in the text."""
    counts: Counter[str] = Counter()
    meter = CorpusProgress(progress, "counting words", Corpus(manifest.inputs, _corpus_options(manifest), exclude=target))
    rules = Rules(_build_options(manifest).filters)
    for document in meter.read(ProblemLog()):
        for sentence in (sentence for kept in rules.apply([document])[0] for sentence in kept):
            counts.update(word_forms(tokenizer, sentence))
        meter.show()
    meter.finish()
    return counts


def _check_rereadable(manifest: Manifest, folder: Path) -> None:
    for name in filter(is_remote, manifest.inputs):
        _check_address(name, folder)
    local = [name for name in manifest.inputs if not (is_remote(name) or name.startswith("hf:"))]
    gone = [name for name in local if name == "-" or not _exists(name)]
    if gone:
        raise DataError(
            f"to add tokens, the text of {folder} is read again, but '{gone[0]}' does not exist",
            hint="run the command in the folder where `discern prepare` was run; standard input cannot be read again",
        )


def _check_address(name: str, folder: Path) -> None:
    """Open the first file at an address. Its query, which may have been a signature, is not recorded."""
    try:
        stream = open_remote(next(remote_files(name)).address)
        try:
            stream.read(1)
        finally:
            stream.close()
    except DataError as problem:
        signed = "an address is recorded without its query; if it needs one, download the text and prepare it from the files"
        raise DataError(
            f"to add tokens, the text of {folder} is read again: {problem.message}",
            hint=signed if name.lower().startswith("http") else problem.hint,
        ) from problem


def _exists(name: str) -> bool:
    return Path(name).exists() or any(sign in name for sign in "*?[")


def _corpus_options(manifest: Manifest) -> CorpusOptions:
    """Options with which the data set was made."""
    settings: Any = manifest.configuration
    field = settings["text_field"]
    return CorpusOptions(settings["documents"], None if field == "text" else field)  # 'text' is the default name


def _build_options(manifest: Manifest) -> BuildOptions:
    """Options with which the data set was made, so that it has the same documents and holds the same out."""
    settings: Any = manifest.configuration
    return BuildOptions(
        near_duplicates=settings.get("near_duplicates"),
        filters=tuple(filter(None, (settings.get("filters") or "").split(","))),
        segmenter=settings["segmenter"],
        heldout=settings["heldout"],
        seed=settings["seed"],
        shard_tokens=settings["shard_tokens"],
        workers=available_cores(),
    )


def _digest(file: Path | None) -> str | None:
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
