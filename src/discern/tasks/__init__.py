"""Supervised tasks: what is read, learned and scored. A named task is one object and one line here."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

tasks: Registry[Any] = Registry("task", "discern.tasks")
for _name in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"):
    tasks.register(_name, f"discern.tasks.glue:{_name.upper()}")
for _name in ("squad1", "squad2", "cmrc2018", "newsqa", "naturalqs", "triviaqa", "searchqa", "hotpotqa", "squad-mrqa"):
    tasks.register(_name, f"discern.tasks.squad:{_name.upper().replace('-', '_')}")
for _name in ("chunk", "ner", "weibo-ner"):
    tasks.register(_name, f"discern.tasks.conll:{_name.upper().replace('-', '_')}")
for _name in ("chnsenticorp", "tnews"):
    tasks.register(_name, f"discern.tasks.clue:{_name.upper()}")

families: Registry[Any] = Registry("family of tasks")
families.register("classification", "discern.tasks.classification:Classification")
families.register("tagging", "discern.tasks.tagging:Tagging")
for _name, _class in (("squad1", "Squad1"), ("squad2", "Squad2"), ("mrqa", "Mrqa"), ("cmrc", "Cmrc")):
    families.register(_name, f"discern.tasks.squad:{_class}Questions")
