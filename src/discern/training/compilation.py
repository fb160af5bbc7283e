"""Whether and how the networks of a run are compiled: measured on a GPU; they run uncompiled if the compiler fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from discern.data.batching.synthetic import SyntheticRows
from discern.models.base import Encoder, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.initialization import initialize
from discern.models.unpadding import attends_to_spans, with_spans
from discern.training.distributed import Ranks, lacks_memory
from discern.training.precision import autocast

Mode = Literal["off", "networks", "blocks", "graphs"]
"""'networks': each encoder is compiled as a whole; 'blocks': each of its blocks by itself, which all blocks of the same kind
share; 'graphs': the same, replayed as CUDA graphs, which takes the launches of single kernels off the host."""

_CLEARLY_FASTER = 0.95  # of the eager time: compiling costs a minute or so, and again after every resume
_LEAST_STEPS = 1000  # a shorter run is over before it has paid off
_LAYERS = 4
_VOCABULARY = 64
_WARM_UP, _ROUNDS = 3, 10
# Blocks of all networks share one cache, with an entry for each kind of block, mode and pattern of shapes. Beyond the limit,
# further patterns run eagerly.
_MOST_VERSIONS = 64


@dataclass(frozen=True)
class Compilation:
    """How the networks of a run are compiled.

    Attributes:
        milliseconds: time of a forward and backward pass through some layers, by mode; empty if nothing was measured.
        reason: why they are not compiled although that was possible; "" if there is nothing to say.
    """

    mode: Mode = "off"
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Entries of the record of a run in addition to the mode; empty if nothing was measured."""
        return {"compile_milliseconds": dict(self.milliseconds)} if self.milliseconds else {}

    @property
    def note(self) -> str:
        """One line for the user."""
        times = ", ".join(f"{name} {took:.2f} ms" for name, took in self.milliseconds.items())
        measured = f" (measured on {_LAYERS} layers: {times})" if times else ""
        how = {
            "off": f"not compiled: {self.reason or 'that was the fastest'}",
            "networks": "compiled",
            "blocks": "compiled block by block",
            "graphs": "compiled block by block, and replayed as CUDA graphs",
        }
        return f"the networks are {how[self.mode]}{measured}"


@dataclass(frozen=True)
class Workload:
    """What the networks are run on.

    Attributes:
        model: settings of the largest encoder.
        rows: rows of a forward pass.
        length: positions of a row.
        steps: updates of the run; None: limited by its time.
        divided: whether weights are divided among ranks. They are gathered at changing addresses, while a CUDA graph reads the
            same ones each time it is replayed.
    """

    model: ModelConfig
    rows: int
    length: int
    precision: str
    steps: int | None = None
    divided: bool = False


Timer = Callable[[Workload, torch.device, Mode], float]


def shared_compilation(
    setting: bool | Literal["auto"], ranks: Ranks, workload: Workload, known: Mapping[str, Any] | None = None
) -> Compilation:
    """How the networks of a run are compiled, the same on all ranks: as rank 0 chooses.

    Args:
        setting: `train.compile`.
        known: `device` and `compile` of the record of the run, if it is resumed: it continues in the same mode.
    """
    if setting is False:
        return Compilation()
    chosen = choose(setting, ranks.device, workload, known or {}) if ranks.writes else None
    first: Compilation = ranks.gather(chosen, waits=True)[0]
    return first


def choose(
    setting: bool | Literal["auto"],
    device: torch.device,
    workload: Workload,
    known: Mapping[str, Any],
    timer: Timer | None = None,
) -> Compilation:
    """The mode for this process alone.

    Args:
        timer: returns the milliseconds of a pass in a mode; raises what the compiler raises.
    """
    mode: Mode | None = known.get("compile") if known.get("device") == device.type else None
    if mode == "graphs" and workload.divided:
        mode = "blocks"
    if mode is None and setting == "auto":
        if device.type != "cuda":
            return Compilation(reason="train.compile = 'auto' compiles on a GPU only, as a CPU has kernels of its own")
        if workload.steps is not None and workload.steps < _LEAST_STEPS:
            return Compilation(reason=f"a run of {workload.steps:,} steps ends before compiling has paid off")
        return fastest(workload, device, timer or measure)
    mode = mode or ("blocks" if device.type == "cuda" else "networks")
    problem = None if mode == "off" else compiler_problem(device)
    return Compilation(mode) if problem is None else Compilation(reason=problem)


def fastest(workload: Workload, device: torch.device, timer: Timer) -> Compilation:
    """The fastest mode; modes in which the compiler fails are left out."""
    modes: tuple[Mode, ...] = ("off", "blocks") if workload.divided else ("off", "blocks", "graphs")
    times: dict[Mode, float] = {}
    problem = ""
    for mode in modes:
        try:
            times[mode] = timer(workload, device, mode)
        except Exception as failure:  # whatever a compiler raises: the run works without it
            if lacks_memory(failure) and not times:
                return Compilation(reason="there is not enough memory to measure whether it pays off")
            if not times:
                raise
            problem = problem or f"torch.compile failed: {_first_line(failure)}"
    rounded = {str(mode): round(took, 3) for mode, took in times.items()}
    best = min(times, key=lambda mode: times[mode])
    if times[best] >= _CLEARLY_FASTER * times["off"]:
        return Compilation("off", rounded, problem)
    return Compilation(best, rounded)


def measure(workload: Workload, device: torch.device, mode: Mode) -> float:
    """Milliseconds of a forward and backward pass through a few layers of the encoder, on made-up rows."""
    config = workload.model.model_copy(update={"num_layers": min(_LAYERS, workload.model.num_layers)})
    times = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        encoder = build_encoder(build_embeddings(_VOCABULARY, config.embedding_size, config), config)
        initialize(encoder, torch.Generator().manual_seed(0), config)
        encoder.to(device)
        numbers = np.arange(workload.rows)
        batch = SyntheticRows(_VOCABULARY, workload.length, 1.0, workload.rows, 0).batch(numbers, numbers)
        batch = (with_spans(batch) if attends_to_spans(encoder, device, workload.precision) else batch).to(device)
        compile_encoder(encoder, mode)
        for _ in range(_WARM_UP + _ROUNDS):
            begin = time.perf_counter()
            with autocast(workload.precision, device):
                hidden = encoder(batch.input_ids, *batch.context)
            hidden.float().square().mean().backward()
            encoder.zero_grad(set_to_none=True)
            _wait(device)
            times.append(time.perf_counter() - begin)
    return 1000 * min(times[_WARM_UP:])


def compile_networks(encoders: Iterable[Encoder], mode: Mode) -> None:
    """Compile encoders in place for a run. Where the compiler fails, they run eagerly, with a warning."""
    if mode == "off":
        return
    import torch._dynamo.config as settings

    settings.suppress_errors = True
    for encoder in encoders:
        compile_encoder(encoder, mode)


def compile_encoder(encoder: Encoder, mode: Mode, backend: str = "inductor") -> None:
    """Compile an encoder in place; it is traced when it first runs."""
    if mode == "off":
        return
    import torch._dynamo.config as settings

    settings.recompile_limit = max(settings.recompile_limit, _MOST_VERSIONS)
    if mode == "networks":
        encoder.compile(backend=backend)
        return
    for block in encoder.repeated_blocks() or [encoder]:
        block.compile(backend=backend, mode="reduce-overhead" if mode == "graphs" else None)


def eager_evaluation(mode: Mode) -> AbstractContextManager[object]:
    """A context in which compiled networks run eagerly.

    Without gradients they would be traced and compiled anew, which takes longer than an evaluation.
    """
    return nullcontext() if mode == "off" else torch.compiler.set_stance("force_eager")


def compiler_problem(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device; None if it can."""
    try:
        doubled = torch.compile(lambda values: (values * 2).sin())(torch.ones(8, device=device))
        _wait(device)
    except Exception as failure:  # no compiler, no Triton, an unsupported version of Python
        return f"torch.compile failed: {_first_line(failure)}"
    return None if doubled.shape == (8,) else "torch.compile gave a wrong result"


def _first_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
