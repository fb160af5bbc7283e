"""The page of a pre-training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from discern.config.schema import flatten, to_toml
from discern.data.tokenizer import TokenTexts, load_tokenizer, special_names
from discern.diagnosis.health import (
    Expectations,
    Finding,
    diagnosable_from,
    diagnose_duplicates,
    diagnose_metrics,
    expectations,
    steps_of_run,
    too_early,
    unusual_findings,
)
from discern.errors import DataError, DiscernError
from discern.model_files.run import (
    BLIMP_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    TOKENIZER_FILE,
    build_objective,
    read_counts,
    special_in,
)
from discern.model_files.run import read_record as read_run_record
from discern.models.config import ModelConfig
from discern.objectives import TITLES
from discern.objectives.base import Objective, Vocabulary
from discern.parsing import is_number
from discern.report.curves import last_held_out, run_charts
from discern.report.evaluation import (
    EVALUATE_AGAIN,
    blimp_tables,
    evaluation_charts,
    evaluation_tables,
    read_blimp_results,
)
from discern.report.page import Page, ShadedPiece, ShadedText, render_page
from discern.storage.checksums import Record, read_json, understood
from discern.storage.files import write_text
from discern.storage.output import check_output
from discern.training.metrics_log import EXAMPLES_FILE, HELD_OUT, METRICS_FILE, held_out_metrics, read_metrics, read_records
from discern.training.pretrain_config import PretrainConfig, read_written_config
from discern.training.schedule import step_sizes
from discern.wording import counted

if TYPE_CHECKING:
    from discern.inference.detection import Detection

REPORT_FILE = "report.html"
_MEASURE = "remove it to leave it out of the page; `discern evaluate RUN` writes it again"

_WAITING = {"data_share": "data", "host_share": "the host"}
_UNKNOWN = "not recorded"
# By the AUC; 0.5 is guessing.
_AUC_WORDS = (
    (0.55, "hardly better than guessing"),
    (0.7, "somewhat better than guessing"),
    (0.85, "clearly"),
    (1.01, "well"),
)


def report(
    run: Path, out: Path | None, detections: Sequence[Detection] = (), *, warn: Callable[[str], None] = lambda message: None
) -> Path:
    """Write the page of a run and return its path. The same run gives the same bytes.

    Args:
        out: HTML file to write or replace; None: report.html in the folder of the run.
        detections: texts to show with shaded tokens.
        warn: called with a message about damaged lines of the metrics log, which are skipped.

    Raises:
        ConfigError: `out` is a folder, or lies inside the run under another name.
        DataError: the folder is not a run, its metrics log is empty, one of its files is damaged, or the page cannot be written.
    """
    target = out or run / REPORT_FILE
    check_output("--out", target, REPORT_FILE, run, own=(REPORT_FILE,))
    record = read_run_record(run)
    lines = read_metrics(run, warn)
    if not lines:
        path = run / METRICS_FILE
        if path.is_file() and path.stat().st_size:
            raise DataError(
                f"{path} is damaged: none of its lines can be read",
                hint="restore it from a copy, or continue training",
            )
        raise DataError(
            f"{run} has nothing to show yet: its {METRICS_FILE} is empty",
            hint="run `discern pretrain` until its first log step",
        )
    config = read_written_config(run / CONFIG_FILE)
    step, metrics = last_held_out(lines)
    evaluation = _evaluation(run)
    with understood(run / EVALUATION_FILE, hint=_MEASURE):
        measured = (evaluation_charts(evaluation), evaluation_tables(evaluation)) if evaluation else ((), ())
    with understood(run / BLIMP_FILE, hint=EVALUATE_AGAIN):
        preferences = blimp_tables(read_blimp_results(run))
    page = Page(
        title=f"discern: {run.resolve().name}",
        verdict=_verdict(run, config, record, lines),
        facts=_facts(config, record, lines[-1]),
        curves=[*run_charts(lines), *measured[0]],
        tables=[*measured[1], *preferences],
        metrics=metrics,
        evaluated_at=step,
        before_and_after=_before_and_after(run, warn),
        detections=[ShadedText(found.text, found.offsets, found.replaced_probability) for found in detections],
        configuration=to_toml(config),
        notes=_notes(config, step, has_more=bool(evaluation)),
    )
    try:
        write_text(target, render_page(page))
    except OSError as problem:
        raise DataError(
            f"cannot write {target}: {problem.strerror or problem}",
            hint="choose a file in an existing folder that you can write to: --out FILE.html",
        ) from problem
    return target


def _verdict(run: Path, config: PretrainConfig, record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summary of the last held-out metrics, with the findings of `discern doctor` that need neither weights nor data."""
    found = run_findings(config, record, lines, run_expectations(run, config, record))
    metrics = evaluated_metrics(lines, last_held_out(lines)[0])
    summary = f"{_trained(config, record, lines[-1])} {how_good(metrics, found)}".strip()
    return [summary, *run_verdict(lines[-1]["step"], steps_of_run(config.train, lines[-1]), metrics, found)]


def _trained(config: PretrainConfig, record: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """A sentence about what was trained."""
    objective = _objective(config, record)
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    name, network = next(iter(objective.networks().items()))
    size = network.encoder.config
    layers = counted(size.num_layers, "layer")
    kind = TITLES.get(config.objective.name, config.objective.name)
    read = f" on {_number(last['tokens'])} tokens in {_number(last['step'])} steps" if "tokens" in last else ""
    article = "An" if name.startswith("e") else "A"
    return (
        f"{article} {name} with {layers} of width {size.hidden_size} ({_number(parameters)} parameters in all networks) was "
        f"trained by {kind}{read}."
    )


def how_good(metrics: Mapping[str, float], findings: Sequence[Finding]) -> str:
    """A sentence that compares the last evaluation with simple baselines and with what is usual; "" without an evaluation.

    Args:
        metrics: metrics of the evaluation, by name.
        findings: diagnosis of these metrics.
    """
    parts = []
    right, replaced = metrics.get("discriminator_accuracy"), metrics.get("replaced_fraction")
    if right is not None and replaced is not None:
        parts.append(f"it classifies {right:.1%} of the tokens correctly (always answering 'original': {1 - replaced:.1%})")
    gain = next((each for each in findings if each.name.endswith("_gain") and each.value is not None), None)
    if gain is not None and gain.value is not None:
        compared = f"{gain.value:.2f} nats better" if gain.value >= 0 else f"{-gain.value:.2f} nats worse"
        parts.append(f"it predicts words {compared} than word frequencies alone")
    # Of the text, not of the evaluation.
    own = [each for each in findings if each.name != "duplicate_fraction"]
    judged = [each for each in own if each.usual is not None and each.verdict != "unknown"]
    if judged:
        fine = sum(each.verdict == "fine" for each in judged)
        many = "diagnosed metrics are" if len(judged) > 1 else "diagnosed metric is"
        parts.append(f"{fine} of {len(judged)} {many} in {'their' if len(judged) > 1 else 'its'} usual range")
    if not parts:
        return ""
    return f"Held out, {', and '.join([', '.join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)}."


def evaluated_metrics(lines: Sequence[Mapping[str, Any]], evaluated: int | None) -> dict[str, float]:
    """The metrics of the evaluation at a step, named as in an evaluation; empty without one."""
    last: Mapping[str, Any] = next((line for line in reversed(lines) if line["step"] == evaluated and held_out_metrics(line)), {})
    return {name.removeprefix(HELD_OUT): value for name, value in held_out_metrics(last).items()}


def run_findings(
    config: PretrainConfig,
    record: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    expected: Expectations,
) -> list[Finding]:
    """The findings of `discern doctor` about the last evaluation that need neither weights nor data.

    Args:
        lines: records of the metrics log.
        expected: what is usual for the run's objective.
    """
    evaluated, _ = last_held_out(lines)
    metrics = evaluated_metrics(lines, evaluated)
    settled = diagnosable_from(config.optimizer.warmup_steps, steps_of_run(config.train, lines[-1]))
    statistics = record.get("statistics", {})
    findings = diagnose_metrics(metrics, expected)
    findings += diagnose_duplicates(statistics.get("documents", 0), statistics.get("duplicates", 0))
    return [too_early(each, evaluated or 0, settled, expected.discriminator_from) for each in findings]


def run_expectations(run: Path, config: PretrainConfig, record: Mapping[str, Any]) -> Expectations:
    """What is usual for the objective of a run.

    Raises:
        DataError: the counts of its tokens are damaged.
    """
    objective = _objective(config, record, read_counts(run, record["vocab_size"]))
    return expectations(objective, config.train.max_steps, flatten(config))


def _objective(config: PretrainConfig, record: Mapping[str, Any], counts: Tensor | None = None) -> Objective:
    """The objective of the run, without weights."""
    with torch.device("meta"):
        return build_objective(config, Vocabulary(record["vocab_size"], special_in(record), counts))


def _evaluation(run: Path) -> dict[str, Any]:
    """Results of the last `discern evaluate` in the run's folder; empty if there are none.

    Raises:
        DataError: the file is damaged.
    """
    path = run / EVALUATION_FILE
    return read_json(path, _Evaluation, hint=_MEASURE) if path.is_file() else {}


class _Evaluation(Record):
    step: int
    rows: int


def _before_and_after(run: Path, warn: Callable[[str], None]) -> list[tuple[str, list[ShadedPiece]]]:
    """The first example row at the first and at the last evaluation; empty without two evaluations with examples."""
    path = run / EXAMPLES_FILE
    records = read_records(path, warn) if path.is_file() else []
    if len(records) < 2:
        return []
    try:
        tokenizer = load_tokenizer(run / TOKENIZER_FILE)
        return [(f"At step {each['step']:,}", example_pieces(tokenizer, each["rows"][0])) for each in (records[0], records[-1])]
    except (DiscernError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        warn(f"{path} is damaged: the page has no examples before and after")
        return []


def example_pieces(tokenizer: Tokenizer, row: Mapping[str, Sequence[Any]]) -> list[ShadedPiece]:
    """The tokens of an example row as a text, with the original of each replaced token in brackets."""
    pieces: list[ShadedPiece] = []
    frame, texts = set(special_names(tokenizer).values()), TokenTexts(tokenizer)
    added = texts.row([int(new) for new in row["corrupted"]])
    for old, new, text, probability in zip(row["original"], row["corrupted"], added, row["probability"], strict=True):
        if old == new and tokenizer.id_to_token(int(new)) in frame:
            continue
        if pieces and text.startswith(" "):
            pieces.append(ShadedPiece(" ", None))
        pieces.append(ShadedPiece(text.strip() or text, float(probability)))
        if old != new:
            pieces.append(ShadedPiece(f" [{texts.shown(int(old))}]", None))
    return pieces


def _rows_per_step(config: PretrainConfig) -> str:
    """Number and length of the rows of a step, first and last if they change."""
    segments = step_sizes(config.train, config.data).segments
    ends = dict.fromkeys((segment.rows, segment.length) for segment in (segments[0], segments[-1]))
    return ", later ".join(f"{_number(rows)} of at most {_number(length)} tokens" for rows, length in ends)


def _facts(config: PretrainConfig, record: Mapping[str, Any], last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The head of the page, without paths and machine names, so that the page can be shared."""
    objective = _objective(config, record)
    sizes = {name: network.encoder.config for name, network in objective.networks().items()}
    statistics = record.get("statistics", {})
    unknown = statistics.get("unknown_fraction")
    versions = {"discern": record.get("discern", _UNKNOWN), **record.get("versions", {})}
    name, train = config.objective.name, config.train
    steps = steps_of_run(train, last)
    ended = ", when its time was used" if steps < train.max_steps else f" of {_number(steps)}"
    return [
        ("Objective", TITLES.get(name, name)),
        *((network.capitalize(), _size(size)) for network, size in sizes.items()),
        ("Parameters (shared ones counted once)", _number(sum(parameter.numel() for parameter in objective.parameters()))),
        ("Vocabulary", f"{_number(record['vocab_size'])} tokens"),
        ("Steps", f"{_number(last['step'])}{ended}"),
        ("Rows per step", _rows_per_step(config)),
        ("Tokens read, including repetitions", _number(last.get("tokens"))),
        ("Time in training", _duration(last.get("seconds"))),
        *_cost(last),
        ("Precision setting", train.precision),
        *((f"Share of {name}", f"{share:.1%} of the tokens") for name, share in record.get("mixture", {}).items()),
        ("Data set", f"{_number(statistics.get('documents'))} documents, {_number(statistics.get('tokens'))} tokens"),
        ("Unknown tokens", _UNKNOWN if unknown is None else f"{unknown:.3%}"),
        ("Fingerprint of the data", record.get("data_fingerprint", _UNKNOWN)[:12]),
        ("Made with", ", ".join(f"{library} {version}" for library, version in versions.items())),
    ]


def _cost(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """FLOPs, peak memory and what the run waited for at its last record, if the metrics log has them."""
    found = []
    waited = {name: last[key] for key, name in _WAITING.items() if is_number(last.get(key))}
    if waited:
        found.append(("Time spent waiting", ", ".join(f"{share:.1%} for {name}" for name, share in waited.items())))
    if is_number(last.get("flops")):
        found.append(("FLOPs executed", f"{last['flops']:.3e}"))
    if is_number(last.get("peak_memory_bytes")):
        found.append(("Peak memory", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return found


def _notes(config: PretrainConfig, evaluated_at: int | None, *, has_more: bool) -> list[str]:
    notes = [
        "A point of a training curve is the mean over the steps since the previous point; held-out metrics are without dropout."
    ]
    if evaluated_at is None:
        return [*notes, "There are no held-out metrics: no text was held out, or no evaluation was run yet."]
    rows = config.train.evaluate_sequences
    more = "" if has_more else " `discern evaluate RUN` adds metrics by token frequency and position, and a calibration curve."
    amount = f"at most {rows:,} rows, evenly spaced in the held-out text" if rows else "all held-out text"
    return [*notes, f"Every evaluation uses the same rows and masked positions: {amount}.{more}"]


def _size(size: ModelConfig) -> str:
    layers = counted(size.num_layers, "layer")
    heads = counted(size.num_heads, "attention head")
    return f"{layers} of width {size.hidden_size}, {heads}, feed-forward width {size.feedforward_size}"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _UNKNOWN


def _duration(seconds: object) -> str:
    """A duration in words."""
    if not isinstance(seconds, int | float) or not is_number(seconds):
        return _UNKNOWN
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{minutes // 60:,} hours {minutes % 60} minutes"


def run_verdict(step: int, max_steps: int, metrics: Mapping[str, float], findings: Sequence[Finding]) -> list[str]:
    """Sentences about a pre-training run.

    Args:
        metrics: metrics of the last evaluation, by name.
        findings: diagnosis of these metrics.
    """
    if not metrics:
        return [f"Step {step:,} of {max_steps:,}; no evaluation during training yet."]
    early = [finding for finding in findings if finding.cause.startswith("too early to tell")]
    begun = f"Step {step:,} of {max_steps:,}. " if step < max_steps else ""
    found = [begun + " ".join(_learned(metrics))]
    unusual = unusual_findings(findings)
    found += [f"Unusual: {each.cause}." + (f" Try {each.knob}." if each.knob else "") for each in unusual]
    if early:
        found.append("It is too early for a verdict.")
    elif not unusual and any(each.verdict == "fine" and each.name != "duplicate_fraction" for each in findings):
        found.append("All metrics are within their usual ranges.")
    return found


def _learned(metrics: Mapping[str, float]) -> list[str]:
    sentences = []
    auc = metrics.get("discriminator_auc")
    if auc is not None:
        how = next(words for bound, words in _AUC_WORDS if auc < bound)
        sentences.append(f"The discriminator tells replaced tokens from original ones {how} (AUC {auc:.3f}; 0.5 is guessing).")
    precision, recall = metrics.get("discriminator_precision"), metrics.get("discriminator_recall")
    if precision is not None and recall is not None:
        right = f", and {precision:.0%} of the tokens it marks were replaced" if recall else ""
        sentences.append(f"At probability 1/2 it marks {recall:.0%} of the replaced tokens{right}.")
    # The accuracy of `all-tokens-mlm` includes the tokens that it copies.
    words = "masked_accuracy" if "masked_accuracy" in metrics else "mlm_accuracy"
    for name, who in (("generator_accuracy", "The generator"), (words, "The network")):
        if name in metrics:
            sentences.append(f"{who} predicts {metrics[name]:.0%} of the masked tokens correctly.")
    if "permutation_lm_accuracy" in metrics:
        sentences.append(f"The network predicts {metrics['permutation_lm_accuracy']:.0%} of the target tokens correctly.")
    return sentences
