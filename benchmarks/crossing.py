"""Fit the losses of objectives against FLOPs, and say where one overtakes another, and how sure that is.

    python benchmarks/crossing.py losses.csv [--reference mlm] [--draws 10000]

The file has the columns `objective`, `flops` and `loss`, with a row for each run. For each objective, `floor + scale *
FLOPs^-exponent` is fitted to the medians over seeds. The crossing is fitted again for many draws, in each of which every
median is moved at random, by the pooled standard deviation of the seeds divided by the root of their number. This covers the
noise of seeds, not whether such a curve describes the losses beyond the runs. Prints Markdown.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EXPONENTS = np.linspace(0.02, 2.0, 397)
FARTHEST = 1e20  # FLOPs; curves that have not met by then count as never meeting


class Curves:
    """`floor + scale * (FLOPs / first)^-exponent`, fitted by least squares; the scale is never negative.

    Args:
        flops: (N,) FLOPs of N >= 3 sizes of run.
        losses: (D, N) losses; a curve is fitted to each row.
    """

    def __init__(self, flops: Floats, losses: Floats) -> None:
        self.first = float(flops[0])
        powers = (flops / self.first) ** -EXPONENTS[:, None]  # (E, N)
        means = powers.mean(1)
        centered = powers - means[:, None]
        scales = np.maximum(0.0, losses @ centered.T / np.square(centered).sum(1))  # (D, E)
        floors = losses.mean(1, keepdims=True) - scales * means
        errors = np.square(floors[:, :, None] + scales[:, :, None] * powers - losses[:, None]).sum(2)
        best = errors.argmin(1)
        rows = np.arange(len(losses))
        self.exponent, self.scale, self.floor = EXPONENTS[best], scales[rows, best], floors[rows, best]

    def at(self, flops: float) -> Floats:
        """(D,) losses of all curves."""
        values: Floats = self.floor + self.scale * (flops / self.first) ** -self.exponent
        return values


def crossings(curves: Curves, others: Curves, start: float) -> Floats:
    """(D,) FLOPs beyond `start` from which each curve is below its counterpart; infinity if it is not by `FARTHEST`."""
    found = np.full(len(curves.floor), np.inf)
    for flops in np.geomspace(start, FARTHEST, 2000):
        found[np.isinf(found) & (curves.at(flops) < others.at(flops))] = flops
    return found


def read(path: Path) -> dict[str, dict[float, list[float]]]:
    """Losses by objective and FLOPs."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["objective"]][float(row["flops"])].append(float(row["loss"]))
    for objective, sizes in found.items():
        if len(sizes) < 3:
            raise SystemExit(f"{path}: {objective} has runs of {len(sizes)} sizes; a curve needs three")
    return {objective: dict(sorted(sizes.items())) for objective, sizes in found.items()}


def seed_deviation(runs: Mapping[str, Mapping[float, Sequence[float]]]) -> float:
    """Standard deviation of seeds, pooled over all sizes with more than one."""
    several = [losses for sizes in runs.values() for losses in sizes.values() if len(losses) > 1]
    if not several:
        raise SystemExit("no size has more than one seed, so that the noise is not known")
    squares = sum(float(np.square(np.asarray(each) - np.mean(each)).sum()) for each in several)
    return float(np.sqrt(squares / sum(len(each) - 1 for each in several)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--reference", default="mlm")
    parser.add_argument("--draws", type=int, default=10_000)
    request = parser.parse_args()
    runs = read(request.losses)
    noise, random = seed_deviation(runs), np.random.default_rng(0)
    points = {
        name: (np.array(list(sizes)), np.array([np.median(each) for each in sizes.values()])) for name, sizes in runs.items()
    }
    spreads = {name: noise / np.sqrt([len(each) for each in sizes.values()]) for name, sizes in runs.items()}
    print(
        f"standard deviation of seeds: {noise:.4f}\n\n"
        "| objective | floor | exponent | scale at the first size |\n|---|---|---|---|"
    )
    fitted, drawn = {}, {}
    for name, (flops, losses) in points.items():
        fitted[name] = Curves(flops, losses[None])
        drawn[name] = Curves(flops, losses + spreads[name] * random.standard_normal((request.draws, len(losses))))
        print(f"| {name} | {fitted[name].floor[0]:.3f} | {fitted[name].exponent[0]:.2f} | {fitted[name].scale[0]:.3f} |")
    start = max(flops[-1] for flops, _ in points.values())
    for name in sorted(runs.keys() - {request.reference}):
        (best,) = crossings(fitted[name], fitted[request.reference], start)
        found = crossings(drawn[name], drawn[request.reference], start)
        low, middle, high = np.quantile(found, [0.05, 0.5, 0.95], method="nearest")
        print(
            f"\n{name} is below {request.reference} from {best:.2e} FLOPs on (inf: never). "
            f"In {request.draws:,} draws: median {middle:.2e}, "
            f"5% to 95% {low:.2e} to {high:.2e}; no crossing before {FARTHEST:.0e} in {np.mean(np.isinf(found)):.0%} of them"
        )


if __name__ == "__main__":
    main()
