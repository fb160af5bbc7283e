"""`discern score`: score sentences by how likely they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from discern.cli.console import Console, JsonOption, command, refuse_text_as_file, typed_text
from discern.cli.options import DeviceOption, ScorerOption, ScoringModelArgument
from discern.errors import ConfigError
from discern.wording import counted

if TYPE_CHECKING:
    from discern.inference.scoring import Score


def score(
    model: ScoringModelArgument,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File with one sentence per line; - reads stdin (default).", show_default=False)
    ] = Path("-"),
    *,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="Sentence to score; may be repeated.", show_default=False),
    ] = None,
    scorer: ScorerOption = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print the score of each token, as JSON lines.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write JSON lines to, instead of stdout.", show_default=False),
    ] = None,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Score how likely sentences are, in nats; higher is likelier.

    Prints the score, a tab and the sentence, one line per sentence; the mean per token and per character goes to standard error.
    An empty line is an error, except at the end.

    Examples: discern score runs/first sentences.txt

    discern score runs/first --text "The children play." --text "The children plays."

    echo "The chef ate purple elephants." | discern score runs/first --tokens
    """
    with command(json_output=json_output) as console:
        if text and str(file) != "-":
            raise ConfigError("--text and FILE are both given", hint="give only one of them")
        if text and not all(each.strip() for each in text):
            raise ConfigError("one --text is empty", hint='give a sentence: --text "A sentence."')
        if text and any("\n" in each or "\r" in each for each in text):
            raise ConfigError("one --text contains a line break", hint="give each sentence its own --text")
        if not text and str(file) == "-" and sys.stdin.isatty():
            raise ConfigError(
                "there are no sentences to score", hint='add --text "A sentence.", or a FILE, or pipe in sentences, one per line'
            )
        refuse_text_as_file(file)
        model = console.local_model(model)
        sentences = [typed_text(each, "--text") for each in text] if text else file
        from discern.inference.score_file import score_lines
        from discern.inference.scoring import UNIT, CorpusScore, load_scorer, token_values
        from discern.storage.output import check_output

        check_output("--out", out, "scores.jsonl", model, file)
        chosen = load_scorer(model, scorer, device, warn=console.warn)
        if not json_output:
            console.progress.note(chosen.described)
        written, together = 0, CorpusScore()
        by_sentence: dict[str, list[float]] = {"scores": [], "scores_per_token": [], "scores_per_character": []}
        by_token: list[dict[str, object]] = []
        with _written(console, out, tokens=tokens) as write:
            for scores in score_lines(chosen, sentences, console.progress, console.warn):
                write(scores)
                written += len(scores)
                together.add(scores)
                if json_output and out is None:
                    by_sentence["scores"] += [each.total for each in scores]
                    by_sentence["scores_per_token"] += [each.per_token for each in scores]
                    by_sentence["scores_per_character"] += [each.per_character for each in scores]
                    by_token += [token_values(each) for each in scores if tokens]
        if not json_output:
            console.progress.note(
                f"mean score {together.per_token:.4g} {UNIT} per token ({together.tokens:,} tokens), "
                f"{together.per_character:.4g} per character ({together.characters:,} characters)"
            )
            if (name := chosen.method.perplexity_name) is not None:
                console.progress.note(f"{name.replace('_', '-')} {together.perplexity:.4g} over {together.tokens:,} tokens")
        if out is not None:
            summary = {**together.values(chosen), "sentences": written, "out": out}
            console.result(summary, text=f"{out}: {counted(written, 'sentence')} scored by '{chosen.name}'")
        elif json_output:
            console.result({**together.values(chosen), **by_sentence, **({"tokens": by_token} if tokens else {})}, text="")


@contextmanager
def _written(console: Console, out: Path | None, *, tokens: bool) -> Iterator[Callable[[list[Score]], None]]:
    """A function that writes scores to the chosen output, in the chosen form."""
    from discern.inference.scoring import score_values

    if out is not None:
        from discern.storage.files import whole_file

        with whole_file(out) as file:
            yield lambda scores: file.writelines(
                json.dumps(score_values(each, tokens=tokens), ensure_ascii=False) + "\n" for each in scores
            )
    elif console.json_output:
        yield lambda scores: None
    elif tokens:
        yield lambda scores: console.records(score_values(each, tokens=True) for each in scores)
    else:
        yield lambda scores: console.lines(f"{each.total:.4f}\t{each.text}" for each in scores)
