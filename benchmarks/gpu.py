"""Correctness and speed on a GPU within a few minutes, the most important first: run by gpu.sh, which lists its requirements.

Every section (see gpu_sections.py) runs in a process of its own with a time limit. Results are written as they come. A section
that fails leaves its traceback in the report, and the others keep their time. The text is made up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = {"correctness": 100, "speed": 80, "peers": 50, "techniques": 25}
"""The sections, in the order of what they are worth, with their share of the time. What one leaves over goes to the next."""
END = 5.0  # seconds that the last section ends before the whole time is up
KEPT = 30  # lines of a traceback, at its beginning and at its end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--minutes", type=float, default=4.0, help="time for all sections together")
    parser.add_argument("--small", action="store_true", help="smaller networks; always so without a GPU")
    parser.add_argument("--sections", nargs="+", default=list(SECONDS), choices=list(SECONDS))
    request = parser.parse_args()
    request.out.mkdir(parents=True, exist_ok=True)
    report = Report(request.out)
    shares = {name: SECONDS[name] for name in request.sections}
    waiting = Section(request.sections[0], request.small)
    for number, name in enumerate(request.sections):
        process = waiting
        if number + 1 < len(request.sections):
            waiting = Section(request.sections[number + 1], request.small)  # it imports torch in the meantime
        left = 60 * request.minutes - END - report.seconds()
        later = sum(shares[other] for other in request.sections[number + 1 :])
        run_section(name, process, max(left * shares[name] / (shares[name] + later), 5.0), report)
    print((request.out / "gpu.md").read_text())


class Section:
    """A process that runs a section when it is told to."""

    def __init__(self, name: str, small: bool) -> None:
        self.said, self.errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, str(Path(__file__).with_name("gpu_sections.py")), name, *(["--small"] if small else [])]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=self.said, stderr=self.errors, text=True, start_new_session=True
        )

    def begin(self, seconds: float) -> None:
        """Let it run for this long."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.close()
        except BrokenPipeError:  # it has failed already; its exit code says so
            pass

    def results(self) -> list[dict[str, Any]]:
        """What it has told so far."""
        self.said.seek(0)
        return [json.loads(line) for line in self.said.read().splitlines() if line.startswith("{") and line.endswith("}")]

    def traceback(self) -> str:
        """The first and the last lines that it wrote as errors."""
        self.errors.seek(0)
        lines = self.errors.read().splitlines()
        return "\n".join(lines if len(lines) <= 2 * KEPT else [*lines[:KEPT], "...", *lines[-KEPT:]])


def run_section(name: str, section: Section, limit: float, report: Report) -> None:
    """Run a section for at most `limit` seconds, and report what it tells."""
    print(f"{name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
    begin, problem = time.monotonic(), None
    section.begin(limit)
    while section.process.poll() is None:
        if time.monotonic() - begin > limit:
            os.killpg(section.process.pid, 9)
            problem = f"stopped after {limit:.0f} s"
            section.process.wait()
            break
        time.sleep(0.5)
        report.write(name, {"seconds": round(time.monotonic() - begin, 1), "results": section.results()})
    if problem is None and section.process.returncode:
        problem = f"exit code {section.process.returncode}"
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1), "results": section.results()}
    report.write(name, found | ({"problem": problem, "traceback": section.traceback()} if problem else {}))


class Report:
    """gpu.json and gpu.md in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._begin = folder, time.monotonic()
        self._record: dict[str, Any] = {"sections": {}}

    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def write(self, name: str, found: dict[str, Any]) -> None:
        """Write both files anew, with what a section has found so far."""
        self._record["sections"][name] = found
        self._record["seconds"] = round(self.seconds(), 1)
        for file, text in (("gpu.json", json.dumps(self._record, indent=1)), ("gpu.md", markdown(self._record))):
            (self._folder / f"{file}.part").write_text(text + "\n")
            (self._folder / f"{file}.part").replace(self._folder / file)


# ---- the page ----


def markdown(record: Mapping[str, Any]) -> str:
    sections: dict[str, Any] = record["sections"]
    machine = next((each["machine"] for found in sections.values() for each in found["results"] if "machine" in each), {})
    told = ", ".join(f"{key} {value}" for key, value in machine.items())
    lines = ["# Correctness and speed", "", f"{told}; {record['seconds']:.0f} s", ""]
    for name, found in sections.items():
        lines += [f"## {name.capitalize()} ({found['seconds']:.0f} s)", ""]
        results = [each for each in found["results"] if "machine" not in each]
        for kind in dict.fromkeys(tuple(each) for each in results if "failed" not in each):
            lines += table([each for each in results if tuple(each) == kind])
        for each in results:
            if "failed" in each:
                lines += [f"{each['what']} failed:", "", "```", each["failed"], "```", ""]
        if "problem" in found:
            lines += [f"The section did not end well: {found['problem']}.", "", "```", found["traceback"], "```", ""]
    return "\n".join(lines).rstrip()


def table(results: list[dict[str, Any]]) -> list[str]:
    """Results that have the same keys, one a row."""
    keys = list(results[0])
    rows = [[cell(each[key]) for key in keys] for each in results]
    heads = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|" + "---|" * len(keys)]
    return [*heads, *("| " + " | ".join(row) + " |" for row in rows), ""]


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


if __name__ == "__main__":
    main()
