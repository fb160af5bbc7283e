"""Scorers of tiny networks with weights far from zero, and their tokenizer."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from discern.data.tokenizer import special_tokens, vocab_size
from discern.inference import scorers
from discern.inference.scoring.scorers import ScoringModel, TextScorer
from discern.models.config import build_config
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from tests.parity.small_networks import make_noisy
from tests.small.tokenizers import small_tokenizer

TOKENIZER = small_tokenizer("wordpiece, lower-cased")
SPECIAL = special_tokens(TOKENIZER)
TEXTS = [
    "The chef cooked the meal.",
    "x",
    "purple elephants ate the naïve guests, and don't stop me now!",
    "hello worldly cats",
    "The meal cooked the chef.",
]


def make_objective(name: str, encoder: str = "bert", **config: Any) -> Objective:
    """An objective with noise for weights, in evaluation mode; `initialize` is not called."""
    narrow = {"embedding_size": 8} if encoder == "bert" else {"embedding_size": 16}
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "feedforward_size": 32, "max_positions": 64}
    model = build_config({"encoder": encoder, "hidden_dropout": 0.1, **sizes, **narrow})
    built = objectives.load(name)
    settings = BuildSettings(model, Vocabulary(vocab_size(TOKENIZER), SPECIAL))
    objective: Objective = built(built.Config(name=name, **config), settings)
    for parameter in objective.parameters():
        parameter.requires_grad_(False)
    make_noisy(objective)
    return objective.eval()


def make_scorer(objective: Objective, name: str, max_length: int = 64, **known: Any) -> TextScorer:
    """A scorer of an objective's networks."""
    model = ScoringModel(objective.networks(), SPECIAL, **known, is_permuted=name == "permutation-lm")
    return TextScorer(TOKENIZER, max_length, name, scorers.load(name)(model))


def ids_of(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    """Without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
