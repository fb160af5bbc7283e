"""Prints what `discern prepare` has made or found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from discern.cli.console import Console
from discern.cli.outputs import after_prepare
from discern.wording import counted

if TYPE_CHECKING:
    from discern.data.curation.contamination import FileOverlap
    from discern.data.reports import CheckReport, PartReport, PrepareReport


def show(report: PrepareReport, console: Console, tokenizer: Path | None) -> None:
    """Print the result of `prepare`, after warnings."""
    from discern.data.reports import warnings_of

    for problem in report.manifest.problems:
        console.warn(str(problem))
    for line in warnings_of(report.manifest):
        console.warn(line)
    if report.repaired:
        were = "was" if len(report.repaired) == 1 else "were"
        console.warn(f"{', '.join(report.repaired)} {were} damaged or missing, and {were} written again")
    console.result(report.values(), text=_text(report, tokenizer))


def show_part(report: PartReport, console: Console) -> None:
    """Print the result of a share."""
    text = (
        f"part {report.part}/{report.parts} of {report.folder}: {report.pieces:,} of {report.of_pieces:,} pieces in "
        f"{report.seconds:.1f} s\nwhen all parts are done: discern prepare --merge --out {report.folder}"
    )
    console.result(report.values(), text=text)


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
            after_prepare(report.folder, tokenizer=tokenizer, words=manifest.configuration.get("segmenter", "none") != "none"),
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


def show_check(report: CheckReport, console: Console) -> None:
    """Print the result of a check. Fails if `prepare` would."""
    from discern.data.reports import overlap_values, unknown_tokens_warning
    from discern.errors import DataError

    found = [f"error: {error}" for error in report.errors] + [str(problem) for problem in report.problems]
    amounts = {"document": report.documents, "sentence": report.sentences, "character": report.characters}
    summary = ", ".join(counted(amount, unit) for unit, amount in amounts.items())
    if report.statistics is not None:
        found += [warning] if (warning := unknown_tokens_warning(report.statistics)) else []
        summary += f", {counted(report.statistics.tokens, 'token')} ({report.statistics.unknown_fraction:.3%} unknown)"
        summary += f", {counted(report.statistics.duplicates, 'exact duplicate')}"
    left_out = [f"left out {counted(count, 'document')}, {reason}" for reason, count in (report.filtered or {}).items()]
    values = vars(report) | {
        "statistics": report.statistics.model_dump() if report.statistics is not None else None,
        "problems": [problem.model_dump() for problem in report.problems],
        "errors": list(report.errors),
        "overlap": overlap_values(report.overlap),
    }
    is_empty = report.documents == sum((report.filtered or {}).values())
    lines = [summary, *left_out, *(found or ["no problems found"] * (not is_empty)), *_overlap_lines(report.overlap)]
    console.result(values, text="\n".join(lines))
    if report.errors or is_empty:
        reason, hint = "the input contains no text", "give files with UTF-8 text"
        if report.errors:
            reason, hint = f"{len(report.errors)} of the inputs cannot be read", "mend them, or leave them out"
        elif report.documents:
            reason, hint = "the filters leave out every document", "leave out a --filter"
        raise DataError(f"`discern prepare` would stop: {reason}", hint=hint)
