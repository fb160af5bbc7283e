"""`discern prepare`: make a tokenized data set from text."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.options import refuse_together
from discern.cli.prepare_text import show, show_check, show_part
from discern.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

_OF_MERGE = ("merge", "out", "workers", "engine", "overwrite", "json_output")


def prepare(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="Files, folders, patterns, addresses (https://, s3://, gs://, hf://), '-' for standard input, or "
            "hf:NAME[:CONFIGURATION[:SPLIT]]. Formats: text, CSV, TSV, "
            "JSON lines, parquet, WikiExtractor's <doc>, and tar archives of them, nested or not; each plain or compressed by "
            "gz, xz, zst or bz2. The format is detected from the content.",
        ),
    ] = None,
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
    documents: Annotated[
        Literal["auto", "blank-line", "file", "line", "record"],
        typer.Option("--documents", help="What ends a document. auto: the end of a <doc> or record, otherwise a blank line."),
    ] = "auto",
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="NAME",
            help="Field or column that holds the text. Default: 'text', or the only text column of a CSV or TSV file.",
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
        Literal["none", "jieba"] | None,
        typer.Option(
            "--segmenter",
            help="Word segmenter for whole-word masking; token ids do not depend on it. Default: none; jieba for Chinese, "
            "if it is installed.",
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
        Literal["local", "ray"],
        typer.Option(
            "--engine",
            help="Where the work runs: in processes on this machine, or on a Ray cluster (the one at RAY_ADDRESS, or one started "
            "on this machine). The result is the same, byte for byte. For ray, INPUT and DATA must be on storage that all "
            "machines share.",
        ),
    ] = "local",
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="I/N",
            help="Prepare only share I of N, counted from 0, for batch schedulers. Give all shares the same --out; when all are "
            "done, --merge combines them.",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Combine the shares that --part prepared into a data set; takes no INPUT.")
    ] = False,
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
    asked_for = dict(locals())
    with command(json_output=json_output) as console:
        from discern.data import prepare as work
        from discern.data.check import check as check_input
        from discern.data.curation.contamination import EvaluationFiles
        from discern.data.dataset.build import BuildOptions
        from discern.data.executors import available_cores
        from discern.data.remote import remote_address
        from discern.data.sources.documents import CorpusOptions
        from discern.data.tokenizer.choice import TokenizerChoice

        if against_field and not against:
            raise ConfigError("--against-field names fields of evaluation files, but none is given", hint="add --against FILE")
        share = _share(part)
        if out is not None and (merge or share is not None) and remote_address(out) is not None:
            raise ConfigError("--part and --merge need a folder that all machines share", hint="give a folder as --out")
        if merge:
            _merge(asked_for, out, work, workers, console, overwrite=overwrite, engine=engine)
            return
        if not inputs:
            raise ConfigError("no INPUT is given", hint="give files or folders; see discern prepare --help")
        evaluation = EvaluationFiles(against, against_field or ()) if against else None
        if tokenizer is not None:
            tokenizer = console.local_model(tokenizer)
        asked = TokenizerChoice(tokenizer, train_tokenizer, vocab_size, lowercase)
        choice, chosen, code = work.in_language(language, asked, segmenter, console.warn)
        corpus = CorpusOptions(documents, (text_field,) if text_field else ())
        cores = workers or available_cores()
        rules = tuple(filters or ())
        build = BuildOptions(chosen, heldout, seed, workers=cores, near_duplicates=near_duplicates, filters=rules)
        shared: dict[str, Any] = {"tokenizer": choice, "corpus": corpus, "build": build, "progress": console.progress}
        described: dict[str, Any] = {"out": out, "language": code, "license": license, "engine": engine}
        if check:
            unfit = {"--near-duplicates": near_duplicates is not None, "--part": part is not None}
            refuse_together("--check", {**unfit, "--engine ray": engine != "local"})
            show_check(check_input(inputs, exclude=out, against=evaluation, **shared), console)
            return
        if out is None:
            choice.check()
            raise ConfigError("no output folder is given", hint="add --out DATA, or --check to look at the input only")
        if share is not None:
            refuse_together("--part", {"--against": evaluation is not None, "--overwrite": overwrite})
            show_part(work.prepare_part(inputs, part=share[0], parts=share[1], **shared, **described), console)
            return
        show(work.prepare(inputs, overwrite=overwrite, against=evaluation, **shared, **described), console, tokenizer)


def _share(part: str | None) -> tuple[int, int] | None:
    """The share that `--part I/N` names.

    Raises:
        ConfigError: it is of another form.
    """
    if part is None:
        return None
    number, slash, of = part.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise ConfigError(
            f"--part is {part!r}, expected I/N: the number of the share, counted from 0, and the number of shares",
            hint="for the first of three shares, give --part 0/3; for the last, --part 2/3",
        )
    return int(number), int(of)


def _merge(
    asked_for: dict[str, object],
    out: Path | None,
    work: ModuleType,
    workers: int | None,
    console: Console,
    *,
    overwrite: bool,
    engine: str,
) -> None:
    """Make the data set of the shares that were prepared."""
    from discern.data.executors import available_cores

    if (unfit := _unfit_for_merge(asked_for)) is not None:
        where = "" if unfit in ("--check", "--against", "--against-field") else "; it was set when the shares were prepared"
        raise ConfigError(f"{unfit} cannot be combined with --merge{where}", hint="discern prepare --merge --out DATA")
    if out is None:
        raise ConfigError("no output folder is given", hint="add --out DATA, the folder that was given to the shares")
    report = work.merge(out, workers=workers or available_cores(), overwrite=overwrite, engine=engine, progress=console.progress)
    show(report, console, None)


def _unfit_for_merge(asked_for: dict[str, object]) -> str | None:
    """An argument that was given although the shares were made with it or without it; None if there is none."""
    for name, parameter in signature(prepare).parameters.items():
        if name not in _OF_MERGE and asked_for[name] not in (parameter.default, [], ()):
            return {"inputs": "INPUT", "filters": "--filter"}.get(name, f"--{name.replace('_', '-')}")
    return None
