"""The named tasks: where their files are published, how these are read, and how the task is scored.

A row of `TABLE` has everything that is particular to a task; its family does the rest.

References: Wang et al. 2019, GLUE; Xu et al. 2020, CLUE; Rajpurkar et al. 2016, 2018, SQuAD; Cui et al. 2019, CMRC 2018; Fisch et
al. 2019, MRQA; Tjong Kim Sang and Buchholz 2000, CoNLL-2000; Tjong Kim Sang and De Meulder 2003, CoNLL-2003; Peng and Dredze
2015, Weibo NER. Lengths and epochs: Clark et al. 2020, appendix B, and the released code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from discern.tasks.base import Definition, Layout
from discern.tasks.classification import Classification
from discern.tasks.questions import CmrcQuestions, Questions, Squad2Questions
from discern.tasks.tagging import Tagging

_SPLITS = ("train", "dev", "test")
_GLUE = "gluebenchmark.com"
_CLUE = "github.com/CLUEbenchmark/CLUE"
_MRQA = "github.com/mrqa/MRQA-Shared-Task-2019"
_BINARY = ("0", "1")
_INFERENCE = ("contradiction", "entailment", "neutral")
_SENTENCE, _SENTENCES = {"text": ("sentence",)}, {"text": ("sentence1",), "pair": ("sentence2",)}


def _glue(
    name: str,
    columns: Mapping[str, tuple[str, ...]],
    label: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...] = ("accuracy",),
    *,
    header: tuple[str, ...] = (),
    **splits: tuple[str, ...],
) -> Definition[Any]:
    """A task of GLUE: TSV files in which a quotation mark is text, whose columns differ between the splits."""
    return Definition(
        name,
        Classification,
        metrics,
        {split: (f"{split}.tsv",) for split in _SPLITS} | splits,
        Layout(
            {**columns, "label": label},
            "tsv",
            kind="label" if "spearman" not in metrics else "number",
            header=header,
            verbatim=True,
            published=True,
        ),
        labels,
        report_splits=("dev_mismatched",) if "dev_mismatched" in splits else (),
        source=_GLUE,
    )


def _clue(name: str, columns: Mapping[str, tuple[str, ...]], labels: tuple[str, ...] = ()) -> Definition[Any]:
    """A task of CLUE, or of FewCLUE, whose test files have labels. Rows labeled "-" have no agreed label."""
    files = {
        "train": ("train.json", "train_few_all.json"),
        "dev": ("dev.json", "dev_few_all.json"),
        "test": ("test_public.json", "test.json"),
    }
    layout = Layout({**columns, "label": ("label",)}, "jsonl", published=True)
    return Definition(name, Classification, ("accuracy",), files, layout, labels, source=_CLUE)


def _questions(
    name: str,
    family: type[Questions],
    files: Mapping[str, tuple[str, ...]],
    format: str,
    source: str,
    *,
    metrics: tuple[str, ...] = ("exact_match", "f1"),
    license: str = "",
    max_answer_length: int | None = None,
) -> Definition[Any]:
    # The released code applies these to tasks whose name contains "qa" or "squad", and so misses naturalqs.
    defaults: dict[str, object] = {"task.sequence_length": 512, "finetune.epochs": 2.0}
    if max_answer_length is not None:
        defaults["task.max_answer_length"] = max_answer_length
    return Definition(name, family, metrics, files, Layout(format=format), (), defaults, source=source, license=license)


def _squad(version: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{split}.json", f"{split}-{version}.json") for split in _SPLITS}


def _mrqa(name: str, published: str) -> Definition[Any]:
    files = {
        split: tuple(f"{stem}{end}" for stem in (split, f"{split}/{published}") for end in (".jsonl", ".jsonl.gz"))
        for split in _SPLITS
    }
    return _questions(name, Questions, files, "mrqa", _MRQA, metrics=("f1", "exact_match"))


def _tags(name: str, files: Mapping[str, tuple[str, ...]], source: str, *, characters: bool = False) -> Definition[Any]:
    usual = {
        "train": ("train.txt", "train.conll", "train.tsv", "train.bio"),
        "dev": ("dev.txt", "valid.txt", "dev.conll", "dev.tsv", "dev.bio"),
        "test": ("test.txt", "test.conll", "test.tsv", "test.bio"),
    }
    return Definition(
        name,
        Tagging,
        ("f1", "precision", "recall", "accuracy"),
        {split: (*names, *files.get(split, ())) for split, names in usual.items()},
        Layout({"words": ("0",), "tags": ("-1",)}, "conll", characters=characters),
        # The released code uses 256 tokens for chunking.
        defaults={"task.sequence_length": 256},
        # Papers report the scores of the test file.
        report_splits=("test",),
        source=source,
    )


_TABLE = (
    _glue("cola", _SENTENCE, ("label",), _BINARY, ("matthews", "accuracy"), header=("source", "label", "mark", "sentence")),
    _glue("sst2", _SENTENCE, ("label",), _BINARY),
    _glue(
        "mrpc",
        {"text": ("#1 String",), "pair": ("#2 String",)},
        ("Quality",),
        _BINARY,
        ("accuracy", "f1"),
        test=("test.tsv", "msr_paraphrase_test.txt"),
    ),
    _glue("stsb", _SENTENCES, ("score",), ("0", "5"), ("spearman", "pearson")),
    _glue("qqp", {"text": ("question1",), "pair": ("question2",)}, ("is_duplicate",), _BINARY, ("accuracy", "f1")),
    _glue(
        "mnli",
        {"text": ("sentence1", "Premise"), "pair": ("sentence2", "Hypothesis")},
        ("gold_label", "Label"),
        _INFERENCE,
        dev=("dev_matched.tsv", "dev.tsv"),
        dev_mismatched=("dev_mismatched.tsv",),
        test=("test_matched.tsv", "test.tsv"),
        test_mismatched=("test_mismatched.tsv",),
        diagnostic=(
            "diagnostic.tsv",
            "AX.tsv",
            "diagnostic-full.tsv",
            "../diagnostic/diagnostic.tsv",
            "../AX/AX.tsv",
            "../AX/diagnostic.tsv",
        ),
    ),
    _glue("qnli", {"text": ("question",), "pair": ("sentence",)}, ("label",), ("entailment", "not_entailment")),
    _glue("rte", _SENTENCES, ("label",), ("entailment", "not_entailment")),
    _glue("wnli", _SENTENCES, ("label",), _BINARY),
    _clue("tnews", _SENTENCE),
    _clue("iflytek", _SENTENCE),
    _clue("afqmc", _SENTENCES, _BINARY),
    _clue("ocnli", _SENTENCES, _INFERENCE),
    _clue("cmnli", _SENTENCES, _INFERENCE),
    Definition(
        "chnsenticorp",
        Classification,
        ("accuracy",),
        {split: (f"{split}.tsv",) for split in _SPLITS},
        Layout({"text": ("text_a",), "label": ("label",)}, "tsv", verbatim=True, published=True),
        _BINARY,
        # A review has 100 characters on average and up to some thousands; BERT-wwm and others truncate it to 256.
        {"task.sequence_length": 256},
        ("test",),
        source="github.com/ymcui/Chinese-BERT-wwm",
    ),
    _questions("squad1", Questions, _squad("v1.1"), "squad", "rajpurkar.github.io/SQuAD-explorer", license="CC BY-SA 4.0"),
    _questions("squad2", Squad2Questions, _squad("v2.0"), "squad", "rajpurkar.github.io/SQuAD-explorer", license="CC BY-SA 4.0"),
    _questions(
        "cmrc2018",
        CmrcQuestions,
        # The trial file of 1,002 questions is published with the others; it is used if there is no other training file.
        {split: (f"cmrc2018_{split}.json", f"{split}.json") for split in _SPLITS}
        | {"train": ("cmrc2018_train.json", "train.json", "cmrc2018_trial.json")},
        "squad",
        "github.com/ymcui/cmrc2018",
        license="CC BY-SA 4.0",
        # A token is a character: 30 of them hold 94.5% of the dev set's answers, 50 hold 99%.
        max_answer_length=50,
    ),
    *(
        _mrqa(name, published)
        for name, published in {
            "newsqa": "NewsQA",
            "naturalqs": "NaturalQuestionsShort",
            "triviaqa": "TriviaQA-web",
            "searchqa": "SearchQA",
            "hotpotqa": "HotpotQA",
            "squad-mrqa": "SQuAD",
        }.items()
    ),
    _tags("chunk", {}, "www.clips.uantwerpen.be/conll2000/chunking"),
    _tags(
        "ner", {"train": ("eng.train",), "dev": ("eng.testa",), "test": ("eng.testb",)}, "www.clips.uantwerpen.be/conll2003/ner"
    ),
    _tags(
        "weibo-ner",
        {split: (f"weiboNER_2nd_conll.{split}", f"weiboNER.conll.{split}") for split in _SPLITS},
        "github.com/hltcoe/golden-horse",
        characters=True,
    ),
)

TASKS: dict[str, Definition[Any]] = {definition.name: definition for definition in _TABLE}
