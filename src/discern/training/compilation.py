"""Compilation of the networks of a run by torch.compile. Where there is no working compiler, they run eagerly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch

from discern.objectives.base import Objective

_LEAST_STEPS = 1000  # a shorter run is over before the half minute of compiling has paid off
# Blocks of all networks share one cache, with an entry for each kind of block and pattern of shapes. Beyond the limit, further
# patterns run eagerly.
_MOST_VERSIONS = 64


class Compilation(NamedTuple):
    """Whether the networks of a run are compiled, and one line about it for the user."""

    enabled: bool
    note: str


def choose_compilation(setting: bool | Literal["auto"], device: torch.device, steps: int | None) -> Compilation:
    """Whether to compile on this device.

    'auto' compiles on a GPU: on an H100 and an H200, compiled steps had 0.95 to 1.54 times the speed of eager ones
    (benchmarks/records/2026-11-26-gpu.md).

    Args:
        setting: `train.compile`.
        steps: updates of the run; None: limited by its time.
    """
    reason = None
    if setting is False:
        reason = "train.compile is false"
    elif setting == "auto" and device.type != "cuda":
        reason = "train.compile = 'auto' compiles on a GPU only, as a CPU has kernels of its own"
    elif setting == "auto" and steps is not None and steps < _LEAST_STEPS:
        reason = f"a run of {steps:,} steps ends before compiling has paid off"
    else:
        try:
            torch.compile(lambda values: (values * 2).sin())(torch.ones(8, device=device)).tolist()
        except Exception as failure:  # no compiler, no Triton, an unsupported version of Python
            reason = f"torch.compile failed: {type(failure).__name__}: {next(iter(str(failure).splitlines()), '')[:200]}"
    return Compilation(
        reason is None, "the networks are " + ("compiled block by block" if reason is None else f"not compiled: {reason}")
    )


def compile_encoders(objective: Objective, backend: str = "inductor") -> None:
    """Compile each block of the encoders in place; equal blocks share their code, which is traced when it first runs."""
    import torch._dynamo.config as settings

    settings.suppress_errors = True  # a block that the compiler cannot compile runs eagerly, with a warning
    settings.recompile_limit = max(settings.recompile_limit, _MOST_VERSIONS)
    for network in objective.networks().values():
        for block in network.encoder.repeated_blocks() or [network.encoder]:
            block.compile(backend=backend)


def eager_evaluation(compiled: bool) -> AbstractContextManager[object]:
    """A context in which compiled networks run eagerly.

    Without gradients they would be traced and compiled anew, which takes longer than an evaluation.
    """
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
