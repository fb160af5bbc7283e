"""Compare the training speed of two checkouts of discern in turns, on a quiet machine and beside other work.

    python benchmarks/before_after.py BEFORE AFTER [--preset electra-small ...] [--precision bfloat16] [--rounds 4] [--busy 2]

BEFORE and AFTER are folders of the repository at two commits; every measurement is `discern bench` in a process of its own.
With `--busy N`, each is repeated beside N processes that compute without end, once with all threads and once with one. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

QUIET, BUSY, ONE_THREAD = "quiet", "busy", "busy, one thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--preset", nargs="+", default=["electra-small"])
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of both")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--busy", type=int, default=0, help="number of processes that compute beside the measurement")
    parser.add_argument("--seconds", type=float, default=6.0)
    request = parser.parse_args()
    for preset in request.preset:
        settings = [f"train.precision={request.precision}", *request.set]
        command = ["bench", "--preset", preset, "--seconds", str(request.seconds), "--json"]
        command += [part for value in settings for part in ("--set", value)]
        table = compare(request.before, request.after, command, request.rounds, request.busy)
        print(f"## {preset}, {request.precision}\n\n{table}")


def compare(before: Path, after: Path, command: Sequence[str], rounds: int, busy: int) -> str:
    """Milliseconds of a step as Markdown: of each round in parentheses, and the median of their ratios."""
    trees = {"before": before, "after": after}
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for number in range(rounds):
        # The order changes, so that a machine that slows down does not favor one of them.
        for name in sorted(trees, reverse=number % 2 == 0):
            times = taken[name]
            times.setdefault(QUIET, []).append(step(trees[name], command))
            if busy:
                with beside(busy):
                    times.setdefault(BUSY, []).append(step(trees[name], command))
                    times.setdefault(ONE_THREAD, []).append(step(trees[name], command, threads=1))
            latest = ", ".join(f"{state} {each[-1]:,.0f} ms" for state, each in times.items())
            print(f"round {number + 1}, {name}: {latest}", file=sys.stderr, flush=True)
    lines = ["| a step, ms | before | after | after / before |", "|---|---|---|---|"]
    for state, earlier in taken["before"].items():
        later = taken["after"][state]
        ratio = statistics.median(b / a for a, b in zip(earlier, later, strict=True))
        lines.append(f"| {state} | {spread(earlier)} | {spread(later)} | {ratio:.2f} |")
    if busy:
        slower = [statistics.median(b / a for a, b in zip(each[QUIET], each[BUSY], strict=True)) for each in taken.values()]
        lines.append(f"| busy / quiet | {slower[0]:.2f} | {slower[1]:.2f} | |")
    return "\n".join(lines) + "\n"


def step(tree: Path, command: Sequence[str], threads: int | None = None) -> float:
    """Mean milliseconds of a step of `discern bench` in a checkout."""
    env = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run([sys.executable, "-m", "discern", *command], env=env, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: discern {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["step_milliseconds"])


@contextmanager
def beside(number: int) -> Iterator[None]:
    """Processes that compute for as long as the block runs."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def spread(values: Sequence[float]) -> str:
    """The median, and each value in parentheses."""
    return f"{statistics.median(values):,.0f} ({', '.join(f'{value:,.0f}' for value in values)})"


if __name__ == "__main__":
    main()
