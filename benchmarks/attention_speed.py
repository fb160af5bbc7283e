"""Time attention with and without a window, at several lengths of a text: forward and backward, 8,192 tokens in all.

    OMP_NUM_THREADS=1 python benchmarks/attention_speed.py [--rounds 7] [--heads 4] [--head-size 64] [--window 64]

Full attention takes time in proportion to the length, attention within a window does not. The cases take turns, so that other
load on the machine affects all alike. Prints medians in milliseconds as a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from discern import kernels

TOKENS = 8192
LENGTHS = (128, 512, 2048, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=64, help="tokens to each side")
    arguments = parser.parse_args()
    packed = torch.randn(TOKENS, 3 * arguments.heads * arguments.head_size, dtype=torch.bfloat16, requires_grad=True)
    times: dict[tuple[int, int | None], list[float]] = {}
    for _ in range(arguments.rounds + 1):
        for length in LENGTHS:
            for window in (None, arguments.window):
                times.setdefault((length, window), []).append(milliseconds(packed, length, arguments.heads, window))
    print(f"| length | full | window of {arguments.window} |\n|---|---|---|")
    for length in LENGTHS:
        # The first round warms up.
        full, near = (statistics.median(times[length, window][1:]) for window in (None, arguments.window))
        print(f"| {length:,} | {full:,.0f} ms | {near:,.0f} ms |")


def milliseconds(packed: torch.Tensor, length: int, heads: int, window: int | None) -> float:
    """Time of one pass, forward and backward, over rows of `length` tokens."""
    starts = torch.arange(0, TOKENS + 1, length)
    begin = time.perf_counter()
    kernels.attention(packed, heads, starts, 0.0, window).sum().backward()
    return 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
