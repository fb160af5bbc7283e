from pathlib import Path

import pytest
import torch

from discern.artifacts.run import build_objective, load_run
from discern.convert.export import export
from discern.errors import ConfigError, DataError
from discern.objectives.base import Objective, Vocabulary
from discern.pretraining.warm_start import start_generator
from discern.progress import Silent
from discern.training.pretrain_config import load_pretrain_config
from tests.small.run import make_run


def mark(run: Path) -> str:
    """The fingerprint of a run's tokenizer."""
    return str(load_run(run, warn=pytest.fail).record["tokenizer_fingerprint"])


def fresh(run: Path, *overrides: str) -> Objective:
    vocabulary: Vocabulary = load_run(run, warn=pytest.fail).vocabulary
    objective = build_objective(load_pretrain_config(None, "tiny", overrides).config, vocabulary)
    objective.initialize(3)
    return objective


def same(left: Objective, right: Objective, name: str, other: str) -> bool:
    parts = [(o.networks()[n].encoder, o.networks()[n].head) for o, n in ((left, name), (right, other))]
    pairs = [zip(ours.parameters(), theirs.parameters(), strict=True) for ours, theirs in zip(*parts, strict=True)]
    return all(torch.equal(mine, yours) for pair in pairs for mine, yours in pair)


@pytest.mark.parametrize("tying", ["embeddings", "none", "gradient-disentangled"])
def test_the_generator_of_a_run(tmp_path: Path, tying: str) -> None:
    made = make_run(tmp_path / "run", overrides=[f"objective.tying={tying}"])
    objective = fresh(tmp_path / "run", f"objective.tying={tying}")
    before = objective.networks()["discriminator"].head.output.weight.clone()  # type: ignore[union-attr]
    start_generator(objective, tmp_path / "run", mark(tmp_path / "run"), pytest.fail)
    assert same(objective, made, "generator", "generator")
    assert torch.equal(objective.networks()["discriminator"].head.output.weight, before)  # type: ignore[union-attr]


def test_the_encoder_of_a_masked_language_model(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    objective = fresh(tmp_path / "run", "objective.generator_size=1.0")
    start_generator(objective, tmp_path / "run", mark(tmp_path / "run"), pytest.fail)
    assert same(objective, made, "generator", "encoder")


def test_an_exported_generator(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "export", network="generator", progress=Silent(), warn=pytest.fail)
    objective = fresh(tmp_path / "run")
    start_generator(objective, tmp_path / "export", mark(tmp_path / "run"), pytest.fail)
    assert same(objective, made, "generator", "generator")


def test_other_sizes_are_refused_with_both(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    objective = fresh(tmp_path / "run", "objective.generator_size=1.0")
    with pytest.raises(ConfigError, match=r"2 layers of 16.*2 layers of 32") as caught:
        start_generator(objective, tmp_path / "run", mark(tmp_path / "run"), pytest.fail)
    assert "generator_size" in (caught.value.hint or "")


def test_equal_shapes_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm", "model.num_heads=4"])
    objective = fresh(tmp_path / "run", "objective.generator_size=1.0")
    with pytest.raises(ConfigError, match="computes something else: num_heads 4 there and 2 here"):
        start_generator(objective, tmp_path / "run", mark(tmp_path / "run"), pytest.fail)


def test_a_discriminator_alone_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    with pytest.raises(ConfigError, match="no masked language model") as caught:
        start_generator(fresh(tmp_path / "run"), tmp_path / "export", mark(tmp_path / "run"), pytest.fail)
    assert "--network generator" in (caught.value.hint or "")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(DataError, match="a different tokenizer") as caught:
        start_generator(fresh(tmp_path / "run"), tmp_path / "run", "0" * 64, pytest.fail)
    assert "discern prepare" in (caught.value.hint or "")
