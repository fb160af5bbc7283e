"""How good a network is, in sentences: what the top of a page says about a run or a fine-tuned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from discern.diagnosis.health import Finding, unusual_findings
from discern.errors import counted
from discern.tasks import tasks as registry
from discern.tasks.baselines import comparison_sentence


def run_verdict(steps: str, metrics: Mapping[str, float], findings: Sequence[Finding]) -> list[str]:
    """Sentences about a pre-training run.

    Args:
        steps: a sentence about the steps of the run.
        metrics: metrics of the last evaluation, by name.
        findings: diagnosis of these metrics.
    """
    if not metrics:
        return [f"{steps} There is no evaluation during training yet."]
    sentences, unusual = [steps], unusual_findings(findings)
    right, replaced = metrics.get("discriminator_accuracy"), metrics.get("replaced_fraction")
    if right is not None and replaced is not None:
        sentences.append(
            f"Held out, it classifies {right:.1%} of the tokens correctly (always answering 'original': {1 - replaced:.1%})."
        )
    # If the networks are ill, the AUC means nothing: against a generator that replaces words at random, it is high.
    ill = any(finding.name.startswith(("discriminator", "replaced")) for finding in unusual)
    for finding in findings:
        if finding.name.endswith("_gain") and finding.value is not None:
            compared = "better" if finding.value >= 0 else "worse"
            sentences.append(f"It predicts words {abs(finding.value):.2f} nats {compared} than word frequencies alone.")
        elif finding.name == "discriminator_auc" and not ill and not finding.early:
            sentences.append(f"{finding.cause}.")
    # The accuracy of `all-tokens-mlm` includes the tokens that it copies.
    for name in ("generator_accuracy", "masked_accuracy", "mlm_accuracy", "permutation_lm_accuracy"):
        if name in metrics:
            who = "The generator" if name == "generator_accuracy" else "The network"
            sentences.append(f"{who} predicts {metrics[name]:.0%} of the hidden tokens correctly.")
            break
    verdict = [" ".join(sentences)]
    verdict += [f"Unusual: {finding.cause}." + (f" Try {finding.knob}." if finding.knob else "") for finding in unusual]
    # The share of duplicates is of the text, not of the evaluation.
    if any(finding.early for finding in findings):
        verdict.append("It is too early for a verdict.")
    elif not unusual and any(finding.verdict == "fine" and finding.name != "duplicate_fraction" for finding in findings):
        verdict.append("All diagnosed metrics are within their usual ranges.")
    return verdict


def task_title(entry: Mapping[str, Any]) -> str:
    """The name of a task; for a user's own files, that of the file that the network was trained on.

    Args:
        entry: entry of the task in results.json.
    """
    name, train = entry["task"], entry.get("files", {}).get("train")
    return Path(train).name if train and name not in registry.names() else str(name)


def task_verdict(title: str, entry: Mapping[str, Any]) -> list[str]:
    """Sentences about a fine-tuned model on one task.

    Args:
        entry: entry of the task in results.json.
    """
    if entry["median"] is None:
        return [f"{title}: no seed has a score; all seeds failed."]
    interval = "" if entry.get("interval") is None else ", 95 % interval {:.3f} to {:.3f}".format(*entry["interval"])
    metric, examples, metrics = entry["metric"].replace("_", " "), counted(entry["examples"], "example"), entry["metrics"]
    score = f"{title}: {metric} {entry['median']:.3f} on {examples} ({entry['split']}{interval})."
    verdict = [f"{score} {comparison_sentence(entry) or ''}".rstrip()]
    if {"precision", "recall"} <= metrics.keys():
        verdict.append(
            f"It finds {metrics['recall']:.0%} of the spans, and {metrics['precision']:.0%} of the spans it marks are correct."
        )
    return verdict
