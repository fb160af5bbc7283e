"""Continued pre-training of a model on the user's own text, with metrics before and after.

The vocabulary may be extended with words of that text; the data set is then prepared again with the extended tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from discern.artifacts.run import build_objective, vocabulary_of
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import ADDED_NAME, Manifest
from discern.data.dataset.shards import TokenData
from discern.data.filters import Rules
from discern.data.prepare import available_cores, prepare
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.problems import ProblemLog
from discern.data.sources.remote import is_remote, open_remote, remote_files
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.extension import extend_tokenizer, frequent_splits, word_form, word_forms
from discern.data.tokenizer.unknown import MORE_TOKENS, report_unknown
from discern.errors import ConfigError, DataError
from discern.objectives.base import Objective
from discern.pretrain.evaluate import check_sequences
from discern.pretrain.opened_run import Run, fill_from_models, open_run
from discern.pretrain.resolved_run import Replay, ResolvedRun, Resume, resolve_run
from discern.pretrain.rows import heldout_stream
from discern.pretrain.run import finish_run
from discern.progress import Progress, warning_to
from discern.storage.files import utf8_name, write_text
from discern.storage.output import OutputFolder
from discern.storage.records import Record, read_record
from discern.tasks.readers.files import json_file, numbered_lines
from discern.training.average import averaged
from discern.training.evaluation import evaluate
from discern.training.interrupt import agree_to_stop, leave_if_stopped, stop_on_signals
from discern.training.parallel import Ranks, join_ranks
from discern.training.rank_environment import rank_environment

ADAPTATION_FILE = "adaptation.json"
"""File in the folder of the run with the metrics before and after."""

Metrics = dict[str, dict[str, float]]
"""Held-out metrics by text: 'domain', and 'general' if there is replayed text."""

# Losses that measure how well words are predicted: the generator's, or that of the only network.
_WORD_LOSSES = ("generator_loss", "mlm_loss", "permutation_lm_loss")


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


def adapt(
    model: Path,
    *,
    data: Path,
    out: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    replay: Replay | None = None,
    added: AddedTokens | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    sequences: int = 0,
    progress: Progress,
) -> dict[str, Any] | None:
    """Train to the end. Return the metrics `before` and `after`, or None on ranks that don't write.

    `before` describes the model at the start of this run: with the added tokens, and a new generator if it had none.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA, BERT, XLNet or ModernBERT folder.
        data: data set of the domain, made with the model's tokenizer or an extension of it.
        out: folder of the new run.
        config: TOML file of settings that override those of the model.
        overrides: settings that override the file, as "section.key=value".
        replay: general text, to mix in and to measure what is forgotten; with a share of 0 it is only measured.
        added: tokens to add to the vocabulary.
        sequences: held-out rows of each text to evaluate on; 0: all.

    Raises:
        ConfigError, DataError: the options are not compatible, or a held-out split is missing; nothing has been trained.
        CheckpointError, NumericsError: the run had to stop; its last intact checkpoint is kept.
        KeyboardInterrupt, SystemExit(143): the run was asked to stop, and has been saved.
    """
    check_sequences(sequences)
    options: dict[str, Any] = {"out": out, "config": config, "overrides": overrides, "replay": replay, "resume": resume}
    if added is not None:
        data = data_with_tokens(model, data=data, added=added, progress=progress, **options)
    resolved = _resolve(model, data=data, progress=progress, **options)
    for name, text in _texts(resolved).items():
        counts = text.manifest.statistics
        report_unknown(
            counts.unknown_tokens, counts.tokens, progress.note, warning_to(progress), of=f"{name} text", advice=MORE_TOKENS
        )
    with join_ranks(device) as ranks, stop_on_signals() as stop, OutputFolder(resolved.out) as folder:
        run = open_run(resolved, ranks, folder, progress)
        first = run.state.step
        kept = _before(run, ranks, progress, sequences)
        record = finish_run(run, ranks, stop, progress)
        earlier = _read(out / ADAPTATION_FILE)
        if first == run.state.step == earlier.get("step") and "after" in earlier:
            return earlier if ranks.writes else None  # an earlier session has finished the run
        stopped = agree_to_stop(stop, ranks)  # a signal may have reached only some ranks
        with averaged(run.objective, run.state.average):
            after = {} if stopped else _measure(run.objective, resolved, ranks, progress, sequences, "after")
    leave_if_stopped(stop, run.state.step, progress)
    if stopped or not ranks.writes:
        return None
    found = {"step": record["step"], **kept, "after": after}
    write_text(out / ADAPTATION_FILE, json.dumps(found, indent=1) + "\n")
    return found


def data_with_tokens(model: Path, *, data: Path, out: Path, added: AddedTokens, progress: Progress, **options: Any) -> Path:
    """The data set of the same text with added tokens, created after all other options are checked.

    Args:
        options: further options of `adapt`: config, overrides, replay, resume.

    Raises:
        ConfigError, DataError: the options are not compatible, or no token can be added.
    """
    _resolve(model, data=data, out=out, progress=progress, **options)
    return extended_data(data, out, added, progress)


def _resolve(model: Path, *, progress: Progress, **options: Any) -> ResolvedRun:
    resolved = resolve_run(init_from=model, warn=progress.note, **options)
    _check_held_out(resolved)
    _check_word_loss(resolved, model)
    return resolved


def _texts(resolved: ResolvedRun) -> dict[str, TokenData]:
    """The data sets to evaluate on."""
    return {"domain": resolved.data} | ({} if resolved.replayed is None else {"general": resolved.replayed})


def _check_held_out(resolved: ResolvedRun) -> None:
    for data in _texts(resolved).values():
        if data.split("heldout").num_tokens == 0:
            raise DataError(
                f"{data.folder} has no held-out split, so gains and forgetting cannot be measured",
                hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
            )


def _check_word_loss(resolved: ResolvedRun, model: Path) -> None:
    """Raise an error if the objective has no loss that measures how well words are predicted."""
    with torch.device("meta"):
        objective = build_objective(resolved.config, vocabulary_of(resolved.data))
    metrics = objective.evaluator().compute()
    if not any(name in metrics for name in _WORD_LOSSES):
        raise ConfigError(
            f"objective '{resolved.config.objective.name}' has no loss over words, by which the gain could be measured",
            hint=f"discern pretrain --init-from {model} starts in the same way, but measures nothing",
        )


def _before(run: Run, ranks: Ranks, progress: Progress, sequences: int) -> dict[str, Any]:
    """Metrics of the model at the start of the run: measured now, or stored when it started."""
    resolved = run.resolved
    path = resolved.out / ADAPTATION_FILE
    texts = {name: data.fingerprint for name, data in _texts(resolved).items()}
    kept = _read(path)
    if run.state.step > 0 and kept.get("texts") == texts and kept.get("sequences") == sequences:
        return {name: kept[name] for name in ("texts", "sequences", "start", "fresh", "added_tokens", "before")}
    objective, filled = run.objective, run.filled
    assert resolved.start is not None
    if filled is None:  # the run is resumed
        objective = build_objective(resolved.config, vocabulary_of(resolved.data))
        objective.initialize(resolved.config.train.seed)
        filled = fill_from_models(resolved, objective, progress)
        assert filled is not None
        objective.to(ranks.device)
    found = {
        "texts": texts,
        "sequences": sequences,
        "start": resolved.start.description,
        "fresh": list(filled.fresh),
        "added_tokens": filled.added_tokens,
        "before": _measure(objective, resolved, ranks, progress, sequences, "before"),
    }
    if ranks.writes:
        write_text(path, json.dumps(found, indent=1) + "\n")
    ranks.barrier()
    return found


def _measure(objective: Objective, resolved: ResolvedRun, ranks: Ranks, progress: Progress, sequences: int, when: str) -> Metrics:
    """Held-out metrics on each text, in float32."""
    found: Metrics = {}
    for name, data in _texts(resolved).items():
        stream = heldout_stream(data, resolved.config)
        assert stream is not None
        progress.start(f"measuring {when}, {name} text", min(sequences or stream.num_rows, stream.num_rows), "rows")
        metrics = evaluate(objective, stream, ranks, sequences=sequences, progress=progress)
        progress.finish()
        found[name] = {**metrics, "perplexity": perplexity(metrics)}
    return found


def perplexity(metrics: Mapping[str, float]) -> float:
    """exp of the mean loss at the predicted positions, many of which are masked at once.

    Differs from the pseudo-perplexity of Salazar et al. 2020, which masks one token at a time (scorer 'pll').
    """
    losses = [metrics[name] for name in _WORD_LOSSES if name in metrics]
    return math.exp(min(losses[0], 700.0))  # the exponential of a larger number overflows


def _read(path: Path) -> dict[str, Any]:
    hint = "remove it: the metrics before training are then measured again on the initial weights"
    return read_record(path, _Adaptation, hint=hint) if path.is_file() else {}


class _Adaptation(Record):
    texts: dict[str, str]
    sequences: int
    start: str
    fresh: list[str]
    added_tokens: int
    before: dict[str, dict[str, float]]


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
    progress.note(f"adding {len(forms):,} tokens: {', '.join(forms[:8])}{', ...' if len(forms) > 8 else ''}")
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
    write_text(target / ADDED_NAME, json.dumps({**asked, "added": forms}, indent=1, ensure_ascii=False) + "\n")
    return target


def _made(target: Path) -> dict[str, Any]:
    """The record of what the data set was made from."""
    path = target / ADDED_NAME
    try:
        made = json_file(path)
    except (DataError, ValueError):  # Python refuses integers of thousands of digits
        made = None
    if not isinstance(made, dict):
        raise DataError(
            f"{path} is damaged: expected the JSON object that `discern adapt` writes",
            hint=f"remove {target}, which is then prepared again; or choose another --out",
        )
    return made


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
