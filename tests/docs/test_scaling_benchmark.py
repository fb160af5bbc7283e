"""The formulas of docs/concepts/scaling.md, on cases that can be computed by hand."""

from __future__ import annotations

import pytest
from benchmarks import scaling


def test_bytes_sent() -> None:
    step = scaling.Step(blocks=800, others=160, vectors=40, flops=1.0, positions=1, rows=1)
    assert scaling.traffic(step, "ddp", 2, 3).sent == 1000, "each of two sends half of the weights twice"
    assert scaling.traffic(step, "fsdp", 2, 1).sent == (2 * 800 + 160 + 960) / 2 + 40
    assert scaling.traffic(step, "fsdp", 2, 3).sent == (3 * (2 * 800 + 160) + 960) / 2 + 40


def test_where_it_stops_being_worth_it() -> None:
    # 1 GB of weights, on Ethernet: 2 x (N - 1)/N GB over 12.5 GB/s at 80 %, so about 0.2 s, however many machines.
    step = scaling.Step(blocks=0, others=10**9, vectors=0, flops=scaling.PEAK * scaling.UTILIZATION * 16, positions=1, rows=4096)
    computed, communicated = scaling.seconds(step, "ddp", 64, "Ethernet")
    assert computed == pytest.approx(0.25)
    assert communicated == pytest.approx(2 * 63 / 64 / 10)
    assert scaling.worth(step, "ddp", "Ethernet") == 64, "computation takes 0.125 s on 128"
    assert scaling.worth(step, "ddp", "InfiniBand") > 512
