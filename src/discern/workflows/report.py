"""A run as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.files import write_text
from discern.artifacts.guard import check_output
from discern.config.tree import flatten, to_toml
from discern.errors import DataError
from discern.model.config import ModelConfig
from discern.objectives.base import Objective, Vocabulary
from discern.records import Record, read_record, understood
from discern.report.evaluation import evaluation_pictures, evaluation_tables
from discern.report.journal import last_held_out, run_charts
from discern.report.minimal_pairs import blimp_tables
from discern.report.page import Page, render_page
from discern.report.shading import ShadedText
from discern.report.verdict import run_verdict
from discern.scoring.detection import Detection
from discern.training.diagnosis import expectations, judge_duplicates, judge_held_out
from discern.training.journal import HELD_OUT, METRICS_FILE, held_out_figures, is_number, read_metrics
from discern.training.watchman import settled_from, too_early
from discern.workflows.configuration import read_written_config
from discern.workflows.runs import CONFIG_FILE, EVALUATION_FILE, build_objective, special_in
from discern.workflows.runs import read_record as read_run_record
from discern.workflows.settings import PretrainConfig
from discern.workflows.suite import BLIMP_FILE, JUDGE_AGAIN, read_kept

REPORT_FILE = "report.html"
_MEASURE = "remove it for a page without it; `discern evaluate RUN` writes it again"

_OBJECTIVES = {
    "rtd": "replaced token detection (ELECTRA)",
    "mlm": "masked language modelling (BERT)",
    "permutation-lm": "permutation language modelling (XLNet)",
    "electric": "noise-contrastive energies (Electric)",
}
_UNKNOWN = "not recorded"


def report(
    run: Path, out: Path | None, detections: Sequence[Detection] = (), *, warn: Callable[[str], None] = lambda message: None
) -> Path:
    """Write a page about a run; gives the file. The same run gives the same bytes.

    Args:
        out: HTML file, replaced where it stands; None: report.html in the folder of the run.
        detections: texts whose tokens are shown, shaded.
        warn: told of damaged lines of the journal, which are left out.

    Raises:
        ConfigError: `out` is a folder, or lies inside the run under another name.
        DataError: the folder holds no run, its journal is empty, a file of it is damaged, or the page cannot be written.
    """
    target = out or run / REPORT_FILE
    check_output("--out", target, REPORT_FILE, run, own=(REPORT_FILE,))
    record = read_run_record(run)
    lines = read_metrics(run, warn)
    if not lines:
        path = run / METRICS_FILE
        if path.is_file() and path.stat().st_size:
            raise DataError(
                f"{path} is damaged: no line of it can be read", hint="copy it back, or continue training to add lines"
            )
        raise DataError(
            f"{run} has nothing to show yet: its {METRICS_FILE} holds no line",
            hint="let `discern pretrain` do its first step",
        )
    config = read_written_config(run / CONFIG_FILE)
    step, figures = last_held_out(lines)
    evaluation = _evaluation(run)
    with understood(run / EVALUATION_FILE, hint=_MEASURE):
        measured = (evaluation_pictures(evaluation), evaluation_tables(evaluation)) if evaluation else ((), ())
    with understood(run / BLIMP_FILE, hint=JUDGE_AGAIN):
        preferences = blimp_tables(read_kept(run))
    page = Page(
        title=f"discern: {run.resolve().name}",
        verdict=_verdict(config, record, lines, step),
        facts=_facts(config, record, lines[-1]),
        curves=[*run_charts(lines), *measured[0]],
        tables=[*measured[1], *preferences],
        figures=figures,
        evaluated_at=step,
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


def _verdict(
    config: PretrainConfig, record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], evaluated: int | None
) -> list[str]:
    """What the last held-out figures say, as `discern doctor` judges them; without looking at weights or data."""
    last: Mapping[str, Any] = next((line for line in reversed(lines) if line["step"] == evaluated and held_out_figures(line)), {})
    # By the names that an evaluation gives them.
    figures = {name.removeprefix(HELD_OUT): value for name, value in held_out_figures(last).items()}
    expected = expectations(_objective(config, record), config.train.max_steps, flatten(config))
    settled = settled_from(config.optimizer.warmup_steps, config.train.max_steps)
    statistics = record.get("statistics", {})
    findings = judge_held_out(figures, expected)
    findings += judge_duplicates(statistics.get("documents", 0), statistics.get("duplicates", 0))
    step = lines[-1]["step"]
    return run_verdict(step, config.train.max_steps, figures, [too_early(each, evaluated or 0, settled) for each in findings])


def _objective(config: PretrainConfig, record: Mapping[str, Any]) -> Objective:
    """Of the run, without weights."""
    with torch.device("meta"):
        return build_objective(config, Vocabulary(record["vocab_size"], special_in(record)))


def _evaluation(run: Path) -> dict[str, Any]:
    """What the last `discern evaluate` left in the run; nothing where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = run / EVALUATION_FILE
    return read_record(path, _Evaluation, hint=_MEASURE) if path.is_file() else {}


class _Evaluation(Record):
    step: int
    rows: int


def _facts(config: PretrainConfig, record: Mapping[str, Any], last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The head of the page; no path and no name of a machine, so that the page can be shown around."""
    objective = _objective(config, record)
    sizes = {name: network.encoder.config for name, network in objective.networks().items()}
    statistics = record.get("statistics", {})
    unknown = statistics.get("unknown_fraction")
    versions = {"discern": record.get("discern", _UNKNOWN), **record.get("versions", {})}
    name, train = config.objective.name, config.train
    return [
        ("Objective", _OBJECTIVES.get(name, name)),
        *((network.capitalize(), _size(size)) for network, size in sizes.items()),
        ("Parameters, shared ones once", _number(sum(parameter.numel() for parameter in objective.parameters()))),
        ("Vocabulary", f"{_number(record['vocab_size'])} entries"),
        ("Steps", f"{_number(last['step'])} of {_number(train.max_steps)}"),
        ("Rows a step", f"{_number(train.sequences_per_step)} of at most {_number(config.data.sequence_length)} tokens"),
        ("Tokens read, repetitions included", _number(last.get("tokens"))),
        ("Time in training", _duration(last.get("seconds"))),
        *_cost(last),
        ("Precision setting", train.precision),
        ("Data set", f"{_number(statistics.get('documents'))} documents, {_number(statistics.get('tokens'))} tokens"),
        ("Unknown tokens", _UNKNOWN if unknown is None else f"{unknown:.3%}"),
        ("Fingerprint of the data", record.get("data_fingerprint", _UNKNOWN)[:12]),
        ("Made with", ", ".join(f"{library} {version}" for library, version in versions.items())),
    ]


def _cost(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arithmetic and memory, where the journal has them."""
    found = []
    if is_number(last.get("flops")):
        found.append(("FLOPs executed", f"{last['flops']:.3e}"))
    if is_number(last.get("peak_memory_bytes")):
        found.append(("Largest memory", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return found


def _notes(config: PretrainConfig, evaluated_at: int | None, *, has_more: bool) -> list[str]:
    notes = [
        "A point of a training curve is the mean over the steps since the point before; held-out figures are without dropout."
    ]
    if evaluated_at is None:
        return [*notes, "Nothing was held out, or nothing evaluated yet: there are no held-out figures."]
    rows = config.train.evaluate_sequences
    more = (
        "" if has_more else " `discern evaluate RUN` measures more, and adds figures by frequency and position and a calibration."
    )
    amount = f"at most {rows:,} rows, evenly spread over the held-out text" if rows else "all held-out text"
    return [*notes, f"Every evaluation is of the same rows and masked positions: {amount}.{more}"]


def _size(size: ModelConfig) -> str:
    layers = "1 layer" if size.num_layers == 1 else f"{size.num_layers} layers"
    return f"{layers}, {size.hidden_size} wide, attention heads {size.num_heads}, feed-forward {size.feedforward_size}"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _UNKNOWN


def _duration(seconds: object) -> str:
    """Seconds in words."""
    if not isinstance(seconds, int | float) or not is_number(seconds):
        return _UNKNOWN
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{minutes // 60:,} hours {minutes % 60} minutes"
