"""Errors for batches that do not fit into memory, which say how many rows do."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from discern.errors import ConfigError
from discern.training.memory import lacks_memory
from discern.training.precision import autocast
from discern.training.prefetch import read_rows
from discern.training.state import State, TrainContext
from discern.wording import counted


@contextmanager
def explains_lack_of_memory(context: TrainContext, state: State) -> Iterator[None]:
    """Turn the error of a step that does not fit into memory into one that says how many rows would.

    Raises:
        ConfigError: there is not enough memory.
    """
    try:
        yield
    except RuntimeError as problem:
        if not lacks_memory(problem):
            raise
        # The frames of the error hold the tensors of the step.
        traceback.clear_frames(problem.__traceback__)
        raise out_of_memory(context, state.step, lambda rows: fits(context, state.step, rows)) from problem


def out_of_memory(context: TrainContext, step: int, fitting: Callable[[int], bool]) -> ConfigError:
    """The error for a step that does not fit.

    Args:
        fitting: whether a forward and backward pass of this many rows fits.
    """
    size = context.micro_batch_size(step) or len(context.rows_of(step)) // context.ranks.world_size
    rows = size
    if context.train.divides_weights(context.ranks.world_size) and size > 1:
        # No rank has the whole weights on its device, so nothing can be tried by one of them alone.
        return ConfigError(
            f"step {step}: there is not enough memory on {context.ranks.device} for {_rows(size)} at once",
            hint=f"run the same command with fewer rows at once, such as --set train.micro_batch_size="
            f"{_setting(context, step, size // 2)}, which computes each step in smaller batches",
        )
    while rows > 1:
        rows //= 2
        if fitting(rows):
            return ConfigError(
                f"step {step}: there is not enough memory on {context.ranks.device} for {_rows(size)} at once; "
                f"{_rows(rows)} would fit",
                hint=f"run the same command with --set train.micro_batch_size={_setting(context, step, rows)}, which "
                f"computes each step in smaller batches",
            )
    return ConfigError(
        f"step {step}: there is not enough memory on {context.ranks.device} for {_rows(size)} at once, nor for a single one",
        hint="--set train.gradient_checkpointing=true, a shorter data.sequence_length, or a smaller model",
    )


def fits(context: TrainContext, step: int, rows: int) -> bool:
    """Whether a forward and backward pass of this many rows of a step fits, beside the moments of the optimizer."""
    objective, device = context.objective, context.ranks.device
    objective.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        moments = [torch.empty_like(parameter) for parameter in (*trained, *trained)]
        tokens, randomness = next(read_rows(context, step))
        tokens, randomness = tokens.rows(0, rows), randomness.rows(0, rows)
        batch = objective.corrupt(tokens, randomness).to(device)
        with autocast(context.precision, device):
            output = objective(batch, randomness.to(device))
        loss = torch.stack([term.total for term in output.terms.values()]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        moments.clear()
    except RuntimeError as problem:
        if not lacks_memory(problem):
            raise
        traceback.clear_frames(problem.__traceback__)
        return False
    finally:
        objective.zero_grad(set_to_none=True)
    return True


def _rows(count: int) -> str:
    return counted(count, "row")


def _setting(context: TrainContext, step: int, rows: int) -> int:
    """The value of `train.micro_batch_size`, which counts rows of the last length of a schedule."""
    if context.sizes is None:
        return rows
    return max(1, rows * context.sizes.at(step).length // context.sizes.stretches[-1].length)
