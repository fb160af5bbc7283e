"""`discern prepare`: make a tokenised data set from text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.next_steps import after_prepare

if TYPE_CHECKING:
    from discern.workflows.prepare import CheckReport, PrepareReport


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, folders, patterns, '-' or hf:NAME[:CONFIGURATION[:SPLIT]]. Text, CSV, TSV, JSON lines, parquet or "
            "WikiExtractor's <doc>, plain or gz, xz, zst, bz2, or tar archives of them, nested or not. "
            "The format is detected from the content.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="DATA", help="Folder of the data set.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, a vocab.txt or a model folder.")
    ] = None,
    train_tokenizer: Annotated[
        Literal["wordpiece", "bpe", "unigram"] | None, typer.Option("--train-tokenizer", help="Train one on the input instead.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Entries of a trained tokenizer. [default: 30522]")
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased",
            help="Lower-case the text, or keep its case. Default: as the tokenizer says; for a bare vocab.txt, as its entries "
            "are; when training, wordpiece lower-cases and the others don't.",
        ),
    ] = None,
    documents: Annotated[
        Literal["auto", "blank-line", "file", "line", "record"],
        typer.Option("--documents", help="What ends a document. auto: <doc> and records as such, otherwise blank lines."),
    ] = "auto",
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Field or column that holds the text. Default: 'text'; for CSV and TSV the only text column.",
            show_default=False,
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            metavar="CODE",
            help="Language of the text (en, de, zh, ...), stated in model cards. Without --tokenizer, one is trained for it.",
            show_default=False,
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="TEXT",
            help="License of the text, such as 'CC BY-SA 3.0', stated in model cards.",
            show_default=False,
        ),
    ] = None,
    segmenter: Annotated[
        Literal["none", "jieba"] | None,
        typer.Option(
            "--segmenter",
            help="Word segmenter for whole-word masking; token ids stay the same. Default: none; for "
            "Chinese jieba, if installed.",
            show_default=False,
        ),
    ] = None,
    heldout: Annotated[float, typer.Option("--heldout", min=0, max=0.99, help="Fraction of documents to hold out.")] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Decides which documents are held out.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Processes that tokenise; the result does not depend on it. [default: cores]"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Look for problems in the input; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data set that DATA holds.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Make a tokenised data set from text. The folder appears whole or not at all.

    Example: discern prepare wiki/ --out DATA --train-tokenizer wordpiece --vocab-size 8000

    Example: discern prepare reviews.csv --text-field review --out DATA --language zh
    """
    with command(json_output=json_output) as console:
        from discern.data.build import BuildOptions
        from discern.data.corpus import CorpusOptions
        from discern.data.tokenizer_choice import TokenizerChoice
        from discern.workflows import prepare as work

        if tokenizer is not None:
            tokenizer = console.local_model(tokenizer)
        asked = TokenizerChoice(tokenizer, train_tokenizer, vocab_size, lowercase)
        choice, chosen, code = work.in_language(language, asked, segmenter, console.warn)
        request = work.PrepareRequest(
            inputs=tuple(inputs),
            out=out,
            tokenizer=choice,
            corpus=CorpusOptions(documents, text_field),
            build=BuildOptions(chosen, heldout, seed, workers=workers or work.available_cores()),
            overwrite=overwrite,
            language=code,
            license=license,
        )
        if check:
            _show_check(work.check(request, console.progress), console)
        else:
            report = work.prepare(request, console.progress)
            for problem in report.manifest.problems:
                console.warn(str(problem))
            for line in work.warnings_of(report.manifest):
                console.warn(line)
            if report.repaired:
                were = "was" if len(report.repaired) == 1 else "were"
                console.warn(f"{', '.join(report.repaired)} {were} damaged or missing, and {were} written again")
            console.result(report.values(), text=_text(report, tokenizer))


def _text(report: PrepareReport, tokenizer: Path | None) -> str:
    """The report for people, a line each."""
    manifest, statistics = report.manifest, report.manifest.statistics
    train, heldout = manifest.splits["train"], manifest.splits["heldout"]
    median, longest = statistics.document_lengths["0.5"], statistics.document_lengths["1"]
    state = "already existed with identical content" if report.unchanged else "repaired" if report.repaired else "made"
    return "\n".join(
        [
            f"{report.folder}: {state} in {report.seconds:.1f} s, {statistics.tokens / report.seconds:,.0f} tokens/s",
            f"  documents   {statistics.documents:,}: {train.num_documents:,} to train on, {heldout.num_documents:,} held out; "
            f"{statistics.duplicates:,} exact duplicates",
            f"  tokens      {statistics.tokens:,}: {train.num_tokens:,} to train on, {heldout.num_tokens:,} held out",
            f"  vocabulary  {manifest.tokenizer.vocab_size:,} ({manifest.tokenizer.kind}), {statistics.unknown_fraction:.3%} of "
            f"the tokens unknown, {statistics.tokens_per_word:.2f} tokens a word",
            f"  lengths     median document {median:,} tokens, longest {longest:,}",
            after_prepare(report.folder, tokenizer=tokenizer, words=manifest.configuration.get("segmenter") == "jieba"),
        ]
    )


def _show_check(report: CheckReport, console: Console) -> None:
    """Print what a check found; fails if `prepare` would."""
    from discern.errors import DataError

    found = [f"error: {error}" for error in report.errors] + [str(problem) for problem in report.problems]
    counted = f"{report.documents:,} documents, {report.sentences:,} sentences, {report.characters:,} characters"
    if report.statistics is not None:
        counted += f", {report.statistics.tokens:,} tokens ({report.statistics.unknown_fraction:.3%} unknown)"
        counted += f", {report.statistics.duplicates:,} exact duplicates"
    values = {
        "documents": report.documents,
        "sentences": report.sentences,
        "characters": report.characters,
        "bytes_read": report.bytes_read,
        "statistics": report.statistics.model_dump() if report.statistics is not None else None,
        "problems": [problem.model_dump() for problem in report.problems],
        "errors": list(report.errors),
    }
    console.result(values, text="\n".join([counted, *(found or ["no problems found"])]))
    if report.errors or not report.documents:
        reason = f"{len(report.errors)} of the inputs cannot be read" if report.errors else "the input holds no text"
        raise DataError(f"`discern prepare` would stop: {reason}", hint="what is wrong is listed above")
