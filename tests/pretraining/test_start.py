"""What a run that goes on from a model takes over of it: heads whole, schedules where they stood."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from discern.data.tokenizer import load_tokenizer, special_tokens, vocab_size
from discern.errors import ConfigError
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.model_files.run import build_objective
from discern.objectives.base import Objective, Vocabulary
from discern.pretraining.warm_start import WarmStartResult, fill, start_config
from discern.progress import Silent
from discern.training.config import PretrainConfig
from tests.inference.small_scorers import ids_of
from tests.parity.small_networks import make_noisy
from tests.small.run import make_run
from tests.small.tokenizers import small_tokenizer

BILINEAR = ["objective.discriminator_head=bilinear", "objective.tying=gradient-disentangled"]


def gone_on(model: Path, *overrides: str, preset: str | None = None) -> tuple[PretrainConfig, Objective, WarmStartResult]:
    start = open_model(model, warn=pytest.fail)
    vocabulary = make_vocabulary(model)
    config = start_config(start, vocabulary, preset, None, overrides, None).config
    objective = build_objective(config, vocabulary)
    objective.initialize(1)
    return config, objective.eval(), fill(objective, start, [])


def make_vocabulary(model: Path) -> Vocabulary:
    tokenizer = load_tokenizer(model / "tokenizer.json")
    return Vocabulary(vocab_size(tokenizer), special_tokens(tokenizer))


def logits(objective: Objective) -> torch.Tensor:
    with torch.no_grad():
        return objective.networks()["discriminator"].token_logits(torch.tensor([[2, *ids_of("the chef ate"), 3]]))


@pytest.mark.usefixtures("unverified")
def test_a_bilinear_head_is_taken_over_whole(tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=BILINEAR)
    export(tmp_path / "run", out=tmp_path / "alone", network="discriminator", progress=Silent(), warn=pytest.fail)
    (tmp_path / "alone" / "discern.toml").unlink()
    config, went_on, filled = gone_on(tmp_path / "alone")
    assert (config.objective.model_dump()["discriminator_head"], filled.fresh) == ("bilinear", ("the generator",))
    assert torch.allclose(logits(went_on), logits(objective), atol=1e-5)
    with pytest.raises(ConfigError, match=r"bilinear term in its head.*\n.*discriminator_head=bilinear"):
        gone_on(tmp_path / "run", "objective.discriminator_head=dense", preset="tiny")


def test_a_term_that_the_model_has_not_is_fresh_and_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    _, _, filled = gone_on(tmp_path / "run", "objective.discriminator_head=bilinear")
    assert filled.fresh == ("the bilinear term of the discriminator",)


@pytest.mark.parametrize(("step", "frozen", "share"), [(7, None, 0.165), (40, 0, 0.2)])
def test_schedules_stand_where_the_weights_were_saved(step: int, frozen: int | None, share: float, tmp_path: Path) -> None:
    """A run that was stopped has not come to the end of what it was told."""
    settings = "tying=none freeze_generator_at=30 mask_probability=0.1 mask_probability_end=0.2 mask_probability_steps=10"
    overrides = ["train.max_steps=40", *(f"objective.{setting}" for setting in settings.split())]
    make_run(tmp_path / "run", overrides=overrides, step=step)
    config, _, _ = gone_on(tmp_path / "run")
    objective = config.objective.model_dump()
    assert objective["freeze_generator_at"] == frozen
    assert (objective["mask_probability"], objective["mask_probability_end"]) == (pytest.approx(share, abs=0.006), None)


XLNET = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32", "data.packing=two-part"]


def states(objective: Objective) -> torch.Tensor:
    with torch.no_grad():
        return objective.networks()["encoder"].token_logits(torch.tensor([[*ids_of("the chef ate"), 3, 2]]))


def test_an_xlnet_is_gone_on_with_from_its_run_or_its_export(tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=[*XLNET, "objective.memory_length=24", "model.activation=gelu-tanh"])
    export(tmp_path / "run", out=tmp_path / "one", progress=Silent(), warn=pytest.fail)
    for model in ("run", "one"):
        config, went_on, filled = gone_on(tmp_path / model)
        assert filled.fresh == ()
        assert torch.equal(states(went_on), states(objective))
        assert (config.objective.model_dump()["memory_length"], config.data.packing) == (24, "two-part")


@pytest.mark.parametrize(
    ("architecture", "fresh", "preset"),
    [("XLNetLMHeadModel", (), None), ("XLNetModel", ("the head of the encoder",), "xlnet-cpu")],
)
def test_somebody_elses_xlnet_is_gone_on_with(
    architecture: str, fresh: tuple[str, ...], preset: str | None, tmp_path: Path
) -> None:
    import transformers

    folder = tmp_path / "theirs"
    tokenizer = small_tokenizer("unigram")
    sizes = transformers.XLNetConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=32, n_layer=2, n_head=2, d_inner=48, ff_activation="relu", dropout=0.0
    )
    model = getattr(transformers, architecture)(sizes)
    make_noisy(model)
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config, objective, filled = gone_on(folder, preset=preset)
    assert filled.fresh == fresh
    assert (config.objective.name, config.data.packing, config.model.activation) == ("permutation-lm", "two-part", "relu")
    assert config.objective.reads_in_order == (preset is not None)
    ids = torch.randint(5, tokenizer.get_vocab_size(), (2, 9), generator=torch.Generator().manual_seed(0))
    network = objective.networks()["encoder"]
    with torch.no_grad():
        if fresh:
            torch.testing.assert_close(network.encoder(ids), model(ids).last_hidden_state, atol=1e-5, rtol=1e-5)
        else:
            torch.testing.assert_close(network.token_logits(ids), model(ids).logits, atol=1e-5, rtol=1e-5)
