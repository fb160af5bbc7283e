"""`discern detect`: the discriminator's probabilities, for runs and exports, short texts and long ones."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from discern.cli import detect as cli_detect
from discern.cli.detect import detect as detect_command
from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError
from discern.inference.detection import Detection, detect, detect_each, detect_replaced, load_detection_model, load_detector
from discern.inference.texts import InputText
from discern.model_files.export import export
from discern.objectives.base import Objective
from discern.progress import Silent
from tests.small.run import make_run
from tests.small.tokenizers import HARD

LONG = "The chef cooked the meal and the naïve guests ate purple elephants. " * 9
ROOM = 30


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
    assert "[CLS]" not in seen.tokens
    assert [text[start:end] for start, end in seen.offsets][-1] == "!"
    assert len(seen.tokens) == len(seen.offsets) == len(seen.replaced_probability)


def test_transformers_gives_the_same_probabilities(made: tuple[Path, Objective]) -> None:
    from transformers import AutoTokenizer, ElectraForPreTraining

    text = HARD[0][:40]
    folder = made[0] / "discriminator"
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        theirs = torch.sigmoid(ElectraForPreTraining.from_pretrained(folder).eval()(**inputs).logits[0, 1:-1])
    (seen,) = found(made[0] / "run", text)
    assert seen.tokens == inputs.tokens()[1:-1]
    assert seen.replaced_probability == pytest.approx(theirs.tolist(), abs=1e-5)


@pytest.mark.parametrize("tying", ["embeddings", "gradient-disentangled"])
@pytest.mark.parametrize("all_networks", [False, True])
def test_an_export_with_a_bilinear_head_judges_as_the_run_does(tying: str, all_networks: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=[f"objective.tying={tying}", "objective.discriminator_head=bilinear"])
    export(tmp_path / "run", out=tmp_path / "out", all_networks=all_networks, progress=Silent(), warn=pytest.fail)
    text = "The chef ate Café, naïve!"
    (by_run,), (by_export,) = found(tmp_path / "run", text), found(tmp_path / "out", text)
    assert by_export.tokens == by_run.tokens
    assert by_export.replaced_probability == pytest.approx(by_run.replaced_probability, abs=1e-6)


def test_batches_change_nothing(made: tuple[Path, Objective]) -> None:
    texts = ["the", "", "The chef cooked the meal.", "hello chef", " ", "the chef ate"]
    together = found(made[0] / "run", *texts)
    assert [seen.text for seen in together] == texts
    for text, seen in zip(texts, together, strict=True):
        (single,) = found(made[0] / "run", text)
        assert seen.replaced_probability == pytest.approx(single.replaced_probability, abs=1e-6)


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_the_size_of_batches_changes_nothing(made: tuple[Path, Objective], tokens: int) -> None:
    detector = load_detector(made[0] / "run", pytest.fail)
    texts = ["x", "The chef cooked the meal.", "", LONG, "purple elephants ate"]
    encodings = detector.tokenizer.encode_batch(texts, add_special_tokens=False)
    usual, other = (detect_replaced(detector, texts, encodings, lambda _: None, *size) for size in ((), (tokens,)))
    for one, two in zip(usual, other, strict=True):
        assert one.replaced_probability == pytest.approx(two.replaced_probability, abs=1e-6)


def test_an_empty_text_has_no_tokens(made: tuple[Path, Objective]) -> None:
    (seen,) = found(made[0] / "run", "")
    assert (seen.tokens, seen.offsets, seen.replaced_probability) == ([], [], [])
    assert found(made[0] / "run") == []


def test_a_long_text_is_judged_in_windows_and_says_so(made: tuple[Path, Objective]) -> None:
    said: list[str] = []
    (seen,) = found(made[0] / "run", LONG, warn=said.append)
    ids = ids_of(made, LONG)
    assert said[0].startswith(f"text 1: {len(ids)} tokens, and the model was trained on {ROOM} at a time: read in overlapping")
    assert len(seen.replaced_probability) == len(ids) > 3 * ROOM
    # Computed by hand: the windows start at 0, 15, 30, ...; token 20 has 9 tokens to its right in the first, 5 to its left in
    # the second, so the first counts; token 25 has 4 in the first and 10 in the second.
    first, second = alone(made, ids[:ROOM]), alone(made, ids[15 : 15 + ROOM])
    assert seen.replaced_probability[20] == pytest.approx(first[20], abs=1e-6)
    assert seen.replaced_probability[25] == pytest.approx(second[10], abs=1e-6)
    last = alone(made, ids[-ROOM:])
    assert seen.replaced_probability[-1] == pytest.approx(last[-1], abs=1e-6)


def test_a_generator_is_refused(made: tuple[Path, Objective]) -> None:
    with pytest.raises(ConfigError, match="has no discriminator") as caught:
        found(made[0] / "generator", "x")
    assert "--network discriminator" in str(caught.value.hint)


def test_a_masked_language_model_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    with pytest.raises(ConfigError, match="has no discriminator: its encoder fills masks") as caught:
        found(tmp_path / "run", "x")
    assert "'rtd'" in str(caught.value.hint)


def test_a_stream_is_read_as_it_is_judged(made: tuple[Path, Objective]) -> None:
    """However long it is, no more than some hundreds of texts are held: the first come out before the last are read."""
    read = 0

    def endless() -> Iterator[InputText]:
        nonlocal read
        for read in itertools.count(1):
            yield InputText(f"line {read}", read, "guests ate")

    judged = detect_each(load_detector(made[0] / "run", pytest.fail), endless(), Silent(), pytest.fail)
    seen = list(itertools.islice(judged, 700))
    assert [text.number for text, _ in seen] == list(range(1, 701))
    assert read <= 1024
    (single,) = found(made[0] / "run", "guests ate")
    assert seen[650][1].replaced_probability == pytest.approx(single.replaced_probability, abs=1e-6)


def test_long_texts_of_a_stream_are_named_and_counted(made: tuple[Path, Objective]) -> None:
    said: list[str] = []
    texts = [InputText(f"file:{number}", number, text) for number, text in enumerate(["a", LONG, "", LONG], 1)]
    judged = list(detect_each(load_detector(made[0] / "run", pytest.fail), texts, Silent(), said.append))
    assert [len(text.text) > 0 for text, _ in judged] == [True, True, False, True]
    assert re.fullmatch(rf"file:2: \d+ tokens, and the model was trained on {ROOM} at a time: read in .* most context", said[0])
    assert said[1:] == ["2 of 4 texts were read in several windows"]


def test_the_generator_is_found_in_runs_and_whole_exports(made: tuple[Path, Objective], tmp_path: Path) -> None:
    export(made[0] / "run", out=tmp_path / "all", all_networks=True, progress=Silent(), warn=pytest.fail)
    for folder, has_one in ((made[0] / "run", True), (tmp_path / "all", True), (made[0] / "discriminator", False)):
        model = load_detection_model(folder, pytest.fail)
        assert (model.proposer is not None) == has_one


def test_a_generator_of_another_vocabulary_is_refused(made: tuple[Path, Objective], tmp_path: Path) -> None:
    make_run(tmp_path / "other", tokenizer="bpe")
    export(tmp_path / "other", out=tmp_path / "stranger", network="generator", progress=Silent(), warn=pytest.fail)
    export(made[0] / "run", out=tmp_path / "mixed", all_networks=True, progress=Silent(), warn=pytest.fail)
    shutil.copytree(tmp_path / "stranger", tmp_path / "mixed" / "generator", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="don't belong together"):
        load_detection_model(tmp_path / "mixed", pytest.fail)


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_json_of_one_text(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(made[0] / "run", text=["The chef"], json_output=True)
    printed = shown(capsys)
    assert printed.keys() == {"tokens", "offsets", "replaced_probability", "marked", "threshold"}
    assert printed["threshold"] == 0.5
    assert printed["marked"] == [probability >= 0.5 for probability in printed["replaced_probability"]]
    assert "".join(token.removeprefix("##") for token in printed["tokens"]) == "thechef"
    assert printed["offsets"][0][0] == 0


def test_json_of_several_texts(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(made[0] / "run", text=["The chef", "guests"], json_output=True)
    assert [len(text["tokens"]) > 0 for text in shown(capsys)["texts"]] == [True, True]


def test_json_of_a_file(made: tuple[Path, Objective], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_bytes("\ufeffThe chef\r\n\nnaïve\u2028guests".encode())
    detect_command(made[0] / "run", input=tmp_path / "lines.txt", json_output=True)
    texts = shown(capsys)["texts"]
    assert len(texts) == 3, "lines end at newlines only"
    assert [texts[1][name] for name in ("tokens", "offsets", "replaced_probability", "marked")] == [[], [], [], []]
    assert texts[0]["offsets"][0][0] == 0


@pytest.mark.parametrize("file", [None, Path("-")])
def test_json_of_the_standard_input(
    file: Path | None, made: tuple[Path, Objective], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    detect_command(made[0] / "run", input=file, json_output=True)
    assert len(shown(capsys)["texts"]) == 2


def test_json_lines_are_written_to_a_file(
    made: tuple[Path, Objective], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"body": "The chef"}\n\n{"body": "guests naïve"}\n')
    out = tmp_path / "found.jsonl"
    detect_command(made[0] / "run", tmp_path / "texts.jsonl", text_field="body", threshold=0.0, out=out, json_output=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3], "an empty line keeps its place"
    assert [line["text"] for line in lines] == ["The chef", "", "guests naïve"]
    assert all(all(line["marked"]) for line in lines)
    tokens = sum(len(line["tokens"]) for line in lines)
    assert shown(capsys) == {"texts": 3, "tokens": tokens, "marked": tokens, "threshold": 0.0, "out": str(out)}


def test_a_line_that_is_no_json_leaves_nothing_behind(
    made: tuple[Path, Objective], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "The chef"}\n{"text": \n')
    with pytest.raises(SystemExit):
        detect_command(made[0] / "run", tmp_path / "texts.jsonl", out=tmp_path / "found.jsonl")
    assert "texts.jsonl:2: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "found.jsonl").exists()


def test_no_line_is_no_text(made: tuple[Path, Objective], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    detect_command(made[0] / "run", input=tmp_path / "empty.txt", json_output=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"texts": [], "threshold": 0.5}
    assert "nothing to check" in printed.err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"text": ["x"], "input": Path("y")}, 2, "--text and INPUT are both given"),
        ({"input": Path("x"), "evaluate": Path("y")}, 2, "--evaluate and INPUT are both given"),
        ({"text": ["x"], "precision": 0.8}, 2, "--precision is for --calibrate"),
        ({"text": ["x"], "text_field": "body"}, 2, "--text-field is for JSON lines"),
        ({"calibrate": Path("data"), "threshold": 0.8}, 2, "--threshold cannot be combined with --calibrate"),
        ({"calibrate": Path("data"), "text_field": "body"}, 2, "--text-field cannot be combined with --calibrate"),
        ({"evaluate": Path("latin.txt"), "html": Path("x.html")}, 2, "--html cannot be combined with --evaluate"),
        ({"text": ["x"], "html": Path(".")}, 2, ". is a folder"),
        ({"text": ["x"], "out": Path(".")}, 2, ". is a folder"),
        ({"input": Path("fine.txt"), "out": Path("fine.txt")}, 2, "fine.txt is the input"),
        ({"input": Path("fine.txt"), "html": Path("fine.txt")}, 2, "fine.txt is the input"),
        ({"text": ["x"], "out": Path("a"), "html": Path("a")}, 2, "--out and --html both name a"),
        ({"input": Path("nowhere.txt")}, 1, "nowhere.txt cannot be read"),
        ({"input": Path("latin.txt")}, 1, "latin.txt:2: not UTF-8"),
    ],
)
def test_wrong_input_is_explained(
    options: dict[str, Any],
    code: int,
    said: str,
    made: tuple[Path, Objective],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    (tmp_path / "fine.txt").write_text("fine\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        detect_command(made[0] / "run", **options)
    assert left.value.code == code
    assert said in capsys.readouterr().err


def test_plain_output_is_a_table(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(made[0] / "run", text=["The chef"], threshold=0.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["replaced", "token", "characters"]
    probability, mark, token, _ = lines[1].split()
    assert 0 <= float(probability) <= 1
    assert (mark, token) == ("*", "The")
    assert "tokens look replaced (threshold 0)" in lines[-1]


DETECTION = Detection("a [b] c", ["a", "[", "b", "]", "c"], [(0, 1), (2, 3), (3, 4), (4, 5), (6, 7)], [0.0, 0.25, 0.9, 1.0, 0.5])


def test_colors_show_the_text_itself() -> None:
    """Brackets are text, not markup; every token has the color of its probability, and the marked ones are underlined."""
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="truecolor").print(cli_detect.colored_text(DETECTION, 0.9))
    assert "\x1b[4;30;48;2;255;85;70m]" in stream.getvalue()
    assert "\x1b[30;48;2;110;225;110ma" in stream.getvalue()
    assert "\x1b[30;48;2;250;220;40mc" in stream.getvalue()
    assert cli_detect.colored_text(DETECTION, 0.5).plain == "a [b] c"


def test_the_most_suspicious_are_named() -> None:
    assert cli_detect.verdict(DETECTION, 0.5).plain == "3 of 5 tokens look replaced (threshold 0.5): ']' 1.00, 'b' 0.90, 'c' 0.50"
    pieces = Detection("it ate", ["it", "a", "##te"], [(0, 2), (3, 4), (4, 6)], [0.6, 0.7, 0.8])
    assert cli_detect.verdict(pieces, 0.5).plain == "3 of 3 tokens look replaced (threshold 0.5): 'ate' 0.80, 'it' 0.60"
    calm = Detection("a", ["a"], [(0, 1)], [0.2])
    assert cli_detect.verdict(calm, 0.5).plain == "no token reaches 0.5; the highest: 'a' 0.20"


def test_the_legend_runs_from_0_to_1() -> None:
    assert cli_detect.legend().plain.split() == [
        *"probability of being replaced:".split(),
        *(f"{step / 5:g}" for step in range(6)),
        "underlined:",
        "marked",
    ]
