"""The curves of a run's metrics log, and the last held-out metrics with their meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discern.parsing import is_number
from discern.report.charts import Chart, Line
from discern.training.metrics_log import HELD_OUT, held_out_metrics

Records = Sequence[Mapping[str, Any]]

_MEANINGS = {
    "heldout_loss": ("Loss", "What training minimizes: the weighted sum of the losses below, in nats. Lower is better."),
    "heldout_generator_loss": (
        "Generator loss",
        "Mean negative log-probability of the original token at the masked positions, in nats. Guessing every word with equal "
        "probability gives the logarithm of the vocabulary size.",
    ),
    "generator_accuracy": (
        "Generator accuracy",
        "Share of the masked positions where the likeliest token is the original one.",
    ),
    "sampled_accuracy": (
        "Sampled accuracy",
        "Share of the masked positions where the sampled token is the original one; such tokens count as original.",
    ),
    "heldout_discriminator_loss": (
        "Discriminator loss",
        "Mean negative log-probability of the correct label, original or replaced, over all tokens, in nats.",
    ),
    "discriminator_auc": (
        "Discriminator AUC",
        "Probability that a replaced token scores above an original one, without [CLS] and [SEP]. 0.5 is guessing, 1 is perfect.",
    ),
    "discriminator_precision": (
        "Discriminator precision",
        "Share of the tokens flagged at probability 1/2 that were replaced. Flagging at random gives the replaced fraction; "
        "0 if nothing was flagged.",
    ),
    "discriminator_recall": (
        "Discriminator recall",
        "Share of the replaced tokens that are flagged at probability 1/2. "
        "Low while the probabilities are close to the replaced fraction, whatever the AUC.",
    ),
    "discriminator_accuracy": ("Discriminator accuracy", "Share of all tokens that are classified correctly at probability 1/2."),
    "replaced_fraction": (
        "Replaced fraction",
        "Share of all tokens that the generator replaced with a different token; with replace-mlm, share of the chosen tokens.",
    ),
    "heldout_mlm_loss": (
        "Loss",
        "Mean negative log-probability of the original token at the positions of the loss, in nats. Guessing every word with "
        "equal probability gives the logarithm of the vocabulary size.",
    ),
    "mlm_accuracy": (
        "Accuracy",
        "Share of the positions of the loss where the likeliest token is the original one: the chosen positions, or all tokens "
        "with all-tokens-mlm.",
    ),
    "masked_accuracy": (
        "Accuracy at chosen positions",
        "Share of the chosen positions where the likeliest token is the original one.",
    ),
    "copy_probability": ("Copy probability", "Mean probability of copying the input token."),
    "heldout_permutation_lm_loss": (
        "Loss",
        "Mean negative log-probability of the token at the predicted positions, each given the context and the positions "
        "before it in a random order, in nats. Guessing every word with equal probability gives the logarithm of the vocabulary "
        "size.",
    ),
    "permutation_lm_accuracy": ("Accuracy", "Share of the predicted positions where the likeliest token is the correct one."),
    "heldout_next_sentence_loss": (
        "Next-sentence loss",
        "Mean negative log-probability of the correct answer to whether the second segment follows the first, in nats. "
        "0.6931 is guessing.",
    ),
    "next_sentence_accuracy": (
        "Next-sentence accuracy",
        "Share of the rows where this is predicted correctly; guessing gives one half if B follows A in half of the rows.",
    ),
    "next_sentence_share": (
        "B follows A",
        "Share of the rows where segment B follows segment A in the text; "
        "below one half if sentences are long compared with the rows.",
    ),
}
"""Name and meaning of each held-out metric, by its key in the metrics log, in the order of the page."""


@dataclass(frozen=True)
class HeldOutMetric:
    """A metric of the last evaluation, with its meaning."""

    name: str
    value: float
    meaning: str


def run_charts(records: Records) -> list[Chart]:
    """The curves that a metrics log has data for.

    Args:
        records: lines of the metrics log, oldest first, each with its "step".
    """
    held_out = [
        ("Generator accuracy", {"generator_accuracy": "likeliest token", "sampled_accuracy": "sampled token"}),
        ("Accuracy of word prediction", {"mlm_accuracy": "positions of the loss", "masked_accuracy": "chosen positions"}),
        ("Accuracy at predicted positions", {"permutation_lm_accuracy": "likeliest token"}),
        ("Accuracy of next-sentence prediction", {"next_sentence_accuracy": "predicted correctly"}),
        (
            "Discriminator at probability 1/2",
            {
                "discriminator_precision": "precision",
                "discriminator_recall": "recall",
                "replaced_fraction": "replaced fraction",
            },
        ),
    ]
    auc = _lines(records, {"discriminator_auc": "AUC"})
    norms = _lines(records, {"grad_norm": "norm"})
    positive = all(value > 0 for line in norms for value in line.values)
    charts = [
        *_losses(records),
        Chart("Discriminator AUC, held out", "AUC", auc, level=0.5, level_label="guessing"),
        *(Chart(f"{title}, held out", "share", _lines(records, keys)) for title, keys in held_out),
        Chart("Learning rate", "learning rate", _lines(records, {"learning_rate": "learning rate"})),
        Chart("Gradient norm before clipping", "norm", norms, logarithmic=positive),
        Chart("Speed of training", "tokens per second", _lines(records, {"tokens_per_second": "tokens per second"})),
    ]
    return [chart for chart in charts if chart.lines]


def last_held_out(records: Records) -> tuple[int | None, list[HeldOutMetric]]:
    """The step and the metrics of the last evaluation; (None, []) without an evaluation."""
    last = next((record for record in reversed(records) if any(key.startswith(HELD_OUT) for key in record)), None)
    if last is None:
        return None, []
    found = held_out_metrics(last)
    if sum(key.endswith("_loss") for key in found) == 2:  # with one term, the sum is the same number
        found.pop("heldout_loss", None)
    order = [key for key in _MEANINGS if key in found] + [key for key in found if key not in _MEANINGS]
    return last["step"], [_metric(key, found) for key in order]


def _metric(key: str, found: Mapping[str, float]) -> HeldOutMetric:
    name, meaning = _MEANINGS.get(key, (key, ""))
    replaced = found.get("replaced_fraction")
    if replaced is not None and 0 < replaced < 1:
        if key == "heldout_discriminator_loss":
            entropy = -replaced * math.log(replaced) - (1 - replaced) * math.log(1 - replaced)
            meaning += f" A constant prediction of the replaced fraction gives {entropy:.4f}."
        if key == "discriminator_accuracy":
            meaning += f" Always predicting 'original' gives {1 - replaced:.4f}."
    return HeldOutMetric(name, found[key], meaning)


def _losses(records: Records) -> list[Chart]:
    """One chart per loss, in training and held out; the sum first, unless there is only one term."""
    keys = {key: None for record in records for key in record if key.endswith("_loss") and not key.startswith(HELD_OUT)}
    names = ["loss", *keys] if len(keys) != 1 else list(keys)
    return [
        Chart(
            _loss_title(name),
            "nats",
            _lines(records, {name: "training", f"{HELD_OUT}{name}": "held out"}),
        )
        for name in names
    ]


def metric_title(key: str) -> str:
    """A key of the metrics log in words, with the split it was measured on."""
    if key in _MEANINGS and not key.startswith(HELD_OUT):
        return f"{_MEANINGS[key][0]}, held out"
    words = _loss_title(key.removeprefix(HELD_OUT))
    return f"{words}, held out" if key.startswith(HELD_OUT) else f"{words}, training" if key.endswith("loss") else words


def _loss_title(key: str) -> str:
    titles = {
        "loss": "Loss, weighted sum",
        "mlm_loss": "Loss",
        "permutation_lm_loss": "Loss",
        "next_sentence_loss": "Next-sentence loss",
    }
    return titles.get(key, key.replace("_", " ").capitalize())


def _lines(records: Records, labels: Mapping[str, str]) -> list[Line]:
    lines = []
    for key, label in labels.items():
        points = [(record["step"], record[key]) for record in records if is_number(record.get(key))]
        if points:
            lines.append(Line(label, [step for step, _ in points], [value for _, value in points]))
    return lines
