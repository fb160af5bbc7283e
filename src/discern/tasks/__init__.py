"""Supervised tasks: how their files are read, what is learned, and how it is scored.

A named task is a `Definition` in the module of its data set, registered below. `base` has the contracts; `classification`,
`tagging` and `questions` are the families that do the work, and `supervised` trains them with the loop of pre-training.
`contrastive` trains text embeddings, by the objective of `contrastive_objective`.
"""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

tasks: Registry[Any] = Registry("task", "discern.tasks")
for _name in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"):
    tasks.register(_name, f"discern.tasks.glue:{_name.upper()}")
for _name in ("squad1", "squad2", "cmrc2018"):
    tasks.register(_name, f"discern.tasks.squad:{_name.upper()}")
for _name in ("newsqa", "naturalqs", "triviaqa", "searchqa", "hotpotqa", "squad-mrqa"):
    tasks.register(_name, f"discern.tasks.mrqa:{_name.upper().replace('-', '_')}")
for _name in ("chunk", "ner", "weibo-ner"):
    tasks.register(_name, f"discern.tasks.conll:{_name.upper().replace('-', '_')}")
for _name in ("chnsenticorp", "tnews", "iflytek", "afqmc", "ocnli", "cmnli"):
    tasks.register(_name, f"discern.tasks.clue:{_name.upper()}")

families: Registry[Any] = Registry("family of tasks")
families.register("classification", "discern.tasks.classification:Classification")
families.register("tagging", "discern.tasks.tagging:Tagging")
families.register("pairs", "discern.tasks.contrastive:Contrastive")
families.register("squad1", "discern.tasks.squad:Squad1Questions")
families.register("squad2", "discern.tasks.squad:Squad2Questions")
families.register("cmrc", "discern.tasks.squad:CmrcQuestions")
families.register("mrqa", "discern.tasks.mrqa:MrqaQuestions")
