"""Check that every fast path learns like the plain one: loss curves on real text, three seeds each.

    python benchmarks/loss_curves.py --data DATA --out FOLDER [--steps 500] [--seeds 0 1 2] [--jobs 2]

The reference is float32 without the kernels. A path passes if the mean of its seeds lies between the lowest and the highest
of the reference's seeds, or differs from their mean by less than half their range. Dropout is on, so that it is compared as well.
Interrupted runs are resumed. Writes FOLDER/curves.md, FOLDER/curves.json and FOLDER/curves.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FIGURES = ("heldout_generator_loss", "heldout_discriminator_loss", "generator_accuracy", "discriminator_auc")


@dataclass(frozen=True)
class Way:
    """One way of computing the same run."""

    name: str
    precision: str
    kernels: bool


REFERENCE = Way("float32, plain", "float32", False)
WAYS = (
    REFERENCE,
    Way("float32, kernels", "float32", True),
    Way("bfloat16, kernels", "bfloat16", True),
    Way("bfloat16, plain", "bfloat16", False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="cpu-small")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs, one thread each")
    parser.add_argument("--set", action="append", default=[], help="further settings of every run")
    request = parser.parse_args()
    request.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(request.jobs) as pool:
        tasks = {(way, seed): pool.submit(train, way, seed, request) for seed in request.seeds for way in WAYS}
        curves = {key: task.result() for key, task in tasks.items()}
    steps = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    text, passed = table(curves, steps, request.seeds)
    print(text)
    (request.out / "curves.md").write_text(text + "\n")
    found = {f"{way.name} | {seed}": curve for (way, seed), curve in curves.items()}
    (request.out / "curves.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(curves, steps, request.seeds, request.out / "curves.png")
    sys.exit(0 if passed else 1)


def train(way: Way, seed: int, request: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Return the held-out metrics by step."""
    folder = request.out / f"{way.precision}-{'kernels' if way.kernels else 'plain'}-{seed}"
    settings = [
        f"train.max_steps={request.steps}",
        f"train.seed={seed}",
        f"train.precision={way.precision}",
        f"train.evaluate_every_steps={max(request.steps // 10, 1)}",
        f"optimizer.warmup_steps={max(request.steps // 10, 1)}",
        "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
        *request.set,
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "discern", "pretrain", "--preset", request.preset, "--data", str(request.data)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DISCERN_KERNELS": str(int(way.kernels))}
    done = subprocess.run([*command, "--out", str(folder), *options], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder} failed:\n{done.stderr[-2000:]}")
    print(f"{folder.name} done", file=sys.stderr, flush=True)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: {name: line[name] for name in FIGURES} for line in lines if FIGURES[0] in line}


Curves = dict[tuple[Way, int], dict[int, dict[str, float]]]


def table(curves: Curves, steps: list[int], seeds: list[int]) -> tuple[str, bool]:
    """Return the means at half of the steps and at the end, and whether all of them pass."""
    lines = ["| step | figure | reference: mean (least to most) | " + " | ".join(way.name for way in WAYS[1:]) + " |"]
    lines.append("|---|---|---|" + "---|" * (len(WAYS) - 1))
    passed = True
    for step in (steps[len(steps) // 2 - 1], steps[-1]):
        for figure in FIGURES:
            reference = [curves[REFERENCE, seed][step][figure] for seed in seeds]
            middle, spread = statistics.mean(reference), max(reference) - min(reference)
            cells = []
            for way in WAYS[1:]:
                mean = statistics.mean(curves[way, seed][step][figure] for seed in seeds)
                fits = min(reference) <= mean <= max(reference) or abs(mean - middle) <= spread / 2
                passed &= fits
                cells.append(f"{mean:.4f}" + ("" if fits else " **outside**"))
            span = f"{middle:.4f} ({min(reference):.4f} to {max(reference):.4f})"
            lines.append(f"| {step} | `{figure}` | {span} | " + " | ".join(cells) + " |")
    return "\n".join(lines), passed


def draw(curves: Curves, steps: list[int], seeds: list[int], path: Path) -> None:
    """Draw a panel per metric: the mean of each way, and a band from the reference's minimum to its maximum."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(FIGURES), figsize=(4 * len(FIGURES), 3.4), layout="constrained")
    for axis, name in zip(axes, FIGURES, strict=True):
        reference = [[curves[REFERENCE, seed][step][name] for seed in seeds] for step in steps]
        axis.fill_between(steps, [min(row) for row in reference], [max(row) for row in reference], alpha=0.25)
        for way in WAYS:
            means = [statistics.mean(curves[way, seed][step][name] for seed in seeds) for step in steps]
            axis.plot(steps, means, label=way.name, linewidth=1.2)
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set_xlabel("step")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
