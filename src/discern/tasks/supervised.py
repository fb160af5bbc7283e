"""Supervised training as an objective: one encoder and a head per task, trained by the loop of pre-training.

After the training, the probabilities of a network are calibrated, and a linear model of n-grams may be added to its logits. Both
are folded into the head, so that predictions and exports need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.corruption.randomness import Randomness, key_of
from discern.errors import ConfigError, NumericsError
from discern.models.base import Encoder, Network, truncated_normal
from discern.models.heads import NGrams, PredictionLayers, mean_state
from discern.objectives.base import Evaluator, Objective
from discern.objectives.losses import distillation_loss
from discern.progress import Progress
from discern.tasks.base import Outputs, Task, TaskHead
from discern.tasks.features import IGNORED, Features, Ragged, TaskBatch, TaskRows, TaskRowsInOrder
from discern.types import CorruptedBatch, LossTerm, Spans, StepOutput, TokenBatch, map_tensors

FrameName = Literal["cls-first", "cls-last"]


@dataclass(frozen=True)
class Distillation:
    """How a teacher's outputs are learned besides the labels; see the settings of fine-tuning.

    Attributes:
        width: number of values of the teacher's states.
    """

    weight: float
    temperature: float
    states_weight: float
    width: int


@dataclass(frozen=True, eq=False)
class Split:
    """Examples and their features."""

    examples: tuple[Any, ...]
    features: Features


def supervised(encoder: Encoder, tasks: Mapping[str, Task[Any]], **settings: Any) -> SupervisedObjective:
    """The objective that trains the tasks: that of their family if it has one of its own.

    Args:
        settings: the other arguments of `SupervisedObjective`.

    Raises:
        ConfigError: a task whose family has an objective of its own is not the only one.
    """
    for name, task in tasks.items():
        if task.objective is not None:
            if len(tasks) > 1:
                raise ConfigError(
                    f"task '{name}' has a loss over whole batches, so it can only be trained alone, but there are "
                    f"{len(tasks)} tasks",
                    hint="fine-tune on it in a separate run",
                )
            return cast(SupervisedObjective, resolve_name(task.objective)(encoder, tasks, **settings))
    return SupervisedObjective(encoder, tasks, **settings)


class SupervisedObjective(Objective):
    """The loss of each task on its rows of a batch.

    Args:
        encoder: encoder with its weights, which are trained with the heads.
        tasks: tasks by name.
        dropout: dropout before the heads.
        reduction: 'mean': the mean over the items of each task (rows, or words for tags), weighted by the task's share of the
            rows of the step, so that all rows count the same; 'sum': the sum over the batch, as in the released code. With
            gradients clipped to norm 1 the two train differently.
        sequences_per_step: rows per training step, which a sum is taken over.
        heldout: labeled splits for evaluation, of some tasks or none.
        frame: order of [CLS], the texts and the padding that the encoder expects. Tasks and heads always use `[CLS] A [SEP]` or
            `[CLS] A [SEP] B [SEP]`, padded on the right, and 'cls-first' (BERT, ELECTRA) leaves it so; 'cls-last' (XLNet): see
            `cls_last_states`.
        distillation: how the rows with a teacher's outputs are learned; None: there are none.

    Attributes:
        observes_states: whether the outputs include the mean state of each row, as `state`.
    """

    observes_states = False

    def __init__(
        self,
        encoder: Encoder,
        tasks: Mapping[str, Task[Any]],
        *,
        dropout: float = 0.1,
        reduction: Literal["mean", "sum"] = "mean",
        sequences_per_step: int = 32,
        heldout: Mapping[str, Split] | None = None,
        frame: FrameName = "cls-first",
        distillation: Distillation | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tasks = dict(tasks)
        # A generator may read embeddings of another width than that of its own settings.
        sizes = encoder.config.model_copy(update={"embedding_size": encoder.embeddings.embedding_size})
        self.heads = nn.ModuleDict({name: task.head(sizes, dropout) for name, task in tasks.items()})
        # From the student's states to the teacher's; only training needs them.
        self.projections = nn.ModuleDict()
        if distillation is not None and distillation.states_weight:
            self.projections.update({name: nn.Linear(sizes.hidden_size, distillation.width) for name in tasks})
        self._distillation = distillation
        self.heldout = dict(heldout or {})
        self._frame = frame
        self._sums = reduction == "sum"
        self._sequences = sequences_per_step

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize the heads: Glorot uniform with zero biases, or as the encoder prescribes. The encoder is unchanged."""
        generator = torch.Generator().manual_seed(key_of(seed, "heads"))
        layers = self.encoder.config.head_layers()
        for head in (*self.heads.values(), *self.projections.values()):
            stds: dict[nn.Module, float | None] = {}
            if isinstance(inner := getattr(head, "inner", None), PredictionLayers):
                stds = {inner.dense: layers.dense_std, cast(nn.Module, head.output): layers.output_std}
            for part in head.modules():
                if isinstance(part, nn.Linear):
                    if (std := stds.get(part)) is not None:
                        truncated_normal(part.weight, generator, std)
                    else:
                        nn.init.xavier_uniform_(part.weight, generator=generator)
                    if part.bias is not None:
                        nn.init.zeros_(part.bias)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        """The batch unchanged, as supervised training corrupts nothing. Its items are counted while it is on the host."""
        batch = cast(TaskBatch, batch)
        groups = tuple(
            replace(group, count=self.tasks[group.task].items(group) if group.targets else 0) for group in batch.groups
        )
        nowhere = torch.zeros_like(batch.attention_mask)
        return CorruptedBatch(replace(batch, groups=groups), batch.input_ids, nowhere, 0, int(batch.attention_mask.sum()))

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        groups = cast(TaskBatch, batch.tokens).groups
        return {group.task: batch.tokens.size if self._sums else group.count for group in groups}

    def hidden_states(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None,
        token_type_ids: Int[Tensor, "B L"],
        spans: Spans | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the tokens, in the order of the task's rows whatever the frame."""
        if self._frame == "cls-last":
            return cls_last_states(self.encoder, input_ids, attention_mask, token_type_ids)
        # Encoders of other packages need not take spans; only those that do are given any.
        context = () if spans is None else (None, None, spans)
        return self.encoder(input_ids, attention_mask, token_type_ids, *context)  # type: ignore[no-any-return]

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = cast(TaskBatch, batch.tokens)
        hidden = self.hidden_states(tokens.input_ids, tokens.visible_mask, tokens.token_type_ids, tokens.spans)
        terms: dict[str, LossTerm] = {}
        observations: dict[str, Tensor] = {}
        counts = self.counts(batch)
        for group in tokens.groups:
            whole = len(group.rows) == tokens.size
            rows = tokens if whole else _select(tokens, group.rows)
            head = cast(TaskHead, self.heads[group.task])
            states = hidden if whole else hidden[group.rows]
            loss, outputs = head(head.inputs(states, self.encoder, rows.input_ids), rows, group)
            if self.observes_states:
                outputs["state"] = mean_state(states, rows.attention_mask)
            if self._distillation is not None and "teacher" in group.targets:
                loss = self._taught(cast(Tensor, loss), states, outputs["logits"], rows, group)
            # The count is the number of items; a sum is the mean over the sequences of a step times their number. Without its
            # share, a task with one row in a step would weigh as much as a task with all the others.
            weight = float(self._sequences) if self._sums else group.share
            terms[group.task] = LossTerm(hidden.new_zeros(()) if loss is None else loss, counts[group.task], weight)
            observations |= {f"{group.task}/{name}": value.detach() for name, value in outputs.items()}
        return StepOutput(terms, observations)

    def _taught(self, loss: Tensor, states: Tensor, logits: Float[Tensor, "R C"], rows: TokenBatch, group: TaskRows) -> Tensor:
        """The loss with the teacher's part, summed over the rows.

        Reference: `distillation_loss`; the states are compared by their cosine, as in DistilBERT (Sanh et al. 2019, section 2).
        """
        settings = cast(Distillation, self._distillation)
        distance = teacher_loss(logits, group.targets["teacher"], self.tasks[group.task].labels.kind, settings.temperature)
        loss = (1 - settings.weight) * loss + settings.weight * distance
        if settings.states_weight:
            projected = self.projections[group.task](mean_state(states, rows.attention_mask))
            cosine = F.cosine_similarity(projected.float(), group.targets["teacher_state"], dim=-1)
            loss = loss + settings.states_weight * (1 - cosine).sum()
        return loss

    def networks(self) -> dict[str, Network]:
        return {name: Network(self.encoder, self.heads[name]) for name in self.tasks}

    def evaluator(self) -> SupervisedEvaluator:
        return SupervisedEvaluator(self.tasks, self.heldout)


def teacher_loss(logits: Float[Tensor, "R C"], teacher: Float[Tensor, "R C"], kind: str, temperature: float) -> Float[Tensor, ""]:
    """How far the predictions are from the teacher's, summed over the rows: squared distances of scores, otherwise in nats.

    Args:
        kind: 'single', 'multi' or 'number', as in `Labels`.
    """
    if kind == "number":
        return (logits - teacher).square().sum()
    if kind == "multi":  # each class against its absence, whose logit is 0
        logits, teacher = (torch.stack([each, torch.zeros_like(each)], -1) for each in (logits, teacher))
    return distillation_loss(logits, teacher, temperature).sum()


class SupervisedEvaluator(Evaluator):
    """Collects the outputs for all rows of a split, and computes the metrics over the whole of it.

    The metrics of several tasks are prefixed by their names ("rte_accuracy"); `mean_headline` is then the mean of their
    headline metrics, and `mean_loss` the mean of their losses.
    """

    def __init__(self, tasks: Mapping[str, Task[Any]], splits: Mapping[str, Split]) -> None:
        self._tasks = tasks
        self._splits = splits
        self.outputs: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in tasks}
        self._losses = dict.fromkeys(tasks, 0.0)
        self._items = dict.fromkeys(tasks, 0)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        tokens = cast(TaskBatch, batch.tokens)
        for group in tokens.groups:
            prefix = f"{group.task}/"
            arrays = {
                name.removeprefix(prefix): value.float().cpu().numpy()
                for name, value in output.observations.items()
                if name.startswith(prefix)
            }
            for row, number in enumerate(group.features.tolist()):
                self.outputs[group.task][number] = {name: array[row] for name, array in arrays.items()}
            self._losses[group.task] += float(output.terms[group.task].total.detach())
            self._items[group.task] += group.count

    def merge(self, other: Evaluator) -> None:
        other = cast(SupervisedEvaluator, other)
        for name in self._tasks:
            self.outputs[name] |= other.outputs[name]
            self._losses[name] += other._losses[name]
            self._items[name] += other._items[name]

    def ordered(self, task: str) -> Outputs:
        """Outputs for the rows of a task, in their order."""
        return [outputs for _, outputs in sorted(self.outputs[task].items())]

    def loss(self, task: str) -> float:
        """Mean loss over the items of a task, in nats; 0 without targets."""
        return self._losses[task] / max(self._items[task], 1)

    def compute(self) -> dict[str, float]:
        """The metrics by name.

        Raises:
            NumericsError: the outputs of the network are not finite.
        """
        metrics: dict[str, float] = {}
        headlines, losses = [], []
        for name, split in self._splits.items():
            task, outputs, loss = self._tasks[name], self.ordered(name), self.loss(name)
            refuse_non_finite(name, outputs, loss)
            scores = task.score(split.examples, task.predict(split.examples, split.features, outputs)).values
            prefix = f"{name}_" if len(self._splits) > 1 else ""
            metrics |= {f"{prefix}{metric}": value for metric, value in {"loss": loss, **scores}.items()}
            headlines.append(scores[task.metrics[0]])
            losses.append(loss)
        if len(losses) > 1:
            metrics |= {"mean_headline": sum(headlines) / len(headlines), "mean_loss": sum(losses) / len(losses)}
        return metrics


def are_finite(outputs: Outputs) -> bool:
    """Whether all outputs are finite numbers."""
    return all(np.isfinite(array).all() for row in outputs for array in row.values())


def refuse_non_finite(
    task: str, outputs: Outputs, loss: float, hint: str = "try a lower optimizer.learning_rate or a longer warm-up"
) -> None:
    """Refuse the outputs of a network whose weights have overflowed.

    Raises:
        NumericsError: an output or the loss is not finite.
    """
    if not math.isfinite(loss) or not are_finite(outputs):
        raise NumericsError(f"{task}: the outputs of the network are not finite (loss {loss:.4g})", hint=hint)


def _select(tokens: TaskBatch, rows: Int[Tensor, "R"]) -> TokenBatch:
    """Some rows of a batch, without their targets."""
    # The slots are on the host, and nobody reads them: they cannot be indexed without waiting for the device.
    return map_tensors(replace(tokens, spans=None, groups=(), slot=tokens.example_index), lambda tensor: tensor[rows])


_CLS_SEGMENT, _PADDING_SEGMENT = 2, 3


def cls_last_states(
    encoder: Encoder,
    input_ids: Int[Tensor, "B L"],
    attention_mask: Bool[Tensor, "B L"] | None,
    token_type_ids: Int[Tensor, "B L"],
) -> Float[Tensor, "B L D"]:
    """Hidden states of the rows `[CLS] A [SEP] B [SEP]`, of an encoder that reads `A [SEP] B [SEP] [CLS]`: XLNet.

    What it reads is padded on the left, with [CLS] and padding in segments of their own.

    Args:
        input_ids: rows, padded on the right.
        attention_mask: True = real token; None: there is no padding.

    Reference: zihangdai/xlnet, run_classifier.py; transformers' `XLNetTokenizer`.
    Differs: questions come before their contexts, as for every encoder; run_squad.py puts the context first.
    """
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
    segments = token_type_ids.masked_fill(~mask, _PADDING_SEGMENT)
    segments[:, 0] = _CLS_SEGMENT
    # Padding comes first, then the texts, then [CLS].
    ranks = mask.long()
    ranks[:, 0] = 2
    order = ranks.argsort(stable=True)
    moved_mask = None if attention_mask is None else mask.gather(1, order)
    hidden: Tensor = encoder(input_ids.gather(1, order), moved_mask, segments.gather(1, order))
    return hidden.gather(1, order.argsort()[..., None].expand_as(hidden))


# Tokens per batch: large enough for the matrix products, small enough for the caches.
_TOKENS = 4096


@torch.inference_mode()
def outputs_of(
    objective: SupervisedObjective,
    task: str,
    features: Features,
    *,
    precision: str = "float32",
    progress: Progress | None = None,
) -> tuple[Outputs, float]:
    """The outputs of a task's head for each row, and the mean loss in nats if the rows have targets (0 otherwise).

    Up to rounding, the results do not depend on how rows are batched. The objective is left in evaluation mode.
    """
    device = next(objective.parameters()).device
    rows, evaluator = TaskRowsInOrder({task: features}), objective.evaluator()
    objective.eval()
    for chosen in _batches(features.input_ids.lengths):
        batch = objective.corrupt(rows.batch(chosen, chosen), Randomness(0, 0, torch.from_numpy(chosen))).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            output = objective(batch, Randomness(0, 0, batch.tokens.example_index))
        evaluator.update(output, batch)
        if progress is not None:
            progress.advance(len(chosen))
    return evaluator.ordered(task), evaluator.loss(task)


def _batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of the rows in order of length, in batches of about `_TOKENS` tokens including padding."""
    ordered = np.sort(lengths, kind="stable")
    start = 0
    while start < len(ordered):
        # The last row of a batch is its longest.
        stop = start + 1
        while stop < len(ordered) and (stop + 1 - start) * ordered[stop] <= _TOKENS:
            stop += 1
        yield np.arange(start, stop)
        start = stop


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
    """Fit the n-grams to labeled rows: multinomial logistic regression, one for each of several classes, or ridge regression.

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
    weight, bias = _fit_glm(logits, shape, targets, _INVERSE_REGULARIZATION[0])
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
    standardized, shape = (states - mean) / deviation, layer.weight.shape[::-1]
    weight, bias = _fit_glm(lambda weight, bias: standardized @ weight + bias, shape, targets, _INVERSE_REGULARIZATION[1])
    weight = weight.T / deviation
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias - weight @ mean)


def fit_scales(logits: Sequence[Float[Tensor, "N C"]], targets: Mapping[str, Any]) -> list[float]:
    """The factors of the logits of each model whose weighted sum is most likely on held-out rows; of one model, 1 / temperature.

    Args:
        logits: logits of each model.
        targets: `class`, `classes`, `tags` or `score` of the rows.

    Reference: Guo et al. 2017, "On calibration of modern neural networks", section 4.2.
    Differs: a prior, which decides if there are few rows.
    """
    # Scores are not overconfident: the prior of their two models is the mean.
    prior = (0.5, 0.5) if "score" in targets else _PRIORS[len(logits) - 1]
    means = torch.tensor(prior, dtype=torch.float64).log()
    scales, parts = means.clone(), torch.stack(tuple(logits)).double()

    def loss() -> Tensor:
        return _loss((scales.exp()[:, None, None] * parts).sum(0), targets) + (scales - means).square().sum() / 2

    _minimize([scales], loss)
    return scales.exp().tolist()


def _fit_glm(
    logits: Callable[[Tensor, Tensor], Tensor], shape: Sequence[int], targets: Mapping[str, Any], inverse_regularization: float
) -> tuple[Float[Tensor, "F C"], Float[Tensor, "C"]]:
    """The most likely weights and biases of a generalized linear model with an L2 penalty.

    Args:
        logits: the model, given both.
        shape: number of features and of classes.
    """
    weight, bias = torch.zeros(*shape, dtype=torch.float64), torch.zeros(shape[1], dtype=torch.float64)
    penalty = 2 * inverse_regularization
    _minimize([weight, bias], lambda: _loss(logits(weight, bias), targets) + weight.square().sum() / penalty)
    return weight, bias


def _loss(logits: Float[Tensor, "N C"], targets: Mapping[str, Any]) -> Tensor:
    """The negative log-likelihood of the labels, summed, in nats. Scores are normal, with the variance of `targets`."""
    name, column = next(iter(targets.items()))
    if name == "score":
        scores = torch.from_numpy(np.asarray(column)).double()
        return (logits[:, 0] - scores).square().sum() / (2 * scores.var(correction=0).clamp(min=1e-2))
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
