import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from discern.errors import ConfigError
from discern.objectives import objectives
from discern.objectives.base import Phase
from discern.objectives.rtd import ReplacedTokenDetection
from discern.pretraining import bench as module
from discern.pretraining.bench import bench
from discern.progress import Silent
from discern.training.distributed import Ranks

TINY = ("data.sequence_length=16", "train.sequences_per_step=6", "model.num_layers=1")


def measure(*overrides: str, preset: str = "tiny", **options: object) -> dict[str, object]:
    figures = bench(
        preset=preset,
        overrides=(*TINY, *overrides),
        vocab_size=300,
        steps=2,
        seconds=0.0,
        progress=Silent(),
        **options,  # type: ignore[arg-type]
    )
    assert figures is not None
    return figures


def test_the_figures_fit_together() -> None:
    begin = time.perf_counter()
    figures = measure()
    assert time.perf_counter() - begin < 20  # about one second
    assert figures["steps"] == 2
    assert figures["tokens_per_second"] * figures["step_milliseconds"] == pytest.approx(96_000, rel=0.5)
    assert figures["step_milliseconds_min"] <= figures["step_milliseconds"] <= figures["step_milliseconds_max"]
    assert figures["gemm_share"] == pytest.approx(figures["tokens_per_second"] / figures["gemm_limit_tokens_per_second"])
    assert figures["flops_per_second"] == pytest.approx(figures["flops_per_token"] * figures["tokens_per_second"])
    assert figures["peak_memory_bytes"] >= figures["peak_memory_bytes_forward"] > 2**20
    assert figures["precision"] == "float32"
    assert figures["threads"] == torch.get_num_threads()
    assert figures["objective"] == "rtd"


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
    assert figures["tokens_per_second"] * figures["step_milliseconds"] < 96_000 * 0.95


def test_bfloat16_where_asked_for() -> None:
    assert measure("train.precision=bfloat16")["precision"] == "bfloat16"


def test_phases_count_by_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    trained: list[int] = []

    def phases(self: ReplacedTokenDetection, max_steps: int) -> list[Phase]:
        return [
            Phase("generator", 1, frozenset({"generator"}), lambda: started.append("generator")),
            Phase("discriminator", 3, frozenset({"discriminator"}), lambda: started.append("discriminator")),
        ]

    original = module.setup_phase

    def setup_phase(parts, phase):  # type: ignore[no-untyped-def]
        result = original(parts, phase)
        trained.append(sum(parameter.requires_grad for parameter in parts.objective.parameters()))
        return result

    monkeypatch.setattr(ReplacedTokenDetection, "phases", phases)
    monkeypatch.setattr(module, "setup_phase", setup_phase)
    assert measure()["steps"] == 4
    assert started == ["generator", "discriminator"]
    assert len(set(trained)) == 2


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    measure()
    assert list(tmp_path.iterdir()) == []


def test_two_processes_must_share_the_step_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(device: str) -> AbstractContextManager[Ranks]:
        return nullcontext(Ranks(0, 4, torch.device("cpu")))

    monkeypatch.setattr(module, "join_ranks", join)
    with pytest.raises(ConfigError, match="cannot be divided evenly among 4 processes"):
        measure()


def test_lack_of_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.")

    monkeypatch.setattr(module, "time_training", fails)
    with pytest.raises(ConfigError, match="not enough memory on cpu for 6 rows at once") as caught:
        measure()
    assert "train.micro_batch_size=3," in str(caught.value.hint)


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(module, "time_training", fails)
    with pytest.raises(RuntimeError, match="something else"):
        measure()


def test_peak_memory_sees_what_was_taken() -> None:
    """In a process of its own: the peak of this one may lie above all that a test can take."""
    program = """if True:
        import torch
        from discern.training.memory import peak_memory
        before = peak_memory(torch.device("cpu"))
        taken = torch.ones(2**26)
        print(peak_memory(torch.device("cpu")) - before)
    """
    taken = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(taken) > 2**27
