"""`discern detect`: find tokens that look replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from discern.cli.console import Console, JsonOption, command
from discern.cli.detection_text import Shown
from discern.cli.options import DeviceOption, refuse_text_as_file, typed_text
from discern.errors import ConfigError
from discern.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from discern.inference.calibration import ChosenThreshold
    from discern.inference.detection import Detection
    from discern.inference.texts import InputText

_CALIBRATION = "Calibration"


def detect(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A run, an export, or any Hugging Face ELECTRA discriminator (folder or name on the Hub)."
        ),
    ],
    input: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT", help="File with one text per line, plain text or JSON lines; - reads stdin.", show_default=False
        ),
    ] = None,
    *,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="Text to check; may be repeated.", show_default=False),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Field that holds the text in JSON lines. [default: text, in .jsonl files]",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            min=0.0,
            max=1.0,
            help="Lowest probability at which a token is marked. [default: calibrated, or 0.5]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write the results to, as JSON lines, one per text.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="PAGE",
            help="Self-contained HTML page to write. Click a token in it to see the generator's predictions.",
        ),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--evaluate",
            metavar="FILE",
            help="Measure how well wrong words are found: sentences with the wrong words in [[brackets]], or JSON lines.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="DATA",
            help="Find the threshold on held-out text corrupted by the generator, and store it in MODEL.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            "--precision",
            min=0.0,
            max=1.0,
            help="Precision to reach with --calibrate: the fraction of marked tokens that were really replaced. [default: 0.9]",
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
            help="Fraction of the tokens that --calibrate masks and fills. [default: 0.15]",
            rich_help_panel=_CALIBRATION,
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            min=0,
            help="Number of held-out rows that --calibrate uses, evenly spaced; 0: all. [default: 2000]",
            rich_help_panel=_CALIBRATION,
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Predict, for each token of a text, the probability that it was replaced. Reads stdin if neither --text nor INPUT is given.

    Examples: discern detect runs/first --text "The chef ate purple elephants." --html page.html

    discern detect runs/first texts.txt --out found.jsonl

    discern detect runs/first --calibrate data --precision 0.9
    """
    with command(json_output=json_output) as console:
        model = console.local_model(model)
        given = {"precision": precision, "corruption": corruption, "sequences": sequences}
        options = {name: value for name, value in given.items() if value is not None}
        works = {"--calibrate": calibrate, "--evaluate": evaluate, "--text": text or None, "INPUT": input}
        asked = [name for name, value in works.items() if value is not None]
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join(asked)} are both given", hint="give only one of them")
        if options and calibrate is None:
            raise ConfigError(f"--{next(iter(options))} is for --calibrate", hint="add --calibrate DATA, or leave it out")
        if (calibrate is not None or evaluate is not None) and (out is not None or html is not None):
            raise ConfigError(f"--out and --html cannot be combined with {asked[0]}", hint="leave them out")
        if calibrate is not None:
            for option, value in {"--threshold": threshold, "--text-field": text_field}.items():
                if value is not None:
                    raise ConfigError(f"{option} cannot be combined with --calibrate", hint="give only one of them")
            _calibrate(console, model, calibrate, {**options, "device": device})
        elif evaluate is not None:
            _evaluate(console, model, evaluate, text_field, threshold, device)
        else:
            refuse_text_as_file(input)
            texts = _texts(text, input, text_field)
            _detect(console, model, texts, threshold, out, html, input, device, single=len(text or ()) == 1)


def _detect(
    console: Console,
    model: Path,
    texts: Iterable[InputText],
    threshold: float | None,
    out: Path | None,
    html: Path | None,
    source: Path | None,
    device: str,
    *,
    single: bool,
) -> None:
    from discern.inference.detect import detect_texts, detection_values

    shown, values = Shown(console), []
    # With an output file, only a summary is printed.
    gathers = console.json_output and out is None
    prints = not console.json_output and out is None and html is None

    def show(_: InputText, detection: Detection, chosen: ChosenThreshold) -> None:
        if gathers:
            values.append(detection_values(detection, chosen.value))
        elif prints:
            shown.add(detection, chosen.value)

    done = detect_texts(
        model,
        texts,
        show,
        console.progress,
        console.warn,
        threshold=threshold,
        out=out,
        page=html,
        source=source,
        device=device,
    )
    shown.finish()
    if not done.texts:
        console.warn("the input has no lines, so there is nothing to check")
    if prints:
        return
    sums: dict[str, Any] = {"texts": done.texts, "tokens": done.tokens, "marked": done.marked, "threshold": done.threshold.value}
    if gathers:
        sums = values[0] if single else {"texts": values, "threshold": done.threshold.value}
    files = {name: path for name, path in (("out", out), ("html", html)) if path is not None}
    marked = f"{done.marked:,} of {done.tokens:,} tokens marked at threshold {done.threshold.value:.3g}"
    counts = f"{counted(done.texts, 'text')}, {marked}"
    console.result({**sums, **files}, text=f"{' and '.join(map(str, files.values()))}: {counts} ({done.threshold.described})")


def _texts(text: list[str] | None, source: Path | None, field: str | None) -> Iterable[InputText]:
    """The texts to check: those given, or the lines of a file."""
    from discern.inference.texts import InputText, read_texts

    if text:
        text = [typed_text(each, "--text") for each in text]
        if field is not None:
            raise ConfigError("--text-field is for JSON lines, but --text is given", hint="leave one of them out")
        return [InputText(f"text {number}" if len(text) > 1 else "the text", number, each) for number, each in enumerate(text, 1)]
    if source is None and sys.stdin.isatty():
        raise ConfigError("there is no text to check", hint='add --text "Some text.", or a file, or pipe a text in')
    return read_texts(source or Path("-"), field)


def _calibrate(console: Console, model: Path, data: Path, options: dict[str, Any]) -> None:
    from discern.inference.calibration import calibrate

    found = calibrate(model, data, console.progress, console.warn, **options)
    low, high = found["precision_interval"]
    what = (
        f"precision {found['precision']:.3f} ({low:.3f} to {high:.3f}), recall {found['recall']:.3f}: "
        f"marks {found['marked']:,} of {found['tokens']:,} tokens; {found['replaced']:,} tokens were replaced; AUC "
        f"{found['auc']:.3f}"
    )
    if found["reached"]:
        lines = [f"threshold {found['threshold']:.4f}: {what}"]
        if found["kept"] is not None:
            lines.append(f"stored in {found['kept']}; discern detect uses it unless --threshold is given")
    else:
        lines = [
            f"no threshold reaches precision {found['wanted_precision']:g} on this text",
            f"the most precise is {found['threshold']:.4f}: {what}",
            "no threshold was stored",
        ]
    console.result(found, text="\n".join(lines))
    if not found["reached"]:
        raise SystemExit(1)


def _evaluate(console: Console, model: Path, sentences: Path, field: str | None, threshold: float | None, device: str) -> None:
    from discern.inference.detection_evaluation import evaluate_detection

    found = evaluate_detection(
        model, sentences, console.progress, console.warn, text_field=field, threshold=threshold, device=device
    )
    area = "-" if found["auc"] is None else f"{found['auc']:.4f}"
    read = f"{counted(found['sentences'], 'sentence')}, {counted(found['words'], 'word')}"
    console.result(found, text=f"{read}, {found['wrong']:,} of them wrong; AUC {area}")
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
        console.print(f"{kind or 'no kind'}: {each['recall']:.4f} of {each['wrong']:,} found at {found['threshold']:.4f}")
