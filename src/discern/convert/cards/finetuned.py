"""The model card of a fine-tuned model. A fact that is not known is shown as "not recorded"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from discern.convert.cards.markdown import render
from discern.convert.cards.model import language_code
from discern.interop.finetuned import HeadWeights, OwnHead
from discern.interop.huggingface import HuggingFaceModel

_PIPELINE_TAGS = {
    "classification": "text-classification",
    "tagging": "token-classification",
    "span": "question-answering",
    "vectors": "sentence-similarity",
}
_AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
    "vectors": "AutoModel",
}


@dataclass(frozen=True)
class TaskFacts:
    """Facts for the card.

    Attributes:
        title: heading of the card.
        task: name of the task.
        base: name of the model that was fine-tuned.
        seed: seed of these weights.
        max_length: maximum number of tokens per row, [CLS] and [SEP] included.
        tokenizer: kind and casing, as text.
        pairs: whether an input is two texts.
        results: results of the task, as in results.json; empty if there are none.
        seeds: all seeds of the fine-tuning.
        of_seed: the main metric of this seed.
        training: `steps`, `epochs` and `kept_step` of this seed, as in scores.json; empty if there is none.
        settings: settings of the fine-tuning, by dotted key.
        versions: versions of discern and the libraries.
        language: language code of the text that the model was pre-trained on.
        text_license: license of that text.
    """

    title: str
    task: str
    base: str
    seed: int
    model: HuggingFaceModel
    head: HeadWeights | OwnHead
    max_length: int
    tokenizer: str
    pairs: bool
    results: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    of_seed: float | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    text_license: str | None = None


def task_card(facts: TaskFacts) -> str:
    """Return the content of README.md."""
    labels = list(dict.fromkeys(facts.head.labels))
    return render(
        "finetuned.md.j2",
        facts=facts,
        config=facts.model.config,
        own_head=isinstance(facts.head, OwnHead),
        language=language_code(facts.language),
        pipeline_tag=_PIPELINE_TAGS[facts.head.kind],
        auto_class=_AUTO_CLASSES[facts.head.kind],
        labels=labels,
        marks_spans=marks_spans(labels),
        several=len(facts.seeds) > 1,
        scores=_scores(facts),
        train_examples=facts.results.get("train_examples"),
        made_with=", ".join(f"{name} {version}" for name, version in facts.versions.items()),
    )


def marks_spans(labels: Sequence[str]) -> bool:
    """Whether tags mark spans (`B-LOC`), which the pipelines of transformers can merge; parts of speech do not."""
    return any(label.startswith(("B-", "I-")) for label in labels)


def _scores(facts: TaskFacts) -> dict[str, Any]:
    """Return the results that the card shows; a missing key is a KeyError, as the file is damaged then."""
    results = facts.results
    if results.get("median") is None:
        return {}
    several = ("metric", "mean", "standard_deviation", "worst", "best") if len(facts.seeds) > 1 else ()
    optional = {"selected_on": results.get("selected_on"), "failed_seeds": results.get("failed_seeds", {})}
    return {key: results[key] for key in ("split", "examples", "metrics", *several)} | optional
