"""Fine-tuned models in transformers: the same numbers, and what they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from discern.errors import CheckpointError, ConfigError
from discern.interop.finetuned import HeadWeights, finetuned_to_huggingface
from discern.interop.huggingface import network_from_huggingface
from discern.interop.pretrained import encoder_from_huggingface
from discern.models.electra.encoder import BertEncoder
from tests.parity.small_networks import VOCABULARY, build, inputs, sizes, token_batch

BATCH = token_batch([17, 12, 5], 19, second=[6, 4, 3])
REAL = BATCH.attention_mask


def encoder_of(**changes: Any) -> BertEncoder:
    encoder = build(sizes(**changes)).networks()["discriminator"].encoder
    assert isinstance(encoder, BertEncoder)
    return encoder


ENCODERS = {"projected": encoder_of(), "of one width": encoder_of(embedding_size=32)}


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> BertEncoder:
    return ENCODERS[request.param]


def head(kind: Literal["classification", "tagging", "span"], classes: int, **options: Any) -> HeadWeights:
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(classes, 32, generator=random), torch.randn(classes, generator=random)
    return HeadWeights(kind, weight, bias, **options)


@torch.no_grad()
def outputs(encoder: BertEncoder, head: HeadWeights) -> Tensor:
    """What the head makes of every token's state."""
    states = encoder(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids)
    return head.scale * torch.nn.functional.linear(states, head.weight, head.bias) + head.shift


def loaded(auto: str, folder: Path, encoder: BertEncoder, head: HeadWeights) -> Any:
    """What transformers makes of the folder: all of it, and nothing drawn."""
    import transformers

    finetuned_to_huggingface(encoder, head, VOCABULARY).write(folder)
    model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


@pytest.mark.parametrize("classes", [2, 3, 16])
@torch.no_grad()
def test_a_classifier(encoder: BertEncoder, classes: int, tmp_path: Path) -> None:
    labels = tuple(f"class {number}" for number in range(classes))
    made = head("classification", classes, labels=labels)
    model = loaded("AutoModelForSequenceClassification", tmp_path, encoder, made)
    assert model.config.problem_type == "single_label_classification"
    assert model.config.id2label == dict(enumerate(labels))
    assert model.config.label2id == {label: number for number, label in enumerate(labels)}
    torch.testing.assert_close(model(**inputs(BATCH)).logits, outputs(encoder, made)[:, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_several_classes_at_once(tmp_path: Path) -> None:
    made = head("classification", 3, labels=("a", "b", "c"), problem="multi")
    model = loaded("AutoModelForSequenceClassification", tmp_path, ENCODERS["projected"], made)
    assert model.config.problem_type == "multi_label_classification"
    expected = outputs(ENCODERS["projected"], made)[:, 0]
    torch.testing.assert_close(model(**inputs(BATCH)).logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_regression_in_the_unit_of_its_targets(tmp_path: Path) -> None:
    made = head("classification", 1, problem="regression", scale=1.5, shift=2.5)
    model = loaded("AutoModelForSequenceClassification", tmp_path, ENCODERS["projected"], made)
    assert model.config.problem_type == "regression"
    assert model.config.num_labels == 1
    expected = outputs(ENCODERS["projected"], made)[:, 0]
    torch.testing.assert_close(model(**inputs(BATCH)).logits, expected, atol=1e-5, rtol=1e-5)
    finetuned_to_huggingface(ENCODERS["projected"], made, VOCABULARY, "bfloat16")
    years = replace(made, shift=2005.3)
    finetuned_to_huggingface(ENCODERS["projected"], years, VOCABULARY)
    with pytest.raises(ConfigError, match=r"bfloat16 would shift all scores by .*: they lie around 2005\.3 and vary by 1\.5"):
        finetuned_to_huggingface(ENCODERS["projected"], years, VOCABULARY, "bfloat16")


@torch.no_grad()
def test_a_tagger(encoder: BertEncoder, tmp_path: Path) -> None:
    """More tags than half the width are no matter: the head is one layer there too."""
    labels = ("O", *(f"B-{number}" for number in range(19)))
    made = head("tagging", 20, labels=labels)
    model = loaded("AutoModelForTokenClassification", tmp_path, encoder, made)
    assert model.config.id2label == dict(enumerate(labels))
    torch.testing.assert_close(model(**inputs(BATCH)).logits[REAL], outputs(encoder, made)[REAL], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_finder_of_spans(encoder: BertEncoder, tmp_path: Path) -> None:
    made = head("span", 2)
    given = loaded("AutoModelForQuestionAnswering", tmp_path, encoder, made)(**inputs(BATCH))
    start, end = outputs(encoder, made).unbind(-1)
    torch.testing.assert_close(given.start_logits[REAL], start[REAL], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given.end_logits[REAL], end[REAL], atol=1e-5, rtol=1e-5)


def test_the_exact_gelu_of_a_number_less_that_of_its_opposite_is_the_number() -> None:
    numbers = torch.tensor([-40.0, -3.0, -1e-3, 0.0, 0.5, 2.0, 40.0])
    gelu = torch.nn.functional.gelu
    torch.testing.assert_close(gelu(numbers) - gelu(-numbers), numbers, atol=0, rtol=1e-6)


def test_too_many_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="can represent 16 classes on states of width 32; this head has 17") as caught:
        finetuned_to_huggingface(ENCODERS["projected"], head("classification", 17), VOCABULARY)
    assert "hidden_size is 34 or more" in str(caught.value.hint)


def test_pre_norm_has_no_electra_form() -> None:
    with pytest.raises(ConfigError, match="normalization is 'pre'"):
        finetuned_to_huggingface(encoder_of(normalization="pre"), head("span", 2), VOCABULARY)


def test_a_head_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="2 labels for 3 outputs"):
        head("tagging", 3, labels=("a", "b"))
    with pytest.raises(ValueError, match="not 3 outputs"):
        head("span", 3)


def test_a_disentangled_encoder_is_merged(tmp_path: Path) -> None:
    encoder = build(sizes(), tying="gradient-disentangled").networks()["discriminator"].encoder
    assert isinstance(encoder, BertEncoder)
    made = head("tagging", 4)
    model = loaded("AutoModelForTokenClassification", tmp_path, encoder, made)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs(BATCH)).logits[REAL], outputs(encoder, made)[REAL], atol=1e-5, rtol=1e-5)


def test_equal_weights_are_equal_bytes_and_the_encoder_comes_back(encoder: BertEncoder, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        finetuned_to_huggingface(encoder, head("classification", 2), VOCABULARY, "bfloat16").write(tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "bfloat16"
    back = encoder_from_huggingface(tmp_path / "one")
    for name, value in encoder.named_parameters():
        assert torch.equal(back.get_parameter(name), value.bfloat16().float()), name
    with pytest.raises(CheckpointError, match="a bare encoder or a fine-tuned model"):
        network_from_huggingface(tmp_path / "one")
