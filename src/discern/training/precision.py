"""Precision of the forward pass: float32 or bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discern.errors import ConfigError
from discern.models.config import ModelConfig
from discern.training.parallel import Ranks

# bfloat16 must be clearly faster: it costs precision, and a tie on a busy machine should not be decided by chance.
_CLEARLY_FASTER = 0.9
_BUDGET = 0.2  # seconds of all timed passes
_LEAST_ROUNDS = 3
# Few rows favor float32: converting the weights to bfloat16 costs the same for any number of rows.
_MOST_ROWS, _MOST_INNER, _MOST_OUTER = 2048, 512, 1024
_NAMES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """The two linear layers that a network spends most of its time in.

    Attributes:
        rows: tokens per forward pass.
        inner: width of the hidden states.
        outer: width of the feed-forward layer.
    """

    rows: int
    inner: int
    outer: int


@dataclass(frozen=True)
class Precision:
    """Precision of a run.

    Attributes:
        name: 'float32' or 'bfloat16'.
        milliseconds: time of a pass through two linear layers in each precision; empty if nothing was measured.
    """

    name: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Entries of the record of a run in addition to the name; empty if nothing was measured."""
        return {"precision_milliseconds": dict(self.milliseconds)} if self.milliseconds else {}


def shape_of(model: ModelConfig, tokens: int) -> Shape:
    """The layers to measure for a network that reads this many tokens at once."""
    return Shape(max(1, min(tokens, _MOST_ROWS)), min(model.hidden_size, _MOST_INNER), min(model.feedforward_size, _MOST_OUTER))


def resolve_precision(name: str, device: torch.device, shape: Shape) -> Precision:
    """'float32' or 'bfloat16'; 'auto' chooses bfloat16 if the device is faster in it than in float32.

    On a processor with instructions for bfloat16 both are measured, because which is faster depends on the processor and on the
    widths of the network: narrow ones may be slower in bfloat16.

    Raises:
        ConfigError: bfloat16 is asked for, and the GPU does not have it.
    """
    check_precision(name, device)
    if name != "auto":
        return Precision(name)
    if device.type == "cuda":
        return Precision("bfloat16" if _gpu_has_bfloat16() else "float32")
    if device.type != "cpu" or not cpu_has_bfloat16():
        return Precision("float32")
    milliseconds = measured(shape)
    wins = milliseconds["bfloat16"] < _CLEARLY_FASTER * milliseconds["float32"]
    return Precision("bfloat16" if wins else "float32", milliseconds)


def shared_precision(name: str, ranks: Ranks, shape: Shape, known: Mapping[str, Any] | None = None) -> Precision:
    """The precision of a run, the same on all ranks: that of its record if it is resumed, or else the choice of rank 0.

    Args:
        known: `device`, `precision` and possibly `precision_milliseconds` of the run so far, or of another run.

    Raises:
        ConfigError: bfloat16 is asked for, and the GPU does not have it.
    """
    check_precision(name, ranks.device)
    if name != "auto":
        return Precision(name)
    found: Precision | None = None
    if known and known.get("device") == ranks.device.type and known.get("precision") in _NAMES:
        found = Precision(known["precision"], known.get("precision_milliseconds") or {})
    elif ranks.writes:
        found = resolve_precision(name, ranks.device, shape)
    first: Precision = ranks.gather(found)[0]
    return first


def check_precision(name: str, device: torch.device) -> None:
    """Refuse bfloat16 on a GPU without instructions for it: torch would emulate it, slowly.

    Raises:
        ConfigError: the GPU does not have it.
    """
    if name == "bfloat16" and device.type == "cuda" and not _gpu_has_bfloat16():
        raise ConfigError(
            f"train.precision is bfloat16, which {torch.cuda.get_device_name(device)} does not support; "
            "GPUs since Ampere (compute capability 8.0) do",
            hint="--set train.precision=float32",
        )


def _gpu_has_bfloat16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


@cache
def measured(shape: Shape) -> Mapping[str, float]:
    """Milliseconds of the fastest pass in each precision, measured once per process.

    One thread, and the clock of that thread, because other programs on the machine then matter least: of two threads, one waits
    for the other. The precisions take turns, so that what still disturbs affects both.
    """
    passes = {name: _pass(shape, name) for name in _NAMES}
    best = dict.fromkeys(_NAMES, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for call in passes.values():
            call()  # the library chooses its kernels
        begin, rounds = time.thread_time(), 0
        while rounds < _LEAST_ROUNDS or time.thread_time() - begin < _BUDGET:
            for name, call in passes.items():
                since = time.thread_time()
                call()
                best[name] = min(best[name], time.thread_time() - since)
            rounds += 1
    finally:
        torch.set_num_threads(threads)
    return {name: round(1000 * seconds, 4) for name, seconds in best.items()}


def emulation_warning(name: str, device: torch.device, *, resumed: bool) -> str | None:
    """A warning about bfloat16 on a CPU without instructions for it; None elsewhere, and for float32.

    On two cores of an AMD EPYC with AVX2, `measured` found 12 to 30 times the time of float32; others were not measured.
    """
    if name != "bfloat16" or device.type != "cpu" or cpu_has_bfloat16():
        return None
    slow = "this CPU has no instructions for it, so torch emulates it, which can take more than ten times as long as float32"
    if resumed:
        return (
            f"this run began in bfloat16 and continues in it, but {slow}. Continue on a CPU with avx512_bf16, amx_bf16 or Arm's "
            "bf16, or start a new run with train.precision=float32"
        )
    return f"train.precision is bfloat16, but {slow}. Set train.precision=float32 or auto"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in bfloat16; weights, softmax and losses stay float32."""
    if precision == "float32" or device.type == "meta":  # autocast refuses the meta device; meta_step.py has a stand-in
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for it (avx512_bf16, amx_bf16; bf16 on Arm); emulated, it is never faster."""
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _pass(shape: Shape, precision: str) -> Callable[[], None]:
    """Forward and backward through two linear layers as a block has them: float32 weights and float32 states between."""
    generator = torch.Generator().manual_seed(0)  # the global generator belongs to the user

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, requires_grad=True)

    operands = draw(shape.rows, shape.inner), draw(shape.outer, shape.inner), draw(shape.inner, shape.outer)
    gradient = torch.ones(shape.rows, shape.inner)

    def call() -> None:
        states, up, down = operands
        with torch.enable_grad(), autocast(precision, torch.device("cpu")):
            output = functional.linear(functional.linear(states, up).float(), down).float()
        torch.autograd.grad(output, operands, gradient)

    return call
