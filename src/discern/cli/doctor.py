"""`discern doctor`: what ails a run, or this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from discern.cli.console import JsonOption, command

if TYPE_CHECKING:
    from discern.training.diagnosis import Finding
    from discern.workflows.doctor import Diagnosis


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a pre-training run; without it this machine is looked at.")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Rows of text to look at.")] = 500,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...")] = "auto",
    json_output: JsonOption = False,
) -> None:
    """Tell what is wrong with a run: each figure with its usual band, the likely cause and the setting to turn.

    Example: discern doctor runs/first
    """
    with command(json_output=json_output) as console:
        from discern.workflows.doctor import examine

        found = examine(run, sequences, device, console.progress, console.warn)
        findings = [_plain(finding) for finding in found.findings]
        console.result({**found.facts, "findings": findings}, text=_text(found))


def _plain(finding: Finding) -> dict[str, object]:
    """For --json: a band that is open above has no upper end."""
    usual = None if finding.usual is None else [None if bound == float("inf") else bound for bound in finding.usual]
    return {**vars(finding), "usual": usual}


def _text(found: Diagnosis) -> str:
    from discern.training.diagnosis import ailing

    facts = [f"  {name:<12} {value}" for name, value in found.facts.items() if isinstance(value, str | int) and name != "run"]
    facts += [f"  {'devices':<12} {', '.join(found.facts['devices']) or 'no GPU'}"] if "devices" in found.facts else []
    number = len(ailing(found.findings))
    verdict = "nothing is out of its usual band" if number == 0 else f"{number} out of the usual band"
    early = sum(finding.cause.startswith("too early to tell") for finding in found.findings)
    if early:
        verdict += f"; for {early} figure{'s' if early > 1 else ''} it is too early to tell"
    return "\n".join([f"{found.subject}: {verdict}", *facts, "", *(line for each in found.findings for line in _lines(each))])


def _lines(finding: Finding) -> list[str]:
    """One figure: its value and band, what it says, and what to do about it."""
    mark = {"fine": "ok  ", "low": "LOW ", "high": "HIGH", "unknown": "-   "}[finding.verdict]
    value = "-" if finding.value is None else _number(finding.value)
    usual = "" if finding.usual is None else f"   usually {_number(finding.usual[0])} to {_number(finding.usual[1])}"
    lines = [f"{mark} {finding.name:<26} {value}{usual}", f"       {finding.cause}"]
    if finding.verdict in ("low", "high") and finding.knob:
        lines.append(f"       try: {finding.knob}")
    return lines


def _number(value: float) -> str:
    if value == float("inf"):
        return "any"
    if value >= 2**20:
        return f"{value / 2**30:,.1f} GiB"
    return f"{value:,.0f}" if value == round(value) else f"{value:.4f}"
