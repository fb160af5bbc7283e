"""Continued pre-training of a model on the user's own text, with metrics before and after.

The vocabulary may be extended with words of that text; the data set is then prepared again with the extended tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from discern.data.batching.mixture import sources_of
from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import ConfigError
from discern.model_files.run import vocabulary_of
from discern.objectives.base import Objective
from discern.pretraining.evaluate import heldout_rows_of
from discern.pretraining.resume import Resume, meta_objective
from discern.pretraining.run import DataSets, Plan, Run, finish_run, open_run, plan
from discern.pretraining.warm_start import AddedTokens, extended_data
from discern.progress import Progress, warning_to
from discern.storage.checksums import Record, read_json, write_json
from discern.storage.files import OutputFolder
from discern.training.distributed import Ranks, join_ranks
from discern.training.evaluation import evaluate
from discern.training.process import agree_to_stop, leave_if_stopped, stop_on_signals
from discern.training.state import averaged

ADAPTATION_FILE = "adaptation.json"
"""File in the folder of the run with the metrics before and after."""

_MOST_FORGOTTEN = 2.0
"""Perplexity of all but the first data set after the training, as a multiple of that before, from which a warning is given."""

Metrics = dict[str, dict[str, float]]
"""Held-out metrics by data set."""

# Losses that measure how well words are predicted: the generator's, or that of the only network.
_WORD_LOSSES = ("generator_loss", "mlm_loss", "permutation_lm_loss")


def adapt(
    model: Path,
    *,
    data: DataSets,
    out: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    replay: Path | str | None = None,
    replay_share: float | None = None,
    added: AddedTokens | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    sequences: int = 0,
    progress: Progress,
) -> dict[str, Any] | None:
    """Train to the end. Return the metrics `before` and `after`, or None on ranks that don't write.

    `before` describes the model at the start of this run: with the added tokens, and a new generator if it had none.

    Args:
        model: a run, an export, or a Hugging Face model.
        data: data set of the domain, made with the model's tokenizer or an extension of it; or several to mix.
        out: folder of the new run.
        config: TOML file of settings that override those of the model.
        overrides: settings that override the file, as "section.key=value".
        replay: data set of general text, to mix with that of the domain and to measure what is forgotten.
        replay_share: share of the general text in the mixture; None: 0.2; 0: it is only measured.
        added: tokens to add to the vocabulary.
        sequences: held-out rows of each text to evaluate on; 0: all.

    Raises:
        ConfigError, DataError: the options are not compatible, or a held-out split is missing; nothing has been trained.
        CheckpointError, NumericsError: the run had to stop; its last intact checkpoint is kept.
        KeyboardInterrupt, SystemExit(143): the run was asked to stop, and has been saved.
    """
    options: dict[str, Any] = {
        "out": out,
        "config": config,
        "overrides": overrides,
        "replay": replay,
        "replay_share": replay_share,
        "resume": resume,
    }
    if added is not None:
        data = data_with_tokens(model, data=data, added=added, progress=progress, **options)
    planned = _plan(model, data=data, progress=progress, **options)
    for name, text in sources_of(planned.data).items():
        counts, warn = text.manifest.statistics, warning_to(progress)
        unknown = UnknownTokens(text.tokenizer(), counts.tokens, counts.unknown_tokens)
        unknown.report(progress.note, warn, f"{name} text")

    # Measure, train and measure again
    path = out / ADAPTATION_FILE
    with join_ranks(device) as ranks, stop_on_signals() as stop, OutputFolder(out) as folder:
        run = open_run(planned, ranks, folder, progress)
        first = run.state.step
        results = _before(run, path, ranks, progress, sequences)
        record = finish_run(run, ranks, stop, progress)
        stored = _read(path)
        if first == run.state.step == stored.get("step") and "after" in stored:
            return stored if ranks.writes else None  # an earlier session has finished the run
        stopped = agree_to_stop(stop, ranks)  # a signal may have reached only some ranks
        with averaged(run.objective, run.state.average):
            after = {} if stopped else _measure(run.objective, planned, ranks, progress, sequences, "after")
    leave_if_stopped(stop, run.state.step, progress)
    if stopped or not ranks.writes:
        return None

    # Warn if the model is worse, and store the metrics
    for number, name in enumerate(after):
        then, now = results["before"][name]["perplexity"], after[name]["perplexity"]
        if now > then * (_MOST_FORGOTTEN if number else 1):
            progress.note(
                f"warning: perplexity on the {name} text rose from {then:,.4g} to {now:,.4g}: this training has made the model "
                "worse; try a lower optimizer.learning_rate, a larger optimizer.warmup_steps, fewer train.max_steps or more text"
                + (", or a larger share of it" if number else "")
            )
    results = {"step": record["step"], **results, "after": after}
    write_json(path, results)
    return results


def data_with_tokens(model: Path, *, data: DataSets, out: Path, added: AddedTokens, progress: Progress, **options: Any) -> Path:
    """The data set of the same text with added tokens, created after all other options are checked.

    Args:
        options: further options of `adapt`: config, overrides, replay, replay_share, resume.

    Raises:
        ConfigError, DataError: the options are not compatible, or no token can be added.
    """
    _plan(model, data=data, out=out, progress=progress, **options)
    locations = [data] if isinstance(data, str | Path) else [*data]
    if len(locations) > 1:
        raise ConfigError("--add-tokens extends one data set, but several are given", hint="give one --data")
    return extended_data(Path(locations[0]), out, added, progress)


def _plan(
    model: Path,
    *,
    data: DataSets,
    replay: Path | str | None,
    replay_share: float | None,
    overrides: Sequence[str],
    progress: Progress,
    **options: Any,
) -> Plan:
    """Plan the run, and check that its gains can be measured: there are held-out rows, and a loss over words."""
    share = 0.2 if replay_share is None else replay_share
    if replay is None and replay_share is not None:
        raise ConfigError(f"--replay-share {share:g} needs the text to replay", hint="add --replay DATA")
    if replay is not None:
        texts = [data] if isinstance(data, str | Path) else list(data)
        if len(texts) > 1:
            raise ConfigError(
                "--replay is mixed with one data set, but several are given",
                hint="give the general text as another of them, without --replay: --data A=0.5 --data B=0.3 --data GENERAL=0.2",
            )
        data = [*texts, replay]
        overrides = [*overrides, f"data.mixture=[[0, [{round(1 - share, 6)}, {share}]]]"]
    planned = plan(init_from=model, data=data, overrides=overrides, warn=progress.note, **options)
    for source in sources_of(planned.data).values():
        heldout_rows_of(source, planned.config)
    objective = meta_objective(planned.config, vocabulary_of(planned.data))
    if not any(network.predicts_words for network in objective.networks().values()):
        raise ConfigError(
            f"objective '{planned.config.objective.name}' has no loss over words, by which the gain could be measured",
            hint=f"discern pretrain --init-from {model} starts in the same way, but measures nothing",
        )
    return planned


def _before(run: Run, path: Path, ranks: Ranks, progress: Progress, sequences: int) -> dict[str, Any]:
    """Metrics of the model at the start of the run: measured now, or stored at `path` when it started."""
    planned, result = run.plan, run.warm_start
    texts = {name: data.fingerprint for name, data in sources_of(planned.data).items()}
    if result is None:  # the run is resumed
        stored = _read(path)
        if stored.get("texts") != texts or stored.get("sequences") != sequences:
            raise ConfigError(
                f"{path} has no metrics before training on these texts with --sequences {sequences}",
                hint="give the same --replay and --sequences as at the start, or choose another --out",
            )
        return {name: stored[name] for name in _Adaptation.model_fields}
    assert planned.start is not None
    results = {
        "texts": texts,
        "sequences": sequences,
        "start": planned.start.description,
        "fresh": list(result.fresh),
        "added_tokens": result.added_tokens,
        "before": _measure(run.objective, planned, ranks, progress, sequences, "before"),
    }
    if ranks.writes:
        write_json(path, results)
    ranks.barrier()
    return results


def _measure(objective: Objective, planned: Plan, ranks: Ranks, progress: Progress, sequences: int, when: str) -> Metrics:
    """Held-out metrics on each text, in float32."""
    results: Metrics = {}
    for name, data in sources_of(planned.data).items():
        stream = heldout_rows_of(data, planned.config)
        progress.start(f"measuring {when}, {name} text", min(sequences or stream.num_rows, stream.num_rows), "rows")
        metrics = evaluate(objective, stream, ranks, sequences=sequences, progress=progress)
        progress.finish()
        results[name] = {**metrics, "perplexity": perplexity(metrics)}
    return results


def perplexity(metrics: Mapping[str, float]) -> float:
    """exp of the mean loss at the predicted positions, many of which are masked at once.

    Differs from the pseudo-perplexity of Salazar et al. 2020, which masks one token at a time (scorer 'pll').
    """
    losses = [metrics[name] for name in _WORD_LOSSES if name in metrics]
    return math.exp(min(losses[0], 700.0))  # the exponential of a larger number overflows


def _read(path: Path) -> dict[str, Any]:
    hint = "choose another --out"
    return read_json(path, _Adaptation, hint=hint) if path.is_file() else {}


class _Adaptation(Record):
    texts: dict[str, str]
    sequences: int
    start: str
    fresh: list[str]
    added_tokens: int
    before: Metrics
