"""How the cost of a training step grows with the number of GPUs: bytes between them, and from where on more are not worth it.

    python benchmarks/scaling.py --compute [--presets electra-base ...]
    python benchmarks/scaling.py --measure --out FOLDER [--processes 2 4] [--modes ddp fsdp]

--compute prints the tables of docs/concepts/scaling.md, from the shapes of a preset's weights and the FLOPs of its step on the
meta device. --measure trains a small network with gloo in a network namespace of its own, and compares the bytes that the kernel
counts on its loopback interface (/proc/net/dev, headers of TCP included) with the formula: the difference between two runs of
different length, divided by the steps. It needs Linux, `unshare` and `ip`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRESETS = ("electra-small", "electra-base", "electra-large", "modern-base", "xlnet-large")
MODES = ("ddp", "fsdp")
SIZES = (8, 64, 512)

GPUS = 8  # per machine
PEAK = 989.4e12  # FLOP/s of an H100 SXM in bfloat16 without sparsity: NVIDIA H100 data sheet
UTILIZATION = 0.4  # assumed share of it that a step reaches
MICRO_TOKENS = 16_384  # assumed positions per GPU and forward pass
REACHED = 0.8  # assumed share of the nominal bandwidths
NVLINK = 450e9  # bytes/s per GPU and direction: half of the 900 GB/s of the H100 data sheet
INFINIBAND = 50e9  # the same: one adapter of 400 Gb/s (NDR) for each GPU, as in NVIDIA's DGX H100 data sheet
ETHERNET = 12.5e9  # bytes/s per machine and direction: 100 Gb/s (IEEE 802.3)
LINKS = ("NVLink", "InfiniBand", "Ethernet")


@dataclass(frozen=True)
class Step:
    """What a training step exchanges and computes.

    Attributes:
        blocks: bytes of the matrices of the repeated blocks, which FSDP gathers one by one.
        others: bytes of all other matrices: embeddings, heads.
        vectors: bytes of biases and norms, which FSDP does not divide.
        flops: of the matrix products, over all GPUs.
        positions: over all GPUs.
        rows: over all GPUs.
    """

    blocks: int
    others: int
    vectors: int
    flops: float
    positions: int
    rows: int

    def micro_batches(self, gpus: int) -> int:
        """Forward passes per GPU."""
        return max(1, round(self.positions / gpus / MICRO_TOKENS))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends in a step.

    Attributes:
        divided: of the matrices that are divided among the GPUs.
        whole: of what is summed by all GPUs as a whole: everything under 'ddp', otherwise the vectors.
    """

    divided: float
    whole: float

    @property
    def sent(self) -> float:
        return self.divided + self.whole


def traffic(step: Step, mode: str, gpus: int, micro_batches: int, *, scatter: int = 1) -> Traffic:
    """Bytes that each GPU sends, in float32.

    A ring of n passes (n - 1)/n of the data once to gather or to sum and divide it, and twice to sum it for all.

    Args:
        scatter: passes to sum and divide; 2 with gloo, which sums for all and drops what belongs to others.
    """
    matrices = step.blocks + step.others
    if mode == "ddp":
        return Traffic(0.0, 2 * _ring(gpus) * (matrices + step.vectors))
    # Blocks are gathered for the forward and again for the backward pass, the rest once; gradients are summed after the last.
    moved = micro_batches * (2 * step.blocks + step.others) + scatter * matrices
    return Traffic(_ring(gpus) * moved, 2 * _ring(gpus) * step.vectors)


def seconds(step: Step, mode: str, gpus: int, link: str) -> tuple[float, float]:
    """Seconds of computation and of communication of a step.

    A ring crosses the edge of a machine once, so a machine sends what one GPU of the ring does; the GPUs of a machine share its
    adapters. Latency is not counted.
    """
    machine = GPUS if link == "NVLink" or gpus > GPUS else 1  # 8 GPUs without NVLink: 8 machines
    found = traffic(step, mode, gpus, step.micro_batches(gpus))
    adapters = {"NVLink": NVLINK, "InfiniBand": min(NVLINK, machine * INFINIBAND), "Ethernet": ETHERNET}[link]
    return step.flops / gpus / PEAK / UTILIZATION, found.sent / adapters / REACHED


def worth(step: Step, mode: str, link: str) -> int:
    """The largest number of GPUs (8, 16, 32, ...) at which a step communicates no longer than it computes; 0: not even 8."""
    last, gpus = 0, GPUS
    while gpus <= step.rows:
        computed, communicated = seconds(step, mode, gpus, link)
        if communicated > computed:
            break
        last, gpus = gpus, 2 * gpus
    return last


def _ring(gpus: int) -> float:
    return (gpus - 1) / gpus


def step_of(preset: str | None, overrides: list[str], vocab_size: int | None = None) -> Step:
    """The step of a preset, from the meta device."""
    import torch

    from discern.config.resolve import usual_vocabulary
    from discern.data.batching.synthetic import SPECIAL
    from discern.model_files.run import build_objective
    from discern.objectives.base import Vocabulary
    from discern.pretraining.bench import meta_steps
    from discern.training.config import load_pretrain_config

    config = load_pretrain_config(None, preset, overrides).config
    size = vocab_size or usual_vocabulary(preset or "")
    with torch.device("meta"):
        objective = build_objective(config, Vocabulary(size, SPECIAL, torch.ones(size, dtype=torch.int64)))
    repeated = [
        parameter
        for network in objective.networks().values()
        for block in network.encoder.repeated_blocks()
        for parameter in block.parameters()
    ]
    in_blocks = {id(parameter) for parameter in repeated}
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    rows = config.train.sequences_per_step
    return Step(
        blocks=4 * sum(each.numel() for each in trained if each.ndim > 1 and id(each) in in_blocks),
        others=4 * sum(each.numel() for each in trained if each.ndim > 1 and id(each) not in in_blocks),
        vectors=4 * sum(each.numel() for each in trained if each.ndim == 1),
        flops=float(meta_steps(config, objective, "bfloat16", size).flops),
        positions=rows * config.data.sequence_length,
        rows=rows,
    )


def tables(presets: list[str]) -> Iterator[str]:
    """The tables of the page."""
    steps = {preset: step_of(preset, []) for preset in presets}
    yield "| preset | weights (M) | FLOPs of a step | sequences x length | computed on 8 GPUs | on 64 | on 512 |"
    yield "|---|---|---|---|---|---|---|"
    for preset, step in steps.items():
        weights = (step.blocks + step.others + step.vectors) / 4e6
        times = " | ".join(_milliseconds(step.flops / gpus / PEAK / UTILIZATION) for gpus in SIZES)
        yield f"| {preset} | {weights:.1f} | {step.flops:.3g} | {step.rows} x {step.positions // step.rows} | {times} |"
    yield "\n| preset | mode | MB sent by each of 8 GPUs | of 64 | of 512 |\n|---|---|---|---|---|"
    for preset, step in steps.items():
        for mode in MODES:
            sent = [traffic(step, mode, gpus, step.micro_batches(gpus)).sent / 1e6 for gpus in SIZES]
            yield f"| {preset} | {mode} | " + " | ".join(f"{each:,.0f}" for each in sent) + " |"
    heads = " | ".join(f"{link}, {gpus}" for link in LINKS for gpus in SIZES)
    yield f"\n| preset | mode | {heads} |\n|---|---|{'---|' * len(LINKS) * len(SIZES)}"
    for preset, step in steps.items():
        for mode in MODES:
            yield f"| {preset} | {mode} | {' | '.join(_share(step, mode, gpus, link) for link in LINKS for gpus in SIZES)} |"
    yield f"\n| preset | mode | {' | '.join(LINKS)} |\n|---|---|{'---|' * len(LINKS)}"
    for preset, step in steps.items():
        for mode in MODES:
            yield f"| {preset} | {mode} | " + " | ".join(str(worth(step, mode, link) or "-") for link in LINKS) + " |"


def _share(step: Step, mode: str, gpus: int, link: str) -> str:
    """Share of the step that is spent computing, if nothing overlaps; '-' if there are more GPUs than sequences."""
    if gpus > step.rows:
        return "-"
    computed, communicated = seconds(step, mode, gpus, link)
    return f"{computed / (computed + communicated):.0%}"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if value > 0.1 else f"{1000 * value:.3g} ms"


SMALL = {
    "model.hidden_size": 128,
    "model.num_heads": 2,
    "model.feedforward_size": 512,
    "data.sequence_length": 32,
    "train.sequences_per_step": 8,
    "train.evaluate_sequences": 1,
    "train.log_every_steps": 1000,
    "train.precision": "float32",
}


def measure(out: Path, processes: list[int], modes: list[str]) -> Iterator[dict[str, Any]]:
    """Bytes of a step on the wire, measured and by the formula, over all processes together."""
    out.mkdir(parents=True, exist_ok=True)
    data = make_data(out)
    overrides = [f"{key}={value}" for key, value in SMALL.items()]
    step = step_of("tiny", overrides, vocab_size=300)
    for mode in modes:
        for number in processes:
            for micro in (1, 2):
                settings = [*overrides, f"train.micro_batch_size={8 // number // micro}"]
                if mode != "ddp":  # so that the measurement of ddp runs with versions without the other modes
                    settings.append(f"train.parallel={mode}")
                few, many = (run_bytes(out, data, number, [*settings, f"train.max_steps={steps}"]) for steps in (5, 25))
                expected = number * traffic(step, mode, number, micro, scatter=2).sent
                measured = (many - few) / 20
                yield {
                    "mode": mode,
                    "processes": number,
                    "micro_batches": micro,
                    "measured_bytes": round(measured),
                    "formula_bytes": round(expected),
                    "ratio": round(measured / expected, 4),
                }


def run_bytes(out: Path, data: Path, processes: int, settings: list[str]) -> int:
    """Bytes that a run sends over the loopback interface of a network namespace of its own."""
    options = " ".join(f"--set {setting}" for setting in settings)
    command = f"pretrain --preset tiny --data {data} --out {out / 'run'} --resume never --nproc {processes} {options}"
    script = f"ip link set lo up && {sys.executable} -m discern {command} >&2 && cat /proc/net/dev"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = ["unshare", "-rn", "bash", "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])  # transmitted bytes


def make_data(out: Path) -> Path:
    """A data set of random words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(300)]
    documents = ("\n".join(" ".join(rng.choices(words, k=12)) for _ in range(6)) for _ in range(300))
    (out / "text.txt").write_text("\n\n".join(documents))
    options = ["--train-tokenizer", "wordpiece", "--vocab-size", "300", "--heldout", "0.05", "--json"]
    line = [
        sys.executable,
        "-m",
        "discern",
        "prepare",
        str(out / "text.txt"),
        "--out",
        str(out / "data"),
        "--overwrite",
        *options,
    ]
    subprocess.run(line, check=True, capture_output=True)
    return out / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", action="store_true")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    if options.compute:
        for line in tables(options.presets):
            print(line)
    if options.measure:
        if options.out is None:
            parser.error("--measure needs --out FOLDER")
        for found in measure(options.out, options.processes, options.modes):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
