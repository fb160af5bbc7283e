"""Compare training speed with another program, in turns, so that load on the machine affects both alike.

    python benchmarks/speed.py --peer PEER.py [--rounds 5] [--length 128] [--batch 32] [--json OUT.json]

PEER is a script whose last line of output is a JSON object with `tokens_per_second`; it gets --batch and --length. Each
round runs the peer and `discern bench` in each precision, each in a process of its own. Prints Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="electra-small")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--bench", nargs=argparse.REMAINDER, default=[], help="further options of discern bench; must come last")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    request = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {"peer": [], **{precision: [] for precision in request.precisions}}
    for number in range(1, request.rounds + 1):
        for name, results in rounds.items():
            results.append(measure(name, request))
            print(f"round {number}, {name}: {results[-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    print(markdown(rounds))
    if request.json:
        record = {"date": datetime.date.today().isoformat(), "command": sys.argv, "rounds": rounds, "medians": medians(rounds)}
        request.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str, request: argparse.Namespace) -> dict[str, Any]:
    """Run a process, and return the last line that it printed."""
    if name == "peer":
        command = [str(request.peer), "--batch", str(request.batch), "--length", str(request.length)]
    else:
        values = {
            "train.precision": name,
            "data.sequence_length": request.length,
            "train.sequences_per_step": request.batch,
            "train.micro_batch_size": request.batch,
        }
        settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        command = ["-m", "discern", "bench", "--preset", request.preset, *settings, "--json", *request.bench]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def medians(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    return {name: statistics.median(result["tokens_per_second"] for result in results) for name, results in rounds.items()}


def markdown(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """A row per program and precision: median, spread, ratio, fraction of the matrix products' limit, memory."""
    middle = medians(rounds)
    lines = [
        f"| | tokens/s, median of {len(rounds['peer'])} | least to most | ratio | share of the GEMM limit | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, results in rounds.items():
        speeds = [result["tokens_per_second"] for result in results]
        share = f"{statistics.median(result['gemm_share'] for result in results):.0%}" if name != "peer" else ""
        mib = [result.get("peak_rss_mib") or result.get("peak_memory_bytes", 0) / 2**20 for result in results]
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        title = name if name == "peer" else f"discern, {name}"
        ratio = middle[name] / middle["peer"]
        lines.append(f"| {title} | {middle[name]:,.0f} | {spread} | {ratio:.2f} | {share} | {statistics.median(mib):,.0f} MiB |")
    ours = next(result for name, results in rounds.items() if name != "peer" for result in results)
    machine = f"{ours['device_name']}, {ours['threads']} threads, torch {ours['torch']}"
    return "\n".join([*lines, "", f"{machine}; {ours['preset']}, {ours['sequences_per_step']} x {ours['sequence_length']}."])


if __name__ == "__main__":
    main()
