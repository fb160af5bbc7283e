"""Going on with a model on one's own text, and what that gained there and cost elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from discern.artifacts.files import write_text
from discern.artifacts.locks import Claim
from discern.data.shards import TokenData
from discern.data.unknown import MORE_TOKENS, report_unknown
from discern.errors import ConfigError, DataError
from discern.objectives.base import Objective
from discern.progress import Progress, warning_to
from discern.records import Record, read_record
from discern.training.evaluation import evaluate
from discern.training.interrupt import agree_to_stop, stop_on_signals
from discern.training.parallel import Ranks, join_ranks
from discern.workflows.adapt_vocabulary import AddedTokens, extended_data
from discern.workflows.pretrain import Run, heldout_stream, leave_if_stopped, open_run, run_to_the_end
from discern.workflows.request import PretrainRequest, Replay, Settled, settle
from discern.workflows.runs import build_objective, vocabulary_of
from discern.workflows.start_weights import fill

ADAPTATION_FILE = "adaptation.json"
"""In the run's folder: what was measured before, and at the end after."""

Figures = dict[str, dict[str, float]]
"""Held-out figures by text: 'domain', and 'general' where there is some."""

# Whose loss says how well words are predicted: the generator's, or that of the one network there is.
_WORD_LOSSES = ("generator_loss", "mlm_loss", "permutation_lm_loss")


@dataclass(frozen=True)
class AdaptRequest:
    """What to adapt, to what.

    Attributes:
        model: a run, an export, or a Hugging Face ELECTRA or BERT folder.
        data: data set of the domain, made with the model's tokenizer or with that one extended.
        out: folder of the run that comes of it.
        config: TOML file over the model's own settings, or None.
        overrides: "section.key=value".
        replay: general text, to mix in and to measure what is forgotten; a share of 0 measures only.
        added: tokens to extend the vocabulary by, or None.
        resume: as of pre-training.
        sequences: held-out rows of each text to measure on; 0: all.
    """

    model: Path
    data: Path
    out: Path
    config: Path | None = None
    overrides: Sequence[str] = ()
    replay: Replay | None = None
    added: AddedTokens | None = None
    resume: Literal["auto", "never", "must"] = "auto"
    device: str = "auto"
    sequences: int = 0


def adapt(request: AdaptRequest, progress: Progress) -> dict[str, Any] | None:
    """Train to the end; gives the figures `before` and `after`, or None on ranks that don't write.

    Before is the model as it begins here: with the added tokens, and a fresh generator where it had none.

    Raises:
        ConfigError, DataError: something doesn't fit, or nothing is held out; nothing has been trained.
        CheckpointError, NumericsError: the run had to stop; its last good checkpoint is in place.
        KeyboardInterrupt, SystemExit(143): it was asked to stop, and has saved.
    """
    settled = _settled(request, data_of(request, progress), progress)
    for name, data in _texts(settled).items():
        statistics = data.manifest.statistics
        told = statistics.unknown_tokens, statistics.tokens, progress.note, warning_to(progress)
        report_unknown(*told, of=f"{name} text", advice=MORE_TOKENS)
    with join_ranks(request.device) as ranks, stop_on_signals() as stop, Claim() as claim:
        run = open_run(settled, progress, ranks, claim)
        begun_at = run.state.step
        kept = _before(run, ranks, progress, request.sequences)
        record = run_to_the_end(run, (ranks, progress, stop))
        earlier = _read(request.out / ADAPTATION_FILE)
        if begun_at == run.state.step == earlier.get("step") and "after" in earlier:
            return earlier if ranks.writes else None  # all of it was done before
        stopped = agree_to_stop(stop, ranks)  # a signal may have reached some of them only
        after = {} if stopped else _measure(run.objective, settled, ranks, progress, request.sequences, "after")
    leave_if_stopped(stop, run.state, progress)
    if stopped or not ranks.writes:
        return None
    found = {"step": record["step"], **kept, "after": after}
    write_text(request.out / ADAPTATION_FILE, json.dumps(found, indent=1) + "\n")
    return found


def data_of(request: AdaptRequest, progress: Progress) -> Path:
    """The data set to train on: that of the request, or the one with added tokens, made once all else is found to fit.

    Raises:
        ConfigError, DataError: something doesn't fit.
    """
    if request.added is None:
        return request.data
    _settled(request, request.data, progress)
    return extended_data(request.data, request.out, request.added, progress)


def _settled(request: AdaptRequest, data: Path, progress: Progress) -> Settled:
    settled = settle(_pretraining(request, data), progress.note)
    _check_held_out(settled)
    _check_words(settled)
    return settled


def _pretraining(request: AdaptRequest, data: Path) -> PretrainRequest:
    return PretrainRequest(
        data=data,
        out=request.out,
        config=request.config,
        overrides=request.overrides,
        resume=request.resume,
        device=request.device,
        init_from=request.model,
        replay=request.replay,
    )


def _texts(settled: Settled) -> dict[str, TokenData]:
    """The data sets that are measured on."""
    return {"domain": settled.data} | ({} if settled.replayed is None else {"general": settled.replayed})


def _check_held_out(settled: Settled) -> None:
    for data in _texts(settled).values():
        if data.split("heldout").num_tokens == 0:
            raise DataError(
                f"{data.folder} has no held-out split, so gains and forgetting cannot be measured",
                hint="prepare it again with a larger --heldout; text that is one document needs --documents line, or more text",
            )


def _check_words(settled: Settled) -> None:
    """Raise where no figure of the objective says how well it predicts words."""
    with torch.device("meta"):
        objective = build_objective(settled.config, vocabulary_of(settled.data))
    figures = objective.evaluator().compute()
    if not any(name in figures for name in _WORD_LOSSES):
        raise ConfigError(
            f"objective '{settled.config.objective.name}' measures no loss of words, by which to tell what is gained",
            hint=f"discern pretrain --init-from {settled.request.init_from} begins in the same way and measures nothing",
        )


def _before(run: Run, ranks: Ranks, progress: Progress, sequences: int) -> dict[str, Any]:
    """The figures of the model as it begins: measured now, or once when the run began."""
    settled = run.settled
    path = settled.request.out / ADAPTATION_FILE
    texts = {name: data.fingerprint for name, data in _texts(settled).items()}
    kept = _read(path)
    if run.state.step > 0 and kept.get("texts") == texts and kept.get("sequences") == sequences:
        return {name: kept[name] for name in ("texts", "sequences", "start", "fresh", "added_tokens", "before")}
    objective, filled = run.objective, run.filled
    assert settled.start is not None
    if filled is None:
        objective = build_objective(settled.config, vocabulary_of(settled.data))
        objective.initialise(settled.config.train.seed)
        filled = fill(objective, settled.start, settled.start.added_pieces(settled.data))
        objective.to(ranks.device)
    found = {
        "texts": texts,
        "sequences": sequences,
        "start": settled.start.description,
        "fresh": list(filled.fresh),
        "added_tokens": filled.added_tokens,
        "before": _measure(objective, settled, ranks, progress, sequences, "before"),
    }
    if ranks.writes:
        write_text(path, json.dumps(found, indent=1) + "\n")
    ranks.barrier()
    return found


def _measure(objective: Objective, settled: Settled, ranks: Ranks, progress: Progress, sequences: int, when: str) -> Figures:
    """Held-out figures on each text, in float32."""
    found: Figures = {}
    for name, data in _texts(settled).items():
        stream = heldout_stream(data, settled.config)
        assert stream is not None
        progress.start(f"measuring {when}, {name} text", min(sequences or stream.num_rows, stream.num_rows), "rows")
        figures = evaluate(objective, stream, ranks, sequences=sequences, progress=progress)
        progress.finish()
        found[name] = {**figures, "perplexity": perplexity(figures)}
    return found


def perplexity(figures: Mapping[str, float]) -> float:
    """exp of the mean loss of the words at the positions where they are predicted, many of them hidden at once.

    Not the pseudo-perplexity of Salazar et al. 2020, which hides one token at a time: scorer 'pll' gives that.
    """
    losses = [figures[name] for name in _WORD_LOSSES if name in figures]
    return math.exp(min(losses[0], 700.0))  # beyond that no float holds it


def _read(path: Path) -> dict[str, Any]:
    hint = "remove it: the figures before training are then measured again on the initial weights"
    return read_record(path, _Adaptation, hint=hint) if path.is_file() else {}


class _Adaptation(Record):
    texts: dict[str, str]
    sequences: int
    start: str
    fresh: list[str]
    added_tokens: int
    before: dict[str, dict[str, float]]
