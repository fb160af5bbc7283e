"""Arithmetic of a run by two conventions: what is executed, and the ELECTRA paper's.

    arithmetic = run_flops(objective, config.train.max_steps, config.data.sequence_length, config.train.sequences_per_step)
    arithmetic.after(1000).executed    # of the first 1000 steps
    arithmetic.steps_within(1e15)      # how many steps 1e15 executed FLOPs pay for

The objective may stand on the meta device: only its shapes are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from discern.model.attention import SelfAttention
from discern.model.config import ModelConfig
from discern.model.encoder import Encoder
from discern.model.heads import LanguageHead, TiedLMHead
from discern.model.network import Network
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import Objective, Phase
from discern.objectives.passes import Pass, has_vocabulary, step_passes
from discern.training.paper_flops import MASKED_SHARE, PaperTransformer


@dataclass(frozen=True)
class Flops:
    """One amount of arithmetic by both conventions.

    Attributes:
        executed: multiplications and additions of the matrix products that run: forward, twice that backward, and what gradient
            checkpointing computes anew. A row counts with its padding.
        paper: by the released `flops_computation.py`.
    """

    executed: float = 0.0
    paper: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.executed + other.executed, self.paper + other.paper)

    def times(self, factor: float) -> Flops:
        """So many of it."""
        return Flops(self.executed * factor, self.paper * factor)


@dataclass(frozen=True)
class RunFlops:
    """Arithmetic of a run, whose steps may differ from phase to phase.

    Attributes:
        stretches: of each phase the number of steps and the cost of one.
    """

    stretches: Sequence[tuple[int, Flops]]

    @property
    def total(self) -> Flops:
        """Of all steps."""
        return self.after(sum(steps for steps, _ in self.stretches))

    def after(self, steps: int) -> Flops:
        """Of the first `steps` steps; beyond the last phase its steps go on."""
        found, left = Flops(), steps
        for number, (length, each) in enumerate(self.stretches, 1):
            taken = left if number == len(self.stretches) else min(left, length)
            found, left = found + each.times(taken), left - taken
        return found

    def steps_within(self, executed: float) -> int:
        """The most steps that cost no more than `executed`; may be more than the run has."""
        first = int(executed // max(each.executed for _, each in self.stretches))
        last = int(executed // min(each.executed for _, each in self.stretches)) + 1
        return first + bisect_right(range(first, last + 1), executed, key=lambda steps: self.after(steps).executed) - 1


def run_flops(objective: Objective, max_steps: int, sequence_length: int, sequences_per_step: int) -> RunFlops:
    """Arithmetic of a run, from the shapes of its networks.

    Args:
        sequence_length: positions a row.
        sequences_per_step: rows an update, over all ranks.
    """
    return RunFlops(
        [
            (phase.steps, step_flops(objective, phase, sequence_length, sequences_per_step))
            for phase in objective.phases(max_steps)
        ]
    )


def step_flops(objective: Objective, phase: Phase, sequence_length: int, sequences: int) -> Flops:
    """Arithmetic of one update of a phase."""
    passes = step_passes(objective, phase)
    return Flops(executed_flops(passes, sequence_length, sequences), paper_flops(passes, sequence_length, sequences))


def executed_flops(passes: Iterable[Pass], sequence_length: int, sequences: int, *, recomputed: bool = True) -> float:
    """FLOPs of the matrix products of a step: those of linear layers, attention and vocabulary, by their shapes.

    The keys of an XLNet's distances, which all rows of a batch share, are left out.

    Args:
        recomputed: what gradient checkpointing computes a second time counts; False: what the model asks for.
    """
    return sum(_executed(each, sequence_length, recomputed=recomputed) for each in passes) * sequence_length * sequences


def paper_flops(passes: Iterable[Pass], sequence_length: int, sequences: int) -> float:
    """FLOPs of a step by the paper's convention; a frozen network counts its forward half.

    The released script knows BERT's layers alone: distances, memory and query stream of an XLNet are not in these numbers.
    """
    total = 0.0
    for each in passes:
        network = each.network
        towers = [_paper(tower, sequence_length) for tower in _towers(network.encoder)]
        head = towers[0].binary_head
        if has_vocabulary(network):
            # The script's share stands for "at the masked positions", whatever their number.
            head = _vocabulary_head(network, sequence_length) * (MASKED_SHARE if each.head_share < 1 else 1.0)
        forward = sum(tower.body for tower in towers) + head
        total += (2 if each.trains else 1) * forward * sequence_length * sequences
    return total


def _executed(each: Pass, length: int, *, recomputed: bool) -> float:
    """One pass, a token."""
    network = each.network
    times = 3 if each.trains else 1
    total = times * each.head_share * _head(network)
    for tower in _towers(network.encoder):
        inside = _inside(tower, each, length)
        again = recomputed and each.trains and getattr(tower, "gradient_checkpointing", False)
        projection = getattr(tower, "projection", None)
        kept = 0 if projection is None else _linear(projection)
        total += times * inside + (inside - kept if again else 0)
    return total


def _inside(tower: Encoder, each: Pass, length: int) -> float:
    """One tower forward, a token."""
    if isinstance(tower, XLNetEncoder):
        return _two_streams(tower.config, length, each.query_share, each.remembered)
    return _linear(tower) + _attention(tower, length)


def _two_streams(config: ModelConfig, length: int, query_share: float, remembered: int) -> float:
    """The blocks of an XLNet, a token of content.

    With a query stream, nobody reads the content of the last block: only keys and values are made of it.
    """
    size, keys = config.hidden_size, length + remembered
    # Query and output, scores by content and by distance, the sum of the values, feed-forward.
    asking = 4 * size**2 + 2 * size * (keys + (keys + length) + keys) + 4 * size * config.feedforward_size
    asked = 4 * size**2 * keys / length
    layers = config.num_layers
    return layers * asked + (layers - (query_share > 0)) * asking + layers * query_share * asking


def _linear(module: nn.Module) -> float:
    """The linear layers of a module, each once a token."""
    return float(sum(2 * part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear)))


def _attention(module: nn.Module, length: int) -> float:
    """Scores and weighted values of each attention, a token that sees `length` others."""
    return float(sum(4 * part.value.out_features * length for part in module.modules() if isinstance(part, SelfAttention)))


def _head(network: Network) -> float:
    """What stands on an encoder, a position: its linear layers, and the product with the words."""
    words = [part.word_embeddings for part in network.head.modules() if isinstance(part, LanguageHead)]
    vocabulary = sum(2 * table.embedding_dim * table.num_embeddings for table in words)
    bilinear = 0.0 if network.bilinear is None else _linear(network.bilinear)
    return _linear(network.head) + vocabulary + bilinear


def _towers(encoder: Encoder) -> list[Encoder]:
    """The encoders of which an encoder consists: itself, unless it holds others."""
    inner = [part for part in encoder.modules() if isinstance(part, Encoder) and part is not encoder]
    return [tower for part in inner for tower in _towers(part)] if inner else [encoder]


def _vocabulary_head(network: Network, length: int) -> float:
    """The paper's count of the head, a position; it may read the states of several towers side by side."""
    paper = _paper(_towers(network.encoder)[0], length)
    head = next(part for part in network.head.modules() if isinstance(part, LanguageHead))
    if isinstance(head, TiedLMHead):
        return paper.vocabulary_softmax
    return replace(paper, hidden_size=head.dense.in_features).vocabulary_head


def _paper(encoder: Encoder, length: int) -> PaperTransformer:
    config, embeddings = encoder.config, encoder.embeddings
    return PaperTransformer(
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        sequence_length=length,
        vocab_size=embeddings.vocab_size,
        embedding_size=embeddings.embedding_size,
        feedforward_size=config.feedforward_size,
        num_heads=config.num_heads,
    )
