"""`discern doctor`: check a run, the files of a folder, or this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.options import DeviceOption
from discern.errors import ConfigError

if TYPE_CHECKING:
    from discern.diagnosis.health import Finding
    from discern.doctor.checks import Diagnosis
    from discern.doctor.files import Accepted


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Pre-training run to check (default: check this machine). With --files or --accept, also an export, a "
            "fine-tuned model or a data set.",
        ),
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Compare every file of the folder with its checksum.")] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Accept the files of the folder as they are, and rewrite their checksums.")
    ] = False,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Number of rows of text to evaluate on.")] = 500,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Diagnose a run: each metric with its usual range, the likely cause and the setting to change.

    With --files: list the files of a folder that have changed since they were written; the exit code is 1 if there are any.

    Example: discern doctor runs/first
    """
    with command(json_output=json_output) as console:
        if files and accept:
            raise ConfigError(
                "--files and --accept are both given",
                hint="give one of them: --files checks the files, --accept rewrites their checksums",
            )
        if files or accept:
            _files(run, accept, console)
            return
        from discern.doctor.checks import examine

        found = examine(run, sequences, device, console.progress, console.warn)
        findings = [_plain(finding) for finding in found.findings]
        console.result({**found.facts, "findings": findings}, text=_text(found))


def _files(folder: Path | None, accept: bool, console: Console) -> None:
    """Check the files of a folder, or accept them."""
    from discern.doctor.files import accept_folder, check_folder

    if folder is None:
        raise ConfigError("no folder is given", hint=f"discern doctor {'--accept' if accept else '--files'} FOLDER")
    if accept:
        changes = accept_folder(folder, lambda change: console.print(f"{change.name}: {_digests(change)}"))
        number = len(changes)
        verdict = "no file has changed" if not changes else f"accepted {number} file{'s' if number > 1 else ''} as they are now"
        console.result({"folder": folder, "accepted": [vars(change) for change in changes]}, text=f"{folder}: {verdict}")
        return
    found = check_folder(folder, console.progress)
    marks = {"ok": "ok", "differs": "DIFFERS", "missing": "MISSING", "damaged": "DAMAGED", "unknown": "-"}
    lines = [f"  {marks[each.state]:<8} {each.name}" + (f": {each.reason}" if each.reason else "") for each in found.files]
    number = len(found.problems)
    verdict = "all files are intact" if not number else f"{number} of {len(found.files)} checks failed"
    if not number and any(each.state == "unknown" for each in found.files):
        verdict = "no problem found; `discern doctor --accept FOLDER` adds the missing checksums"
    values = {"folder": folder, "kind": found.kind, "problems": number, "files": [vars(each) for each in found.files]}
    console.result(values, text="\n".join([f"{found.kind} {folder}: {verdict}", *lines]))
    if found.problems:
        console.warn(f"copy these files again; to accept files that were edited on purpose: discern doctor --accept {folder}")
        console.fail()


def _digests(change: Accepted) -> str:
    if change.after is None:
        return "removed"
    return f"{change.after[:12]}..., new" if change.before is None else f"{change.before[:12]}... -> {change.after[:12]}..."


def _plain(finding: Finding) -> dict[str, object]:
    """Values for --json, with null for the upper end of a range that has none."""
    usual = None if finding.usual is None else [None if bound == float("inf") else bound for bound in finding.usual]
    return {**vars(finding), "usual": usual}


def _text(found: Diagnosis) -> str:
    from discern.diagnosis.health import unusual_findings

    facts = [f"  {name:<12} {value}" for name, value in found.facts.items() if isinstance(value, str | int) and name != "run"]
    facts += [f"  {'devices':<12} {', '.join(found.facts['devices']) or 'no GPU'}"] if "devices" in found.facts else []
    number = len(unusual_findings(found.findings))
    verdict = (
        "nothing is out of its usual range"
        if number == 0
        else f"{number} value{'s' if number > 1 else ''} out of the usual range"
    )
    early = sum(finding.cause.startswith("too early to tell") for finding in found.findings)
    if early:
        verdict += f"; for {early} metric{'s' if early > 1 else ''} it is too early to tell"
    return "\n".join([f"{found.subject}: {verdict}", *facts, "", *(line for each in found.findings for line in _lines(each))])


def _lines(finding: Finding) -> list[str]:
    """One metric: its value, usual range, likely cause and the setting to change."""
    mark = {"fine": "ok  ", "low": "LOW ", "high": "HIGH", "unknown": "-   "}[finding.verdict]
    value = "-" if finding.value is None else _number(finding.value)
    usual = "" if finding.usual is None else f"   usually {_range(*finding.usual)}"
    lines = [f"{mark} {finding.name:<26} {value}{usual}", f"       {finding.cause}"]
    if finding.verdict in ("low", "high") and finding.knob:
        lines.append(f"       try: {finding.knob}")
    return lines


def _range(low: float, high: float) -> str:
    if high == float("inf"):
        return f"{_number(low)} or more"
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    if value >= 2**20:
        return f"{value / 2**30:,.1f} GiB"
    return f"{value:,.0f}" if value == round(value) else f"{value:.4f}"
