"""The page of a pre-training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from discern.config.schema import flatten, to_toml
from discern.data.tokenizer import TokenTexts, load_tokenizer, special_names
from discern.diagnosis.health import (
    diagnosable_from,
    diagnose_duplicates,
    diagnose_metrics,
    expectations,
    steps_of_run,
    too_early,
)
from discern.errors import DataError, counted
from discern.model_files.finetuned import is_finetuned
from discern.model_files.run import (
    BLIMP_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    TOKENIZER_FILE,
    build_objective,
    read_counts,
    read_record as read_run_record,
    special_in,
)
from discern.models.config import ModelConfig
from discern.objectives import TITLES
from discern.objectives.base import Objective, Vocabulary
from discern.progress import duration_in_words
from discern.report.charts import reliability_chart
from discern.report.finetuned_page import finetuned_page
from discern.report.metrics import (
    EVALUATE_AGAIN,
    blimp_tables,
    group_tables,
    held_out_table,
    last_held_out,
    metric_charts,
    read_blimp_results,
)
from discern.report.page import Confusion, Page, Piece, Table, Texts, render_page, shaded_pieces
from discern.report.verdict import run_verdict
from discern.storage.checksums import read_json, understood
from discern.storage.files import check_output, write_text
from discern.training.config import PretrainConfig, read_written_config
from discern.training.metrics import EXAMPLES_FILE, HELD_OUT, METRICS_FILE, read_metrics, read_records

if TYPE_CHECKING:
    from discern.inference.detection import Detection

_REPORT_FILE = "report.html"
_MEASURE = "remove it to leave it out of the page; `discern evaluate RUN` writes it again"


@dataclass(frozen=True)
class LoggedRun:
    """What the folder of a run says about it, without its weights.

    Attributes:
        record: content of run.json.
        objective: its objective, on the device "meta".
        metrics_log: records of the metrics log, oldest first; at least one.
    """

    folder: Path
    config: PretrainConfig
    record: dict[str, Any]
    objective: Objective
    metrics_log: list[dict[str, Any]]


def read_logged_run(folder: Path, warn: Callable[[str], None] = lambda message: None) -> LoggedRun:
    """Read the settings and the metrics log of a run.

    Args:
        warn: called with a message about damaged lines of the metrics log, which are skipped.

    Raises:
        DataError: the folder is not a run, its metrics log is empty, or one of its files is damaged.
    """
    record, metrics_log, config = read_run_record(folder), read_metrics(folder, warn), read_written_config(folder / CONFIG_FILE)
    if not metrics_log:
        raise DataError(
            f"{folder} has nothing to show yet: no line of its {METRICS_FILE} can be read",
            hint="run `discern pretrain` until its first log step",
        )
    counts = read_counts(folder, record["vocab_size"])
    with torch.device("meta"):
        objective = build_objective(config, Vocabulary(record["vocab_size"], special_in(record), counts))
    return LoggedRun(folder, config, record, objective, metrics_log)


def report(
    folder: Path, out: Path | None, detections: Sequence[Detection] = (), *, warn: Callable[[str], None] = lambda message: None
) -> Path:
    """Write the page of a run or a fine-tuned model and return its path. The same folder gives the same bytes.

    Args:
        out: HTML file to write or replace; None: report.html in the folder.
        detections: texts to show with shaded tokens.
        warn: called with a message about damaged lines of a metrics log, which are skipped.

    Raises:
        ConfigError: `out` is a folder, or lies inside the folder under another name.
        DataError: the run or the model cannot be read or is not finished, or the page cannot be written.
    """
    target = out or folder / _REPORT_FILE
    check_output("--out", target, _REPORT_FILE, folder, own=(_REPORT_FILE,))
    html = render_page(finetuned_page(folder) if is_finetuned(folder) else run_page(folder, detections, warn))
    try:
        write_text(target, html)
    except OSError as problem:
        raise DataError(
            f"cannot write {target}: {problem.strerror or problem}",
            hint="choose a file in an existing folder that you can write to: --out FILE.html",
        ) from problem
    return target


def run_page(run: Path, detections: Sequence[Detection], warn: Callable[[str], None]) -> Page:
    """The page of a run."""
    logged = read_logged_run(run, warn)
    config, last = logged.config, logged.metrics_log[-1]
    charts = metric_charts({run.name: [logged.metrics_log]})
    sections: list[Table | Texts | Confusion] = [*example_texts(run, warn)]
    if detections:
        pieces = [shaded_pieces(each.text, each.offsets, each.replaced_probability) for each in detections]
        sections.append(Texts("Probability that each token was replaced", [("", text) for text in pieces]))
    step, metrics = last_held_out(logged.metrics_log)
    notes = ["A point of a training curve is the mean since the previous point; held-out metrics are without dropout."]
    if metrics:
        rows = config.train.evaluate_sequences
        amount = f"at most {rows:,} rows, evenly spaced in the held-out text" if rows else "all held-out text"
        notes.append(f"Every evaluation uses the same rows and masked positions: {amount}.")
        sections.append(held_out_table(f"Held-out metrics at step {step:,}", {"Value": metrics}))
    else:
        notes.append("There are no held-out metrics: no text was held out, or no evaluation was run yet.")
    if (run / EVALUATION_FILE).is_file():
        results = read_json(run / EVALUATION_FILE, hint=_MEASURE)
        with understood(run / EVALUATION_FILE, hint=_MEASURE):
            if "calibration" in results:
                bins, title = results["calibration"]["bins"], "Calibration of the discriminator, held out"
                charts.append(reliability_chart(title, bins, "probability of 'replaced'", "share replaced"))
            sections += group_tables(results)
    elif metrics:
        notes.append("`discern evaluate RUN` adds tables by token frequency and position, and a calibration curve.")
    with understood(run / BLIMP_FILE, hint=EVALUATE_AGAIN):
        sections += blimp_tables(read_blimp_results(run))
    name, network = next(iter(logged.objective.networks().items()))
    parameters = sum(parameter.numel() for parameter in logged.objective.parameters())  # shared ones count once
    with understood(run / METRICS_FILE, hint="restore it from a copy, or remove its last line"):
        trained = (
            f"{'An' if name.startswith('e') else 'A'} {name} with {_size(network.encoder.config)} ({parameters:,} parameters in "
            f"all networks) was trained by {_title(config)} on {last['tokens']:,} tokens in {last['step']:,} steps."
        )
        return Page(
            title=f"discern: {run.resolve().name}",
            verdict=[trained, *verdict_of_run(logged)],
            facts=_facts(logged),
            charts=charts,
            sections=sections,
            configuration=to_toml(config),
            notes=notes,
        )


def steps_done(run: LoggedRun) -> str:
    """ "20 of 50", or, if the run has a time budget, "20 in 10 minutes"."""
    train, last = run.config.train, run.metrics_log[-1]
    if train.max_hours is None:
        return f"{last['step']:,} of {train.max_steps:,}"
    return f"{last['step']:,} in {duration_in_words(last['seconds'])}"


def verdict_of_run(run: LoggedRun) -> list[str]:
    """Sentences about the last evaluation, with the findings of `discern doctor` that need neither weights nor data."""
    config, last, statistics = run.config, run.metrics_log[-1], run.record["statistics"]
    evaluated, held_out = last_held_out(run.metrics_log)
    metrics = {name.removeprefix(HELD_OUT): value for name, value in held_out.items()}
    expected = expectations(run.objective, config.train.max_steps, flatten(config))
    settled = diagnosable_from(config.optimizer.warmup_steps, steps_of_run(config.train, last))
    findings = [
        *diagnose_metrics(metrics, expected),
        *diagnose_duplicates(statistics["documents"], statistics["duplicates"]),
    ]
    judged = [too_early(finding, evaluated or 0, settled, expected.discriminator_from) for finding in findings]
    return run_verdict(f"Steps: {steps_done(run)}.", metrics, judged)


def spent(run: Path) -> dict[str, float]:
    """Hours of training in the log of a run, with their cost and joules as far as they are known; empty without a record."""
    if not (records := read_metrics(run)):
        return {}
    hours, price = records[-1].get("seconds", 0.0) / 3600, read_written_config(run / CONFIG_FILE).train.price_per_hour
    values = {"hours": hours, "cost": price and hours * price, "energy_joules": records[-1].get("energy_joules")}
    return {name: value for name, value in values.items() if value is not None}


def _title(config: PretrainConfig) -> str:
    return TITLES.get(config.objective.name, config.objective.name)


def example_texts(run: Path, warn: Callable[[str], None] = lambda message: None) -> list[Texts]:
    """The example rows of the first and of the last evaluation; nothing without examples."""
    records = read_records(run / EXAMPLES_FILE, warn)
    if not records:
        return []
    tokenizer = load_tokenizer(run / TOKENIZER_FILE)
    with understood(run / EXAMPLES_FILE, hint="remove it for a page without examples"):
        rows_by_step = {record["step"]: record["rows"] for record in (records[0], records[-1])}
        texts = [
            (f"At step {step:,}" if row is rows[0] else "", example_pieces(tokenizer, row))
            for step, rows in rows_by_step.items()
            for row in rows
        ]
    note = (
        "Words in [brackets] are the originals of replaced tokens. The texts are held out; at each step, the generator replaced "
        "other tokens, as it learned too."
    )
    return [Texts("Before and after" if len(rows_by_step) > 1 else "What the discriminator marks", texts, note)]


def example_pieces(tokenizer: Tokenizer, row: Mapping[str, Sequence[Any]]) -> list[Piece]:
    """The tokens of an example row as a text, with the original of each replaced token in brackets."""
    pieces: list[Piece] = []
    frame, texts = set(special_names(tokenizer).values()), TokenTexts(tokenizer)
    added = texts.row([int(new) for new in row["corrupted"]])
    for old, new, text, probability in zip(row["original"], row["corrupted"], added, row["probability"], strict=True):
        if old == new and tokenizer.id_to_token(int(new)) in frame:
            continue
        if pieces and text.startswith(" "):
            pieces.append(Piece(" "))
        pieces.append(Piece(text.strip() or text, float(probability)))
        if old != new:
            pieces.append(Piece(f" [{texts.shown(int(old))}]"))
    return pieces


def _facts(run: LoggedRun) -> list[tuple[str, str]]:
    """The head of the page, without paths and machine names, so that the page can be shared."""
    config, record, last = run.config, run.record, run.metrics_log[-1]
    statistics, unknown, used = record["statistics"], record["statistics"].get("unknown_fraction"), spent(run.folder)
    facts = {
        "Objective": _title(config),
        **{name.capitalize(): _size(network.encoder.config) for name, network in run.objective.networks().items()},
        "Vocabulary": f"{record['vocab_size']:,} tokens",
        "Steps": steps_done(run),
        "Time in training": duration_in_words(last["seconds"]),
        "Cost": f"{used['cost']:,.2f}" if "cost" in used else "",
        "Energy": f"{used['energy_joules'] / 3.6e6:,.3f} kWh" if "energy_joules" in used else "",
        "FLOPs executed": f"{last['flops']:.3e}" if "flops" in last else "",
        "Peak memory": f"{last['peak_memory_bytes'] / 2**30:.2f} GiB",
        **{f"Share of {source}": f"{share:.1%} of the tokens" for source, share in record.get("mixture", {}).items()},
        "Data set": f"{statistics['documents']:,} documents, {statistics['tokens']:,} tokens",
        "Unknown tokens": f"{unknown:.3%}" if unknown else "",
        "Fingerprint of the data": record["data_fingerprint"][:12],
        "Made with": ", ".join(
            f"{library} {version}" for library, version in {"discern": record["discern"], **record["versions"]}.items()
        ),
    }
    return [(fact, value) for fact, value in facts.items() if value]


def _size(size: ModelConfig) -> str:
    layers, heads = counted(size.num_layers, "layer"), counted(size.num_heads, "attention head")
    return f"{layers} of width {size.hidden_size}, {heads}, feed-forward width {size.feedforward_size}"
