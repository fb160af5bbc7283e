"""The whole training step as a GPU runs it: that the host never waits in it, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from discern.config.resolve import preset_names
from discern.data.batching.synthetic import SyntheticRows
from discern.objectives import losses as word_logits, objectives
from discern.pretraining.bench import META, MemoryLedger, meta_bench, meta_step
from discern.progress import Silent
from discern.training import loop, prefetch as feed
from discern.training.config import OptimizerConfig, TrainConfig, load_pretrain_config
from discern.training.distributed import Ranks
from discern.training.flops import step_flops
from discern.training.metrics import NonFiniteGuard, StepCounters, StepMeter
from discern.training.optimizer import clip_gradients
from discern.training.process import StopRequest
from discern.training.state import TrainContext
from tests.golden.runs import OPTIMIZERS, ROWS, VARIANTS, build
from tests.training.no_waits import WaitsError, no_waits

CPU = torch.device("cpu")
NAMES = sorted({*objectives.names(), *VARIANTS})
VOCABULARY = 50


def context(name: str, device: torch.device, *, fill: float = 0.7, precision: str = "float32", **train: Any) -> TrainContext:
    objective = build(name, hidden_dropout=0.0, attention_dropout=0.0)
    kind = VARIANTS.get(name, (name, {}))[0]
    two_parts = bool(ROWS.get(kind))
    return TrainContext(
        objective=objective.to(device),
        source=SyntheticRows(VOCABULARY, 32, 1.0 if two_parts else fill, 32, 0, two_parts=two_parts),
        heldout=None,
        optimizer=OptimizerConfig(**OPTIMIZERS.get(name, {})),
        train=TrainConfig(**({"max_steps": 20, "sequences_per_step": 8} | train)),
        ranks=Ranks(0, 1, device),
        precision=precision,
        folder=Path(),
        metrics_log=None,
        progress=Silent(),
        stop=StopRequest(),
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_host_never_waits_in_a_step(name: str) -> None:
    run = context(name, META, precision="bfloat16", weight_average=0.9, micro_batch_size=4)
    for phase in run.objective.phases(20):
        meta_step(run, phase, around=no_waits())


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=META)


WAITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a value": lambda values, mask: float(values.sum()),
    "a selection": lambda values, mask: values[mask],
    "an assignment": lambda values, mask: values.__setitem__(mask, torch.ones((), device=META)),
    "positions": lambda values, mask: mask.nonzero(),
    "a new tensor": lambda values, mask: torch.tensor([1.0, 2.0], device=META),
    "a copy to the device": lambda values, mask: torch.ones(3).to(META),
    "a copy from the device": lambda values, mask: values.cpu(),
    "an index on the host": lambda values, mask: values[torch.tensor([0, 1])],
    "an operand on the host": lambda values, mask: torch.where(mask, values, torch.ones(2, 3)),
}


@pytest.mark.parametrize("kind", WAITS)
def test_what_would_wait_is_refused(kind: str) -> None:
    values, mask = torch.zeros(2, 3, device=META), torch.zeros(2, 3, dtype=torch.bool, device=META)
    with no_waits(), pytest.raises((WaitsError, RuntimeError, NotImplementedError)):
        WAITS[kind](values, mask)


def test_what_does_not_wait_is_allowed() -> None:
    values = torch.zeros(2, 3, device=META)
    with no_waits():
        copied = torch.ones(2, 3).to(META, non_blocking=True)
        assert (torch.where(values > 0, copied, 1.0) + 2).shape == values.flatten()[ids(2, 3)].shape


def losses_and_gradients(run: TrainContext, steps: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    run.objective.train()
    (phase, *_) = run.objective.phases(run.train.max_steps)
    replica = loop.setup_phase(run, phase)
    for step in range(steps):
        run.objective.zero_grad()
        local = feed.read_local_batch(run, step)
        counts = {name: count for batch, _ in local.micro_batches[:1] for name, count in run.objective.counts(batch).items()}
        means = loop.forward_backward(run, replica, local, counts, step)
    found = {name: p.grad for name, p in run.objective.named_parameters() if p.grad is not None}
    return means.shares.tolist(), found


@pytest.mark.parametrize("name", NAMES)
def test_the_way_of_a_device_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with equally many entries, some of which do not count, and logits in parts change no loss and no gradient."""
    expected = losses_and_gradients(context(name, CPU), 2)
    monkeypatch.setattr(Ranks, "reads_freely", False)

    def in_parts(head: Any, states: Tensor) -> word_logits.WordLogits:
        words = getattr(head, "words", head)
        return word_logits.ChunkedLogits(words.inner(states), words.word_embeddings.weight, words.bias, rows=5)

    for module in ("masked", "rtd", "rtd_variants", "ablations", "electric", "permutation_lm"):
        monkeypatch.setattr(f"discern.objectives.{module}.word_logits", in_parts)
    run = context(name, CPU)
    assert all(batch.places("chosen").even for batch, _ in feed.read_local_batch(run, 0).micro_batches)
    got = losses_and_gradients(run, 2)
    assert got[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert got[1].keys() == expected[1].keys()
    for key, gradient in got[1].items():
        torch.testing.assert_close(gradient, expected[1][key], rtol=1e-4, atol=1e-5, msg=lambda said, key=key: f"{key}: {said}")


class NoFloat64(TorchDispatchMode):
    """Refuses float64 on the meta device, as Apple's GPUs do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not any(
            isinstance(value, Tensor) and value.is_meta and value.dtype == torch.float64 for value in tree_iter(result)
        )
        return result


# Masking by entropy needs float64, and the permutations look for positions, which are unknown on the meta device.
@pytest.mark.parametrize("name", [name for name in NAMES if "entropy" not in name and "permutation" not in name])
def test_a_device_without_float64_runs_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "reads_freely", True)
    monkeypatch.setattr(Tensor, "cpu", lambda value: torch.zeros(value.shape))
    with NoFloat64():
        losses_and_gradients(context(name, META))


def test_the_ledger_by_hand() -> None:
    kib = 256  # numbers in a KiB
    ledger = MemoryLedger()
    weights = torch.zeros(4 * kib, device=META)
    ledger.track(weights)
    with ledger:
        first = weights + 1  # 8 KiB live
        second = first * 2  # 12
        view = second[:kib]
        del first  # 8
        third = weights - 1  # 12
        assert ledger.live == 12 * 1024
        del second  # the view holds it
        assert ledger.live == 12 * 1024
        del view, third
        assert ledger.live == 4 * 1024
        torch.zeros(1, device=META)  # rounded up
    assert (ledger.live, ledger.peak) == (4 * 1024, 12 * 1024)


def test_the_flops_are_those_of_the_shapes() -> None:
    for micro in (None, 2):
        run = context("mlm", META, fill=1.0, micro_batch_size=micro)
        (phase,) = run.objective.phases(20)
        found = meta_step(run, phase)
        # The executed products are those that `step_flops` counts, but for the logits, computed again in the backward pass.
        counted = step_flops(run.objective, phase, 32, 8).executed
        assert 1 < found.flops / counted < 1.1
        assert found.peak_memory_bytes > 16 * sum(parameter.numel() for parameter in run.objective.parameters())


@pytest.mark.parametrize(
    "preset", [name for name in preset_names() if not name.endswith(("-large", "-google", "-plusplus", "-1.75m"))]
)
def test_every_preset_is_measured_on_the_meta_device(preset: str) -> None:
    # Few layers and rows: what differs between presets is the rest. Those left out differ in numbers only.
    overrides = ["model.num_layers=2", "train.sequences_per_step=4", "train.micro_batch_size=2", "train.batch_schedule=[]"]
    figures = meta_bench(load_pretrain_config(None, preset, overrides).config, 1000, 0.9)
    assert figures["flops_per_step"] > 0
    assert figures["peak_memory_bytes"] > 16 * figures["parameters"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_runs_the_step_without_a_wait(name: str) -> None:
    run = context(name, torch.device("cuda", 0), precision="bfloat16")
    run.objective.train()
    for phase in run.objective.phases(20):
        if phase.start is not None:
            phase.start()
        guard, means = NonFiniteGuard(run.ranks, pytest.fail), []
        replica = loop.setup_phase(run, phase)
        local = [feed.read_local_batch(run, step) for step in range(3)]
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")  # the first steps create what lasts
            try:
                totals = loop.reduce_step_counts(run, local[step], StepMeter(0.0))
                means.append(loop.forward_backward(run, replica, local[step], totals.counts, step))
                norm = clip_gradients(replica.objective.parameters(), 1.0)
                loop.update(replica.optimizer, 1e-3, guard.allow(StepCounters(step, 0, step, 0), norm, means[-1]))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        guard.check()
        assert all(torch.isfinite(each.shares).all() for each in means)
