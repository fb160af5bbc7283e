"""Compare training speed with another program, in turns, so that load on the machine affects both alike.

    python benchmarks/speed.py --peer PEER.py [--rounds 5] [--length 128] [--batch 32] [--json OUT.json]

PEER is a script whose last line of output is a JSON object with `tokens_per_second`. It gets --batch, --length and --precision
(float32, or bfloat16 for autocast) and, to run in torch.compile, --compile. Each round runs the peer in these three ways and
`discern bench` in each precision, each in a process of its own. Prints Markdown: for each way of the peer, the median over the
rounds of the ratio to it.
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

PEERS = ["peer, float32", "peer, bfloat16", "peer, bfloat16, compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="electra-small")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--programs", nargs="+", default=[*PEERS, "discern, float32", "discern, bfloat16"], help="what to run")
    parser.add_argument("--bench", nargs=argparse.REMAINDER, default=[], help="further options of discern bench; must come last")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    request = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {program: [] for program in request.programs}
    for number in range(1, request.rounds + 1):
        for name, results in rounds.items():
            results.append(measure(name, request))
            print(f"round {number}, {name}: {results[-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    print(markdown(rounds))
    if request.json:
        record = {"date": datetime.date.today().isoformat(), "command": sys.argv, "rounds": rounds}
        request.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str, request: argparse.Namespace) -> dict[str, Any]:
    """Run a process, and return the last line that it printed."""
    program, precision, *compiled = name.split(", ")
    if program == "peer":
        command = [str(request.peer), "--batch", str(request.batch), "--length", str(request.length), "--precision", precision]
        command += ["--compile"] * len(compiled)
    else:
        values = {
            "train.precision": precision,
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


def markdown(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """A row per program and precision: median, spread, ratio to each peer, fraction of the matrix products' limit, memory."""
    speeds = {name: [result["tokens_per_second"] for result in results] for name, results in rounds.items()}
    peers = [name for name in PEERS if name in rounds]
    heading = [
        "",
        f"tokens/s, median of {len(next(iter(speeds.values())))}",
        "least to most",
        *(f"over {name}" for name in peers),
    ]
    lines = [" | ".join([*heading, "share of the GEMM limit", "peak memory"]), "|".join(["---"] * (len(heading) + 2))]
    for name, own in speeds.items():
        ratios = [statistics.median(one / other for one, other in zip(own, speeds[peer], strict=True)) for peer in peers]
        shares = [result["gemm_share"] for result in rounds[name] if "gemm_share" in result]
        mib = [result.get("peak_rss_mib") or result.get("peak_memory_bytes", 0) / 2**20 for result in rounds[name]]
        cells = [
            name,
            f"{statistics.median(own):,.0f}",
            f"{min(own):,.0f} to {max(own):,.0f}",
            *(f"{each:.2f}" for each in ratios),
        ]
        cells += [f"{statistics.median(shares):.0%}" if shares else "", f"{statistics.median(mib):,.0f} MiB"]
        lines.append(" | ".join(cells))
    ours = next(results[-1] for name, results in rounds.items() if name not in PEERS)
    machine = f"{ours['device_name']}, {ours['threads']} threads, torch {ours['torch']}"
    table = "\n".join(f"| {line} |" for line in lines)
    return f"{table}\n\n{machine}; {ours['preset']}, {ours['sequences_per_step']} x {ours['sequence_length']}."


if __name__ == "__main__":
    main()
