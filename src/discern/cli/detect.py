"""`discern detect`: which tokens of a text look replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from discern.cli.console import Console, JsonOption, command
from discern.cli.detection_text import Shown
from discern.cli.options import typed_text
from discern.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from discern.scoring.detection import Detection
    from discern.workflows.detect_calibrate import ChosenThreshold
    from discern.workflows.detect_input import InputText
    from discern.workflows.detect_texts import DetectRequest

_CALIBRATION = "Calibration"


def detect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, an export, or any Hugging Face ELECTRA discriminator.")],
    input: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT", help="A file with one text a line, plain or JSON lines; - reads stdin.", show_default=False
        ),
    ] = None,
    *,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="The text to judge; may be repeated.", show_default=False),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="The same as INPUT.", show_default=False)] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Of JSON lines, the field of the text. [default: text, in .jsonl]",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            min=0.0,
            max=1.0,
            help="Probability from which a token is marked. [default: as calibrated, or 0.5]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write JSON lines, one a text, of inputs of any size.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="PAGE", help="Write one self-contained page; a click shows what the generator would put."),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--evaluate", metavar="FILE", help="Measure on sentences whose wrong words are in [[brackets]], or JSON lines."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="DATA",
            help="Find the threshold on held-out text that the generator corrupts, and keep it in MODEL.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            "--precision",
            min=0.0,
            max=1.0,
            help="To reach: share of the marked tokens that were replaced. [default: 0.9]",
            rich_help_panel=_CALIBRATION,
            show_default=False,
        ),
    ] = None,
    corruption: Annotated[
        float | None,
        typer.Option(
            "--corruption",
            min=0.001,
            max=0.9,
            help="Share of the tokens to mask and fill. [default: 0.15, as in training]",
            rich_help_panel=_CALIBRATION,
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            min=0,
            help="Held-out rows, evenly spread; 0: all. [default: 2000]",
            rich_help_panel=_CALIBRATION,
            show_default=False,
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Tell how probable it is that each token of a text was replaced. Without a text or INPUT, reads the standard input.

    Examples: discern detect runs/first --text "The chef ate purple elephants." --html page.html

    discern detect runs/first texts.txt --out found.jsonl

    discern detect runs/first --calibrate data --precision 0.9
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        given = {"precision": precision, "corruption": corruption, "sequences": sequences}
        options = {name: value for name, value in given.items() if value is not None}
        works = {"--calibrate": calibrate, "--evaluate": evaluate, "--text": text or None, "INPUT": input, "--file": file}
        asked = [name for name, value in works.items() if value is not None]
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join(asked)} are both given", hint="give one of them")
        if options and calibrate is None:
            raise ConfigError(f"--{next(iter(options))} is for --calibrate", hint="add --calibrate DATA, or leave it out")
        if (calibrate is not None or evaluate is not None) and (out is not None or html is not None):
            raise ConfigError(f"{asked[0]} writes no --out and no --html", hint="leave them out")
        if calibrate is not None:
            if threshold is not None:
                raise ConfigError("--calibrate finds the threshold, and --threshold gives one", hint="give one of them")
            _calibrate(console, model, calibrate, options)
        elif evaluate is not None:
            _evaluate(console, model, evaluate, text_field, threshold)
        else:
            from discern.workflows.detect_texts import DetectRequest

            request = DetectRequest(model, _texts(text, input or file, text_field), threshold, out, html, input or file)
            _judge(console, request, single=len(text or ()) == 1)


def _judge(console: Console, request: DetectRequest, *, single: bool) -> None:
    from discern.workflows.detect_texts import detect_texts, detection_values

    shown, values, out, html = Shown(console), [], request.out, request.page
    # Whoever asks for a file is told what is in it, rather than shown all of it.
    gathers = console.json_output and out is None
    prints = not console.json_output and out is None and html is None

    def show(_: InputText, detection: Detection, chosen: ChosenThreshold) -> None:
        if gathers:
            values.append(detection_values(detection, chosen.value))
        elif prints:
            shown.add(detection, chosen.value)

    done = detect_texts(request, show, console.progress, console.warn)
    shown.finish()
    if not done.texts:
        console.warn("there is no line in the input: nothing to judge")
    if prints:
        return
    sums: dict[str, Any] = {"texts": done.texts, "tokens": done.tokens, "marked": done.marked, "threshold": done.threshold.value}
    if gathers:
        sums = values[0] if single else {"texts": values, "threshold": done.threshold.value}
    files = {name: path for name, path in (("out", out), ("html", html)) if path is not None}
    said = f"{done.texts:,} texts, {done.marked:,} of {done.tokens:,} tokens marked, from {done.threshold.value:.3g} on"
    console.result({**sums, **files}, text=f"{' and '.join(map(str, files.values()))}: {said} ({done.threshold.described})")


def _texts(text: list[str] | None, source: Path | None, field: str | None) -> Iterable[InputText]:
    """What to judge: the texts given, or the lines of a file."""
    from discern.workflows.detect_input import InputText, read_texts

    if text:
        text = [typed_text(each, "--text") for each in text]
        if field is not None:
            raise ConfigError("--text-field is for JSON lines, and --text is given", hint="leave one of them out")
        return [InputText(f"text {number}" if len(text) > 1 else "the text", number, each) for number, each in enumerate(text, 1)]
    if source is None and sys.stdin.isatty():
        raise ConfigError("there is no text to judge", hint='add --text "Some text.", or a file, or pipe a text in')
    return read_texts(source or Path("-"), field)


def _calibrate(console: Console, model: Path, data: Path, options: dict[str, Any]) -> None:
    from discern.workflows.detect_calibrate import CalibrateRequest, calibrate

    found = calibrate(CalibrateRequest(model, data, **options), console.progress, console.warn)
    low, high = found["precision_interval"]
    what = (
        f"precision {found['precision']:.3f} ({low:.3f} to {high:.3f}), recall {found['recall']:.3f}: "
        f"marks {found['marked']:,} of {found['tokens']:,} tokens, "
        f"of which {found['replaced']:,} were replaced; AUC {found['auc']:.3f}"
    )
    if found["reached"]:
        lines = [f"threshold {found['threshold']:.4f}: {what}"]
        if found["kept"] is not None:
            lines.append(f"kept in {found['kept']}; discern detect goes by it until --threshold says otherwise")
    else:
        lines = [
            f"no threshold reaches precision {found['wanted_precision']:g} on this text",
            f"the most precise is {found['threshold']:.4f}: {what}",
            "nothing is kept",
        ]
    console.result(found, text="\n".join(lines))
    if not found["reached"]:
        raise SystemExit(1)


def _evaluate(console: Console, model: Path, sentences: Path, field: str | None, threshold: float | None) -> None:
    from discern.workflows.detect_evaluate import EvaluateDetectionRequest, evaluate_detection

    request = EvaluateDetectionRequest(model, sentences, field, threshold)
    found = evaluate_detection(request, console.progress, console.warn)
    area = "-" if found["auc"] is None else f"{found['auc']:.4f}"
    counts = f"{found['sentences']:,} sentences, {found['words']:,} words, {found['wrong']:,} of them wrong; AUC {area}"
    console.result(found, text=counts)
    table = Table("threshold", "", "precision", "recall", "F1", "marked")
    for column in (0, 2, 3, 4, 5):
        table.columns[column].justify = "right"
    special = [(found["at_threshold"], found["threshold_origin"]), (found["best_f1"], "best F1")]
    rows = [(rates, "") for rates in found["thresholds"]] + special
    for rates, note in sorted(rows, key=lambda row: row[0]["threshold"]):
        numbers = (f"{rates[name]:.4f}" for name in ("precision", "recall", "f1"))
        table.add_row(f"{rates['threshold']:.4f}", note, *numbers, f"{rates['marked']:,}")
    console.print(table)
    for kind, each in found["by_kind"].items():
        console.print(f"{kind or 'no kind named'}: {each['recall']:.4f} of {each['wrong']:,} found at {found['threshold']:.4f}")
