"""Parameters of the presets, as the specification of the released code counts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from discern.model_files.run import build_objective
from discern.models.electra.encoder import BertEncoder
from discern.objectives.base import Objective, Vocabulary
from discern.objectives.masked import MaskedLanguageModel
from discern.objectives.rtd import ReplacedTokenDetection
from discern.training.config import load_pretrain_config
from discern.types import SpecialTokens

BERT = Vocabulary(30522, SpecialTokens(pad=0, unk=100, cls=101, sep=102, mask=103))


def on_paper(preset: str) -> Objective:
    """The objective of a preset without memory for its weights."""
    with torch.device("meta"):
        return build_objective(load_pretrain_config(None, preset).config, BERT)


def count(*modules: nn.Module | None, without: nn.Module | None = None) -> int:
    shared = {id(value) for value in without.parameters()} if without else set()
    return sum(
        value.numel() for value in {value for part in modules if part for value in part.parameters()} if id(value) not in shared
    )


@pytest.mark.parametrize(
    ("preset", "encoder", "head", "generator", "generator_head", "total"),
    [
        ("electra-small", 13_483_008, 66_049, 608_064, 39_098, 14_196_219),
        ("electra-small-plusplus", 13_483_008, 66_049, 9_510_144, 63_674, 23_122_875),
        ("electra-base", 108_891_648, 591_361, 9_673_984, 229_434, 119_386_427),
        ("electra-large", 334_092_288, 1_050_625, 19_216_640, 295_738, 354_655_291),
    ],
)
def test_replaced_token_detection(preset: str, encoder: int, head: int, generator: int, generator_head: int, total: int) -> None:
    """Reference: the parameter counts of the released TensorFlow code."""
    objective = on_paper(preset)
    assert isinstance(objective, ReplacedTokenDetection)
    assert isinstance(objective.generator, BertEncoder)
    embeddings = objective.discriminator.embeddings
    assert count(objective.discriminator) == encoder
    assert count(objective.discriminator_head) == head
    assert count(objective.generator, without=embeddings) == generator
    assert count(objective.generator_head, without=embeddings) == generator_head
    assert count(objective) == total


def test_masked_language_modeling() -> None:
    """The small encoder, and a head of 256 x 128 + 128, a LayerNorm of 2 x 128, and a bias a word."""
    objective = on_paper("mlm-small")
    assert isinstance(objective, MaskedLanguageModel)
    assert count(objective.encoder) == 13_483_008
    assert count(objective) == 13_483_008 + 256 * 128 + 128 + 2 * 128 + 30_522


@pytest.mark.parametrize(
    ("preset", "hidden", "heads", "feedforward", "layers"),
    [
        ("electra-small", 64, 1, 256, 12),
        ("electra-base", 256, 4, 1024, 12),
        ("electra-large", 256, 4, 1024, 24),
        ("electra-small-plusplus", 256, 4, 1024, 12),
    ],
)
def test_the_generator_is_narrower_and_as_deep(preset: str, hidden: int, heads: int, feedforward: int, layers: int) -> None:
    sizes = on_paper(preset).networks()["generator"].encoder.config
    assert (sizes.hidden_size, sizes.num_heads, sizes.feedforward_size, sizes.num_layers) == (hidden, heads, feedforward, layers)


@pytest.mark.parametrize(
    ("tying", "shared"), [("embeddings", {"word", "position", "token_type", "norm"}), ("token", {"word"}), ("none", set())]
)
def test_what_is_tied(tying: str, shared: set[str]) -> None:
    config = load_pretrain_config(None, "tiny", [f"objective.tying={tying}"]).config
    objective = build_objective(config, BERT)
    assert isinstance(objective, ReplacedTokenDetection)
    ours, theirs = objective.discriminator.embeddings, objective.generator.embeddings
    assert {name for name in ("word", "position", "token_type", "norm") if getattr(ours, name) is getattr(theirs, name)} == shared
    assert objective.generator_head.word_embeddings is theirs.word
    width = objective.generator.config.hidden_size if tying == "none" else ours.embedding_size
    assert theirs.embedding_size == width


def test_parameters_are_named_once() -> None:
    """A shared table is saved, decayed and updated once."""
    objective = build_objective(load_pretrain_config(None, "tiny").config, BERT)
    names = [name for name, _ in objective.named_parameters()]
    assert len(names) == len(set(names))
    assert sum(name.endswith("word.weight") for name in names) == 1


def test_a_model_on_paper_has_the_shapes_of_a_real_one() -> None:
    config = load_pretrain_config(None, "tiny").config
    real = build_objective(config, BERT)
    with torch.device("meta"):
        paper = build_objective(config, BERT)
    assert {name: value.shape for name, value in paper.named_parameters()} == {
        name: value.shape for name, value in real.named_parameters()
    }
