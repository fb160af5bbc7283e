"""Devices that are not there, cards without bfloat16, and batches that do not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.models.config import build_config
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training import evaluation
from discern.training.distributed import Ranks, choose_device, join_ranks
from discern.training.execution import choose_compilation, resolve_precision, shared_precision
from discern.training.loop import train
from discern.training.process import RankEnvironment
from discern.training.state import State
from discern.types import CorruptedBatch, StepOutput
from tests.support import settings
from tests.training.test_loop import context


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")


@pytest.mark.parametrize(
    ("count", "name", "says"),
    [
        (0, "cuda:7", "there is no device 'cuda:7'; this machine has cpu"),
        (2, "cuda:7", r"there is no device 'cuda:7'; this machine has cpu, cuda:0 \(Some GPU\), cuda:1 \(Some GPU\)"),
        (0, "meta", "device 'meta' computes no numbers"),
        (0, "warp", "there is no device 'warp'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, count: int, name: str, says: str) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=says):
        choose_device(name)


def test_a_mac_trains_eagerly_in_float32_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no device 'mps'; this machine has cpu"):
        choose_device("mps")
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    with join_ranks("auto") as ranks:
        assert ranks == Ranks(0, 1, torch.device("mps"))
    assert resolve_precision("auto", ranks.device, build_config(), 8).name == "float32"
    assert not choose_compilation(True, ranks.device, None).enabled
    with pytest.raises(ConfigError, match=r"train.precision is bfloat16, which .* does not support"):
        resolve_precision("bfloat16", ranks.device, build_config(), 8)
    monkeypatch.setattr("discern.training.distributed.rank_environment", lambda: RankEnvironment(0, 2, 0, 2))
    with pytest.raises(ConfigError, match="mps cannot train"), join_ranks("auto"):
        pass


def test_a_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_card_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would emulate it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    gpus(monkeypatch, 1)
    gpu, model = torch.device("cuda"), build_config()
    assert resolve_precision("auto", gpu, model, 8).name == "float32"
    for resolve in (
        lambda: resolve_precision("bfloat16", gpu, model, 8),
        lambda: shared_precision("bfloat16", Ranks(0, 1, gpu), model, 8),
    ):
        with pytest.raises(ConfigError, match="bfloat16, which Some GPU does not support") as caught:
            resolve()
        assert "train.precision=float32" in str(caught.value.hint)
    assert resolve_precision("float32", gpu, model, 8).name == "float32"


class Hungry(ReplacedTokenDetection):
    """Runs out of memory in training with more than `most` rows at once."""

    most = 3

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        if self.training and batch.tokens.size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(batch, randomness)


def hungry(most: int) -> Hungry:
    objective = Hungry(RTDConfig(), settings())
    objective.most = most
    objective.initialize(0)
    return objective


@pytest.mark.parametrize(
    ("most", "options", "rows", "setting"),
    [
        (3, {}, 8, "micro_batch_size=4,"),
        (3, {"micro_batch_size": 5}, 5, "micro_batch_size=2,"),
        (0, {"micro_batch_size": 1}, 1, "checkpointing"),
    ],
)
def test_a_batch_that_does_not_fit(tmp_path: Path, most: int, options: dict[str, Any], rows: int, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"step 0: there is not enough memory on cpu for {rows} rows at once") as caught:
        train(context(tmp_path, hungry(most), **options), State())
    assert setting in str(caught.value.hint)


def test_an_evaluation_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(*_: Any, **__: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    with pytest.raises(ConfigError, match="step 2: there is not enough memory") as caught:
        train(context(tmp_path, max_steps=2, micro_batch_size=2), State())
    assert "--set train.micro_batch_size=1" in str(caught.value.hint)
