"""Every card: names, labels and remarks from elsewhere stay text, whatever they hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from discern.convert.cards.finetuned import TaskFacts, task_card
from discern.convert.cards.imported import ImportedFacts, imported_card
from discern.convert.cards.markdown import escaped
from discern.convert.cards.model import ModelFacts, model_card
from discern.interop.finetuned import HeadWeights
from discern.interop.huggingface import HuggingFaceModel, to_huggingface
from tests.parity.small_networks import VOCABULARY, build, sizes

HOSTILE = "x`<script>[a](b)|{{ 7 * 7 }}\n## not a heading\n---\nlicense: mit | *"


def model() -> HuggingFaceModel:
    return to_huggingface(build(sizes(), generator_size=0.5).networks()["discriminator"], VOCABULARY)


def run_card() -> str:
    return model_card(
        ModelFacts(
            title=HOSTILE,
            network="discriminator",
            model=model(),
            version="0.1.0",
            objective="rtd",
            step=10,
            settings={"data.packing": HOSTILE, "train.precision": HOSTILE},
            tokenizer=HOSTILE,
            others={HOSTILE: model()},
            reference="electra-small",
            differences=[(HOSTILE, HOSTILE, None)],
            evaluation={HOSTILE: 0.5},
            evaluated_at=10,
            versions={"torch": HOSTILE},
            language=HOSTILE,
            text_license=HOSTILE,
        )
    )


def card_of_import() -> str:
    return imported_card(
        ImportedFacts(
            title=HOSTILE,
            origin=escaped(HOSTILE),
            models={"discriminator": model(), HOSTILE: model()},
            version="0.1.0",
            tokenizer=HOSTILE,
            max_length=16,
            left_out=[HOSTILE] * 9,
            remarks=[HOSTILE],
            source_card=f"# Theirs\n{HOSTILE}",
        )
    )


def card_of_task(**values: Any) -> str:
    results: dict[str, Any] = {
        "median": 0.5,
        "split": HOSTILE,
        "selected_on": HOSTILE,
        "examples": 3,
        "metrics": {HOSTILE: 0.5},
        "metric": HOSTILE,
        "failed_seeds": {HOSTILE: HOSTILE},
        **dict.fromkeys(("mean", "standard_deviation", "worst", "best"), 0.5),
        **values,
    }
    return task_card(
        TaskFacts(
            title=HOSTILE,
            task=HOSTILE,
            base=HOSTILE,
            seed=0,
            model=model(),
            head=HeadWeights("classification", torch.zeros(2, 8), torch.zeros(2), (HOSTILE, "b")),
            max_length=16,
            tokenizer=HOSTILE,
            pairs=True,
            results=results,
            seeds=[0, 1],
            of_seed=0.5,
            settings={HOSTILE: HOSTILE},
            versions={"torch": HOSTILE},
            language=HOSTILE,
            text_license=HOSTILE,
        )
    )


@pytest.mark.parametrize("make", [run_card, card_of_import, card_of_task])
def test_what_others_wrote_stays_text(make: Any) -> None:
    card = make()
    own, _, theirs = card.partition("## Original model card")
    assert not re.search(r"(?<!`)<script>", re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", card)), "HTML only in code spans"
    assert "49" not in card, "a template in a value is not rendered"
    assert "\n## not a heading" not in card
    assert "\nlicense: mit" not in card
    assert own.count("\n---\n") == 1, "the end of the front matter"
    assert all(line.startswith(">") for line in theirs.splitlines() if line)
    for table in re.findall(r"(?:^\|.*\n)+", own, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


@pytest.mark.parametrize("make", [run_card, card_of_import, card_of_task])
def test_a_card_is_tidy(make: Any) -> None:
    card = make()
    assert card.startswith("---\n# Fill in")
    assert card.endswith("\n")
    assert not card.endswith("\n\n")
    assert "\n\n\n" not in card
    assert "{%" not in card
    assert "None" not in card


def test_a_single_score_of_several_seeds_has_no_deviation() -> None:
    assert "mean 0.5000, standard deviation 0.5000, from 0.5000 to 0.5000" in card_of_task()
    assert "mean 0.5000, from 0.5000 to 0.5000" in card_of_task(standard_deviation=None)
