"""Fine-tune on every task whose files are present: a pre-trained and an untrained encoder, several seeds each.

    python benchmarks/tasks.py MODEL --out FOLDER [--data FOLDER] [--seeds 3] [--tasks cola,rte] [--rows 10000]

Runs `discern finetune` once per task and encoder, with its defaults. It can be interrupted at any time: the same command
continues, without repeating complete results. Prints a Markdown table of the results; `--table` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Folder of the files, and the maximum number of training rows (0: all).
FOLDERS = {
    "wnli": "glue/WNLI",
    "mrpc": "glue/MRPC",
    "cola": "glue/CoLA",
    "rte": "glue/RTE",
    "stsb": "glue/STS-B",
    "sst2": "glue/SST-2",
    "chunk": "conll2000",
    "squad1": "squad1",
    "squad2": "squad2",
    "qnli": "glue/QNLI",
    "qqp": "glue/QQP",
    "mnli": "glue/MNLI",
}
CUT = ("sst2", "qnli", "qqp", "mnli")
NETWORKS = {"pre-trained": (), "untrained": ("--untrained",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISCERN_TEST_DATA", ".")))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(FOLDERS))
    parser.add_argument("--rows", type=int, default=10_000, help=f"maximum number of training rows of {', '.join(CUT)}")
    parser.add_argument("--table", action="store_true", help="print existing results without running anything")
    request = parser.parse_args()
    tasks = [task for task in request.tasks.split(",") if (request.data / FOLDERS[task]).is_dir()]
    for task in () if request.table else tasks:
        for network, further in NETWORKS.items():
            run(task, network, further, request)
    print(
        "| task | metric | pre-trained: median (seeds) | untrained: median (seeds) | rows to train, to judge | minutes |\n"
        + "|---" * 6
        + "|"
    )
    for task in tasks:
        found = [results(request.out / f"{task}-{network}") for network in NETWORKS]
        if all(found):
            print(row(task, found[0], found[1]))


def run(task: str, network: str, further: tuple[str, ...], request: argparse.Namespace) -> None:
    out = request.out / f"{task}-{network}"
    print(f"{task}, {network}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "discern", "finetune", request.model, "--task", task, "--data", request.data / FOLDERS[task]]
    cut = ("--set", f"finetune.train_rows={request.rows}") if task in CUT else ()
    subprocess.run(
        [*map(str, command), "--out", str(out), "--seeds", str(request.seeds), *cut, *further], check=True, stdout=sys.stderr
    )


def results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def row(task: str, pretrained: dict[str, Any], untrained: dict[str, Any]) -> str:
    minutes = sum(found["seconds"] for found in (pretrained, untrained)) / 60
    rows = f"{pretrained['train_examples']:,}, {pretrained['examples']:,} ({pretrained['split']})"
    return f"| {task} | {pretrained['metric']} | {scores(pretrained)} | {scores(untrained)} | {rows} | {minutes:.0f} |"


def scores(found: dict[str, Any]) -> str:
    """The median, the score of each seed, and the failed seeds."""
    each = ", ".join("-" if score is None else f"{score:.3f}" for score in found["scores"])
    failed = "".join(f"; seed {seed}: {reason}" for seed, reason in found["failed_seeds"].items())
    median = "-" if found["median"] is None else f"{found['median']:.3f}"
    return f"{median} ({each}{failed})"


if __name__ == "__main__":
    main()
