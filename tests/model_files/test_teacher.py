"""Distillation of fine-tuned models: what a teacher predicts, and a student that learns it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

import discern
from discern.errors import DataError, DiscernError
from discern.model_files.teacher import Teacher
from discern.progress import Silent
from discern.tasks.base import ClassificationExample
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.supervised import teacher_loss
from tests.small.finetuned import MULTI, NUMBER, SINGLE, TAGS, Made, make_finetuned
from tests.small.task import Finetuning, Notes, finetune, prepare_finetuning, small_request, with_settings
from tests.small.tokenizers import ROBERTA_NAMES, roberta, stated, written

TEXTS = ["the model reads the file", "a tensor", "returns none of the shape"]


def test_the_loss_by_hand() -> None:
    student, teacher = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    # At temperature 2: softmax (1, 0) against softmax (0, 2).
    p, q = torch.tensor([0.0, 2.0]).softmax(0), torch.tensor([1.0, 0.0]).softmax(0)
    expected = 4 * (p * (p / q).log()).sum()
    torch.testing.assert_close(teacher_loss(student, teacher, "single", 2.0), expected)
    # Each of several classes is a Bernoulli variable, and a score has a squared distance.
    p, q = teacher.sigmoid(), student.sigmoid()
    of_each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(teacher_loss(student, teacher, "multi", 1.0), of_each.sum())
    assert teacher_loss(student, teacher, "number", 2.0).item() == 4 + 16


def test_any_classifier_of_transformers_teaches(tmp_path: Path) -> None:
    tokenizer = roberta()
    config = RobertaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        id2label={0: "good", 1: "bad", 2: "so-so"},
        pad_token_id=tokenizer.token_to_id("<pad>"),
    )
    torch.manual_seed(0)
    model = RobertaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    written(tmp_path, tokenizer, tokenizer_class="PreTrainedTokenizerFast", **stated(ROBERTA_NAMES))
    examples = [ClassificationExample(str(number), text) for number, text in enumerate(TEXTS)]
    student = Classification("own", ClassificationConfig(), (), SINGLE.labels)
    teacher = Teacher(tmp_path, student, Silent())
    assert teacher.task.labels.names == ("good", "bad", "so-so")
    predictions, states = teacher.outputs(examples, torch.device("cpu"), Silent())
    for text, prediction, state in zip(TEXTS, predictions, states, strict=True):
        encoded = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            expected = model(encoded, output_hidden_states=True)
        np.testing.assert_allclose(prediction["logits"], expected.logits[0], atol=1e-5)
        np.testing.assert_allclose(state, expected.hidden_states[-1][0].mean(0), atol=1e-5)

    model.roberta.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"not a complete classifier: it lacks classifier\."):
        Teacher(tmp_path, student, Silent())
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"lacks its tokenizer|cannot load"):
        Teacher(tmp_path, student, Silent())


@pytest.fixture
def request_(tmp_path: Path) -> Finetuning:
    """A fine-tuning with a teacher whose labels are in another order than the student's."""
    labels = replace(SINGLE.labels, names=("so-so", "good", "bad"))
    teacher = make_finetuned(tmp_path / "teacher", own=replace(SINGLE, labels=labels))
    student = make_finetuned(tmp_path / "student", own=SINGLE)
    (tmp_path / "more.txt").write_text("\n".join(TEXTS) + "\n")
    more = f"finetune.unlabeled='{tmp_path / 'more.txt'}'"
    return with_settings(small_request(student, tmp_path), f"finetune.teacher='{teacher}'", more)


def test_targets_are_the_logits_of_the_teacher_in_the_order_of_the_student(request_: Finetuning, tmp_path: Path) -> None:
    notes = Notes()
    data = prepare_finetuning(request_, notes).data["own"]
    assert [example.text for example in data.taught] == TEXTS
    texts = [*(example.text for example in data.train.examples), *TEXTS]
    (tmp_path / "all.txt").write_text("\n".join(texts))
    predicted = discern.predict(tmp_path / "teacher", tmp_path / "all.txt", logits=True)["predictions"]
    names = ["so-so", "good", "bad"]
    expected = [[each["logits"][names.index(name)] for name in data.task.labels.names] for each in predicted]
    np.testing.assert_allclose(data.train.features.targets["teacher"], expected, atol=1e-5)
    assert [example.label for example in data.taught] == [each["label"] for each in predicted[-3:]]
    classes = data.train.features.targets["class"][-3:]
    assert [data.task.labels.names[number] for number in classes] == [example.label for example in data.taught]
    assert any("the teacher: accuracy" in line for line in notes.lines)


def test_a_student_with_no_other_loss_becomes_its_teacher(request_: Finetuning, tmp_path: Path) -> None:
    few = ("finetune.teacher_weight=1", "finetune.teacher_states_weight=1", "train.max_steps=150", "task.words=false")
    results = finetune(with_settings(request_, *few), Silent())
    assert results["teacher"]["unlabeled_examples"] == 3
    assert results["train_examples"] == 60
    student, teacher = (discern.load(folder).predict(TEXTS) for folder in (request_.out, tmp_path / "teacher"))
    assert [each["label"] for each in student] == [each["label"] for each in teacher]
    # The layer that compares the states is not part of the model, and a finished work has nothing to do.
    assert finetune(with_settings(request_, *few), Silent()) == results
    assert "teacher" in json.loads((request_.out / "results.json").read_text())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (MULTI, "predicts old, red, but 'own' has bad, good, so-so"),
        (NUMBER, "predicts labels of the kind 'number'"),
        (TAGS, "predicts B-X, E-X"),
    ],
)
def test_a_teacher_of_another_task_is_refused(request_: Finetuning, tmp_path: Path, made: Made, says: str) -> None:
    other = make_finetuned(tmp_path / "other", own=made)
    with pytest.raises(DiscernError, match=says):
        prepare_finetuning(with_settings(request_, f"finetune.teacher='{other}'"), Silent())
