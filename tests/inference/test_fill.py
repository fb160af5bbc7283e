"""`discern fill`: the generator's probabilities, for every folder that holds one, one mask or several, short texts and long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.cli.fill import fill as fill_command
from discern.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, vocab_size
from discern.errors import CheckpointError, ConfigError, DataError
from discern.inference.fill import FilledToken, fill, fill_masks, load_filler, reading_masks, window_start
from discern.model_files.export import export
from discern.objectives.base import Objective
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME
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


def test_transformers_gives_the_same_probabilities(made: tuple[Path, Objective]) -> None:
    from transformers import AutoTokenizer, ElectraForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(made[0] / "generator")
    inputs = tokenizer(TEXT, return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        theirs = ElectraForMaskedLM.from_pretrained(made[0] / "generator").eval()(**inputs).logits[0, place].softmax(-1)
    (found,) = filled(made[0] / "whole", TEXT)
    for each in found:
        assert each.probability == pytest.approx(float(theirs[tokenizer.convert_tokens_to_ids(each.token)]), abs=1e-5)


def test_a_bert_of_somebody_else_fills_masks(made: tuple[Path, Objective], tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertModel

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
    BertModel(model.config).save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_bytes(tokenizer)
    with pytest.raises(CheckpointError, match="has no pre-training head"):
        filled(tmp_path / "bare", TEXT)


def test_each_of_several_masks_sees_the_others(made: tuple[Path, Objective]) -> None:
    mask = load_tokenizer(made[0] / "run" / "tokenizer.json").token_to_id("[MASK]")
    tokenizer = load_tokenizer(made[0] / "run" / "tokenizer.json")
    before, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in ("The", "ate"))
    first, second = filled(made[0] / "run", "The [MASK][MASK] ate", top=1)
    assert first[0].probability == pytest.approx(alone(made, before, [mask, *after])[first[0].token], abs=1e-6)
    assert second[0].probability == pytest.approx(alone(made, [*before, mask], after)[second[0].token], abs=1e-6)


def test_a_masked_language_model_fills(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
    by_run, by_export = filled(tmp_path / "run", TEXT), filled(tmp_path / "out", TEXT)
    assert [each.token for each in by_run[0]] == [each.token for each in by_export[0]]


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
    tokenizer = load_tokenizer(made[0] / "run" / "tokenizer.json")
    before = tokenizer.encode("The chef cooked the meal and the guests. " * 4, add_special_tokens=False).ids
    text = "The chef cooked the meal and the guests. " * 4 + "[MASK]" + " The chef cooked the meal and the guests." * 4
    after = tokenizer.encode("The chef cooked the meal and the guests. " * 4, add_special_tokens=False).ids
    assert len(before) > ROOM
    said: list[str] = []
    (found,) = filled(made[0] / "run", text, top=3, warn=said.append)
    assert said == [
        f"the text is longer than the {ROOM} tokens that the model was trained on: each mask is predicted from those around it"
    ]
    # 30 tokens with the mask at the 16th: 15 before it, 14 behind.
    expected = alone(made, before[-15:], after[:14])
    assert [each.probability for each in found] == pytest.approx([expected[each.token] for each in found], abs=1e-6)


@pytest.mark.parametrize(("position", "start"), [(0, 0), (5, 0), (6, 1), (40, 35), (94, 89), (95, 90), (99, 90)])
def test_where_a_window_begins(position: int, start: int) -> None:
    assert window_start(position, 100, 10) == start
    assert window_start(min(position, 7), 8, 10) == 0


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


def test_tokens_outside_of_the_vocabulary_keep_their_ids() -> None:
    tokenizer = small_tokenizer(next(iter(KINDS)))
    tokenizer.add_special_tokens(["<a>"])
    tokenizer.add_tokens(["zebra"])
    ids = reading_masks(tokenizer).encode("the zebra <a>", add_special_tokens=False).ids
    assert tokenizer.token_to_id("zebra") in ids
    assert tokenizer.token_to_id("<a>") not in ids


@pytest.mark.parametrize("text", ["The chef ate.", "", "The <mask> ate.", "The [mask] ate."])
def test_a_text_without_a_mask_is_refused(made: tuple[Path, Objective], text: str) -> None:
    with pytest.raises(ConfigError, match=r"the text has no \[MASK\]") as caught:
        filled(made[0] / "run", text)
    assert "in capitals and brackets" in str(caught.value.hint)


def test_nothing_to_ask_for_is_refused(made: tuple[Path, Objective]) -> None:
    with pytest.raises(ConfigError, match="top is 0, expected 1 or more"):
        filled(made[0] / "run", TEXT, top=0)


def test_a_model_without_words_is_refused(made: tuple[Path, Objective], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no head over the vocabulary.*it only has the discriminator") as caught:
        filled(made[0] / "discriminator", TEXT)
    assert "--all-networks" in str(caught.value.hint)
    make_run(tmp_path / "run", overrides=["objective.generator=unigram"])
    with pytest.raises(ConfigError, match="no head over the vocabulary"):
        filled(tmp_path / "run", TEXT)


@pytest.mark.usefixtures("unverified")
def test_a_tokenizer_that_is_too_large_is_refused(made: tuple[Path, Objective], tmp_path: Path) -> None:
    export(made[0] / "run", out=tmp_path / "out", network="generator", progress=Silent(), warn=pytest.fail)
    tokenizer = load_tokenizer(tmp_path / "out")
    rows = vocab_size(tokenizer)
    tokenizer.add_tokens(["zzyzx"])
    tokenizer.save(str(tmp_path / "out" / "tokenizer.json"))
    (tmp_path / "out" / CHECKSUMS_NAME).unlink()
    with pytest.raises(DataError, match=f"has {rows + 1:,} entries, but the embeddings have only {rows:,} rows"):
        filled(tmp_path / "out", TEXT)


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_token_says_what_it_adds_to_the_text(made: tuple[Path, Objective]) -> None:
    filler = load_filler(made[0] / "run", pytest.fail)
    (mask,) = filled(made[0] / "run", TEXT, top=40)
    assert any(each.token.startswith("##") for each in mask)
    for each in mask:
        assert each.text.strip() == each.token.removeprefix("##")
        assert each.shown == each.token
        if each.token.isalpha() or each.token.startswith("##"):
            assert each.text.startswith(" ") != each.token.startswith("##")
    assert [filler.begins_words(before) for before in ("", "the ", "the\n", "(")] == [True, True, True, False]


def test_json_of_one_mask_and_of_several(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    fill_command(made[0] / "run", TEXT, json_output=True)
    one = shown(capsys)
    assert one.keys() == {"text", "predictions"}
    assert len(one["predictions"]) == 5
    assert all(each.keys() == {"token", "text", "probability"} for each in one["predictions"])
    fill_command(made[0] / "run", "[MASK] ate [MASK]", top=2, json_output=True)
    assert [len(mask) for mask in shown(capsys)["predictions"]] == [2, 2]


def test_people_see_a_table_for_each_mask(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    fill_command(made[0] / "run", "[MASK] ate [MASK]", top=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("probability")] == [
        "token at mask 1",
        "token at mask 2",
    ]
    assert len(lines) == 6


def test_a_masked_language_model_on_xlnets_encoder_fills(tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=["objective.name=mlm", "model.encoder=xlnet", "model.embedding_size=32"])
    ((first, *_),) = filled(tmp_path / "run", TEXT, top=1)
    tokenizer, network = load_tokenizer(tmp_path / "run" / "tokenizer.json"), objective.networks()["encoder"]
    left, right = (tokenizer.encode(part, add_special_tokens=False).ids for part in ("The", "ate the meal."))
    cls, mask, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[MASK]", "[SEP]"))
    row = [*left, mask, *right, sep, cls]
    segments = torch.tensor([[0] * (len(row) - 1) + [2]])
    with torch.no_grad():
        logits = network.head(network.encoder(torch.tensor([row]), None, segments))[0, len(left)]
    assert first.probability == pytest.approx(logits.softmax(-1)[tokenizer.token_to_id(first.token)].item(), abs=1e-5)


def test_an_xlnet_fills_nothing_and_says_why(tmp_path: Path) -> None:
    settings = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32"]
    make_run(tmp_path / "run", overrides=settings)
    with pytest.raises(ConfigError, match=r"query stream and was trained without \[MASK\].*\n.*discern score"):
        load_filler(tmp_path / "run", pytest.fail)
