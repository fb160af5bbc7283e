"""Continued pre-training of a model on the user's own text, with metrics before and after.

The vocabulary may be extended with words of that text; the data set is then prepared again with the extended tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.run import build_objective, vocabulary_of
from discern.data.dataset.shards import TokenData
from discern.data.tokenizer.unknown import MORE_TOKENS, report_unknown
from discern.errors import ConfigError, DataError
from discern.objectives.base import Objective
from discern.pretraining.evaluate import check_sequences
from discern.pretraining.opened_run import Run, fill_from_models, open_run
from discern.pretraining.resolved_run import Replay, ResolvedRun, Resume, resolve_run
from discern.pretraining.rows import heldout_stream
from discern.pretraining.run import finish_run
from discern.pretraining.warm_start import AddedTokens, extended_data
from discern.progress import Progress, warning_to
from discern.storage.checksums import Record, read_record, write_recorded
from discern.storage.output import OutputFolder
from discern.training.average import averaged
from discern.training.distributed import Ranks, join_ranks
from discern.training.evaluation import evaluate
from discern.training.interrupt import agree_to_stop, leave_if_stopped, stop_on_signals

ADAPTATION_FILE = "adaptation.json"
"""File in the folder of the run with the metrics before and after."""

_MOST_PERPLEXITY = {"domain": 1.0, "general": 2.0}
"""Perplexity after the training, as a multiple of that before, from which a warning is given: some forgetting is usual."""

Metrics = dict[str, dict[str, float]]
"""Held-out metrics by text: 'domain', and 'general' if there is replayed text."""

# Losses that measure how well words are predicted: the generator's, or that of the only network.
_WORD_LOSSES = ("generator_loss", "mlm_loss", "permutation_lm_loss")


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
    for name, most in _MOST_PERPLEXITY.items():
        if name in after and after[name]["perplexity"] > most * kept["before"][name]["perplexity"]:
            progress.note(
                f"warning: perplexity on the {name} text rose from {kept['before'][name]['perplexity']:,.4g} to "
                f"{after[name]['perplexity']:,.4g}: this training has made the model worse; try a lower "
                "optimizer.learning_rate, a larger optimizer.warmup_steps, fewer train.max_steps or more text"
                + (", or a larger --replay-share" if name == "general" else "")
            )
    found = {"step": record["step"], **kept, "after": after}
    write_recorded(out, {ADAPTATION_FILE: json.dumps(found, indent=1) + "\n"})
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
        write_recorded(resolved.out, {ADAPTATION_FILE: json.dumps(found, indent=1) + "\n"})
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
