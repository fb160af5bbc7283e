"""Compare two ways of training a small network at equal FLOPs, on several seeds: the paper's, and that of preset `cpu-small`.

    python benchmarks/learning_curves.py --data DATA --out RUNS [--tokens 4e6] [--seeds 0 1 2] [--rates WAY=RATE ...]
        [--picture PNG]

Both have the sizes, the optimizer and the batch of `cpu-small`; the paper's way is initialized like the released code,
shares the embeddings and has the paper's discriminator head. Ours gets the requested number of tokens, the paper's way the number
of steps with the same FLOPs of matrix products, forward and backward.

Without --rates both ways have the preset's learning rate, which was chosen for ours. `--rates paper=3e-4 paper=5e-4 ours=1.5e-3`
trains only the paper's way at two peak rates and ours at one: a search for the best rate of each.

Each run has its own folder under RUNS. The same command resumes interrupted runs and skips complete ones. At the end it prints a
table and draws the medians with the spread of the seeds. --picture-only draws the existing results.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from discern.data.dataset.shards import TokenData
from discern.model_files.run import build_objective
from discern.objectives.base import Vocabulary
from discern.training.config import PretrainConfig, load_pretrain_config
from discern.training.flops import step_flops
from discern.training.metrics import read_metrics

PRESET = "cpu-small"
WAYS = {
    "ours": (),
    "paper": (
        'model.initialization="released"',
        "model.initializer_range=0.02",
        'model.normalization="post"',
        'objective.tying="embeddings"',
        'objective.discriminator_head="dense"',
    ),
}
NAMES = {"ours": "cpu-small", "paper": "the paper's way"}
COLORS = ("#1b6ca8", "#b5541c", "#3f7f4f", "#7a4f9a", "#8a7a1c", "#555555")
FIGURES = {
    "generator_accuracy": "generator accuracy",
    "discriminator_auc": "discriminator AUC",
    "discriminator_recall": "recall of replaced tokens",
}


@dataclass(frozen=True)
class Way:
    """One way of training.

    Attributes:
        name: name of its folders, followed by the seed.
        title: title in tables and pictures.
        overrides: settings over the preset, "section.key=value", including the length of the run.
        steps: number of steps of a run.
        tokens: number of tokens of a run.
        flops: FLOPs of a run's matrix products.
    """

    name: str
    title: str
    overrides: tuple[str, ...]
    steps: int
    tokens: int
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tokens", type=float, default=4e6, help="number of tokens of a run of ours")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--evaluations", type=int, default=16, help="number of points per curve")
    parser.add_argument("--warmup", type=int, default=100, help="warm-up steps; the preset's value is for a longer run")
    parser.add_argument("--rates", type=rate, nargs="+", metavar="WAY=RATE", help="only these ways, at these peak learning rates")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--picture-only", action="store_true")
    arguments = parser.parse_args()
    ways = plan(arguments.data, arguments.tokens, arguments.evaluations, arguments.warmup)
    if arguments.rates:
        ways = [at_rate(way, peak) for name, peak in arguments.rates for way in ways if way.name == name]
    for seed in () if arguments.picture_only else arguments.seeds:
        for way in ways:
            train(way, seed, arguments.data, folder(arguments.out, way, seed))
    curves = {way.name: [points(folder(arguments.out, way, seed)) for seed in arguments.seeds] for way in ways}
    curves = {name: [run for run in runs if run] for name, runs in curves.items()}
    print(table(ways, curves))
    if arguments.picture:
        draw({way.title: curves[way.name] for way in ways}, arguments.picture)
        print(f"wrote {arguments.picture}")


def rate(text: str) -> tuple[str, str]:
    """Parse `WAY=RATE` of the command line; the rate remains text, for the name of the folder."""
    name, _, value = text.partition("=")
    if name not in WAYS or not float(value) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected WAY=RATE with a way of {', '.join(WAYS)}, such as paper=5e-4")
    return name, value


def at_rate(way: Way, peak: str) -> Way:
    """The same way at another peak learning rate."""
    overrides = (*way.overrides, f"optimizer.learning_rate={peak}")
    return replace(way, name=f"{way.name}-{peak}", title=f"{way.title} at {peak}", overrides=overrides)


def plan(data: Path, tokens: float, evaluations: int, warmup: int) -> list[Way]:
    """Return both ways, the paper's with the number of steps for which its FLOPs equal ours."""
    ways: list[Way] = []
    for name, overrides in WAYS.items():
        config = load_pretrain_config(None, PRESET, overrides).config
        step = config.train.sequences_per_step * config.data.sequence_length
        each = flops_of_a_step(config, data)
        steps = round(ways[0].flops / each) if ways else round(tokens / step)
        length = (
            f"train.max_steps={steps}",
            f"train.evaluate_every_steps={max(1, steps // evaluations)}",
            "train.evaluate_sequences=1000",
            f"train.checkpoint_every_steps={max(1, steps // 4)}",
            f"optimizer.warmup_steps={warmup}",
        )
        ways.append(Way(name, NAMES[name], (*overrides, *length), steps, steps * step, steps * each))
    return ways


def flops_of_a_step(config: PretrainConfig, data: Path) -> float:
    """FLOPs of the matrix products of one update."""
    opened = TokenData.open(data)
    with torch.device("meta"):
        objective = build_objective(config, Vocabulary(opened.vocab_size, opened.special_tokens))
    (phase,) = objective.phases(config.train.max_steps)
    return step_flops(objective, phase, config.data.sequence_length, config.train.sequences_per_step).executed


def folder(out: Path, way: Way, seed: int) -> Path:
    return out / f"{way.name}-{seed}"


def train(way: Way, seed: int, data: Path, out: Path) -> None:
    """Run to the end, resuming an existing run."""
    settings = [part for override in (*way.overrides, f"train.seed={seed}") for part in ("--set", override)]
    command = [sys.executable, "-m", "discern", "pretrain", "--preset", PRESET, "--data", data, "--out", out, *settings, "--json"]
    print(f"{out.name}: {way.tokens:,} tokens, {way.flops:.3g} FLOPs", flush=True)
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def points(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run on held-out text, oldest first."""
    return [record for record in read_metrics(run) if "generator_accuracy" in record]


def table(ways: Sequence[Way], curves: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Return the final metrics as Markdown: the median of the seeds, and each seed in brackets; complete runs only."""
    lines = ["| way | M tokens | FLOPs | " + " | ".join(FIGURES.values()) + " |", "|---" * (3 + len(FIGURES)) + "|"]
    for way in ways:
        cells = [way.title, f"{way.tokens / 1e6:.2f}", f"{way.flops:.2e}"]
        for figure in FIGURES:
            values = [run[-1][figure] for run in curves[way.name] if run[-1]["step"] == way.steps]
            each = ", ".join(f"{value:.3f}" for value in values)
            cells.append(f"{statistics.median(values):.3f} ({each})" if values else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: dict[str, list[list[dict[str, Any]]]], picture: Path) -> None:
    """Draw one panel per metric: medians as lines, from the lowest to the highest seed as bands."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(FIGURES)), FIGURES.items(), strict=True):
        for color, (title_of_way, runs) in zip(itertools.cycle(COLORS), curves.items(), strict=False):
            if runs:
                band(axes, title_of_way, color, key, runs)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("tokens, millions")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), frameon=False, loc="outside upper right", ncols=2)
    figure.savefig(picture, dpi=130)


def band(axes: Axes, title: str, color: str, key: str, runs: list[list[dict[str, Any]]]) -> None:
    """Return median and spread at the evaluations that all runs have reached."""
    columns = list(zip(*runs, strict=False))
    tokens = [statistics.median(point["tokens"] for point in column) / 1e6 for column in columns]
    values = [[point[key] for point in column] for column in columns]
    axes.plot(tokens, [statistics.median(column) for column in values], color=color, label=title)
    axes.fill_between(tokens, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2, linewidth=0)


if __name__ == "__main__":
    main()
