"""Records the matrix products of a computation and times each alone: a lower bound for the time of any implementation."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from discern.models.attention import SelfAttention
from discern.models.unpadding import Unpadding
from discern.objectives.base import Objective

_LEAST, _MOST = 3, 20  # number of runs of a product, of which the fastest counts
_Shape = tuple[int, int, int, int]  # batch, rows, inner, columns


@dataclass(frozen=True)
class Product:
    """One matrix product: (batch of) rows x inner times inner x columns.

    Attributes:
        batch: number of products in a batch; 0 if the operands are plain matrices.
        orders: memory layout of both operands: their axes, largest stride first; a transposed operand may be slower.
        dtype: data type of both operands.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * max(self.batch, 1) * self.rows * self.inner * self.columns


class RecordProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products that run in its context, including those of the backward pass.

    Fused attention is counted as the products that it replaces: two in the forward pass and four in the backward pass.

    Attributes:
        found: number of runs of each product.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Variants such as `addmm.out` and `addmm` run the same product.
        name = func.overloadpacket.__name__
        if name in _OPERANDS:
            first = _OPERANDS[name]
            self._add(args[first], args[first + 1])
        elif "attention" in name and all(isinstance(value, Tensor) for value in args[:3]):
            backward = name.endswith("_backward")
            self._add_attention(*(args[1:4] if backward else args[:3]), backward=backward)
        return func(*args, **(kwargs or {}))

    def _add(self, left: Tensor, right: Tensor) -> None:
        batch = left.shape[0] if left.ndim == 3 else 0
        orders = _order(left), _order(right)
        product = Product(batch, left.shape[-2], left.shape[-1], right.shape[-1], orders, left.dtype)
        if product.flops:
            self.found[product] += 1

    def _add_attention(self, query: Tensor, key: Tensor, value: Tensor, *, backward: bool) -> None:
        for shape in attention_products(tuple(query.shape), key.shape[-2], value.shape[-1], backward=backward):
            self.found[_dense(shape, query.dtype)] += 1


# Index of the first of the two operands among the arguments.
_OPERANDS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}


def attention_products(query: tuple[int, ...], keys: int, width: int, *, backward: bool) -> list[_Shape]:
    """The products of attention: the scores and the weighted values, or their four gradients.

    Args:
        query: shape of the queries, (B, H, L, d).
        keys: number of keys of each query.
        width: width of a value.
    """
    batch, length, size = math.prod(query[:-2]), query[-2], query[-1]
    scores, values = (batch, length, size, keys), (batch, length, keys, width)
    if not backward:
        return [scores, values]
    return [
        (batch, length, width, keys),  # gradient of the probabilities
        (batch, keys, length, width),  # gradient of the values
        (batch, length, keys, size),  # gradient of the queries
        (batch, keys, length, size),  # gradient of the keys
    ]


def _dense(shape: _Shape, dtype: torch.dtype) -> Product:
    return Product(*shape, ((0, 1, 2), (0, 1, 2)), dtype)


def _order(operand: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(operand.ndim), key=operand.stride, reverse=True))


def record_products(objective: Objective, run: Callable[[], object]) -> Counter[Product]:
    """Record the matrix products that the networks of an objective execute in `run`.

    Products inside an attention kernel cannot be recorded; they are added according to their shapes.
    """
    mode = RecordProducts()
    seen = 0

    def before(module: SelfAttention, args: tuple[Tensor, Unpadding]) -> None:
        nonlocal seen
        seen = _batched(mode.found)

    def after(module: SelfAttention, args: tuple[Tensor, Unpadding], result: Tensor) -> None:
        if _batched(mode.found) != seen:
            return
        mode.found += _spans(args[1], result, module.num_heads, backward=False)
        if result.requires_grad:
            # Counted when the backward pass runs: the recomputation of gradient checkpointing has none of its own.
            gradients = _spans(args[1], result, module.num_heads, backward=True)
            result.register_hook(lambda _: mode.found.update(gradients))  # type: ignore[no-untyped-call]

    hooks = []
    for module in objective.modules():
        if isinstance(module, SelfAttention):
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        # Compiled code would hide its products.
        with torch.compiler.set_stance("force_eager"), mode:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return mode.found


def _batched(found: Counter[Product]) -> int:
    return sum(count for product, count in found.items() if product.batch)


def _spans(unpadding: Unpadding, result: Tensor, num_heads: int, *, backward: bool) -> Counter[Product]:
    """The products of attention among the tokens of each span, forward or backward."""
    offsets = unpadding.offsets
    lengths = [result.shape[1]] * result.shape[0] if offsets is None else offsets.diff().tolist()
    found: Counter[Product] = Counter()
    for length, count in Counter(lengths).items():
        query = count, num_heads, length, result.shape[-1] // num_heads
        found.update(_dense(shape, result.dtype) for shape in attention_products(query, length, query[-1], backward=backward))
    return found


class ProductTimer:
    """Measures the shortest time of each product alone, with its operands in the cache and its result preallocated.

    Args:
        device: device to run on.
        seconds: maximum time for one product, after its first three runs.
    """

    def __init__(self, device: torch.device, seconds: float = 0.05) -> None:
        self._device = device
        self._seconds = seconds
        self._best: dict[Product, float] = {}

    def limit(self, found: Counter[Product]) -> float:
        """Total time of all products in seconds, with the shortest time of each."""
        return sum(count * self.best(product) for product, count in found.items())

    def fastest(self) -> float:
        """FLOP/s of the fastest product measured so far."""
        return max(product.flops / seconds for product, seconds in self._best.items())

    def best(self, product: Product) -> float:
        """Shortest time of a product, in seconds."""
        if product not in self._best:
            self._best[product] = self._time(product)
        return self._best[product]

    @torch.no_grad()
    def _time(self, product: Product) -> float:
        lead = (product.batch,) if product.batch else ()
        left = self._operand((*lead, product.rows, product.inner), product.orders[0], product.dtype)
        right = self._operand((*lead, product.inner, product.columns), product.orders[1], product.dtype)
        result = left.new_empty((*lead, product.rows, product.columns))
        multiply = torch.bmm if product.batch else torch.mm
        times: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < end):
            times.append(self._once(lambda: multiply(left, right, out=result)))
        return min(times)

    def _operand(self, shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        operand = torch.empty([shape[axis] for axis in order], dtype=dtype, device=self._device).normal_()
        return operand.permute([order.index(axis) for axis in range(len(shape))])

    def _once(self, multiply: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            multiply()
            return time.perf_counter() - begin
        # Ten in a row: for a single small product, mostly the launch would be measured.
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin_event.record()
        for _ in range(10):
            multiply()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1e4


def fastest_product(device: torch.device, precision: str) -> float:
    """Measure the FLOP/s of a large square product: about the peak of this device in 'float32' or 'bfloat16'."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    product = Product(0, size, size, size, ((0, 1), (0, 1)), dtype)
    return product.flops / ProductTimer(device, 0.1).best(product)
