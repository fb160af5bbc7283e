"""Summary of a run or a fine-tuned model in a few sentences, for the top of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from discern.training.diagnosis import Finding, ailing

# Of the AUC; 0.5 is guessing.
_AUC_WORDS = (
    (0.55, "hardly better than by guessing"),
    (0.7, "somewhat better than by guessing"),
    (0.85, "clearly"),
    (1.01, "well"),
)


def run_verdict(step: int, max_steps: int, figures: Mapping[str, float], findings: Sequence[Finding]) -> list[str]:
    """Sentences about a pre-training run.

    Args:
        figures: of the last evaluation, by name.
        findings: what a diagnosis makes of them.
    """
    if not figures:
        return [f"Step {step:,} of {max_steps:,}; there is no evaluation to judge by yet."]
    early = [finding for finding in findings if finding.cause.startswith("too early to tell")]
    begun = f"Step {step:,} of {max_steps:,}. " if step < max_steps else ""
    found = [begun + " ".join(_learned(figures))]
    ill = ailing(findings)
    found += [f"Unusual: {each.cause}." + (f" Try {each.knob}." if each.knob else "") for each in ill]
    if early:
        found.append("It is too early to judge the run.")
    elif not ill:
        found.append("All figures are within their usual ranges.")
    return found


def _learned(figures: Mapping[str, float]) -> list[str]:
    said = []
    auc = figures.get("discriminator_auc")
    if auc is not None:
        how = next(words for bound, words in _AUC_WORDS if auc < bound)
        said.append(f"The discriminator tells replaced tokens from original ones {how} (AUC {auc:.3f}; 0.5 is guessing).")
    precision, recall = figures.get("discriminator_precision"), figures.get("discriminator_recall")
    if precision is not None and recall is not None:
        right = f", and {precision:.0%} of the tokens it marks were replaced" if recall else ""
        said.append(f"At probability 1/2 it marks {recall:.0%} of the replaced tokens{right}.")
    for name, who in (("generator_accuracy", "The generator"), ("mlm_accuracy", "The network")):
        if name in figures:
            said.append(f"{who} predicts {figures[name]:.0%} of the masked tokens correctly.")
    if "permutation_lm_accuracy" in figures:
        said.append(f"The network gets {figures['permutation_lm_accuracy']:.0%} of the predicted tokens right.")
    return said


def task_verdict(name: str, entry: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]], against: str | None) -> list[str]:
    """Sentences about a fine-tuned model on one task.

    Args:
        entry: of the task, as results.json has it.
        mistakes: all of the best seed.
        against: what the baselines say against the score; None: nothing.
    """
    if entry["median"] is None:
        return [f"{name}: no seed has a score; all of them failed."]
    metric, baselines = entry["metric"], entry.get("baselines") or {}
    found = f"{name}: {metric.replace('_', ' ')} {entry['median']:.3f} on {entry['examples']:,} examples ({entry['split']})"
    if against is not None:
        found += f". {against}"
    elif baselines and entry.get("beats_baselines"):
        best = max(baselines.values(), key=lambda each: each["metrics"][metric])
        found += f", which beats every simple baseline (the best, {best['title']}: {best['metrics'][metric]:.3f})."
    else:
        found += "."
    return [found, *_kinds_of_mistakes(entry, mistakes)]


def _kinds_of_mistakes(entry: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    metrics = entry["metrics"]
    found = []
    if {"precision", "recall"} <= metrics.keys():
        found.append(
            f"It finds {metrics['recall']:.0%} of the spans, and {metrics['precision']:.0%} of the spans it marks are correct."
        )
    confusions = Counter(
        (str(each["gold"]), str(each["label"])) for each in mistakes if isinstance(each.get("label"), str) and "gold" in each
    )
    if confusions:
        ((gold, said), count), *_ = confusions.most_common(1)
        found.append(f"The most frequent mistake: '{gold}' predicted as '{said}' ({count:,} of {len(mistakes):,} mistakes).")
    kinds = Counter(str(span[2]) for each in mistakes for span in each.get("missed", ()))
    if kinds:
        (kind, count), *_ = kinds.most_common(1)
        found.append(f"Most often missed: {kind} ({count:,} of {sum(kinds.values()):,} missed spans).")
    return found
