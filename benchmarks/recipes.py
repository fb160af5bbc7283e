"""Search for a recipe: train variants of a preset at equal FLOPs, and judge them by what they are for.

    python benchmarks/recipes.py TRIALS.toml --data FOLDER --out RUNS [--jobs 2] [--only NAME ...]

TRIALS.toml lists the trials. `[defaults]` and each `[[trial]]` may have

- `name`: of the trial and its folders;
- `preset`, `set`: the configuration; the settings of `defaults` come first;
- `data`: a folder of FOLDER that `discern prepare` wrote;
- `flops` or `hours`: the length of training (default: that of the preset). FLOPs are those of matrix products, forward and
  backward, so that the number of updates follows from the sizes. A schedule of the batch that comes from the preset is shortened
  with the run: set `train.batch_schedule` to keep the sizes;
- `seeds`;
- `judge`: what to measure afterwards: "pll" (pseudo-log-likelihood per character of FOLDER/sentences.txt), "blimp" (minimal
  pairs in FOLDER/blimp), "NAME.jsonl" (AUC of the wrong words in that file, see detection.py), or a task such as "chunk" or
  "cola", with its files in FOLDER/tasks/<task>;
- `predicted`: what was expected before the trial ran, for the notebook.

`judge_data.py` makes sentences.txt, blimp and tasks.

Each run has its own folder under RUNS. The same command resumes interrupted runs and skips complete ones. Results are kept in
RUNS/<run>.json. Prints a table, and writes it to RUNS/table.md. With `--jobs N`, N runs share the machine, with one thread each
if N is above 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from discern.data.dataset.shards import TokenData
from discern.model_files.run import build_objective
from discern.objectives.base import Vocabulary
from discern.training.config import load_pretrain_config, step_sizes
from discern.training.flops import run_flops
from discern.training.metrics import read_metrics

JUDGES = {"pll": "nats per character", "blimp": "BLiMP"}
# Figures of an evaluation: of the network that predicts words, and of the discriminator.
LOSSES = ("heldout_generator_loss", "heldout_mlm_loss", "heldout_permutation_lm_loss")
ACCURACIES = ("generator_accuracy", "mlm_accuracy", "permutation_lm_accuracy")
CURVE = (*LOSSES, *ACCURACIES, "discriminator_auc")


@dataclass(frozen=True)
class Trial:
    """A configuration to train, with the measurements that follow."""

    name: str
    preset: str
    settings: tuple[str, ...]
    data: Path
    flops: float | None
    hours: float | None
    seeds: tuple[int, ...]
    judge: tuple[str, ...]
    predicted: str

    @classmethod
    def read(cls, entry: dict[str, Any], defaults: dict[str, Any], data: Path) -> Trial:
        """A trial of the file, completed by the defaults."""
        merged = {**defaults, **entry}
        length = {key: entry.get(key) for key in ("flops", "hours")}
        if not any(length.values()):
            length = {key: defaults.get(key) for key in length}
        return cls(
            name=merged["name"],
            preset=merged["preset"],
            settings=(*defaults.get("set", ()), *entry.get("set", ())),
            data=data / merged["data"],
            flops=length["flops"],
            hours=length["hours"],
            seeds=tuple(merged.get("seeds", (0,))),
            judge=tuple(merged.get("judge", ())),
            predicted=merged.get("predicted", ""),
        )

    def length(self) -> tuple[str, ...]:
        """The settings that end training at the budget."""
        if self.hours is not None:
            return (f"train.max_hours={self.hours}",)
        return () if self.flops is None else (f"train.max_steps={self.steps_within(self.flops)}",)

    def steps_within(self, flops: float) -> int:
        """Number of updates whose matrix products take `flops`; under a schedule of the batch, they differ in size."""
        config = load_pretrain_config(None, self.preset, self.settings).config
        opened = TokenData.open(self.data)
        with torch.device("meta"):
            objective = build_objective(config, Vocabulary(opened.vocab_size, opened.special_tokens))
        sizes = step_sizes(config.train, config.data)
        return run_flops(objective, config.train.max_steps, sizes).steps_within(flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time")
    parser.add_argument("--only", nargs="+", help="names of the trials to run")
    arguments = parser.parse_args()
    with arguments.trials.open("rb") as file:
        content = tomllib.load(file)
    trials = [Trial.read(entry, content.get("defaults", {}), arguments.data) for entry in content["trial"]]
    chosen = [trial for trial in trials if not arguments.only or trial.name in arguments.only]
    arguments.out.mkdir(parents=True, exist_ok=True)
    threads = "1" if arguments.jobs > 1 else str(torch.get_num_threads())
    runs = [(trial, seed) for trial in chosen for seed in trial.seeds]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda run: attempt(*run, arguments, threads), runs))
    text = table(trials, arguments.out)
    print(text)
    (arguments.out / "table.md").write_text(text + "\n")


def attempt(trial: Trial, seed: int, arguments: argparse.Namespace, threads: str) -> None:
    """`carry_out`; a failure is printed and does not stop the other runs."""
    try:
        carry_out(trial, seed, arguments, threads)
    except RuntimeError as error:
        print(f"{trial.name}-{seed} failed: {error}", flush=True)


def carry_out(trial: Trial, seed: int, arguments: argparse.Namespace, threads: str) -> None:
    """Train a run to its end and take the measurements that are missing."""
    run, record = arguments.out / f"{trial.name}-{seed}", arguments.out / f"{trial.name}-{seed}.json"
    results: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    if "curve" not in results:
        settings = [part for value in (*trial.settings, *trial.length(), f"train.seed={seed}") for part in ("--set", value)]
        discern(threads, "pretrain", "--preset", trial.preset, "--data", trial.data, "--out", run, *settings)
        curve = [line for line in read_metrics(run) if any(key in line for key in CURVE)]
        results["curve"] = [{key: line[key] for key in ("step", "tokens", *CURVE) if key in line} for line in curve]
    for name in trial.judge:
        if name not in results:
            results[name] = judge(name, run, arguments, threads)
            record.write_text(json.dumps(results, indent=1) + "\n")
    record.write_text(json.dumps(results, indent=1) + "\n")
    print(run.name, {name: results[name] for name in trial.judge}, flush=True)


def judge(name: str, run: Path, arguments: argparse.Namespace, threads: str) -> float:
    """A measurement of a trained run: higher is better."""
    if name == "pll":
        return float(discern(threads, "score", run, arguments.data / "sentences.txt", "--scorer", "pll")["score_per_character"])
    if name == "blimp":
        suite = discern(threads, "evaluate", run, "--suite", "blimp", "--data", arguments.data / "blimp", "--scorer", "pll")
        return float(suite["accuracy"])
    if name.endswith(".jsonl"):
        return float(discern(threads, "detect", run, "--evaluate", arguments.data / name)["auc"])
    out = run.with_name(f"{run.name}-{name}")
    files = arguments.data / "tasks" / name
    return float(discern(threads, "finetune", run, "--task", name, "--data", files, "--out", out, "--no-baselines")["median"])


def discern(threads: str, *command: object) -> dict[str, Any]:
    """Run a command of discern, and return what it prints with `--json`."""
    done = subprocess.run(
        [sys.executable, "-m", "discern", *map(str, command), "--json"],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def table(trials: Sequence[Trial], out: Path) -> str:
    """The results as Markdown: medians, and each seed in parentheses."""
    judges = list(dict.fromkeys(name for trial in trials for name in trial.judge))
    heads = ["trial", "settings", "M tokens", "held-out loss", "accuracy", "AUC", *(JUDGES.get(name, name) for name in judges)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for trial in trials:
        records = [out / f"{trial.name}-{seed}.json" for seed in trial.seeds]
        found = [json.loads(record.read_text()) for record in records if record.exists()]
        if not found:
            continue
        ends = [results["curve"][-1] for results in found]
        cells = [
            trial.name,
            " ".join(f"`{value}`" for value in trial.settings) or "-",
            f"{statistics.median(end['tokens'] for end in ends) / 1e6:.2f}",
            spread([end[key] for end in ends for key in LOSSES if key in end]),
            spread([end[key] for end in ends for key in ACCURACIES if key in end]),
            spread([end.get("discriminator_auc") for end in ends]),
            *(spread([results.get(name) for results in found]) for name in judges),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: Sequence[float | None]) -> str:
    """The median, with each value in parentheses if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    each = ", ".join(f"{value:.3f}" for value in known)
    return f"{statistics.median(known):.3f}" + (f" ({each})" if len(known) > 1 else "")


if __name__ == "__main__":
    main()
