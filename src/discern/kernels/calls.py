"""Calling the compiled functions: where they can be used, and how arguments are passed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from discern.kernels.build import load_kernels

_switched_off: ContextVar[bool] = ContextVar("kernels_switched_off", default=False)
_NAMES = {torch.float32: "float", torch.bfloat16: "half"}
_OUTSIDE = {2: "a target is not a valid column index", 3: "a position is not a valid row of the rotary tables"}


def usable(*tensors: Tensor, parameters: Sequence[Tensor] = ()) -> bool:
    """Whether the kernels support these tensors: on the CPU, float32 or bfloat16, not under torch.compile, library loaded.

    Args:
        parameters: weights, biases and gains, which must be float32 and contiguous.
    """
    if torch.compiler.is_compiling() or _switched_off.get() or load_kernels().library is None:
        return False
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") not in _NAMES:
        return False
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in parameters):
        return False
    return all(tensor.device.type == "cpu" and tensor.dtype in _NAMES for tensor in (*tensors, *parameters))


@contextmanager
def switched_off() -> Iterator[None]:
    """A context in which the plain path is used everywhere, to compare the two."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def threshold(probability: float) -> int:
    """The probability in units of 1/65536."""
    return min(round(probability * 65536), 65535)


def rows_of(x: Tensor) -> tuple[int, int]:
    columns = x.shape[-1]
    return x.numel() // max(columns, 1), columns


def draw_seed() -> int:
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu"))


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Run a kernel. Tensors are passed as pointers (None as null), and integers as 64 bits."""
    library = load_kernels().library
    assert library is not None
    converted = [_converted(argument) for argument in arguments]
    code = getattr(library, f"{name}_{_NAMES[dtype]}")(*converted)
    if code in _OUTSIDE:
        raise IndexError(_OUTSIDE[code])
    if code:
        raise MemoryError(f"kernel '{name}' could not allocate its working memory")


def _converted(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument
