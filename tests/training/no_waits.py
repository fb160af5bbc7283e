"""A ban on operations that make the host wait for a device, checked on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_READ = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_COPIES = {"_to_copy", "copy_", "copy"}


class WaitsError(RuntimeError):
    """An operation would make the host wait for a device."""


@contextmanager
def no_waits() -> Iterator[None]:
    """Refuses what would make the host wait, if the meta device were a GPU.

    The meta device itself refuses what needs a value. It allows what is banned here in addition: boolean indexing and assignment,
    copies that block, tensors created on the host for the device, and operands that were left on the host.
    """
    with _Operations(), _Creations():
        yield


class _Creations(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_NUMBERS and result.is_meta and not isinstance(args[0], Tensor):
            raise WaitsError(f"torch.{func.__name__}(..., device=...) is a copy that blocks")
        return result


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        result = func(*args, **kwargs)
        made = [value for value in tree_iter(result) if isinstance(value, Tensor)]
        on_device = [value for value in given if value.is_meta]
        on_host = [value for value in given if not value.is_meta and value.ndim]
        if name in _READ and on_device:
            raise WaitsError(f"{name} reads the values of a device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and on_device:
            indices = [each for each in args[1] if each is not None]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                raise WaitsError(f"{name} with a mask: the number of its positions is a value of the device")
        if name == "repeat_interleave" and on_device and kwargs.get("output_size") is None:
            raise WaitsError("repeat_interleave by numbers on a device")
        if name in _COPIES:
            crosses = (
                bool(given) and any(value.is_meta for value in (*made, *given)) and any(not value.is_meta for value in given)
            )
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if crosses and blocks:
                raise WaitsError(f"{name} between host and device blocks")
        elif on_device and on_host:
            raise WaitsError(f"{name} has an operand on the host")
        return result
