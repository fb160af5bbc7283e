"""`discern demo`: every stage, from text to a trained network, in five minutes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from discern.cli.console import Console, JsonOption, command
from discern.cli.detect import show
from discern.cli.options import SetOption
from discern.cli.outputs import hint, shell_path

if TYPE_CHECKING:
    from discern.demo.run import DemoResult
    from discern.demo.task import LabeledTask


def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the text, the data set, the run and the report.")
    ] = Path("demo"),
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, help="Maximum training time in minutes.")] = 3.0,
    set_: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Train a small network on text from this machine, and show what it has learned.

    The text is the documentation of the installed Python packages. The demo takes at most five minutes on two cores. If you
    interrupt it with Ctrl-C, run the same command again to continue.

    Example: discern demo --out demo
    """
    with command(json_output=json_output, trains=True) as console:
        from discern.demo.run import demo as run

        result = run(out=out, minutes=minutes, overrides=tuple(set_ or ()), progress=console.progress, warn=console.warn)
        if json_output:
            console.result(_values(result), text="")
        else:
            _show(console, result, out)


def _values(result: DemoResult) -> dict[str, object]:
    sentences = [
        {"text": found.detection.text, "wrong_word": found.word, "rank": found.rank, "tokens": len(found.detection.tokens)}
        for found in result.sentences
    ]
    task = result.task
    labeled = None
    if task is not None:
        labeled = {
            "examples": task.examples,
            "pretrained": task.pretrained["scores"],
            "untrained": task.untrained["scores"],
            "difference": task.difference,
            "verdict": task.verdict,
        }
    return {
        "text": result.text,
        **result.metrics,
        "sentences": sentences,
        "wrong_words": None if result.wrong_words is None else asdict(result.wrong_words),
        "labeled_task": labeled,
        "report": str(result.report),
        "seconds_by_stage": result.seconds,
    }


def _show(console: Console, result: DemoResult, out: Path) -> None:
    """Print a summary of the run: the text, the metrics, the sentences with wrong words, and where the results are."""
    text, metrics = result.text, result.metrics
    where = f"{text['modules']:,} modules of {text['packages']} packages"
    console.print(f"\nRead {text['characters']:,} characters of documentation from {where}.")
    console.print(f"Trained {metrics['step']:,} steps; on text held out:")
    for name, meaning in _SHOWN.items():
        console.print(f"  {name:<24} {metrics[name]:>6.3f}  {meaning}")
    random_words = result.wrong_words
    if random_words is not None:
        console.print(
            f"\nA random word was put into each of {random_words.sentences} held-out sentences. It is the most suspicious token "
            f"in {random_words.most_suspicious} of them; AUC {random_words.auc:.3f}."
        )
    first = sum(found.rank == 1 for found in result.sentences)
    console.print(
        Text(f"\nSentences with a wrong word, which is the most suspicious token in {first} of {len(result.sentences)}:\n")
    )
    for found in result.sentences:
        place = "the most suspicious token"
        if found.rank > 1:
            place = f"number {found.rank} of {len(found.detection.tokens)} in order of suspicion"
        console.print(Text(f"'{found.word}' does not belong here, and is {place}:"))
        show(console, [found.detection], 0.5)
        console.print("")
    if result.task is not None:
        _show_task(console, result.task)
    total = sum(result.seconds.values())
    stages = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in result.seconds.items())
    console.print(f"{total:.0f} seconds: {stages}.")
    console.print(f"Curves and shaded sentences: {result.report}")
    console.print(
        hint(
            f"detect {shell_path(out / 'run')} --text 'Your own sentence.'",
            "prepare YOUR-TEXT --out DATA --train-tokenizer wordpiece",
        )
    )


def _show_task(console: Console, task: LabeledTask) -> None:
    """Print the comparison of the pre-trained and the untrained network."""
    kinds = "does a documentation string describe a module, a class or a function?"
    console.print(
        f"A labeled task from the same text: {kinds} {task.examples:,} examples, {len(task.pretrained['seeds'])} seeds:"
    )
    for name, results in (("pre-trained", task.pretrained), ("untrained", task.untrained)):
        spread = f"{results['worst']:.3f} to {results['best']:.3f}"
        console.print(f"  {name:<12} median accuracy {results['median']:.3f} ({spread})")
    console.print(f"  difference of the medians {task.difference:+.3f}; {task.verdict}\n")


_SHOWN = {
    "generator_accuracy": "fraction of the masked tokens that the generator predicts correctly",
    "replaced_fraction": "fraction of all tokens that its samples replaced; for replace-mlm, fraction of the chosen tokens",
    "discriminator_auc": "chance that a sample of its generator looks more suspicious than an original token; 0.5 is guessing",
    "discriminator_precision": "fraction of the tokens marked as replaced that were replaced",
    "discriminator_recall": "fraction of the replaced tokens that were marked",
}
