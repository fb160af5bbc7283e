"""How the networks are run: in float32 or bfloat16, compiled or eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from discern.errors import ConfigError
from discern.models.config import ModelConfig
from discern.objectives.base import Objective
from discern.training.device import device_name
from discern.training.distributed import Ranks

# bfloat16 must be clearly faster: it costs precision, and a tie on a busy machine should not be decided by chance.
_CLEARLY_FASTER = 0.9
_BUDGET = 0.5  # seconds of all timed passes
# Few rows favor float32: converting the weights to bfloat16 costs the same for any number of rows.
_MOST_ROWS, _MOST_INNER, _MOST_OUTER = 2048, 512, 1024
_NAMES = ("float32", "bfloat16")


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


def resolve_precision(name: str, device: torch.device, model: ModelConfig, tokens: int) -> Precision:
    """'float32' or 'bfloat16'; 'auto' chooses bfloat16 if the device is faster in it than in float32.

    On a processor with instructions for bfloat16 both are measured, because which is faster depends on the processor and on the
    widths of the network: narrow ones may be slower in bfloat16.

    Args:
        tokens: number of tokens that a network with the settings `model` reads at once.

    Raises:
        ConfigError: bfloat16 is asked for, and the GPU does not have it.
    """
    gpu_has_it = device.type == "cuda" and torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    # On older GPUs torch would emulate it, slowly; on Apple's it has not been tried.
    if name == "bfloat16" and device.type in ("cuda", "mps") and not gpu_has_it:
        raise ConfigError(
            f"train.precision is bfloat16, which {device_name(device)} does not support; "
            "GPUs since Ampere (compute capability 8.0) do",
            hint="--set train.precision=float32",
        )
    if name != "auto":
        return Precision(name)
    if device.type == "cuda":
        return Precision("bfloat16" if gpu_has_it else "float32")
    if device.type != "cpu" or not cpu_has_bfloat16():
        return Precision("float32")
    rows = max(1, min(tokens, _MOST_ROWS))
    milliseconds = measured(rows, min(model.hidden_size, _MOST_INNER), min(model.feedforward_size, _MOST_OUTER))
    wins = milliseconds["bfloat16"] < _CLEARLY_FASTER * milliseconds["float32"]
    return Precision("bfloat16" if wins else "float32", milliseconds)


def shared_precision(
    name: str, ranks: Ranks, model: ModelConfig, tokens: int, known: Mapping[str, Any] | None = None
) -> Precision:
    """The precision of a run, the same on all ranks: that of its record if it is resumed, or else the choice of rank 0.

    Args:
        known: `device`, `precision` and possibly `precision_milliseconds` of the run so far, or of another run.

    Raises:
        ConfigError: bfloat16 is asked for, and the GPU does not have it.
    """
    if name == "auto" and known and known.get("device") == ranks.device.type:
        chosen: Precision | None = Precision(known["precision"], known.get("precision_milliseconds") or {})
    else:
        chosen = resolve_precision(name, ranks.device, model, tokens) if ranks.writes or name != "auto" else None
    first: Precision = ranks.gather(chosen)[0]
    return first


@contextmanager
def one_thread() -> Iterator[None]:
    """A context, or a decorator, in which operations on the CPU run in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
@one_thread()
def measured(rows: int, inner: int, outer: int) -> Mapping[str, float]:
    """Milliseconds of the fastest pass in each precision through the two linear layers of a block, measured once per process.

    One thread, and the clock of that thread, because other programs on the machine then matter least: of two threads, one waits
    for the other.

    Args:
        rows: tokens per forward pass.
        inner: width of the hidden states.
        outer: width of the feed-forward layer.
    """
    generator = torch.Generator().manual_seed(0)  # the global generator belongs to the user
    shapes = (rows, inner), (outer, inner), (inner, outer)
    operands = states, up, down = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]

    def forward_backward(precision: str) -> None:
        # As a block has them: float32 weights, and float32 states between the layers
        with torch.enable_grad(), autocast(precision, torch.device("cpu")):
            output = functional.linear(functional.linear(states, up).float(), down).float()
        torch.autograd.grad(output, operands, torch.ones_like(output))

    fastest = fastest_in_turns({name: partial(forward_backward, name) for name in _NAMES}, _BUDGET, time.thread_time)
    return {name: round(1000 * seconds, 4) for name, seconds in fastest.items()}


def fastest_in_turns(
    calls: Mapping[str, Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of the fastest run of each call, of at least two; in turns, so that other programs affect all alike."""
    best, begin, rounds = dict.fromkeys(calls, float("inf")), clock(), 0
    while rounds < 2 or clock() - begin < seconds:  # the first run is slow: libraries choose their kernels, memory is allocated
        for name, call in calls.items():
            since = clock()
            call()
            best[name] = min(best[name], clock() - since)
        rounds += 1
    return best


def emulation_warning(name: str, device: torch.device) -> str | None:
    """A warning about bfloat16 on a CPU without instructions for it; None elsewhere, and for float32.

    On two cores of an AMD EPYC with AVX2, `measured` found 12 to 30 times the time of float32; others were not measured.
    """
    if name != "bfloat16" or device.type != "cpu" or cpu_has_bfloat16():
        return None
    return (
        "train.precision is bfloat16, but this CPU has no instructions for it, so torch emulates it, which can take more than "
        "ten times as long as float32. Use another CPU, or train.precision=float32 in a new run"
    )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in bfloat16; weights, softmax and losses stay float32."""
    if precision == "float32" or device.type == "meta":  # autocast refuses the meta device; bench.py has a stand-in
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for it (avx512_bf16, amx_bf16; bf16 on Arm); emulated, it is never faster."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "bf16" in info.read_text()


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
    elif device.type == "mps" or (setting == "auto" and device.type != "cuda"):
        reason = "by default, networks are compiled on CUDA only: the CPU has kernels of its own, and mps has not been tried"
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
