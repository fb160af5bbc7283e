"""What a run's journal shows: its curves, and its last held-out figures with what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discern.report.charts import Chart, Line
from discern.training.journal import HELD_OUT, held_out_figures, is_number

Records = Sequence[Mapping[str, Any]]

_MEANINGS = {
    "heldout_loss": ("Loss", "What training minimises: the weighted sum of the losses below, in nats. Lower is better."),
    "heldout_generator_loss": (
        "Generator loss",
        "Mean negative log-probability of the original token at the masked positions, in nats. Even guessing gives the logarithm "
        "of the vocabulary's size.",
    ),
    "generator_accuracy": ("Generator accuracy", "Share of the masked positions where its likeliest token is the original one."),
    "sampled_accuracy": (
        "Sampled accuracy",
        "Share of the masked positions where the token that it drew is the original one; these count as original.",
    ),
    "heldout_discriminator_loss": (
        "Discriminator loss",
        "Mean negative log-probability of the right answer, original or replaced, over all tokens, in nats.",
    ),
    "discriminator_auc": (
        "Discriminator AUC",
        "Probability that a replaced token scores above an original one, without [CLS] and [SEP]. 0.5 is guessing, 1 is perfect.",
    ),
    "discriminator_precision": (
        "Discriminator precision",
        "Share of the tokens flagged at probability 1/2 that were replaced. Flagging at random gives the replaced fraction; "
        "0 where nothing was flagged.",
    ),
    "discriminator_recall": (
        "Discriminator recall",
        "Share of the replaced tokens that are flagged at probability 1/2. Low while the networks are unsure, whatever the AUC.",
    ),
    "discriminator_accuracy": ("Discriminator accuracy", "Share of all tokens judged rightly at probability 1/2."),
    "replaced_fraction": ("Replaced fraction", "Share of all tokens that the generator replaced by another."),
    "heldout_mlm_loss": (
        "Loss",
        "Mean negative log-probability of the original token at the masked positions, in nats. Even guessing gives the logarithm "
        "of the vocabulary's size.",
    ),
    "mlm_accuracy": ("Accuracy", "Share of the masked positions where the likeliest token is the original one."),
    "heldout_permutation_lm_loss": (
        "Loss",
        "Mean negative log-probability of the token at the predicted positions, each told by the context and the positions "
        "before it in a random order, in nats. Even guessing gives the logarithm of the vocabulary's size.",
    ),
    "permutation_lm_accuracy": ("Accuracy", "Share of the predicted positions where the likeliest token is the right one."),
    "heldout_next_sentence_loss": (
        "Next-sentence loss",
        "Mean negative log-probability of the right answer to whether the second segment follows the first, in nats. "
        "0.6931 is guessing.",
    ),
    "next_sentence_accuracy": (
        "Next-sentence accuracy",
        "Share of the rows where that is answered rightly; half is guessing where B follows A in half of them.",
    ),
    "next_sentence_share": ("B follows A", "Share of the rows where it does; below half where sentences are long for the rows."),
}
"""Held-out figures by their key in the journal, in the order of the page: name and meaning."""


@dataclass(frozen=True)
class HeldOutFigure:
    """A figure of the last evaluation, and what it says."""

    name: str
    value: float
    meaning: str


def run_charts(records: Records) -> list[Chart]:
    """The curves that a journal has data for; a key that it lacks leaves its curve out.

    Args:
        records: lines of the journal, oldest first, each with its "step".
    """
    held_out = [
        ("Generator accuracy", {"generator_accuracy": "likeliest token", "sampled_accuracy": "sampled token"}),
        ("Accuracy at masked positions", {"mlm_accuracy": "likeliest token"}),
        ("Accuracy at predicted positions", {"permutation_lm_accuracy": "likeliest token"}),
        ("Accuracy of next-sentence prediction", {"next_sentence_accuracy": "answered rightly"}),
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


def last_held_out(records: Records) -> tuple[int | None, list[HeldOutFigure]]:
    """The figures of the last evaluation, and the step it was of; None where nothing was evaluated."""
    last = next((record for record in reversed(records) if any(key.startswith(HELD_OUT) for key in record)), None)
    if last is None:
        return None, []
    found = held_out_figures(last)
    if sum(key.endswith("_loss") for key in found) == 2:  # one term: the sum says nothing of its own
        found.pop("heldout_loss", None)
    order = [key for key in _MEANINGS if key in found] + [key for key in found if key not in _MEANINGS]
    return last["step"], [_figure(key, found) for key in order]


def _figure(key: str, found: Mapping[str, float]) -> HeldOutFigure:
    name, meaning = _MEANINGS.get(key, (key, ""))
    replaced = found.get("replaced_fraction")
    if replaced is not None and 0 < replaced < 1:
        if key == "heldout_discriminator_loss":
            entropy = -replaced * math.log(replaced) - (1 - replaced) * math.log(1 - replaced)
            meaning += f" Giving every token the replaced fraction as its probability would give {entropy:.4f}."
        if key == "discriminator_accuracy":
            meaning += f" Always answering 'original' would give {1 - replaced:.4f}."
    return HeldOutFigure(name, found[key], meaning)


def _losses(records: Records) -> list[Chart]:
    """A chart a loss, in training and held out; the sum first, unless it is of one term."""
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


def figure_title(key: str) -> str:
    """A key of the journal in words, whether of training or held out."""
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
