"""`discern detect`: find tokens that look replaced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from discern.cli.console import Console, JsonOption, command, refuse_text_as_file, typed_text
from discern.cli.options import DeviceOption, refuse_together
from discern.errors import ConfigError
from discern.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from discern.inference.detection import ChosenThreshold, Detection
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
        files = {"--out": out is not None, "--html": html is not None}
        if calibrate is not None:
            unread = {"--threshold": threshold is not None, "--text-field": text_field is not None}
            refuse_together("--calibrate", files | unread)
            _calibrate(console, model, calibrate, {**options, "device": device})
        elif evaluate is not None:
            refuse_together("--evaluate", files)
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
    from discern.inference.detection import detect_texts, detection_values

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


# Background of a token at probability 0, 1/2 and 1; black text is legible on all of them. They are strong enough that a
# terminal of sixteen colors shows green, yellow and red.
_COLORS = ((110, 225, 110), (250, 220, 40), (255, 85, 70))
_MOST_SUSPICIOUS = 5


class Shown:
    """Prints detections one by one; `finish` prints the legend."""

    def __init__(self, console: Console) -> None:
        terminal = RichConsole()
        self._console = console
        self._colored = terminal.is_terminal and terminal.color_system is not None and not terminal.no_color
        self._count = 0

    def add(self, detection: Detection, threshold: float) -> None:
        """Print a text with its tokens, and the number of marked tokens."""
        if self._count:
            self._console.print("")
        self._count += 1
        if not detection.tokens:
            self._console.print("(empty)")
            return
        self._console.print(colored_text(detection, threshold) if self._colored else token_table(detection, threshold))
        self._console.print(verdict(detection, threshold))

    def finish(self) -> None:
        """Print the legend after the last text."""
        if self._colored and self._count:
            self._console.print(legend())


def show(console: Console, found: Sequence[Detection], threshold: float) -> None:
    """Print texts with colored tokens, or as tables where colors are not available."""
    shown = Shown(console)
    for detection in found:
        shown.add(detection, threshold)
    shown.finish()


def colored_text(detection: Detection, threshold: float) -> Text:
    """The text with the color of its probability behind each token; marked tokens are underlined."""
    text = Text(detection.text)
    for (start, end), probability in zip(detection.offsets, detection.replaced_probability, strict=True):
        text.stylize(_style(probability) + (" underline" if probability >= threshold else ""), start, end)
    return text


def token_table(detection: Detection, threshold: float) -> RenderableType:
    """One line per token: its probability, a mark if it reaches the threshold, the token, and its position."""
    table = Table("replaced", "", "token", "characters")
    table.columns[0].justify = "right"
    for index, ((start, end), probability) in enumerate(zip(detection.offsets, detection.replaced_probability, strict=True)):
        token = _token(detection, index)
        table.add_row(f"{probability:.3f}", "*" if probability >= threshold else "", Text(token), f"{start}-{end}")
    return table


def verdict(detection: Detection, threshold: float) -> Text:
    """The number of tokens that look replaced, and the most suspicious words, each with its highest probability."""
    probabilities = detection.replaced_probability
    ranked = sorted(range(len(detection.tokens)), key=lambda index: -probabilities[index])
    marked = [index for index in ranked if probabilities[index] >= threshold]
    words: dict[tuple[int, int], str] = {}  # by position; the most suspicious token of a word comes first
    for index in marked or ranked[:1]:
        span, name = _word(detection, index)
        words.setdefault(span, f"{name!r} {probabilities[index]:.2f}")
    named = ", ".join(list(words.values())[:_MOST_SUSPICIOUS])
    if not marked:
        return Text(f"no token reaches {threshold:.3g}; the highest: {named}")
    more = f" and {len(words) - _MOST_SUSPICIOUS} more" if len(words) > _MOST_SUSPICIOUS else ""
    look = "looks" if len(marked) == 1 else "look"
    return Text(
        f"{len(marked)} of {counted(len(detection.tokens), 'token')} {look} replaced (threshold {threshold:.3g}): {named}{more}"
    )


def legend() -> Text:
    """The legend: colors of probabilities from 0 to 1, in fewer than 80 columns."""
    steps = [index / 5 for index in range(6)]
    return Text.assemble(
        "probability of being replaced: ", *((f" {step:g} ", _style(step)) for step in steps), "  underlined: marked"
    )


def _word(detection: Detection, index: int) -> tuple[tuple[int, int], str]:
    """The position of a token's word in the text, and the word as it is written there; the token itself if it is in no word."""
    from discern.inference.texts import overlapping, words_of

    words = words_of(detection.text)
    whole = [words[number] for number in overlapping(words, detection.offsets[index])]
    if not whole:
        return detection.offsets[index], _token(detection, index)
    start, end = whole[0][0], whole[-1][1]
    return (start, end), detection.text[start:end]


def _token(detection: Detection, index: int) -> str:
    """The token as the text writes it, or as the vocabulary does for a WordPiece suffix or part of a character."""
    token, (start, end), offsets = detection.tokens[index], detection.offsets[index], detection.offsets
    text = detection.text[start:end].strip()
    part = (start, end) in (*offsets[max(0, index - 1) : index], *offsets[index + 1 : index + 2])
    return token if part or token.startswith("##") or not text else text


def _style(probability: float) -> str:
    """Black on green at 0, on yellow at 1/2, on red at 1."""
    low, high = (_COLORS[0], _COLORS[1]) if probability < 0.5 else (_COLORS[1], _COLORS[2])
    part = probability * 2 if probability < 0.5 else probability * 2 - 1
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"black on #{red:02x}{green:02x}{blue:02x}"
