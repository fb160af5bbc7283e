"""FLOPs of a run by two conventions: those that are executed, and those of the ELECTRA paper.

    flops = run_flops(objective, config.train.max_steps, step_sizes(config.train, config.data))
    flops.after(1000).executed    # FLOPs of the first 1000 steps
    flops.steps_within(1e15)      # number of steps within 1e15 executed FLOPs

The objective may be on the meta device, as only its shapes are used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from discern.models.attention import SelfAttention, Unpadding
from discern.models.base import Encoder
from discern.models.layers import module_flops
from discern.objectives.base import ForwardPass, Objective, Phase
from discern.training.config import StepSizes

# Operations per element.
_DROPOUT, _LAYER_NORM, _ACTIVATION, _SOFTMAX = 4, 5, 8, 5
MASKED_SHARE = 0.15625
"""Share of the positions for which the paper counts a softmax in masked language modeling, at any mask probability: 20/128."""


@dataclass(frozen=True)
class Flops:
    """A number of FLOPs by both conventions.

    Attributes:
        executed: multiplications and additions of the matrix products: the forward pass, twice as many for the backward pass, and
            the recomputation of gradient checkpointing. Padding is included.
        paper: count by the released `flops_computation.py`.
    """

    executed: float = 0.0
    paper: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.executed + other.executed, self.paper + other.paper)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.executed - other.executed, self.paper - other.paper)

    def __mul__(self, factor: float) -> Flops:
        return Flops(self.executed * factor, self.paper * factor)


@dataclass(frozen=True)
class RunFlops:
    """FLOPs of a run, whose steps may differ between phases and under schedules of batch and length.

    Attributes:
        segments: number of steps of each phase, or part of one with steps of one size, and the FLOPs of one of its steps.
    """

    segments: Sequence[tuple[int, Flops]]

    @property
    def total(self) -> Flops:
        """FLOPs of all steps."""
        return self.after(sum(steps for steps, _ in self.segments))

    def after(self, steps: int) -> Flops:
        """FLOPs of the first `steps` steps. Steps beyond the last phase count like its steps."""
        total, left = Flops(), steps
        for number, (length, step) in enumerate(self.segments, 1):
            taken = left if number == len(self.segments) else min(left, length)
            total, left = total + step * taken, left - taken
        return total

    def steps_within(self, executed: float) -> int:
        """Maximum number of steps with at most `executed` FLOPs; may exceed the steps of the run."""
        most = int(executed // min(step.executed for _, step in self.segments)) + 1
        return bisect_right(range(most + 1), executed, key=lambda steps: self.after(steps).executed) - 1


def run_flops(objective: Objective, max_steps: int, sizes: StepSizes) -> RunFlops:
    """FLOPs of a run, computed from the shapes of its networks.

    Args:
        sizes: rows per step, over all ranks, and positions per row.
    """
    segments: list[tuple[int, Flops]] = []
    first = 0
    for phase in objective.phases(max_steps):
        last = first + phase.steps
        # The part of each segment that lies within the phase.
        begins = [first, *(segment.first for segment in sizes.segments if first < segment.first < last)]
        for begin, end in zip(begins, [*begins[1:], last], strict=True):
            # The share of positions that a head runs on may change within the phase.
            part = phase if len(begins) == 1 else replace(phase, steps=end - begin, begins=begin)
            size = sizes.at(begin)
            segments.append((end - begin, step_flops(objective, part, size.length, size.rows)))
        first = last
    return RunFlops(segments)


def step_flops(objective: Objective, phase: Phase, sequence_length: int, sequences: int) -> Flops:
    """FLOPs of one update of a phase."""
    passes = objective.forward_passes(phase)
    return Flops(executed_flops(passes, sequence_length, sequences), paper_flops(passes, sequence_length, sequences))


def executed_flops(passes: Iterable[ForwardPass], sequence_length: int, sequences: int, *, recomputed: bool = True) -> float:
    """FLOPs of the matrix products of a step (linear layers, attention and output layers), computed from their shapes.

    The keys for relative distances, which all rows of a batch share, are not counted.

    Args:
        recomputed: whether the recomputation of gradient checkpointing counts.
    """
    total = 0.0  # per token
    for part in passes:
        network, times = part.network, 3 if part.trains else 1
        streams: dict[str, Any] = {"query_share": part.query_share, "remembered": part.remembered}
        head = module_flops(network.head, sequence_length)
        head += 0.0 if network.bilinear is None else module_flops(network.bilinear, sequence_length)
        # A companion that predicts does so at every position; the others read a few states.
        head += sum(module_flops(part, sequence_length) for part in network.companions if hasattr(part, "predicts"))
        total += times * (network.encoder.forward_flops(sequence_length, **streams) + part.head_share * head)
        if recomputed and part.trains:
            total += network.encoder.recomputed_flops(sequence_length, **streams)
    return total * sequence_length * sequences


def paper_flops(passes: Iterable[ForwardPass], sequence_length: int, sequences: int) -> float:
    """FLOPs of a step by the paper's convention. Of a frozen network, only the forward pass counts.

    The released script supports only BERT's layers: relative distances, memory and a query stream are not counted.
    """
    total = 0.0
    for part in passes:
        towers = [
            PaperTransformer(
                hidden_size=tower.config.hidden_size,
                num_layers=tower.config.num_layers,
                sequence_length=sequence_length,
                vocab_size=tower.embeddings.vocab_size,
                embedding_size=tower.embeddings.embedding_size,
                feedforward_size=tower.config.feedforward_size,
                num_heads=tower.config.num_heads,
            )
            for tower in _towers(part.network.encoder)
        ]
        head = towers[0].binary_head
        if part.network.predicts_words:
            words: Any = getattr(part.network.head, "words", part.network.head)
            if hasattr(words, "dense"):  # its input may be the states of several towers
                head = replace(towers[0], hidden_size=words.input_size).vocabulary_head
            else:
                head = towers[0].vocabulary_softmax
            # The script uses this fraction for any number of masked positions.
            head *= MASKED_SHARE if part.head_share < 1 else 1.0
        forward = sum(tower.body for tower in towers) + head
        total += (2 if part.trains else 1) * forward * sequence_length * sequences
    return total


def _towers(encoder: Encoder) -> list[Encoder]:
    """The encoders that an encoder consists of: only itself, unless it contains others."""
    inner = [part for part in encoder.modules() if isinstance(part, Encoder) and part is not encoder]
    return [tower for part in inner for tower in _towers(part)] if inner else [encoder]


@dataclass(frozen=True)
class PaperTransformer:
    """FLOPs of a transformer by the convention of the released `flops_computation.py`.

    A product of m x n numbers counts 2 m n. The backward pass counts as much as the forward pass. An embedding lookup counts as
    the dense product with a one-hot vector, which no program executes, but which the published totals include.


    Reference: Clark et al. 2020, section 3.1 and table 1; ELECTRA-Small with 1M steps of 128 sequences of 128 has 1.2937e18.
    """

    hidden_size: int
    num_layers: int
    sequence_length: int
    vocab_size: int
    embedding_size: int
    feedforward_size: int
    num_heads: int

    @property
    def layer(self) -> float:
        """Forward pass of one layer, per token."""
        size, inner, length = self.hidden_size, self.feedforward_size, self.sequence_length
        projections = 6 * size**2 + 3 * size
        attention = 4 * size * length + (_SOFTMAX + _DROPOUT + 1) * length * self.num_heads
        # The script counts this LayerNorm once per token instead of once per element; kept as well.
        output = 2 * size**2 + (2 + _DROPOUT) * size + _LAYER_NORM
        feedforward = 4 * size * inner + (1 + _ACTIVATION) * inner + (2 + _DROPOUT + _LAYER_NORM) * size
        return projections + attention + output + feedforward

    @property
    def vocabulary_head(self) -> float:
        """Forward pass of the transform, the logits over the vocabulary and the softmax, per position."""
        width = self.embedding_size
        transform = 2 * self.hidden_size * width + (1 + _ACTIVATION + _LAYER_NORM) * width
        return transform + self.vocabulary_softmax

    @property
    def vocabulary_softmax(self) -> float:
        """Forward pass of the logits over the vocabulary and the softmax, per position."""
        return 2 * self.embedding_size * self.vocab_size + (_SOFTMAX + 2) * self.vocab_size

    @property
    def binary_head(self) -> float:
        """Forward pass of the discriminator's dense layer and logit, per token."""
        return 2 * self.hidden_size**2 + (1 + _ACTIVATION + 2) * self.hidden_size

    @property
    def body(self) -> float:
        """Forward pass of embeddings and layers, per token. Words, positions and segments count as dense products."""
        size, width = self.hidden_size, self.embedding_size
        tables = 2 * width * self.vocab_size + 2 * width * (2 + self.sequence_length)
        projection = 2 * size * width + size if size != width else 0
        return tables + (2 + _LAYER_NORM + _DROPOUT) * width + projection + self.num_layers * self.layer


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
    orders: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2), (0, 1, 2))
    dtype: torch.dtype = torch.float32

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * max(self.batch, 1) * self.rows * self.inner * self.columns


# Index of the first of the two operands among the arguments.
_OPERANDS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}


class RecordProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products that run in its context, including those of the backward pass.

    Fused attention is counted as the products that it replaces: two in the forward pass and four in the backward pass.

    Attributes:
        products: number of runs of each product.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[Product] = Counter()

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(count * product.flops for product, count in self.products.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Variants such as `addmm.out` and `addmm` run the same product.
        name = func.overloadpacket.__name__
        if name in _OPERANDS:
            left, right = args[_OPERANDS[name] : _OPERANDS[name] + 2]
            batch = left.shape[0] if left.ndim == 3 else 0
            orders = _layout(left), _layout(right)
            product = Product(batch, left.shape[-2], left.shape[-1], right.shape[-1], orders, left.dtype)
            self.products[product] += 1 if product.flops else 0
        elif "attention" in name and all(isinstance(value, Tensor) for value in args[:3]):
            backward = name.endswith("_backward")
            query, key, value = args[1:4] if backward else args[:3]
            batch, length, size = math.prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
            self.products.update(
                attention_products(batch, length, key.shape[-2], size, value.shape[-1], query.dtype, backward=backward)
            )
        return func(*args, **(kwargs or {}))


def _layout(operand: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(operand.ndim), key=operand.stride, reverse=True))


def attention_products(
    batch: int, length: int, keys: int, size: int, width: int, dtype: torch.dtype, *, backward: bool
) -> list[Product]:
    """The products of attention: the scores and the weighted values, or their four gradients.

    Args:
        batch: number of rows times number of heads.
        keys: number of keys of each of the `length` queries.
        size: width of a query.
        width: width of a value.
    """
    shapes = [(length, size, keys), (length, keys, width)]
    if backward:  # gradients of the probabilities, the values, the queries and the keys
        shapes = [(length, width, keys), (keys, length, width), (length, keys, size), (keys, length, size)]
    return [Product(batch, *shape, dtype=dtype) for shape in shapes]


def record_products(objective: Objective, run: Callable[[], object]) -> Counter[Product]:
    """Record the matrix products that the networks of an objective execute in `run`.

    Products of attention within spans of tokens, by a kernel, cannot be recorded; they are added according to their shapes.
    """
    mode = RecordProducts()

    def attended(module: SelfAttention, args: tuple[Tensor, Unpadding], result: Tensor) -> None:
        if (offsets := args[1].offsets) is None:
            return

        def add(*, backward: bool) -> None:
            for length, count in spans.items():
                mode.products.update(
                    attention_products(count * module.num_heads, length, length, size, size, result.dtype, backward=backward)
                )

        size, spans = result.shape[-1] // module.num_heads, Counter(offsets.diff().tolist())
        add(backward=False)
        if result.requires_grad:
            # Counted when the backward pass runs: the recomputation of gradient checkpointing has none of its own.
            result.register_hook(lambda _: add(backward=True))  # type: ignore[no-untyped-call]

    hooks = [part.register_forward_hook(attended) for part in objective.modules() if isinstance(part, SelfAttention)]
    try:
        # Compiled code would hide its products.
        with torch.compiler.set_stance("force_eager"), mode:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return mode.products


@torch.no_grad()
def shortest_time(product: Product, device: torch.device, seconds: float = 0.05) -> float:
    """Seconds of a product alone, with its operands in the cache and its result preallocated; the shortest of some runs.

    Args:
        seconds: time for all runs.
    """
    batch = (product.batch,) if product.batch else ()
    operands = []
    for shape, order in zip(((product.rows, product.inner), (product.inner, product.columns)), product.orders, strict=True):
        sizes = (*batch, *shape)
        stored = torch.empty([sizes[axis] for axis in order], dtype=product.dtype, device=device).normal_()
        operands.append(stored.permute([order.index(axis) for axis in range(len(sizes))]))
    result = operands[0].new_empty((*batch, product.rows, product.columns))
    names = {"multiply": torch.bmm if product.batch else torch.mm, "operands": operands, "result": result}
    timer = Timer("multiply(*operands, out=result)", globals=names, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)


def fastest_product(device: torch.device, precision: str) -> float:
    """Measure the FLOP/s of a large square product: about the peak of this device in 'float32' or 'bfloat16'."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    product = Product(0, size, size, size, ((0, 1), (0, 1)), dtype)
    return product.flops / shortest_time(product, device, 0.1)
