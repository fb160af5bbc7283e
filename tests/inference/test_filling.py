"""Filled masks: the generator's probabilities, for every folder that holds one, one mask or several, short texts and long."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from discern.data.tokenizer import SPECIAL_TOKENS, load_tokenizer
from discern.errors import ConfigError
from discern.inference.filling import FilledToken, fill, fill_masks, load_filler, reading_masks
from discern.model_files.export import export
from discern.objectives.base import Objective
from discern.progress import Silent
from tests.small.run import make_run
from tests.small.tokenizers import KINDS, small_tokenizer

ROOM = 30
TEXT = "The [MASK] ate the meal."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Objective]:
    """A run, beside it `whole` with all networks and each network alone; and the run's networks."""
    folder = tmp_path_factory.mktemp("fill")
    objective = make_run(folder / "run", overrides=[f"data.sequence_length={ROOM + 2}"])
    for name in ("discriminator", "generator"):
        export(folder / "run", out=folder / name, network=name, progress=Silent(), warn=pytest.fail)
    export(folder / "run", out=folder / "whole", all_networks=True, progress=Silent(), warn=pytest.fail)
    return folder, objective


def filled(model: Path, text: str, top: int = 5, warn: Callable[[str], None] = pytest.fail) -> list[list[FilledToken]]:
    return fill(model, text, top, warn)


def alone(made: tuple[Path, Objective], before: str | list[int], after: str | list[int]) -> dict[str, float]:
    """Probability of every token between two texts, by one plain call of the generator."""
    tokenizer, network = load_tokenizer(made[0] / "run" / "tokenizer.json"), made[1].networks()["generator"]
    left, right = (
        tokenizer.encode(part, add_special_tokens=False).ids if isinstance(part, str) else part for part in (before, after)
    )
    ids = [tokenizer.token_to_id(name) for name in ("[CLS]", "[MASK]", "[SEP]")]
    with torch.no_grad():
        logits = network.token_logits(torch.tensor([[ids[0], *left, ids[1], *right, ids[2]]]))[0, 1 + len(left)]
    return {tokenizer.id_to_token(number): value for number, value in enumerate(logits.softmax(-1).tolist())}


@pytest.mark.parametrize("model", ["run", "generator", "whole"])
def test_probabilities_are_those_of_the_generator(made: tuple[Path, Objective], model: str) -> None:
    (found,) = filled(made[0] / model, TEXT, top=10)
    expected = alone(made, "The", "ate the meal.")
    best = sorted((value, token) for token, value in expected.items() if token not in SPECIAL_TOKENS.values())[::-1][:10]
    assert [each.token for each in found] == [token for _, token in best]
    assert [each.probability for each in found] == pytest.approx([value for value, _ in best], abs=1e-6)


def test_a_bert_of_somebody_else_fills_masks(made: tuple[Path, Objective], tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 220, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=40, initializer_range=0.5)).eval()
    model.save_pretrained(tmp_path / "bert")
    tokenizer = (made[0] / "run" / "tokenizer.json").read_bytes()
    (tmp_path / "bert" / "tokenizer.json").write_bytes(tokenizer)
    (found,) = filled(tmp_path / "bert", TEXT)
    reading = reading_masks(load_tokenizer(tmp_path / "bert"))
    encoding, place = reading.encode(TEXT), reading.token_to_id("[MASK]")
    with torch.no_grad():
        theirs = model(torch.tensor([encoding.ids])).logits[0, encoding.ids.index(place)].softmax(-1)
    for each in found:
        assert each.probability == pytest.approx(float(theirs[reading.token_to_id(each.token)]), abs=1e-5)


def test_each_of_several_masks_sees_the_others(made: tuple[Path, Objective]) -> None:
    tokenizer = load_tokenizer(made[0] / "run" / "tokenizer.json")
    mask = tokenizer.token_to_id("[MASK]")
    before, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in ("The", "ate"))
    first, second = filled(made[0] / "run", "The [MASK][MASK] ate", top=1)
    assert first[0].probability == pytest.approx(alone(made, before, [mask, *after])[first[0].token], abs=1e-6)
    assert second[0].probability == pytest.approx(alone(made, [*before, mask], after)[second[0].token], abs=1e-6)


def test_of_two_networks_with_words_the_one_that_reads_masks_fills(tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=["objective.name=replace-mlm"])
    network = load_filler(tmp_path / "run", pytest.fail).network
    generator, encoder = (objective.networks()[name].encoder for name in ("generator", "encoder"))
    assert network.encoder.config.hidden_size == generator.config.hidden_size != encoder.config.hidden_size


def test_two_towers_fill_one_mask_and_warn_of_several(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=electric"])
    assert len(filled(tmp_path / "run", TEXT)[0]) == 5
    said: list[str] = []
    assert len(filled(tmp_path / "run", "[MASK] ate [MASK]", warn=said.append)) == 2
    assert "trained on text without [MASK]" in said[0]


def test_equal_words_come_in_the_order_of_their_ids_and_no_special_token_does(made: tuple[Path, Objective]) -> None:
    """A head of zeros spreads the probability evenly over the vocabulary."""
    filler = load_filler(made[0] / "run", pytest.fail)
    rows = filler.network.encoder.embeddings.vocab_size
    for parameter in filler.network.head.parameters():
        torch.nn.init.zeros_(parameter)
    (found,) = fill_masks(filler, TEXT, 10**6, pytest.fail)
    ids = [filler.tokenizer.token_to_id(each.token) for each in found]
    assert ids == sorted(set(range(rows)) - {filler.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS.values()})
    assert [each.probability for each in found] == pytest.approx([1 / rows] * len(found))


def test_a_mask_in_a_long_text_sees_what_is_around_it(made: tuple[Path, Objective]) -> None:
    part = "The chef cooked the meal and the guests. " * 4
    ids = load_tokenizer(made[0] / "run" / "tokenizer.json").encode(part, add_special_tokens=False).ids
    said: list[str] = []
    (found,) = filled(made[0] / "run", f"{part}[MASK] {part}", top=3, warn=said.append)
    assert re.fullmatch(rf"the text: \d+ tokens, .* trained on {ROOM} at a time: each mask is .* around it", said[0])
    # 30 tokens with the mask at the 16th: 15 before it, 14 behind.
    expected = alone(made, ids[-15:], ids[:14])
    assert [each.probability for each in found] == pytest.approx([expected[each.token] for each in found], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_stands_for_the_word_and_the_blank_before_it(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    mask = tokenizer.token_to_id("[MASK]")
    as_text = tokenizer.encode("The [MASK] ate").ids
    found = reading_masks(tokenizer).encode("The [MASK] ate", add_special_tokens=False).ids
    parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in ("The", "ate")]
    assert found == [*parts[0], mask, *parts[1]]
    assert tokenizer.encode("The [MASK] ate").ids == as_text, "the tokenizer itself is as it was"


@pytest.mark.parametrize("kind", KINDS)
def test_other_special_tokens_are_read_as_text(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    reading, places = reading_masks(tokenizer), tokenizer.get_vocab(with_added_tokens=True)
    special = {tokenizer.token_to_id(name) for name in SPECIAL_TOKENS.values()}
    found = reading.encode("The [MASK] [SEP] [CLS][PAD] ate", add_special_tokens=False).ids
    unknown = tokenizer.token_to_id("[UNK]")
    assert [number for number in found if number in special - {unknown}] == [tokenizer.token_to_id("[MASK]")]
    words = reading.get_vocab(with_added_tokens=True)
    assert {name: words[name] for name in words if name in places} == {name: places[name] for name in words if name in places}


@pytest.mark.parametrize("text", ["The chef ate.", "", "The <mask> ate.", "The [mask] ate."])
def test_a_text_without_a_mask_is_refused(made: tuple[Path, Objective], text: str) -> None:
    with pytest.raises(ConfigError, match=r"the text has no \[MASK\]") as caught:
        filled(made[0] / "run", text)
    assert "in capitals and brackets" in str(caught.value.hint)


def test_a_model_without_words_is_refused(made: tuple[Path, Objective], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no head over the vocabulary.*it only has the discriminator") as caught:
        filled(made[0] / "discriminator", TEXT)
    assert "--all-networks" in str(caught.value.hint)
    make_run(tmp_path / "run", overrides=["objective.generator=unigram"])
    with pytest.raises(ConfigError, match="no head over the vocabulary"):
        filled(tmp_path / "run", TEXT)


def test_a_token_says_what_it_adds_to_the_text(made: tuple[Path, Objective]) -> None:
    (mask,) = filled(made[0] / "run", TEXT, top=40)
    assert any(each.token.startswith("##") for each in mask)
    for each in mask:
        assert each.text.strip() == each.token.removeprefix("##")
        assert each.shown == each.token
        if each.token.isalpha() or each.token.startswith("##"):
            assert each.text.startswith(" ") != each.token.startswith("##")


def test_an_xlnet_fills_nothing_and_says_why(tmp_path: Path) -> None:
    settings = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32"]
    make_run(tmp_path / "run", overrides=settings)
    with pytest.raises(ConfigError, match="no head over the vocabulary that was trained to fill masks"):
        load_filler(tmp_path / "run", pytest.fail)
