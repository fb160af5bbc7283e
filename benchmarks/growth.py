"""Measure how the cost of a training step grows: tokens per second and memory, along one axis at a time.

    python benchmarks/growth.py --out FOLDER [--axes length batch ...] [--cells 2] [--limit 240]

Every cell is a `discern bench` in a process of its own and a line of FOLDER/cells.jsonl; cells in that file are not run again.
A cell that takes longer than --limit seconds, or leaves less than --reserve GiB of memory free, is stopped and recorded as
failed. Writes FOLDER/growth.md and FOLDER/growth.png.

In the table, *arithmetic* is the ratio of tokens per second to the axis's base cell that the FLOPs of the matrix products
predict; *kept* is the measured fraction of it. Memory is that of the process, or of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = {"data.sequence_length": 128, "train.sequences_per_step": 32}
TINY = ["model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "model.feedforward_size=512"]


@dataclass(frozen=True)
class Cell:
    """One point of an axis.

    Attributes:
        axis: name of the axis.
        label: position on the axis.
        base: whether the other cells of the axis are compared with this one.
        settings: settings over BASE.
        options: further options of `discern bench`.
        threads: number of threads of each process.
    """

    axis: str
    label: str
    base: bool = False
    preset: str = "electra-small"
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    threads: int = 2

    def command(self, precision: str) -> list[str]:
        values = BASE | {"train.precision": precision}
        fixed = [f"{key}={value}" for key, value in values.items()]
        settings = [part for setting in (*fixed, *self.settings) for part in ("--set", setting)]
        return [sys.executable, "-m", "discern", "bench", "--preset", self.preset, *settings, *self.options, "--json"]


def cells() -> list[Cell]:
    lengths = [Cell("length", str(n), n == 128, settings=(f"data.sequence_length={n}",)) for n in (64, 128, 256, 512)]
    batches = [Cell("batch", str(n), n == 32, settings=(f"train.sequences_per_step={n}",)) for n in (8, 16, 32, 64, 128, 256)]
    words = [Cell("vocabulary", f"{n}k", n == 32, options=("--vocab-size", str(n * 1024))) for n in (4, 8, 16, 32, 64)]
    models = [
        Cell("model", "2 x 128", settings=tuple(TINY)),
        Cell("model", "12 x 256 (small)", base=True),
        Cell("model", "12 x 768 (base)", preset="electra-base", settings=("train.micro_batch_size=32",)),
    ]
    work = [
        Cell("cores", "1 thread", True, threads=1),
        Cell("cores", "2 threads"),
        Cell("cores", "--nproc 2, 1 thread each", options=("--nproc", "2"), threads=1),
    ]
    return [*lengths, *batches, *words, *models, *work]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--axes", nargs="+", default=sorted({cell.axis for cell in cells()}))
    parser.add_argument("--cells", type=int, help="maximum number of new cells to measure")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--limit", type=float, default=240.0, help="seconds per cell")
    parser.add_argument("--reserve", type=float, default=2.0, help="GiB that must stay free")
    parser.add_argument("--bench", nargs=argparse.REMAINDER, default=[], help="further options of discern bench; must come last")
    request = parser.parse_args()
    request.out.mkdir(parents=True, exist_ok=True)
    path = request.out / "cells.jsonl"
    results = read(path)
    left = request.cells
    for precision in request.precisions:
        for cell in cells():
            key = " | ".join((precision, cell.axis, cell.label))
            if cell.axis not in request.axes or key in results or left == 0:
                continue
            results[key] = run(cell, precision, request) | {"key": key}
            with path.open("a") as file:
                file.write(json.dumps(results[key]) + "\n")
            shown = results[key].get("tokens_per_second") or results[key]["failed"]
            print(f"{key}: {shown}", file=sys.stderr, flush=True)
            left = left - 1 if left is not None else None
    table = markdown(results, request.precisions)
    (request.out / "growth.md").write_text(table + "\n")
    print(table)
    draw(results, request.precisions, request.out / "growth.png")


def read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, path.read_text().splitlines())}


def run(cell: Cell, precision: str, request: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of a cell, or the reason why it failed."""
    command = [*cell.command(precision), *request.bench]
    environment = os.environ | {"OMP_NUM_THREADS": str(cell.threads)}
    # In its own session, so that the processes of --nproc end with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True)
    begin = time.monotonic()
    while True:
        try:
            out, errors = process.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            late = time.monotonic() - begin > request.limit
            if late or available() < request.reserve * 2**30:
                os.killpg(process.pid, 15)
                process.communicate()
                return {"failed": f"longer than {request.limit:.0f} s" if late else "not enough memory"}
    if process.returncode:
        said = errors.decode().strip().splitlines()
        return {"failed": said[-1] if said else f"exit code {process.returncode}"}
    metrics: dict[str, Any] = json.loads(out.decode().strip().splitlines()[-1])
    return metrics


def available() -> float:
    """Bytes of memory that are free; infinite if unknown."""
    try:
        return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return float("inf")


def points(results: dict[str, dict[str, Any]], precision: str, axis: str) -> tuple[list[tuple[Cell, dict[str, Any]]], Any]:
    """Return the cells of an axis with their metrics, and the metrics of its base."""
    found = [(cell, results.get(f"{precision} | {axis} | {cell.label}")) for cell in cells() if cell.axis == axis]
    present = [(cell, metrics) for cell, metrics in found if metrics is not None]
    bases = [metrics for cell, metrics in present if cell.base and "failed" not in metrics]
    return present, bases[0] if bases else None


def kept(metrics: dict[str, Any], base: dict[str, Any] | None, axis: str) -> tuple[float, float] | None:
    """Return the speed that the FLOPs predict, as a ratio to the base, and the measured fraction of it."""
    if base is None:
        return None
    cores = (metrics["threads"] * metrics["processes"]) / (base["threads"] * base["processes"])
    expected = cores if axis == "cores" else base["gemm_flops_per_token"] / metrics["gemm_flops_per_token"]
    return expected, metrics["tokens_per_second"] / base["tokens_per_second"] / expected


def markdown(results: dict[str, dict[str, Any]], precisions: list[str]) -> str:
    lines = [
        "| precision | axis | | tokens/s | forward only | GEMM share | memory | bytes a token of the step | arithmetic | kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for precision in precisions:
        for axis in dict.fromkeys(cell.axis for cell in cells()):
            present, base = points(results, precision, axis)
            for cell, metrics in present:
                start = f"| {precision} | {axis} | {cell.label} |"
                if "failed" in metrics:
                    lines.append(f"{start} {metrics['failed']} | | | | | | |")
                    continue
                ratios = kept(metrics, base, axis)
                ratio_text = f"{ratios[0]:.2f} | {ratios[1]:.2f}" if ratios else " | "
                tokens = metrics["sequences_per_step"] * metrics["sequence_length"]
                lines.append(
                    f"{start} {metrics['tokens_per_second']:,.0f} | {metrics['tokens_per_second_forward']:,.0f} | "
                    f"{metrics['gemm_share']:.0%} | {metrics['peak_memory_bytes'] / 2**30:.2f} GiB | "
                    f"{metrics['peak_memory_bytes'] / tokens:,.0f} | {ratio_text} |"
                )
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], precisions: list[str], path: Path) -> None:
    """Draw speed above and memory below, with one column per axis; dashed: prediction from the FLOPs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = [axis for axis in dict.fromkeys(cell.axis for cell in cells()) if any(points(results, p, axis)[0] for p in precisions)]
    figure, grid = pyplot.subplots(2, len(axes), figsize=(max(3.4 * len(axes), 7.5), 6), squeeze=False, layout="constrained")
    colors = dict(zip(precisions, ("#1f5f8b", "#c8553d", "#4f7942"), strict=False))
    for column, axis in enumerate(axes):
        speeds, memory = grid[0][column], grid[1][column]
        order = [cell.label for cell in cells() if cell.axis == axis]
        for precision in precisions:
            present, base = points(results, precision, axis)
            good = [(cell, metrics) for cell, metrics in present if "failed" not in metrics]
            places = [order.index(cell.label) for cell, _ in good]
            style = {"marker": "o", "color": colors[precision], "label": precision}
            speeds.plot(places, [metrics["tokens_per_second"] for _, metrics in good], **style)
            memory.plot(places, [metrics["peak_memory_bytes"] / 2**30 for _, metrics in good], **style)
            expected = [(at, kept(metrics, base, axis)) for at, (_, metrics) in zip(places, good, strict=True)]
            line = [(at, ratios[0] * base["tokens_per_second"]) for at, ratios in expected if ratios and base]
            if line:
                speeds.plot(*zip(*line, strict=True), "--", color=colors[precision], alpha=0.5, linewidth=1)
        for panel in (speeds, memory):
            panel.set_xticks(range(len(order)), order, rotation=30, ha="right")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        speeds.set_title(axis)
    grid[0][0].set_ylabel("tokens a second")
    grid[1][0].set_ylabel("peak memory, GiB")
    grid[0][0].legend(frameon=False)
    figure.suptitle("ELECTRA-Small, 32 x 128 unless the axis says otherwise; dashed: by the arithmetic alone", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
