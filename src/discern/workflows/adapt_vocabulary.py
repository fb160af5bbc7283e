"""A data set of the same text with a vocabulary that has grown by words of it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from discern.artifacts.files import utf8_name, write_text
from discern.data.build import BuildOptions
from discern.data.corpus import Corpus, CorpusOptions
from discern.data.extension import extend_tokenizer, frequent_splits, word_form, word_forms
from discern.data.manifest import ADDED_NAME, Manifest
from discern.data.meter import Meter
from discern.data.problems import ProblemLog
from discern.data.shards import TokenData
from discern.data.tokenizer_choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.tasks.readers.files import json_file, numbered_lines
from discern.training.place import place
from discern.workflows.prepare import PrepareRequest, available_cores, prepare


@dataclass(frozen=True)
class AddedTokens:
    """Which words become tokens: those of a file, one a line, or so many that the text itself suggests. One of the two."""

    file: Path | None = None
    number: int | None = None

    @classmethod
    def of(cls, text: str) -> AddedTokens:
        """What `--add-tokens` was given: a number, or a path.

        Raises:
            ConfigError: it is neither.
        """
        if text.isdecimal() and int(text) > 0:
            return cls(number=int(text))
        if not Path(text).is_file():
            raise ConfigError(
                f"--add-tokens {text}: there is no such file, and it is no number above 0",
                hint="a file of words, one a line; or how many words of the text to add, for example --add-tokens 500",
            )
        return cls(file=Path(text))


def extended_data(folder: Path, out: Path, added: AddedTokens, progress: Progress) -> Path:
    """The data set beside `out` with the text of another one under the extended tokenizer; made unless it is there.

    Args:
        folder: the data set as it is, whose inputs are read again.
        out: of the run: the data set becomes `<out>-data`.

    Raises:
        ConfigError: nothing can be added, or the data set was made for another request.
        DataError: the text is not where it was, the file of words is not UTF-8, or what an earlier call left is damaged.
    """
    data = TokenData.open(folder)
    target = out.resolve().with_name(f"{out.resolve().name}-data")
    asked = {"data_fingerprint": data.fingerprint, "number": added.number, "words": _digest(added.file)}
    if (target / ADDED_NAME).is_file():
        made = _made(target)
        if {key: made.get(key) for key in asked} != asked:
            raise ConfigError(
                f"{target} was made of another text or with other added tokens",
                hint="choose another --out, or remove that folder",
            )
        return target
    if place().world > 1:
        raise ConfigError(
            "--add-tokens makes a data set first, which one process does", hint="use --nproc, or start once without torchrun"
        )
    _check_rereadable(data.manifest, folder)
    tokenizer = data.tokenizer()
    forms = _forms(data, tokenizer, added, target, progress)
    progress.note(f"adding {len(forms):,} tokens: {', '.join(forms[:8])}{', ...' if len(forms) > 8 else ''}")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        with utf8_name(path.parent) as folder:
            extend_tokenizer(tokenizer, forms).save(str(folder / path.name))
        request = PrepareRequest(
            inputs=data.manifest.inputs,
            out=target,
            tokenizer=TokenizerChoice(path=path),
            corpus=_corpus_options(data.manifest),
            build=_build_options(data.manifest),
        )
        prepare(request, progress)
    write_text(target / ADDED_NAME, json.dumps({**asked, "added": forms}, indent=1, ensure_ascii=False) + "\n")
    return target


def _made(target: Path) -> dict[str, Any]:
    """What the data set was made for, as it says itself."""
    path = target / ADDED_NAME
    try:
        made = json_file(path)
    except (DataError, ValueError):  # the latter of an integer of thousands of digits
        made = None
    if not isinstance(made, dict):
        raise DataError(
            f"{path} is damaged: expected the JSON object that `discern adapt` writes",
            hint=f"remove {target}, and it is made again; or choose another --out",
        )
    return made


def _forms(data: TokenData, tokenizer: Tokenizer, added: AddedTokens, target: Path, progress: Progress) -> list[str]:
    """The words to add, as the tokenizer's model gets them."""
    if added.file is not None:
        lines = [line.strip() for _, line in numbered_lines(added.file)]
        forms = list(dict.fromkeys(word_form(tokenizer, line) for line in lines if line))
        found = [form for form in forms if tokenizer.token_to_id(form) is None]
        reason = f"the vocabulary has all {len(forms):,} words of {added.file}" if forms else f"{added.file} holds no word"
    else:
        assert added.number is not None
        found = frequent_splits(_count_words(data.manifest, tokenizer, target, progress), tokenizer, added.number)
        reason = f"no word that occurs three times in the text of {data.folder} is split or unknown"
    if not found:
        raise ConfigError(f"there is no token to add: {reason}", hint="leave out --add-tokens")
    return found


def _count_words(manifest: Manifest, tokenizer: Tokenizer, target: Path, progress: Progress) -> Counter[str]:
    """How often each word occurs in the text."""
    counts: Counter[str] = Counter()
    meter = Meter(progress, "counting words", Corpus(manifest.inputs, _corpus_options(manifest), exclude=target))
    for document in meter.read(ProblemLog()):
        for sentence in document:
            counts.update(word_forms(tokenizer, sentence))
        meter.show()
    meter.finish()
    return counts


def _check_rereadable(manifest: Manifest, folder: Path) -> None:
    gone = [name for name in manifest.inputs if name == "-" or not (name.startswith("hf:") or _exists(name))]
    if gone:
        raise DataError(
            f"to add tokens the text of {folder} is read again, and '{gone[0]}' is not there",
            hint="give the command in the folder where `discern prepare` was given; standard input cannot be read again",
        )


def _exists(name: str) -> bool:
    return Path(name).exists() or any(sign in name for sign in "*?[")


def _corpus_options(manifest: Manifest) -> CorpusOptions:
    """As the data set was made."""
    settings: Any = manifest.configuration
    field = settings["text_field"]
    return CorpusOptions(settings["documents"], None if field == "text" else field)  # without a name, 'text' comes first


def _build_options(manifest: Manifest) -> BuildOptions:
    """As the data set was made, so that the same documents are held out."""
    settings: Any = manifest.configuration
    return BuildOptions(
        segmenter=settings["segmenter"],
        heldout=settings["heldout"],
        seed=settings["seed"],
        shard_tokens=settings["shard_tokens"],
        workers=available_cores(),
    )


def _digest(file: Path | None) -> str | None:
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
