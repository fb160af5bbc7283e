"""Supervised tasks: how their files are read, what is learned, and how it is scored.

A named task is a row of the table in `named`, registered below. `base` has the contracts; `classification`,
`tagging` and `questions` are the families that do the work, and `supervised` trains them with the loop of pre-training.
`contrastive` trains text embeddings, by the objective of `contrastive_objective`.
"""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

tasks: Registry[Any] = Registry("task", "discern.tasks")
for _name in (
    *("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"),
    *("squad1", "squad2", "cmrc2018", "newsqa", "naturalqs", "triviaqa", "searchqa", "hotpotqa", "squad-mrqa"),
    *("chunk", "ner", "weibo-ner", "chnsenticorp", "tnews", "iflytek", "afqmc", "ocnli", "cmnli"),
):
    tasks.register(_name, "discern.tasks.named:TASKS")

families: Registry[Any] = Registry("family of tasks")
families.register("classification", "discern.tasks.classification:Classification")
families.register("tagging", "discern.tasks.tagging:Tagging")
families.register("pairs", "discern.tasks.contrastive:Contrastive")
families.register("squad1", "discern.tasks.questions:Questions")
families.register("squad2", "discern.tasks.questions:Squad2Questions")
families.register("cmrc", "discern.tasks.questions:CmrcQuestions")


def known_definition(name: str) -> Any:
    """The registered definition of a task; None for a task from the user's own files."""
    return tasks.load(name) if name in tasks.names() else None
