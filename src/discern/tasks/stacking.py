"""After the training of a network: its probabilities are calibrated, and a linear model of n-grams may be added to its logits.

Both are folded into the head, so that predictions and exports need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.models.heads import NGrams
from discern.tasks.features import IGNORED, Features, Ragged

# Of n-grams, as of the baseline TF-IDF; and of standardized states.
_INVERSE_REGULARIZATION = (10.0, 0.03)
# The logits of one model, or of two (network and n-grams), are scaled by positive numbers. Their logarithms have a normal prior
# with these means and deviation 1, so that a few held-out examples suffice (benchmarks/records/2026-11-28-small-data.md).
_PRIORS = ((0.3,), (0.15, 1.0))
_FOLDS = 5


def _tokens(features: Features, number: int) -> tuple[Int[Tensor, "1 L"], Bool[Tensor, "1 L"], Int[Tensor, "1 L"]]:
    columns = (features.input_ids[number], features.token_types[number])
    ids, segments = (torch.from_numpy(column.astype(np.int64))[None] for column in columns)
    return ids, torch.ones_like(ids, dtype=torch.bool), segments


def fit_ngrams(ngrams: NGrams, features: Features, numbers: Sequence[int] | None = None) -> None:
    """Fit the n-grams to labeled rows: logistic regression, multinomial for one class, one for each of several classes.

    Args:
        numbers: numbers of the rows; None: all.
    """
    numbers = range(len(features)) if numbers is None else numbers
    targets = {name: np.asarray(column)[list(numbers)] for name, column in features.targets.items()}
    rows = [_tokens(features, number) for number in numbers]
    documents = torch.bincount(torch.cat([torch.unique(ngrams.hashes(*row[:2])[0]) for row in rows]), minlength=ngrams.buckets)
    # N-grams of no training row get the lowest value, so that they hardly shrink the others.
    ngrams.frequencies.copy_(torch.where(documents > 0, ((1 + len(rows)) / (1 + documents)).log() + 1, 1.0))
    grams, values, overlaps = zip(*(ngrams.features(*row) for row in rows), strict=True)
    seen, places = torch.unique(torch.cat(grams, 1)[0], return_inverse=True)
    lengths = torch.tensor([row.shape[1] for row in grams])
    offsets, weights, overlap = lengths.cumsum(0) - lengths, torch.cat(values, 1)[0].double(), torch.cat(overlaps).double()

    def logits(weight: Tensor, bias: Tensor) -> Tensor:
        sums = F.embedding_bag(places, weight[: len(seen)], offsets, per_sample_weights=weights, mode="sum")
        return sums + overlap @ weight[len(seen) :] + bias

    shape = (len(seen) + overlap.shape[1], len(ngrams.bias))
    weight, bias = _logistic_regression(logits, shape, targets, _INVERSE_REGULARIZATION[0])
    ngrams.weight.zero_()
    ngrams.weight[seen] = weight[: len(seen)].float()
    ngrams.overlap.copy_(weight[len(seen) :])
    ngrams.bias.copy_(bias)


def ngram_logits(ngrams: NGrams, features: Features, numbers: Iterable[int]) -> Float[Tensor, "N C"]:
    """The logits of the n-grams for the rows with these numbers."""
    return torch.cat([ngrams(*_tokens(features, number)) for number in numbers])


def fit_few_shot(output: nn.Linear, ngrams: NGrams, states: Float[Tensor, "N D"], features: Features) -> None:
    """Fit the output layer to the states of few rows, and the n-grams, scaled by what cross-validation shows of both."""
    labels = np.asarray(features.targets["class"])
    order = np.random.default_rng(0).permutation(len(labels))
    logits: list[list[Tensor]] = [[], []]
    for fold in range(_FOLDS):
        train, held_out = np.delete(order, slice(fold, None, _FOLDS)), order[fold::_FOLDS]
        fit_linear(output, states[train], {"class": labels[train]})
        fit_ngrams(ngrams, features, train.tolist())
        logits[0].append(output(states[held_out]).detach())
        logits[1].append(ngram_logits(ngrams, features, held_out.tolist()))
    held_out = np.concatenate([order[fold::_FOLDS] for fold in range(_FOLDS)])
    scales = fit_scales([torch.cat(parts) for parts in logits], {"class": labels[held_out]})
    fit_linear(output, states, features.targets)
    fit_ngrams(ngrams, features)
    scale(scales, output, ngrams)


def scale(scales: Sequence[float], output: nn.Linear, ngrams: NGrams | None) -> None:
    """Fold the factors of the logits into the layers that give them."""
    with torch.no_grad():
        for layer, factor in zip((output, ngrams), scales, strict=False):
            for tensor in (getattr(layer, name, None) for name in ("weight", "overlap", "bias")):
                if tensor is not None:
                    tensor.mul_(factor)


def fit_linear(layer: nn.Linear, states: Float[Tensor, "N D"], targets: Mapping[str, Any]) -> None:
    """Fit a linear layer to the states of labeled rows, standardized: logistic regression."""
    mean, deviation = states.double().mean(0), states.double().std(0).clamp(min=1e-6)
    standardized = (states - mean) / deviation

    def logits(weight: Tensor, bias: Tensor) -> Tensor:
        return standardized @ weight + bias

    weight, bias = _logistic_regression(logits, layer.weight.shape[::-1], targets, _INVERSE_REGULARIZATION[1])
    weight = weight.T / deviation
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias - weight @ mean)


def fit_scales(logits: Sequence[Float[Tensor, "N C"]], targets: Mapping[str, Any]) -> list[float]:
    """The factors of the logits of each model whose weighted sum is most likely on held-out rows; of one model, 1 / temperature.

    Args:
        logits: logits of each model.
        targets: `class`, `classes` or `tags` of the rows.

    Reference: Guo et al. 2017, "On calibration of modern neural networks", section 4.2.
    Differs: a prior, which decides if there are few rows.
    """
    means = torch.tensor(_PRIORS[len(logits) - 1], dtype=torch.float64).log()
    scales, parts = means.clone(), torch.stack(tuple(logits)).double()

    def loss() -> Tensor:
        return _loss((scales.exp()[:, None, None] * parts).sum(0), targets) + (scales - means).square().sum() / 2

    _minimize([scales], loss)
    return scales.exp().tolist()


def _logistic_regression(
    logits: Callable[[Tensor, Tensor], Tensor], shape: Sequence[int], targets: Mapping[str, Any], inverse_regularization: float
) -> tuple[Float[Tensor, "F C"], Float[Tensor, "C"]]:
    """The most likely weights and biases of a linear model with an L2 penalty.

    Args:
        logits: the model, given both.
        shape: number of features and of classes.
    """
    weight, bias = torch.zeros(*shape, dtype=torch.float64), torch.zeros(shape[1], dtype=torch.float64)

    def loss() -> Tensor:
        return _loss(logits(weight, bias), targets) + weight.square().sum() / (2 * inverse_regularization)

    _minimize([weight, bias], loss)
    return weight, bias


def _loss(logits: Float[Tensor, "N C"], targets: Mapping[str, Any]) -> Tensor:
    """The negative log-likelihood of the labels, summed, in nats."""
    name, column = next(iter(targets.items()))
    labels = torch.from_numpy(np.asarray(column.values if isinstance(column, Ragged) else column))
    if name == "classes":
        return F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="sum")
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="sum")


def _minimize(parameters: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Minimize a convex loss."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_()
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        for parameter in parameters:
            parameter.requires_grad_(False)
