"""The model card holds facts, and says of the others that they are not recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from discern.convert.cards.model import ModelFacts, model_card
from discern.interop import families
from discern.interop.huggingface import to_huggingface
from discern.models.base import Network, build_encoder
from discern.models.config import build_config
from discern.models.embeddings import WordEmbeddings
from tests.parity.small_networks import VOCABULARY, build, sizes

OBJECTIVE = build(sizes(), generator_size=0.5)


def facts(network: str = "discriminator", **more: Any) -> ModelFacts:
    model = to_huggingface(OBJECTIVE.networks()[network], VOCABULARY)
    base = ModelFacts("my-model", network, model, "0.1.0", "rtd", 1200, {}, "WordPiece, cased")
    return replace(base, **more)


def test_says_what_it_knows() -> None:
    card = model_card(
        facts(
            settings={
                "data.sequence_length": 16,
                "data.packing": "packed",
                "train.sequences_per_step": 128,
                "train.seed": 3,
                "train.evaluate_sequences": 2000,
            },
            reference="electra-small",
            differences=[("optimizer.learning_rate", 0.001, 0.0005), ("train.max_hours", 2.0, None)],
            data={"documents": 1611, "tokens": 111_597, "unknown_fraction": 0.00123},
            tokens_seen=2_000_000,
            evaluation={"discriminator_auc": 0.84931},
            evaluated_at=1000,
            versions={"torch": "2.13.0"},
        )
    )
    for line in (
        "# my-model",
        "| Layers | 2 |",
        "| Positions | 40, of which 16 were trained |",
        "| Vocabulary | 97 entries; WordPiece, cased |",
        "| Documents | 1,611 |",
        "| Tokens in the data set | 111,597 |",
        "| Unknown tokens | 0.123% |",
        "| Steps | 1,200 |",
        "| Tokens seen, repetitions included | 2,000,000 |",
        "| `optimizer.learning_rate` | 0.001 | 0.0005 |",
        "| `train.max_hours` | 2 | not recorded |",
        "| `discriminator_auc` | 0.8493 |",
        "Measured on at most 2,000 rows, evenly spaced in the held-out split of the data set, at step 1,000.",
        "- Positions from 16 on still have their initial values: truncate texts to 16 tokens.",
        "| Made with | torch 2.13.0 |",
    ):
        assert line in card, line
    assert "`token_type_ids` 1 still has its initial value" in card


def test_says_what_the_training_started_from() -> None:
    assert "Pre-trained from scratch with discern" in model_card(facts())
    card = model_card(facts(start="medical", replay=0.25))
    assert "Further pre-trained from the weights of `medical` by discern" in card
    assert "from scratch" not in card
    assert "the further training only" in card
    assert "the data set that 25% of the rows were taken from" in card


def test_parameters_are_counted_once() -> None:
    generator = OBJECTIVE.networks()["generator"]
    count = sum(value.numel() for value in {*generator.encoder.parameters(), *generator.head.parameters()})
    assert f"| Parameters | {count:,} |" in model_card(facts("generator"))


def test_says_what_it_does_not_know() -> None:
    card = model_card(facts())
    for line in (
        "| Documents | not recorded |",
        "| Unknown tokens | not recorded |",
        "| Tokens seen, repetitions included | not recorded |",
        "| Source of the text | not recorded |",
        "| License of the text | not stated |",
        "| Overlap with evaluation sets | not checked |",
        "| Made with | not recorded |",
        "Differences from a published recipe: not recorded.",
        "Held-out metrics: not recorded.",
    ):
        assert line in card, line
    assert "None" not in card


def test_says_what_evaluation_sets_overlap() -> None:
    known = {"examples": 9, "checked": 8, "too_short": 1, "overlapping": 2, "share": 0.25}
    none = {"examples": 3, "checked": 0, "too_short": 3, "overlapping": 0, "share": None}
    card = model_card(facts(overlap=[{"file": "/home/me/RTE/dev.tsv", **known}, {"file": "/home/me/SST-2/dev.tsv", **none}]))
    assert (
        "| Overlap with evaluation sets | examples that share 13 words in a row with the text: `RTE/dev.tsv`: 25.00% of 8 "
        "(1 too short to check); `SST-2/dev.tsv`: none can be checked (3 too short to check) |" in card
    )
    assert "/home/me" not in card
    assert "text: `a|b`" not in model_card(facts(overlap=[{"file": "a|b", **known}])), "a bar ends the cell"


def test_the_license_is_a_field_to_fill_in() -> None:
    card = model_card(facts())
    assert card.startswith("---\n# Fill in")
    assert "\nlicense:\n" in card


def test_says_what_else_is_in_the_folder() -> None:
    generator = to_huggingface(OBJECTIVE.networks()["generator"], VOCABULARY)
    card = model_card(facts(others={"generator": generator}))
    for line in (
        f"- `generator/`: the generator, an ordinary `ElectraForMaskedLM` with {generator.num_parameters:,} parameters",
        "discern evaluate . --data DATA",
        "to fill masks, use the network in `generator/`.",
        "| Weights stored as | float32 |",
    ):
        assert line in card, line
    assert "discern evaluate" not in model_card(facts()), "a discriminator alone cannot be evaluated"


def test_sixteen_bits_are_said_and_computed_in_float32() -> None:
    model = to_huggingface(OBJECTIVE.networks()["discriminator"], VOCABULARY, "bfloat16")
    card = model_card(facts(model=model, evaluation={"loss": 1.0}, evaluated_at=10))
    for line in (
        "| Weights stored as | bfloat16 |",
        "at step 10, before the weights were rounded to bfloat16.",
        ".float().eval()",
    ):
        assert line in card, line


def test_a_head_beside_is_explained() -> None:
    network = build(sizes(), tying="gradient-disentangled", discriminator_head="bilinear").networks()["discriminator"]
    card = model_card(facts(model=to_huggingface(network, VOCABULARY)))
    for line in (
        "- `discern_head.safetensors`: the whole head of the discriminator",
        "in the head, which transformers cannot load",
    ):
        assert line in card, line


def test_a_projected_word_table_counts_as_its_factors_and_is_no_head() -> None:
    config = build_config(
        encoder="modernbert", num_layers=1, hidden_size=32, embedding_size=16, num_heads=2, feedforward_size=48, local_window=8
    )
    encoder = build_encoder(WordEmbeddings(VOCABULARY.size, 16), config)
    network = Network(encoder, encoder.language_head())
    own = sum(value.numel() for value in {*network.encoder.parameters(), *network.head.parameters()})
    card = model_card(facts("generator", model=families.to_huggingface(network, VOCABULARY)))
    assert f"| Parameters | {own:,} |" in card
    assert "the two matrices of which the word embeddings" in card
    assert "the whole head" not in card


def test_a_masked_language_model_is_shown_filling_a_mask() -> None:
    card = model_card(facts("generator"))
    assert "ElectraForMaskedLM" in card
    assert "pipeline_tag: fill-mask" in card
    assert "cannot detect replaced tokens" in card
    assert 'discern fill . "The chef [MASK] the meal."' in card
    assert "discern detect" not in card


def test_names_and_settings_of_others_are_text() -> None:
    hostile = "x`<script>[a](b)|\n## not a heading\n---\nlicense: mit"
    card = model_card(
        replace(
            facts(reference="electra-small", differences=[("objective.generator_checkpoint", hostile, None)]),
            title=hostile,
            versions={"torch": hostile},
            text_license=hostile,
        )
    )
    assert "<script>" not in card
    assert "\n## not a heading" not in card
    assert card.count("\n---\n") == 1  # the end of the front matter
    assert "\nlicense: mit" not in card
