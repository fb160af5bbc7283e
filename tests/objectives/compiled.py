"""Losses and gradient norms of objectives, eager and compiled, as JSON. A program: the shape checks that tests run under are not
for the compiler to trace.

One layer, and the backend that traces forward and backward but generates no code: what a compiler is known to break.
"""

from __future__ import annotations

import json
import sys

import torch
from torch._dynamo.utils import counters

from discern.objectives.base import Objective
from tests.objectives.test_conformance import build, mean_loss, run
from tests.support import SPECIAL, make_batch


def figures(objective: Objective) -> list[float]:
    """The losses of a batch with padding, and the norm of each parameter's gradient."""
    output = run(objective, make_batch([[SPECIAL.cls, *range(5, 5 + length), SPECIAL.sep] for length in (20, 7, 13)]))
    objective.zero_grad()
    mean_loss(output).backward()
    norms = [float(parameter.grad.norm()) for parameter in objective.parameters() if parameter.grad is not None]
    return [*(term.total.item() / term.count for term in output.terms.values()), *norms]


def both(name: str) -> dict[str, list[float]]:
    """The figures before and after compiling the encoders, as the loop compiles them, and how many graphs that made."""
    objective = build(name, num_layers=1, initializer_range=0.2)
    eager = figures(objective)
    for network in objective.networks().values():
        network.encoder.compile(backend="aot_eager")
    torch._dynamo.reset()  # else a graph of the objective before may serve, uncounted
    counters.clear()
    return {"eager": eager, "compiled": figures(objective), "graphs": [counters["stats"]["unique_graphs"]]}


if __name__ == "__main__":
    print(json.dumps({name: both(name) for name in sys.argv[1:]}))
