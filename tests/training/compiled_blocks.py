"""Outputs and gradients of encoders whose blocks are compiled one by one, for batches of many sizes, as JSON. A program: the
shape checks that tests run under are not for the compiler to trace.

With the backend that traces forward and backward but generates no code: what a compiler is known to break.
"""

from __future__ import annotations

import copy
import json

import torch
from torch._dynamo.utils import counters

from discern import kernels
from discern.models.base import Encoder
from discern.objectives import objectives
from discern.training.execution import compile_encoders
from tests.support import make_batch, settings

LENGTHS = [(9, 7), (12, 3, 4), (6, 8), (6, 9, 2, 7)]


def figures(encoder: Encoder, lengths: tuple[int, ...]) -> list[float]:
    """A weighted sum of the squared states of the real tokens, and the norm of each parameter's gradient."""
    tokens = make_batch([[2, *range(5, 5 + length), 3] for length in lengths])
    encoder.zero_grad()
    states = encoder(tokens.input_ids, *tokens.context)[tokens.attention_mask]
    total = (states.square() * torch.linspace(0, 1, 16)).sum()
    total.backward()
    return [total.item(), *(float(weight.grad.norm()) for weight in encoder.parameters() if weight.grad is not None)]


MODELS = {"modernbert": {"local_window": 4}, "deberta": {"position_buckets": 4, "mask_decoder": True}}


def compare(name: str) -> tuple[list[tuple[list[float], list[float]]], list[int]]:
    """Eager and compiled figures of an encoder, and the number of graphs after each batch."""
    sizes = {"num_layers": 3, "hidden_size": 16, "embedding_size": 16, "num_heads": 2, "feedforward_size": 24}
    dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "initializer_range": 0.2}
    factory = objectives.load("mlm")
    objective = factory(factory.Config(), settings(encoder=name, **MODELS[name], **sizes, **dropout))
    objective.initialize(0)
    copied = copy.deepcopy(objective)
    encoder, compiled = objective.encoder, copied.encoder
    torch._dynamo.reset()
    counters.clear()
    compile_encoders(copied, backend="aot_eager")
    rows, graphs = [], []
    for lengths in LENGTHS:
        rows.append((figures(encoder, lengths), figures(compiled, lengths)))
        graphs.append(counters["stats"]["unique_graphs"])
    return rows, graphs


if __name__ == "__main__":
    with kernels.switched_off():
        print(json.dumps({name: compare(name) for name in MODELS}))
