"""Compare the speed of permutation language modeling with transformers, in turns, so that load on the machine affects both alike.

    python benchmarks/xlnet.py [--rounds 5] [--preset xlnet-small] [--length 128] [--batch 32] [--memory 96] [--json OUT.json]

Each round trains both in each precision, each in a process of its own: `discern bench`, and `XLNetLMHeadModel` with `perm_mask`
and `target_mapping`, on rows, targets and masks that discern creates, half of the rows reversed. Both time whole steps with
equal shapes: forward, backward, clipping and AdamW. transformers gets its masks in advance; discern's time includes their
creation. All tokens of a row count. Prints Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

VOCABULARY = 30_522
LEARNING_RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="xlnet-small")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the preset, for both")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--memory", type=int, default=96, help="length of the memory in positions, for both; 0: no memory")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds to time each, for at least three steps")
    parser.add_argument("--precisions", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--peer", metavar="PRECISION", help=argparse.SUPPRESS)
    request = parser.parse_args()
    if request.batch % 2:
        parser.error(f"--batch {request.batch} is odd, and half of the rows run backwards; give an even number")
    if request.peer:
        print(json.dumps(time_transformers(request)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {
        f"{side}, {precision}": [] for precision in request.precisions for side in ("transformers", "discern")
    }
    for number in range(1, request.rounds + 1):
        for name, results in rounds.items():
            side, precision = name.split(", ")
            results.append(run(command(side, precision, request)))
            print(f"round {number}, {name}: {results[-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    print(markdown(rounds, request))
    if request.json:
        record = {"date": datetime.date.today().isoformat(), "command": sys.argv, "rounds": rounds}
        request.json.write_text(json.dumps(record, indent=1) + "\n")


def command(side: str, precision: str, request: argparse.Namespace) -> list[str]:
    """The program that measures one side in a process of its own."""
    if side == "transformers":
        return [__file__, "--peer", precision, *sys.argv[1:]]
    settings = [part for override in overrides(request, precision) for part in ("--set", override)]
    options = ["--vocab-size", str(VOCABULARY), "--seconds", str(request.seconds), "--json"]
    return ["-m", "discern", "bench", "--preset", request.preset, *settings, *options]


def overrides(request: argparse.Namespace, precision: str) -> list[str]:
    """Return the settings that override the preset on both sides."""
    return [
        *request.set,
        f"train.precision={precision}",
        f"train.sequences_per_step={request.batch}",
        f"train.micro_batch_size={request.batch}",
        f"data.sequence_length={request.length}",
        f"objective.memory_length={request.memory}",
        "objective.permutation_size=none",
    ]


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the last line that a process printed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def time_transformers(request: argparse.Namespace) -> dict[str, Any]:
    """Median tokens per second of whole steps, and the peak memory of this process."""
    step = transformers_step(request)
    for _ in range(3):
        step()  # the memory fills, caches and the heap settle
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < request.seconds:
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    speed = request.batch * request.length / statistics.median(seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens_per_second": speed, "peak_memory_bytes": peak, "steps": len(seconds)}


def transformers_step(request: argparse.Namespace) -> Callable[[], float]:
    """Run a training step of `XLNetLMHeadModel`, and return its loss."""
    import torch
    from transformers import XLNetConfig, XLNetLMHeadModel

    from discern.data.batching.synthetic import SPECIAL
    from discern.model_files.huggingface import network_to_huggingface
    from discern.model_files.run import build_objective
    from discern.objectives.base import Vocabulary
    from discern.training.config import load_pretrain_config

    config = load_pretrain_config(None, request.preset, overrides(request, request.peer)).config
    vocabulary = Vocabulary(VOCABULARY, SPECIAL)
    objective = build_objective(config, vocabulary)
    objective.initialize(0)
    batches = [made_up_batch(objective, request, number) for number in range(4)]
    exported = network_to_huggingface(next(iter(objective.networks().values())), SPECIAL)
    memory = {"mem_len": request.memory or None, "reuse_len": request.length // 2, "use_mems_train": request.memory > 0}
    model = XLNetLMHeadModel(XLNetConfig(**{**exported.config, **memory, "bi_data": True}))
    model.load_state_dict(exported.tensors, strict=False)
    model.tie_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    lower = request.peer == "bfloat16"
    kept: dict[str, Any] = {"mems": None, "step": 0}

    def step() -> float:
        batch = batches[kept["step"] % len(batches)]
        with torch.autocast("cpu", torch.bfloat16) if lower else nullcontext():
            output = model(**batch, mems=kept["mems"], use_mems=request.memory > 0)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        kept["step"] += 1
        if request.memory:
            kept["mems"] = [state.detach() for state in output.mems]
        return float(output.loss.detach())

    return step


def made_up_batch(objective: Any, request: argparse.Namespace, number: int) -> dict[str, Any]:
    """The input of transformers: forward rows, then as many reversed ones, as its `bi_data` expects."""
    import numpy as np
    import torch
    from torch.nn import functional as F

    from discern.corruption.randomness import Randomness
    from discern.data.batching.synthetic import SyntheticRows

    slots = np.arange(request.batch)
    rows = SyntheticRows(VOCABULARY, request.length, 1.0, 4 * request.batch, 0, two_parts=True)
    randomness = Randomness(0, number, torch.from_numpy(slots))
    corrupted = objective.corrupt(rows.batch(slots + number * request.batch, slots), randomness)
    tokens, targets = corrupted.tokens, corrupted.masked_positions
    most = int(targets.sum(1).max())
    positions = (~targets).long().argsort(dim=1, stable=True)[:, :most]
    given = {
        "input_ids": tokens.input_ids,
        "token_type_ids": tokens.token_type_ids,
        "perm_mask": (~objective.visible(corrupted, randomness)).float(),
        "target_mapping": F.one_hot(positions, request.length).float(),
        # transformers ignores labels of -100; rows may differ in their number of targets.
        "labels": tokens.input_ids.gather(1, positions).masked_fill(~targets.gather(1, positions), -100),
    }
    order = tokens.is_reversed.long().argsort(stable=True)
    return {name: value[order] for name, value in given.items()}


def markdown(rounds: dict[str, list[dict[str, Any]]], request: argparse.Namespace) -> str:
    """A row per program and precision: median, spread, ratio to transformers in the same precision and round, memory."""
    lines = [
        f"| | tokens/s, median of {request.rounds} | least to most | ratio in a round, median (least to most) | peak memory |",
        "|---|---|---|---|---|",
    ]
    for name, results in rounds.items():
        speeds = [result["tokens_per_second"] for result in results]
        peers = [result["tokens_per_second"] for result in rounds[f"transformers, {name.split(', ')[1]}"]]
        ratios = [own / peer for own, peer in zip(speeds, peers, strict=True)]
        peak = statistics.median(result["peak_memory_bytes"] for result in results) / 2**20
        lines.append(
            f"| {name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {peak:,.0f} MiB |"
        )
    ours = next(results[0] for name, results in rounds.items() if name.startswith("discern"))
    machine = f"{ours['device_name']}, {ours['threads']} threads, torch {ours['torch']}"
    shape = f"{request.preset}, {request.batch} x {request.length}, memory {request.memory}"
    return "\n".join([*lines, "", f"{machine}; {shape}."])


if __name__ == "__main__":
    main()
