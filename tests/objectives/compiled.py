"""Losses and gradient norms of every objective, eager and compiled, as JSON. A program: the shape checks that tests run under
are not for the compiler to trace.

One layer, and the backend that traces forward and backward but generates no code: what a compiler is known to break.
"""

from __future__ import annotations

import json

import torch
from torch._dynamo.utils import counters

from discern.corruption.randomness import Randomness
from discern.objectives import objectives
from discern.objectives.base import Objective
from tests.support import MODELS, SPECIAL, make_batch, settings


def figures(objective: Objective) -> list[float]:
    """The losses of a batch with padding, and the norm of each parameter's gradient."""
    tokens = make_batch([[SPECIAL.cls, *range(5, 5 + length), SPECIAL.sep] for length in (20, 7, 13)])
    numbers = Randomness(0, 0, tokens.slot)
    output = objective(objective.corrupt(tokens, numbers), numbers)
    means = {name: term.weight * term.total / term.count for name, term in output.terms.items()}
    objective.zero_grad()
    torch.stack(list(means.values())).sum().backward()
    norms = [float(parameter.grad.norm()) for parameter in objective.parameters() if parameter.grad is not None]
    return [*(mean.item() for mean in means.values()), *norms]


def both(name: str) -> dict[str, list[float]]:
    """The figures before and after compiling the encoders, as the loop compiles them, and how many graphs that made."""
    factory = objectives.load(name)
    sizes = {"num_layers": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.2}
    objective: Objective = factory(factory.Config(), settings(**(sizes | MODELS.get(name, {}))))
    objective.initialize(0)
    eager = figures(objective)
    for network in objective.networks().values():
        network.encoder.compile(backend="aot_eager")
    torch._dynamo.reset()  # else a graph of the objective before may serve, uncounted
    counters.clear()
    return {"eager": eager, "compiled": figures(objective), "graphs": [counters["stats"]["unique_graphs"]]}


if __name__ == "__main__":
    print(json.dumps({name: both(name) for name in objectives.names()}))
