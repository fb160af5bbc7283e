"""What the commands that use a model print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from discern.api.use import OnResult
from discern.cli.console import Console, columns
from discern.cli.progress import printable
from discern.cli.train import Result, shell_path, suggested
from discern.errors import counted

_LICENSE = "Check the license in README.md before you publish the model."


def predict_results(console: Console, options: Result) -> OnResult:
    return None if console.json_output else console.records


embed_results = predict_results


def predict(console: Console, result: Result, options: Result) -> None:
    if console.json_output or "out" in result:
        seconds, rows = result["seconds"], counted(result["rows"], "row")
        rate = f"{result['rows'] / max(seconds, 1e-9):,.0f} per second"
        console.result(result, text=f"{result.get('out')}: {rows} in {seconds:.1f} s ({rate})")


embed = predict


def score_results(console: Console, options: Result) -> OnResult:
    if console.json_output:
        return None
    from discern.inference.scoring.scorers import score_values

    def show(scores: Any) -> None:
        if options["tokens"]:
            console.records(score_values(each, tokens=True) for each in scores)
        else:
            console.lines(f"{each.total:.4f}\t{each.text}" for each in scores)

    return show


def score(console: Console, result: Result, options: Result) -> None:
    tokens, characters = result["num_tokens"], result["num_characters"]
    console.progress.note(
        f"mean score {result['score_per_token']:.4g} {result['unit']} per token ({tokens:,} tokens), "
        f"{result['score_per_character']:.4g} per character ({characters:,} characters)"
    )
    for name in (name for name in result if name.endswith("perplexity")):
        console.progress.note(f"{name.replace('_', '-')} {result[name]:.4g} over {tokens:,} tokens")
    if console.json_output or "out" in result:
        text = f"{result.get('out')}: {counted(result.get('sentences', 0), 'sentence')} scored by '{result['scorer']}'"
        console.result(result, text=text)


def rerank(console: Console, result: Result, options: Result) -> None:
    lines = [
        f"{result['out']}: {counted(result['lists'], 'list')} with {result['hypotheses']:,} hypotheses in total, "
        f"{result['changed']:,} with a new best hypothesis; scorer {result['scorer']}, lambda {result['lambda']:g}, "
        f"length weight {result['length_weight']:g}"
    ]
    rows = []
    for where, values in (("", result), ("dev ", result.get("dev", {}))):
        for name in ("wer", "cer", "bleu"):
            if (before := values.get(f"{name}_before")) is None:
                continue
            after, interval = values[f"{name}_after"], values[f"{name}_change_interval"]
            best = values[f"{name}_best_possible"]
            spread = "" if interval is None else "{:+.4f} to {:+.4f}".format(*interval)
            change = (f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
            rows.append((where + name, *change, spread, "" if best is None else f"{best:.4f}"))
    heading = ("", "before", "after", "change", "95% interval", "best possible")
    lines.append(columns(heading, rows) if rows else "no list has a reference, so no metric was measured")
    console.result(result, text="\n".join(lines))


def fill(console: Console, result: Result, options: Result) -> None:
    found = result["predictions"]
    masks = found if found and isinstance(found[0], list) else [found]
    tables = [
        columns(
            ("probability", "token" if len(masks) == 1 else f"token at mask {number}"),
            [(f"{each['probability']:.4f}", each["shown"]) for each in mask],
            right=(0,),
        )
        for number, mask in enumerate(masks, 1)
    ]
    console.result(result, text="\n".join(tables))


def export(console: Console, result: Result, options: Result) -> None:
    folder, quoted, task = str(result["out"]), shell_path(result["out"]), result.get("task")
    at = "" if result.get("step") is None else f" at step {result['step']:,}"
    what = f"{task}, seed {result['seed']}" if task is not None else f"the {result['network']}{at}"
    size = f"{result['parameters']:,} parameters in {result['precision']}, {result['bytes'] / 1e6:,.1f} MB in all"
    lines = [f"{folder}: {what}, {size}"]
    embeds = result["kind"] == "vectors"
    if embeds or options["sentence_transformers"]:
        lines.append(f"  SentenceTransformer({folder!r})")
    if embeds:
        lines.append(f"  discern.load({folder!r}).encode(texts), or discern embed {quoted} FILE")
    elif not result["has_head"]:
        lines.append(f"  transformers has no class for this head: its {result['architecture']} is the encoder alone")
    else:
        lines += [f"  AutoTokenizer.from_pretrained({folder!r})", f"  {result['architecture']}.from_pretrained({folder!r})"]
    if task is not None and not embeds:
        lines.append(f"  discern.load({folder!r}).predict(texts), or discern predict {quoted} FILE")
    if (parity := result.get("onnx")) is not None:
        kind = "int8" if "int8" in parity["file_bytes"] else "float32"
        lines.append(
            f"  {Path(folder) / 'model.onnx'}: {kind}, {parity['file_bytes'][kind] / 1e6:.1f} MB; agreement with the model "
            f"{parity['agreement']:.4f}, largest difference {parity['largest_difference']:.2g} ({parity['rows']:,} rows: "
            f"{parity['compared_on']})"
        )
        if parity["scores"]:
            lines.append(f"  {parity['metric']}: {parity['scores']['onnx']:.4f}, of the model {parity['scores']['torch']:.4f}")
    lines += [f"  pushed to {result['pushed']}"] if "pushed" in result else []
    lines.append(_LICENSE)
    if task is None:
        tried = [f"evaluate {quoted} --data DATA"] if len(result["networks"]) > 1 else []
        lines.append(suggested(*tried, f"finetune {quoted} --train FILE.csv --out TUNED"))
    console.result(result, text="\n".join(lines))


def import_model(console: Console, result: Result, options: Result) -> None:
    place = shell_path(result["out"])
    at = "" if result["step"] is None else f" at step {result['step']:,}"
    lines = [f"{result['out']}: {result['kind']}{at}, {result['bytes'] / 1e6:,.1f} MB in all; {result['tokenizer']}"]
    for name, parameters in result["parameters"].items():
        lines.append(f"  {name}: {parameters:,} parameters")
    lines += [f"  not imported: {', '.join(result['left_out'])}"] if result["left_out"] else []
    tried = [f"detect {place} --text 'Some text.'"] if "discriminator" in result["networks"] else []
    tried += [f"evaluate {place} --data DATA"] if result["measurable"] else []
    lines += [_LICENSE, suggested(*tried, f"finetune {place} --train FILE.csv --out TUNED")]
    console.result(result, text="\n".join(lines))


def serve_results(console: Console, options: Result) -> OnResult:
    def started(server: Result) -> None:
        names = server.get("models") or server.get("runs") or ()
        console.result(server, text=f"{', '.join(names)}: {server['url']} (Ctrl-C stops)")

    return started


# Backgrounds of words up to a probability; black text is legible on all of them.
_COLORS = ((0.25, "#6ee16e"), (0.5, "#c8e05a"), (0.75, "#fadc28"), (1.0, "#ff5546"))
_MOST_SUSPICIOUS = 5


def detect_results(console: Console, options: Result) -> OnResult:
    if console.json_output or options["out"] is not None or options["html"] is not None:
        return None
    shown = 0

    def show(detection: Any, threshold: float) -> None:
        nonlocal shown
        if shown:
            console.print("")
        elif console.has_color:
            scale = ((f" {highest:g} ", _style(highest)) for highest, _ in _COLORS)
            console.print(Text.assemble("probability of being replaced, up to: ", *scale, "  underlined: marked"))
        shown += 1
        if not detection.words:
            console.print("(empty)")
            return
        console.print(_colored(detection, threshold) if console.has_color else _table(detection, threshold))
        console.print(_verdict(detection, threshold))

    return show


def detect(console: Console, result: Result, options: Result) -> None:
    if options["calibrate"] is not None:
        _show_calibration(console, result)
    elif options["evaluate"] is not None:
        _show_evaluation(console, result)
    elif console.json_output or "marked" in result:
        files = " and ".join(str(result[name]) for name in ("out", "html") if name in result)
        text = ""
        if files:
            marked = f"{result['marked']:,} of {result['tokens']:,} tokens marked at threshold {result['threshold']:.3g}"
            text = f"{files}: {counted(result['texts'], 'text')}, {marked} ({result['threshold_origin']})"
        console.result(result, text=text)


def _show_calibration(console: Console, result: Result) -> None:
    low, high = result["precision_interval"]
    what = (
        f"precision {result['precision']:.3f} ({low:.3f} to {high:.3f}), recall {result['recall']:.3f}: "
        f"marks {result['marked']:,} of {result['tokens']:,} tokens; {result['replaced']:,} tokens were replaced; AUC "
        f"{result['auc']:.3f}"
    )
    if result["reached"]:
        lines = [f"threshold {result['threshold']:.4f}: {what}"]
        if result["kept"] is not None:
            lines.append(f"stored in {result['kept']}; discern detect uses it unless --threshold is given")
    else:
        lines = [
            f"no threshold reaches precision {result['wanted_precision']:g} on this text, so none was stored",
            f"the most precise is {result['threshold']:.4f}: {what}",
        ]
    console.result(result, text="\n".join(lines))
    if not result["reached"]:
        console.fail()


def _show_evaluation(console: Console, result: Result) -> None:
    area = "-" if result["auc"] is None else f"{result['auc']:.4f}"
    read = f"{counted(result['sentences'], 'sentence')}, {counted(result['words'], 'word')}"
    special = [(result["at_threshold"], result["threshold_origin"]), (result["best_f1"], "best F1")]
    rows = [
        (
            f"{rates['threshold']:.4f}",
            *(f"{rates[name]:.4f}" for name in ("precision", "recall", "f1")),
            f"{rates['marked']:,}",
            note,
        )
        for rates, note in sorted(
            [*((rates, "") for rates in result["thresholds"]), *special], key=lambda row: row[0]["threshold"]
        )
    ]
    lines = [
        f"{read}, {result['wrong']:,} of them wrong; AUC {area}",
        columns(("threshold", "precision", "recall", "F1", "marked", ""), rows, right=range(5)),
    ]
    for kind, each in result["by_kind"].items():
        lines.append(f"{kind or 'no kind'}: {each['recall']:.4f} of {each['wrong']:,} found at {result['threshold']:.4f}")
    console.result(result, text="\n".join(lines))


def _colored(detection: Any, threshold: float) -> Text:
    """The text with the color of its probability behind each word; marked words are underlined."""
    text, end = Text(), 0
    for word in detection.words:
        style = _style(word.probability) + (" underline" if word.probability >= threshold else "")
        text.append(printable(detection.text[end : word.start])).append(printable(word.text), style=style)
        end = word.end
    return text.append(printable(detection.text[end:]))


def _table(detection: Any, threshold: float) -> str:
    """One line per word: its probability, a mark if it reaches the threshold, the word, and its position."""
    rows = [
        (f"{word.probability:.3f}", "*" if word.probability >= threshold else "", word.text, f"{word.start}-{word.end}")
        for word in detection.words
    ]
    return columns(("replaced", "", "word", "characters"), rows, right=(0,))


def _verdict(detection: Any, threshold: float) -> str:
    """The number of words that look replaced, and the most suspicious ones."""
    ranked = sorted(detection.words, key=lambda word: -word.probability)
    marked = [word for word in ranked if word.probability >= threshold]
    named = ", ".join(f"{word.text!r} {word.probability:.2f}" for word in (marked or ranked[:1])[:_MOST_SUSPICIOUS])
    if not marked:
        return f"no word reaches {threshold:.3g}; the highest: {named}"
    more = f" and {len(marked) - _MOST_SUSPICIOUS} more" if len(marked) > _MOST_SUSPICIOUS else ""
    look = "looks" if len(marked) == 1 else "look"
    return f"{len(marked)} of {counted(len(ranked), 'word')} {look} replaced (threshold {threshold:.3g}): {named}{more}"


def _style(probability: float) -> str:
    return f"black on {next(color for highest, color in _COLORS if probability <= highest)}"
