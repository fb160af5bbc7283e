"""`discern prepare`: make a tokenized data set from text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.options import refuse_together
from discern.cli.outputs import after_prepare
from discern.data.executors import EngineName, available_cores
from discern.data.languages import SegmenterName
from discern.errors import ConfigError, DataError
from discern.wording import counted

if TYPE_CHECKING:
    from discern.data.check import CheckReport
    from discern.data.curation.contamination import FileOverlap
    from discern.data.prepare import PrepareReport


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="Files, folders, patterns, addresses (https://, s3://, gs://, hf://), '-' for standard input, or "
            "hf:NAME[:CONFIGURATION[:SPLIT]]. Formats: text, CSV, TSV, JSON lines or arrays, parquet, HTML, WARC, "
            "WikiExtractor's <doc>, token ids (.npy, .bin, input_ids), and tar or zip archives of them, nested or not; each "
            "plain or compressed by gz, xz, zst or bz2. The format is detected from the content.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DATA", help="Folder or s3://, gs:// or hf:// address of the new data set.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Tokenizer to use: a tokenizer.json, a vocab.txt, a SentencePiece model, a model folder, or the name of a "
            "model on the Hub.",
        ),
    ] = None,
    train_tokenizer: Annotated[
        Literal["wordpiece", "bpe", "unigram"] | None,
        typer.Option("--train-tokenizer", help="Kind of tokenizer to train on the input instead."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Number of entries of a trained tokenizer. [default: 30522]")
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased",
            help="Lower-case the text, or keep its case. Default: as the tokenizer specifies; for a bare vocab.txt, inferred "
            "from its entries; for a trained tokenizer, wordpiece lower-cases and the others do not.",
        ),
    ] = None,
    keep_accents: Annotated[
        bool,
        typer.Option(
            "--keep-accents",
            help="With --lowercase and a WordPiece: keep accents, which BERT removes; they distinguish words (möchte, mochte).",
        ),
    ] = False,
    documents: Annotated[
        Literal["auto", "blank-line", "file", "line", "record"],
        typer.Option("--documents", help="What ends a document. auto: the end of a <doc> or record, otherwise a blank line."),
    ] = "auto",
    text_field: Annotated[
        list[str] | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Field or column that holds the text; PATTERN:NAME for the inputs that match a pattern, such as "
            "'reviews.csv:review'. May be repeated. Default: found by its name, or as the only one with text.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="PATTERN",
            help="Leave out files of folders and archives that match a pattern, such as '*.js'. May be repeated.",
            show_default=False,
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            "--encoding",
            metavar="NAME",
            help="Encoding of the text, such as latin-1. Default: UTF-8, or detected in each file that is not.",
            show_default=False,
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            metavar="CODE",
            help="Language code of the text (en, de, zh, ...), for model cards. Without --tokenizer, a tokenizer that suits the "
            "language is trained.",
            show_default=False,
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="TEXT",
            help="License of the text, such as 'CC BY-SA 3.0', for model cards.",
            show_default=False,
        ),
    ] = None,
    segmenter: Annotated[
        SegmenterName | None,
        typer.Option(
            "--segmenter",
            help="Word segmenter for whole-word masking: jieba for Chinese, fugashi for Japanese, kiwipiepy for Korean, "
            "pythainlp for Thai; token ids do not depend on it. Default: that of --language, if it is installed.",
            show_default=False,
        ),
    ] = None,
    heldout: Annotated[float, typer.Option("--heldout", min=0, max=0.99, help="Fraction of documents to hold out.")] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for choosing the held-out documents.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Number of processes that tokenize; the result does not depend on it. [default: number of cores]",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="Evaluation file to look for in the text: plain text with one example per line, CSV, TSV or JSON lines. Reports "
            "the examples that share 13 words in a row with the text, and records them for model cards. May be repeated.",
            show_default=False,
        ),
    ] = None,
    against_field: Annotated[
        list[str] | None,
        typer.Option(
            "--against-field",
            metavar="NAME",
            help="Field or column of the evaluation files to read. Default: all of them. May be repeated.",
            show_default=False,
        ),
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="NAME",
            help="Keep only documents that pass a filter: words:20 (at least 20 words) or words:20-5000, language:de or "
            "language:de+en, gopher-quality, gopher-repetition or c4. May be repeated; reports how many documents each "
            "reason left out.",
            show_default=False,
        ),
    ] = None,
    near_duplicates: Annotated[
        float | None,
        typer.Option(
            "--near-duplicates",
            metavar="SIMILARITY",
            help="Remove documents that share at least this fraction of their five-word sequences, such as 0.8, with an earlier "
            "document; found by MinHash.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            "--engine",
            help="Where the work runs: in processes on this machine, or on a Ray cluster (the one at RAY_ADDRESS, or one started "
            "on this machine). The result is the same, byte for byte. For ray, INPUT and DATA must be on storage that all "
            "machines share.",
        ),
    ] = "local",
    check: Annotated[bool, typer.Option("--check", help="Check the input for problems without writing anything.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing data set in DATA.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Make a tokenized data set from text. If interrupted, it leaves no incomplete data set.

    Example: discern prepare wiki/ --out DATA --train-tokenizer wordpiece --vocab-size 8000

    Example: discern prepare reviews.csv --text-field review --out DATA --language zh

    Example: discern prepare wiki/ --check --against glue/RTE/dev.tsv

    Example: discern prepare wiki/ --out DATA --tokenizer vocab.txt --engine ray
    """
    with command(json_output=json_output) as console:
        from discern.data import prepare as preparing
        from discern.data.check import check as check_input
        from discern.data.curation.contamination import EvaluationFiles
        from discern.data.job import PrepareOptions
        from discern.data.sources.documents import CorpusOptions
        from discern.data.tokenizer.choice import TokenizerChoice

        if against_field and not against:
            raise ConfigError("--against-field names fields of evaluation files, but none is given", hint="add --against FILE")
        if tokenizer is not None:
            tokenizer = console.local_model(tokenizer)
        given = TokenizerChoice(tokenizer, train_tokenizer, vocab_size, lowercase, keep_accents)
        choice, chosen, code = preparing.in_language(language, given, segmenter, console.warn)
        shared: dict[str, Any] = {
            "tokenizer": choice,
            "corpus": CorpusOptions(
                documents, text_fields=tuple(text_field or ()), exclude=tuple(exclude or ()), encoding=encoding
            ),
            "options": PrepareOptions(
                chosen,
                heldout,
                seed,
                workers=workers or available_cores(),
                near_duplicates=near_duplicates,
                filters=tuple(filters or ()),
                language=code,
                license=license,
            ),
            "against": EvaluationFiles(against, against_field or ()) if against else None,
            "progress": console.progress,
        }
        if check:
            refuse_together("--check", {"--engine ray": engine != "local"})
            _show_check(check_input(inputs, exclude=out, **shared), console)
            return
        if out is None:
            choice.check()
            raise ConfigError("no output folder is given", hint="add --out DATA, or --check to look at the input only")
        report = preparing.prepare(inputs, out=out, overwrite=overwrite, engine=engine, **shared)
        _show(report, console, tokenizer)


def _show(report: PrepareReport, console: Console, tokenizer: Path | None) -> None:
    """Print the result of `prepare`, after warnings."""
    from discern.data.prepare import warnings_of

    for problem in report.manifest.problems:
        console.warn(str(problem))
    for line in warnings_of(report.manifest):
        console.warn(line)
    if report.repaired:
        were = "was" if len(report.repaired) == 1 else "were"
        console.warn(f"{', '.join(report.repaired)} {were} damaged or missing, and {were} written again")
    console.result(report.values(), text=_text(report, tokenizer))


def _text(report: PrepareReport, tokenizer: Path | None) -> str:
    """The report as text."""
    manifest, statistics = report.manifest, report.manifest.statistics
    train, heldout = manifest.splits["train"], manifest.splits["heldout"]
    near = manifest.near_duplicates
    median, longest = statistics.document_lengths["0.5"], statistics.document_lengths["1"]
    state = "already existed with identical content" if report.unchanged else "repaired" if report.repaired else "made"
    return "\n".join(
        [
            f"{report.folder}: {state} in {report.seconds:.1f} s, {statistics.tokens / report.seconds:,.0f} tokens/s",
            f"  documents   {statistics.documents:,}: {train.num_documents:,} to train on, {heldout.num_documents:,} held out; "
            f"{counted(statistics.duplicates, 'exact duplicate')}",
            *(f"  left out    {counted(count, 'document')}, {reason}" for reason, count in (manifest.filtered or {}).items()),
            *(
                [f"  removed     {counted(near.removed, 'near-duplicate')} from {counted(near.clusters, 'cluster')}"]
                if near is not None
                else []
            ),
            f"  tokens      {statistics.tokens:,}: {train.num_tokens:,} to train on, {heldout.num_tokens:,} held out",
            f"  vocabulary  {manifest.tokenizer.vocab_size:,} ({manifest.tokenizer.kind}), {statistics.unknown_fraction:.3%} of "
            f"the tokens unknown, {statistics.tokens_per_word:.2f} tokens per word",
            f"  lengths     median document {median:,} tokens, longest {longest:,}",
            *(f"  {line}" for line in _overlap_lines(manifest.overlap)),
            after_prepare(report.folder, tokenizer=tokenizer, words=manifest.configuration.get("segmenter") != "none"),
        ]
    )


def _overlap_lines(overlap: tuple[FileOverlap, ...] | None) -> list[str]:
    """The overlap with each evaluation file, and its first examples."""
    if overlap is None:
        return []
    lines = ["overlap with evaluation files: examples that share 13 words in a row with the text"]
    for each in overlap:
        lines.append(f"  {each}")
        lines += [
            f"    line {found.line:,}: '{found.words}' in {found.input}, document {found.document:,} ({found.begins!r})"
            for found in each.found
        ]
    return lines


def _show_check(report: CheckReport, console: Console) -> None:
    """Print the result of a check. Fails if `prepare` would."""
    statistics = report.statistics
    amounts = {"document": report.documents, "sentence": report.sentences, "character": report.characters}
    summary = ", ".join(counted(amount, unit) for unit, amount in amounts.items())
    if statistics is not None:
        summary += f", {counted(statistics.tokens, 'token')} ({statistics.unknown_fraction:.3%} unknown)"
    languages = ", ".join(f"{code} {share:.0%}" for code, share in list(report.languages.items())[:5])
    is_empty = report.documents == sum((report.filtered or {}).values())
    remarks = [*(f"error: {error}" for error in report.errors), *map(str, report.problems), *report.advice]
    lines = [
        *([summary] if report.documents else []),
        *([f"languages: {languages}"] if languages else []),
        *(f"left out {counted(count, 'document')}, {reason}" for reason, count in (report.filtered or {}).items()),
        *(remarks or ["no problems found"] * (not is_empty)),
        *_overlap_lines(report.overlap),
    ]
    values = vars(report) | {
        "statistics": statistics.model_dump() if statistics is not None else None,
        "problems": [problem.model_dump() for problem in report.problems],
        "overlap": None if report.overlap is None else [each.model_dump(mode="json") for each in report.overlap],
    }
    console.result(values, text="\n".join(lines))
    if report.errors or is_empty:
        reason, hint = "the input contains no text", "give files with text"
        if report.errors:
            reason, hint = f"{len(report.errors)} of the inputs cannot be read", "mend them, or leave them out"
        elif report.documents:
            reason, hint = "the filters leave out every document", "leave out a --filter"
        raise DataError(f"`discern prepare` would stop: {reason}", hint=hint)
