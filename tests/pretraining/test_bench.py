import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.errors import ConfigError
from discern.objectives import objectives
from discern.objectives.base import Phase
from discern.pretraining import bench as module
from discern.pretraining.bench import Timing, bench, time_training
from discern.progress import Silent
from discern.training import flops
from discern.training.distributed import Ranks
from discern.training.execution import Precision
from discern.training.flops import shortest_time
from discern.training.state import TrainContext

ROWS = 6


@pytest.fixture(autouse=True)
def _quick_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of matrix products is measured for a millisecond each."""
    for shortened in (module, flops):
        monkeypatch.setattr(shortened, "shortest_time", lambda product, device, *_: shortest_time(product, device, 0.001))


@pytest.fixture(autouse=True)
def _even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps take their mean time, so that figures fit together on a busy machine too."""

    def timed(*options: Any) -> Timing:
        timing = time_training(*options)
        return replace(timing, seconds=[sum(timing.seconds) / len(timing.seconds)] * len(timing.seconds))

    monkeypatch.setattr(module, "time_training", timed)


SMALL = ("data.sequence_length=16", f"train.sequences_per_step={ROWS}", "model.num_layers=1")


def measure(*overrides: str, fill: float = 1.0) -> dict[str, Any]:
    options: dict[str, Any] = {"vocab_size": 300, "seconds": 0.0, "progress": Silent()}
    figures = bench(preset="tiny", overrides=(*SMALL, *overrides), fill=fill, **options)
    assert figures is not None
    return figures


def test_the_figures_fit_together_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = measure()
    assert figures["steps"] == 3
    assert figures["tokens_per_second"] * figures["step_milliseconds"] == pytest.approx(1000 * ROWS * 16)
    assert figures["step_milliseconds_min"] <= figures["step_milliseconds"] <= figures["step_milliseconds_max"]
    assert figures["gemm_share"] == pytest.approx(figures["tokens_per_second"] / figures["gemm_limit_tokens_per_second"])
    assert 0 < figures["model_flops_utilization"] <= 1
    assert figures["peak_memory_bytes"] >= figures["peak_memory_bytes_forward"] > 2**20
    assert (figures["precision"], figures["threads"]) == ("float32", torch.get_num_threads())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_can_be_measured(name: str) -> None:
    needed = ("model.encoder=xlnet", "model.embedding_size=32") if name == "permutation-lm" else ()
    figures = measure(f"objective.name={name}", *needed)
    assert figures["objective"] == name
    # What is executed and what the formula counts differ by how the number of masked positions is rounded, and by the keys of
    # distances, of which so small a batch has many.
    assert figures["gemm_flops_per_token"] == pytest.approx(figures["flops_per_token"], rel=0.1 if not needed else 0.2)


def test_micro_batches_and_uneven_rows() -> None:
    figures = measure("train.micro_batch_size=4", fill=0.6)
    assert figures["micro_batch_size"] == 4
    assert figures["tokens_per_second"] * figures["step_milliseconds"] < 0.95 * 1000 * ROWS * 16


def test_phases_count_by_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of the generator, which take a second each, and one of the discriminator, which takes three."""
    trained = []

    def timed(context: TrainContext, phase: Phase, *options: Any) -> Timing:
        timing = time_training(context, phase, *options)
        trained.append(sum(parameter.requires_grad for parameter in context.objective.parameters()))
        return replace(timing, seconds=[1.0 if phase.name == "generator" else 3.0] * 3)

    monkeypatch.setattr(module, "time_training", timed)
    figures = measure("objective.algorithm=two-stage", "objective.generator_size=1.0", "train.max_steps=3")
    assert figures["steps"] == 6
    assert figures["tokens_per_second"] == pytest.approx(3 * ROWS * 16 / 5)
    assert len(set(trained)) == 2


def test_processes_must_share_the_step_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "join_ranks", lambda device: nullcontext(Ranks(0, 4, torch.device("cpu"))))
    with pytest.raises(ConfigError, match="cannot be divided evenly among 4 processes"):
        measure()


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.",
            ConfigError,
            "not enough memory on cpu for 6 rows at once",
        ),
        ("something else", RuntimeError, "something else"),
    ],
)
def test_lack_of_memory_is_explained_and_other_errors_stay(
    message: str, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(module, "time_training", fails)
    with pytest.raises(error, match=says) as caught:
        measure()
    assert error is RuntimeError or "train.micro_batch_size=3," in str(getattr(caught.value, "hint", ""))


def test_peak_memory_sees_what_was_taken() -> None:
    """In a process of its own: the peak of this one may lie above all that a test can take."""
    program = """if True:
        import torch
        from discern.training.distributed import peak_memory
        before = peak_memory(torch.device("cpu"))
        taken = torch.ones(2**26)
        print(peak_memory(torch.device("cpu")) - before)
    """
    taken = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(taken) > 2**27


def test_a_step_is_compared_with_what_else_one_may_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    chosen = Precision("float32", {"float32": 1.0, "bfloat16": 2.0})
    monkeypatch.setattr(module, "shared_precision", lambda name, *_: chosen if name == "auto" else Precision(name))
    contexts = []

    def training_step(context: TrainContext, *options: Any) -> Callable[[], int]:
        contexts.append(context.precision)
        return original(context, *options)

    original = module.training_step
    monkeypatch.setattr(module, "training_step", training_step)
    figures = measure("train.precision=auto")
    assert min(figures["speedup_over_bfloat16"], figures["speedup_over_one_thread"]) > 0
    assert contexts == ["float32", "bfloat16"]
    figures = measure("train.precision=float32")
    assert [name for name in figures if name.startswith("speedup")] == ["speedup_over_one_thread"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not [name for name in measure("train.precision=float32") if name.startswith("speedup")]
