from pathlib import Path

import pytest
import torch

from discern.errors import ConfigError, DataError, DiscernError
from discern.model_files.export import export
from discern.model_files.run import build_objective, load_run
from discern.objectives.base import Objective
from discern.pretraining.warm_start import start_generator
from discern.progress import Silent
from discern.training.config import load_pretrain_config
from tests.pretraining.commands import CONSTANT, figures, train, weights
from tests.small.run import make_run


def started(run: Path, *overrides: str, model: Path | None = None, fingerprint: str = "") -> Objective:
    """An objective on the vocabulary of a run, whose generator starts from that run or another model."""
    loaded = load_run(run, warn=pytest.fail)
    objective = build_objective(load_pretrain_config(None, "tiny", overrides).config, loaded.vocabulary)
    objective.initialize(3)
    before = {name: value.clone() for name, value in head_of(objective).items()}
    start_generator(objective, model or run, fingerprint or str(loaded.record["tokenizer_fingerprint"]), pytest.fail)
    assert all(torch.equal(before[name], value) for name, value in head_of(objective).items())
    return objective


def head_of(objective: Objective) -> dict[str, torch.Tensor]:
    return objective.networks()["discriminator"].head.state_dict()


def assert_same(objective: Objective, source: Objective, name: str) -> None:
    ours, theirs = objective.networks()["generator"], source.networks()[name]
    for parts in ((ours.encoder, theirs.encoder), (ours.head, theirs.head)):
        for mine, yours in zip(*(part.parameters() for part in parts), strict=True):
            assert torch.equal(mine, yours)


@pytest.mark.parametrize("tying", ["embeddings", "none", "gradient-disentangled"])
def test_the_generator_of_a_run(tmp_path: Path, tying: str) -> None:
    made = make_run(tmp_path / "run", overrides=[f"objective.tying={tying}"])
    assert_same(started(tmp_path / "run", f"objective.tying={tying}"), made, "generator")


def test_the_encoder_of_a_masked_language_model(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    assert_same(started(tmp_path / "run", "objective.generator_size=1.0"), made, "encoder")


def test_of_the_networks_of_a_run_only_an_exported_generator(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    for network in ("generator", "discriminator"):
        export(tmp_path / "run", out=tmp_path / network, network=network, progress=Silent(), warn=pytest.fail)
    assert_same(started(tmp_path / "run", model=tmp_path / "generator"), made, "generator")
    with pytest.raises(ConfigError, match="no masked language model") as caught:
        started(tmp_path / "run", model=tmp_path / "discriminator")
    assert "--network generator" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("trained", "fingerprint", "error", "says", "hint"),
    [
        ([], "", ConfigError, "hidden_size is 16 there and 32 here", "generator_size"),
        (
            ["objective.name=mlm", "model.num_heads=4"],
            "",
            ConfigError,
            "num_heads is 4 there and 2 here",
            "generator_size",
        ),
        ([], "0" * 64, DataError, "a different tokenizer", "discern prepare"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, trained: list[str], fingerprint: str, error: type[DiscernError], says: str, hint: str
) -> None:
    make_run(tmp_path / "run", overrides=trained)
    with pytest.raises(error, match=says) as caught:
        started(tmp_path / "run", "objective.generator_size=1.0", fingerprint=fingerprint)
    assert hint in (caught.value.hint or "")


def test_a_run_with_a_teacher_continues_with_the_same_bytes(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "teacher", 2, "objective.name=mlm")
    taught = "objective.name=mlm", f"objective.teacher={tmp_path / 'teacher'}"
    for out, steps in (("whole", (4,)), ("parts", (2, 4))):
        for step in steps:
            train(data, tmp_path / out, step, *taught, *CONSTANT)
    assert weights(tmp_path / "whole", 4) == weights(tmp_path / "parts", 4)
    assert "teacher_loss" in figures(tmp_path / "whole")[-1]
    export(tmp_path / "whole", out=tmp_path / "exported", progress=Silent(), warn=pytest.fail)
    assert 'teacher = "teacher"' in (tmp_path / "exported" / "discern.toml").read_text()
    with pytest.raises(ConfigError, match="teacher"):  # it predicts no words
        train(data, tmp_path / "rtd", 1, *taught[1:])
