"""Fine-tuned XLNets in transformers: the same numbers, whatever the head, and on whichever side the padding stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from discern.errors import ConfigError
from discern.interop.families import finetuned_to_huggingface
from discern.interop.finetuned import HeadWeights, Summary
from discern.interop.xlnet import encoder_from_huggingface
from discern.models.xlnet.encoder import XLNetEncoder
from tests.parity.small_networks import VOCABULARY
from tests.parity.small_networks import build as build_electra
from tests.parity.small_networks import sizes as electra_sizes
from tests.parity.small_xlnet import build_network, encoder_of, rows, sizes

IDS, SEGMENTS = rows(3, 11)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def real(side: Literal["left", "right"]) -> Tensor:
    """Three rows of 11, 8 and 5 tokens, padded on one side."""
    places = torch.arange(11)[None, :] if side == "right" else torch.arange(10, -1, -1)[None, :]
    return places < torch.tensor([[11], [8], [5]])


def head(
    kind: Literal["classification", "tagging", "span"], classes: int, *, summary: bool = False, **options: Any
) -> HeadWeights:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    layer = Summary(draw(32, 32) / 6, draw(32)) if summary else None
    return HeadWeights(kind, draw(classes, 32), draw(classes), summary=layer, **options)


@pytest.fixture(scope="module")
def encoder() -> XLNetEncoder:
    return encoder_of(build_network(sizes()))


def loaded(auto: str, folder: Path, encoder: XLNetEncoder, made: HeadWeights) -> Any:
    """What transformers makes of the folder: all of it, and nothing drawn."""
    import transformers

    folder.mkdir(exist_ok=True)
    finetuned_to_huggingface(encoder, made, VOCABULARY).write(folder)
    model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


def outputs(made: HeadWeights, states: Tensor) -> Tensor:
    if made.summary is not None:
        states = torch.nn.functional.linear(states, made.summary.weight, made.summary.bias).tanh()
    return made.scale * torch.nn.functional.linear(states, made.weight, made.bias) + made.shift


@pytest.mark.parametrize(("frame", "side", "place"), [("cls-last", "left", -1), ("cls-first", "right", 0)])
@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize("options", [{}, {"problem": "regression", "scale": 1.5, "shift": 2.5}])
@torch.no_grad()
def test_a_classifier_reads_cls_where_it_stands(
    encoder: XLNetEncoder,
    frame: Literal["cls-first", "cls-last"],
    side: Literal["left", "right"],
    place: int,
    summary: bool,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    made = head("classification", 1 if options else 4, summary=summary, frame=frame, **options)
    model = loaded("AutoModelForSequenceClassification", tmp_path, encoder, made)
    assert type(model).__name__ == "XLNetForSequenceClassification"
    assert model.config.problem_type == ("regression" if options else "single_label_classification")
    mask = real(side)
    found = model(IDS, attention_mask=mask.float(), token_type_ids=SEGMENTS).logits
    expected = outputs(made, encoder(IDS, mask, SEGMENTS)[:, place])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, **TOLERANCE)


@torch.no_grad()
def test_a_tagger_and_a_finder_of_spans(encoder: XLNetEncoder, tmp_path: Path) -> None:
    mask = real("left")
    states = encoder(IDS, mask, SEGMENTS)
    given: dict[str, Any] = {"attention_mask": mask.float(), "token_type_ids": SEGMENTS}
    tags = head("tagging", 40, labels=("O", *(f"B-{number}" for number in range(39))), frame="cls-last")
    tagger = loaded("AutoModelForTokenClassification", tmp_path / "tags", encoder, tags)
    assert tagger.config.id2label[39] == "B-38"
    torch.testing.assert_close(tagger(IDS, **given).logits[mask], outputs(tags, states)[mask], **TOLERANCE)
    spans = head("span", 2, frame="cls-last")
    finder = loaded("AutoModelForQuestionAnswering", tmp_path / "spans", encoder, spans)
    assert type(finder).__name__ == "XLNetForQuestionAnsweringSimple"
    found = finder(IDS, **given)
    start, end = outputs(spans, states).unbind(-1)
    torch.testing.assert_close(found.start_logits[mask], start[mask], **TOLERANCE)
    torch.testing.assert_close(found.end_logits[mask], end[mask], **TOLERANCE)


def test_the_encoder_comes_back(encoder: XLNetEncoder, tmp_path: Path) -> None:
    finetuned_to_huggingface(encoder, head("classification", 3, summary=True), VOCABULARY, "bfloat16").write(tmp_path)
    back = encoder_from_huggingface(tmp_path)
    for name, value in encoder.named_parameters():
        assert torch.equal(back.get_parameter(name), value.bfloat16().float()), name


def test_electra_has_no_place_for_a_summary() -> None:
    electra = build_electra(electra_sizes()).networks()["discriminator"].encoder
    with pytest.raises(ConfigError, match="ElectraForSequenceClassification has no summary layer") as caught:
        finetuned_to_huggingface(electra, head("classification", 3, summary=True), VOCABULARY)
    assert "task.head=linear" in str(caught.value.hint)
