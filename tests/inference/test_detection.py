"""Which tokens look replaced: the discriminator's probabilities for runs and exports, words, files, and the page."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.data.tokenizer import TokenTexts, load_tokenizer
from discern.errors import ConfigError
from discern.inference import detection as module, windows
from discern.inference.detection import Detection, Detector, detect, detect_each, detect_texts, load_detector, propose
from discern.inference.texts import InputText, numbered, read_texts
from discern.model_files.export import export
from discern.models.base import Network
from discern.models.config import build_config
from discern.models.electra.encoder import BertEncoder
from discern.models.heads import MaskedLMHead, ReplacedTokenHead
from discern.models.layers import Embeddings
from discern.models.two_tower.encoder import two_tower_generator
from discern.objectives.base import Objective
from discern.progress import Silent
from tests.parity.small_networks import make_noisy
from tests.small.run import make_run
from tests.small.tokenizers import small_tokenizer

LONG = "The chef cooked the meal and the naïve guests ate purple elephants. " * 9
ROOM = 30
SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "modern-cpu"
TEXT = "<script> was released in the United States."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Objective]:
    """A run, beside it `discriminator` and `generator` exported; and its networks."""
    folder = tmp_path_factory.mktemp("detect")
    objective = make_run(folder / "run", overrides=[f"data.sequence_length={ROOM + 2}"])
    for name in ("discriminator", "generator"):
        export(folder / "run", out=folder / name, network=name, progress=Silent(), warn=pytest.fail)
    return folder, objective


def found(model: Path, *texts: str, warn: Callable[[str], None] = pytest.fail) -> list[Detection]:
    return detect(model, texts, Silent(), warn)


def alone(made: tuple[Path, Objective], ids: list[int]) -> list[float]:
    """Probabilities of ids that fit, by one plain call of the network."""
    network = made[1].networks()["discriminator"]
    with torch.no_grad():
        logits = network.head(network.encoder(torch.tensor([[2, *ids, 3]])))
    return [float(value) for value in torch.sigmoid(logits[0, 1:-1])]


def ids_of(made: tuple[Path, Objective], text: str) -> list[int]:
    return list(load_tokenizer(made[0] / "run" / "tokenizer.json").encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("model", ["run", "discriminator"])
def test_probabilities_are_those_of_the_network(made: tuple[Path, Objective], model: str) -> None:
    text = "The chef ate Café, naïve!"
    (seen,) = found(made[0] / model, text)
    assert seen.replaced_probability == pytest.approx(alone(made, ids_of(made, text)), abs=1e-6)
    assert [text[start:end] for start, end in seen.offsets][-1] == "!"


@pytest.mark.parametrize("tying", ["embeddings", "gradient-disentangled"])
@pytest.mark.parametrize("all_networks", [False, True])
def test_an_export_with_a_bilinear_head_judges_as_the_run_does(tying: str, all_networks: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=[f"objective.tying={tying}", "objective.discriminator_head=bilinear"])
    export(tmp_path / "run", out=tmp_path / "out", all_networks=all_networks, progress=Silent(), warn=pytest.fail)
    text = "The chef ate Café, naïve!"
    (by_run,), (by_export,) = found(tmp_path / "run", text), found(tmp_path / "out", text)
    assert by_export.replaced_probability == pytest.approx(by_run.replaced_probability, abs=1e-6)


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_batches_change_nothing(made: tuple[Path, Objective], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x", "The chef cooked the meal.", "", " ", LONG, "purple elephants ate"]
    usual = [found(made[0] / "run", text, warn=lambda _: None)[0] for text in texts]
    monkeypatch.setattr(windows, "TOKENS_PER_BATCH", tokens)
    for one, two in zip(usual, found(made[0] / "run", *texts, warn=lambda _: None), strict=True):
        assert (one.text, one.tokens, one.offsets) == (two.text, two.tokens, two.offsets)
        assert one.replaced_probability == pytest.approx(two.replaced_probability, abs=1e-6)


def test_a_long_text_is_judged_in_windows(made: tuple[Path, Objective]) -> None:
    (seen,) = found(made[0] / "run", LONG, warn=lambda _: None)
    ids = ids_of(made, LONG)
    assert len(seen.replaced_probability) == len(ids) > 3 * ROOM
    # Computed by hand: the windows start at 0, 15, 30, ...; token 20 has 9 tokens to its right in the first, 5 to its left in
    # the second, so the first counts; token 25 has 4 in the first and 10 in the second.
    first, second = alone(made, ids[:ROOM]), alone(made, ids[15 : 15 + ROOM])
    assert seen.replaced_probability[20] == pytest.approx(first[20], abs=1e-6)
    assert seen.replaced_probability[25] == pytest.approx(second[10], abs=1e-6)
    assert seen.replaced_probability[-1] == pytest.approx(alone(made, ids[-ROOM:])[-1], abs=1e-6)


def test_the_first_long_text_is_named(made: tuple[Path, Objective]) -> None:
    said: list[str] = []
    found(made[0] / "run", "a", LONG, "", LONG, warn=said.append)
    assert re.fullmatch(rf"text 2: \d+ tokens, and the model was trained on {ROOM} at a time: read in .* most context", said[0])
    assert len(said) == 1, "the first stands for all"


@pytest.mark.parametrize(
    ("text", "offsets", "probabilities", "expected"),
    [
        ("The elephants ate.", [(0, 3), (4, 7), (7, 13), (14, 17), (17, 18)], [0.1, 0.2, 0.9, 0.4, 0.05], [0.1, 0.9, 0.4, 0.05]),
        # A token with the blank before it, one over two words, and one without characters.
        ("ab cd e", [(0, 2), (2, 4), (4, 7), (7, 7)], [0.1, 0.2, 0.6, 0.99], [0.1, 0.6, 0.6]),
        ("a \u200b b", [(0, 1), (4, 5)], [0.7, 0.8], [0.7, 0.0, 0.8]),  # the tokenizer drops a word
    ],
)
def test_a_word_has_the_highest_probability_of_its_tokens(
    text: str, offsets: list[tuple[int, int]], probabilities: list[float], expected: list[float]
) -> None:
    detection = Detection(text, ["?"] * len(offsets), offsets, probabilities)
    assert [word.probability for word in detection.words] == expected


@pytest.mark.parametrize(
    ("model", "overrides", "said", "hint"),
    [
        ("generator", None, "has no discriminator", "--network discriminator"),
        ("mlm", ["objective.name=mlm"], "has no discriminator of .*; it only has the encoder that predicts words", "'rtd'"),
    ],
)
def test_a_model_without_a_discriminator_is_refused(
    made: tuple[Path, Objective], tmp_path: Path, model: str, overrides: list[str] | None, said: str, hint: str
) -> None:
    folder = tmp_path if overrides else made[0]
    if overrides:
        make_run(folder / model, overrides=overrides)
    with pytest.raises(ConfigError, match=said) as caught:
        found(folder / model, "x")
    assert hint in str(caught.value.hint)


def test_a_stream_is_read_as_it_is_judged(made: tuple[Path, Objective]) -> None:
    """However long it is, the first texts come out before the last are read."""
    read = 0

    def endless() -> Iterator[InputText]:
        nonlocal read
        for read in itertools.count(1):
            yield InputText(f"line {read}", read, "guests ate")

    judged = detect_each(load_detector(made[0] / "run", pytest.fail), endless(), Silent(), pytest.fail)
    seen = list(itertools.islice(judged, 700))
    assert [text.number for text, _ in seen] == list(range(1, 701))
    assert read <= 1024


# Files and the page


def written(
    model: Path, texts: Sequence[str] | Path, warn: Callable[[str], None] = pytest.fail, **options: Any
) -> tuple[dict[str, Any], list[Detection]]:
    shown: list[Detection] = []
    inputs = read_texts(texts) if isinstance(texts, Path) else numbered(texts)
    done = detect_texts(model, inputs, lambda detection, _: shown.append(detection), Silent(), warn, **options)
    return done, shown


def test_json_lines_are_written_to_a_file(made: tuple[Path, Objective], tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    done, shown = written(made[0] / "run", ["The chef", "", "guests naïve"], threshold=0.0, out=out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3], "an empty line keeps its place"
    assert [line["text"] for line in lines] == ["The chef", "", "guests naïve"]
    assert lines[0].keys() == {"line", "text", "tokens", "offsets", "replaced_probability", "marked", "threshold"}
    assert all(all(line["marked"]) for line in lines)
    tokens = sum(len(detection.tokens) for detection in shown)
    assert done == {"texts": 3, "tokens": tokens, "marked": tokens, "threshold": 0.0, "threshold_origin": "given"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"page": "."}, "is a folder"),
        ({"out": "fine.txt"}, "fine.txt is the input"),
    ],
)
def test_outputs_are_checked(options: dict[str, str], said: str, made: tuple[Path, Objective], tmp_path: Path) -> None:
    (tmp_path / "fine.txt").write_text("fine\n")
    paths = {name: tmp_path / value for name, value in options.items()}
    with pytest.raises(ConfigError, match=said):
        written(made[0] / "run", tmp_path / "fine.txt", source=tmp_path / "fine.txt", **paths)


def test_the_page_of_a_text(tmp_path: Path) -> None:
    for name in ("page.html", "again.html"):
        written(SHIPPED, [TEXT, ""], page=tmp_path / name, threshold=0.3)
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "again.html").read_bytes()
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;</span>" in page
    assert page.count("(empty line)") == 1
    places, none = json.loads(re.findall(r'id="data">(.*?)</script>', page, flags=re.S)[0])
    tokens = load_tokenizer(SHIPPED).encode(TEXT, add_special_tokens=False).tokens
    assert (len(places), none) == (len(tokens), [])
    for _, best in places:
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
        assert len(best) == 5
    assert places[tokens.index("states")][1][0][0] == "states", "easy enough for a small generator"


def test_a_discriminator_alone_has_a_page_without_proposals(made: tuple[Path, Objective], tmp_path: Path) -> None:
    written(made[0] / "discriminator", ["The chef ate."], page=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "not part of the model" in page
    assert 'id="data">[null]</script>' in page


@pytest.mark.parametrize("room", [1, 5])
def test_what_has_no_room_is_left_out_and_said(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", room)
    said: list[str] = []
    texts = ["The town.", "The river.", "The sea.", ""]
    written(SHIPPED, texts, said.append, page=tmp_path / "page.html", out=tmp_path / "found.jsonl")
    assert said == ["the page shows the first 1 texts; 3 more do not fit on it"], "the first always has room"
    assert "3 more do not fit" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 4


# The generator's likeliest tokens for each place, against one plain call of the network

TOKENIZER = small_tokenizer("wordpiece, lower-cased")
V = TOKENIZER.get_vocab_size()
SIZES = build_config(
    num_layers=1, hidden_size=8, embedding_size=8, num_heads=2, feedforward_size=16, max_positions=16, hidden_dropout=0
)


def network(kind: str) -> Network:
    embeddings = Embeddings(V, 8, SIZES)
    if kind == "two-tower":
        made = two_tower_generator(embeddings, SIZES)
    else:
        head = MaskedLMHead(SIZES, embeddings.word) if kind == "masked" else ReplacedTokenHead(SIZES)
        made = Network(BertEncoder(embeddings, SIZES), head)
    make_noisy(torch.nn.ModuleList([made.encoder, made.head]))
    made.encoder.eval(), made.head.eval()
    return made


def small_detector(kind: str) -> Detector:
    return Detector(TOKENIZER, 16, network("discriminator"), network(kind))


def by_hand(kind: str, ids: list[int], place: int) -> torch.Tensor:
    """Probabilities at one place, told from all the others."""
    special = small_detector(kind).special
    row = torch.tensor([[special.cls, *ids, special.sep]])
    if kind == "masked":
        row[0, place + 1] = special.mask
    with torch.no_grad():
        return network(kind).token_logits(row)[0, place + 1].softmax(-1)


@pytest.mark.parametrize("kind", ["masked", "two-tower"])
@pytest.mark.parametrize("tokens", [1, 20, 4096])
def test_each_place_is_told_from_all_the_others(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "TOKENS_PER_BATCH", tokens)
    ids = [7, 9, 9, 11, 20]
    found, none = propose(small_detector(kind), network(kind), [ids, []], 5, lambda _: None)
    assert (len(found), none) == (len(ids), [])
    for place, said in enumerate(found):
        expected = by_hand(kind, ids, place)
        assert said.own == pytest.approx(float(expected[ids[place]]), abs=1e-6)
        ranked = [number for number in expected.argsort(descending=True).tolist() if number > 4][:5]
        assert [text for text, _ in said.best] == [TokenTexts(TOKENIZER).shown(number) for number in ranked]
        assert [value for _, value in said.best] == pytest.approx(expected[ranked].tolist(), abs=1e-6)
