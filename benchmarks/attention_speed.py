"""Time attention by the kernels, with and without a window, and by torch's function, at several lengths: forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/attention_speed.py [--rounds 7] [--heads 4] [--head-size 64] [--window 64]
        [--dropout 0.0] [--precision bfloat16]

Full attention takes time in proportion to the length, attention within a window does not. The cases take turns, so that other
load on the machine affects all alike. Prints medians in milliseconds for 8,192 tokens as a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from discern import kernels

TOKENS = 8192
LENGTHS = (128, 512, 2048, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=64, help="tokens to each side")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    request = parser.parse_args()
    width = 3 * request.heads * request.head_size
    packed = torch.randn(TOKENS, width, dtype=getattr(torch, request.precision), requires_grad=True)

    def ours(length: int, window: int | None) -> Tensor:
        return kernels.attention(packed, request.heads, torch.arange(0, TOKENS + 1, length), request.dropout, window)

    def torchs(length: int) -> Tensor:
        heads = packed.view(-1, length, 3, request.heads, request.head_size).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(*heads, dropout_p=request.dropout).transpose(1, 2).flatten(2)

    cases: dict[str, Callable[[int], Tensor]] = {
        "full": lambda length: ours(length, None),
        f"window of {request.window}": lambda length: ours(length, request.window),
        "torch, full": torchs,
    }
    times: dict[tuple[int, str], list[float]] = {(length, name): [] for length in LENGTHS for name in cases}
    for _ in range(request.rounds + 1):
        for (length, name), found in times.items():
            begin = time.perf_counter()
            cases[name](length).sum().backward()
            found.append(1e3 * (time.perf_counter() - begin))
    print(f"| length | {' | '.join(cases)} |\n|---|---|---|---|")
    for length in LENGTHS:
        # The first round warms up.
        print(f"| {length:,} | " + " | ".join(f"{statistics.median(times[length, name][1:]):,.1f} ms" for name in cases) + " |")


if __name__ == "__main__":
    main()
