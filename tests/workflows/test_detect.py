"""`discern detect`: the discriminator's probabilities, for runs and exports, short texts and long ones."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from discern.cli import detect as verb
from discern.cli.detect import detect as detect_command
from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError, DataError
from discern.objectives.base import Objective
from discern.progress import Silent
from discern.scoring.detection import Detection, Window, batches, windows_of
from discern.workflows.detect import detect
from discern.workflows.export import ExportRequest, export
from tests.interop.small_tokenizers import HARD
from tests.workflows.small_run import make_run

LONG = "The chef cooked the meal and the naïve guests ate purple elephants. " * 9
ROOM = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Objective]:
    """A run, beside it `discriminator` and `generator` exported; and its networks."""
    folder = tmp_path_factory.mktemp("detect")
    objective = make_run(folder / "run", overrides=[f"data.sequence_length={ROOM + 2}"])
    for name in ("discriminator", "generator"):
        export(ExportRequest(folder / "run", folder / name, name), Silent(), pytest.fail)
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
    export(ExportRequest(tmp_path / "run", tmp_path / "out", all_networks=all_networks), Silent(), pytest.fail)
    text = "The chef ate Café, naïve!"
    (by_run,), (by_export,) = found(tmp_path / "run", text), found(tmp_path / "out", text)
    assert by_export.tokens == by_run.tokens
    assert by_export.replaced_probability == pytest.approx(by_run.replaced_probability, abs=1e-6)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_an_export_in_sixteen_bits_judges_nearly_as_the_run_does(
    precision: str, made: tuple[Path, Objective], tmp_path: Path
) -> None:
    export(ExportRequest(made[0] / "run", tmp_path / "out", precision=precision), Silent(), pytest.fail)
    text = "The chef ate Café, naïve!"
    (by_run,), (by_export,) = found(made[0] / "run", text), found(tmp_path / "out", text)
    assert by_export.replaced_probability == pytest.approx(by_run.replaced_probability, abs=0.1)


def test_batches_change_nothing(made: tuple[Path, Objective]) -> None:
    texts = ["x", "", "The chef cooked the meal.", "hello world", " ", "purple elephants ate"]
    together = found(made[0] / "run", *texts)
    assert [seen.text for seen in together] == texts
    for text, seen in zip(texts, together, strict=True):
        (single,) = found(made[0] / "run", text)
        assert seen.replaced_probability == pytest.approx(single.replaced_probability, abs=1e-6)


def test_an_empty_text_has_no_tokens(made: tuple[Path, Objective]) -> None:
    (seen,) = found(made[0] / "run", "")
    assert (seen.tokens, seen.offsets, seen.replaced_probability) == ([], [], [])
    assert found(made[0] / "run") == []


def test_a_long_text_is_judged_in_windows_and_says_so(made: tuple[Path, Objective]) -> None:
    said: list[str] = []
    (seen,) = found(made[0] / "run", LONG, warn=said.append)
    assert said == [f"the text is longer than the {ROOM} tokens that the model was trained on: judged in overlapping windows"]
    ids = ids_of(made, LONG)
    assert len(seen.replaced_probability) == len(ids) > 3 * ROOM
    # Computed by hand: the windows start at 0, 15, 30, ...; token 20 has 9 tokens to its right in the first, 5 to its left in
    # the second, so the first counts; token 25 has 4 in the first and 10 in the second.
    first, second = alone(made, ids[:ROOM]), alone(made, ids[15 : 15 + ROOM])
    assert seen.replaced_probability[20] == pytest.approx(first[20], abs=1e-6)
    assert seen.replaced_probability[25] == pytest.approx(second[10], abs=1e-6)
    last = alone(made, ids[-ROOM:])
    assert seen.replaced_probability[-1] == pytest.approx(last[-1], abs=1e-6)


def test_several_long_texts_are_counted(made: tuple[Path, Objective]) -> None:
    said: list[str] = []
    found(made[0] / "run", LONG, "short", LONG, warn=said.append)
    assert said[0].startswith(f"2 of 3 texts are longer than the {ROOM} tokens")


@pytest.mark.parametrize("room", [1, 2, 7, 30])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 29, 30, 31, 45, 61, 100])
def test_windows_cover_every_token_and_overlap_by_half(length: int, room: int) -> None:
    windows = windows_of([length], room)
    assert sorted({position for window in windows for position in range(window.start, window.stop)}) == list(range(length))
    assert all(0 < window.stop - window.start <= room for window in windows)
    assert len(windows) == (length > 0) if length <= room else len(windows) > 1
    for before, after in itertools.pairwise(windows):
        assert 0 < after.start - before.start <= max(room // 2, 1)


def test_context_counts_no_end_of_the_text() -> None:
    window = Window(0, start=10, stop=20, whole=30)
    assert [window.context(position) for position in (10, 12, 19)] == [0, 2, 0]
    assert Window(0, 0, 20, 30).context(0) == 19
    assert Window(0, 10, 20, 20).context(19) == 9
    assert Window(0, 0, 20, 20).context(5) == math.inf


def test_batches_hold_every_window_once_and_bounded() -> None:
    windows = windows_of([500] * 40 + [3] * 100, 126)
    made = list(batches(windows))
    assert sorted((w.text, w.start) for batch in made for w in batch) == sorted((w.text, w.start) for w in windows)
    assert all(len(batch) * max(w.stop - w.start + 2 for w in batch) <= 4096 for batch in made)


def test_a_generator_is_refused(made: tuple[Path, Objective]) -> None:
    with pytest.raises(ConfigError, match="holds no discriminator") as caught:
        found(made[0] / "generator", "x")
    assert "--network discriminator" in str(caught.value.hint)


def test_a_masked_language_model_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    with pytest.raises(ConfigError, match="holds no discriminator: its encoder fills masks") as caught:
        found(tmp_path / "run", "x")
    assert "'rtd'" in str(caught.value.hint)


def test_other_folders_are_refused(made: tuple[Path, Objective], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        found(tmp_path / "nowhere", "x")
    with pytest.raises(DataError, match=r"neither a run nor a config\.json"):
        found(tmp_path, "x")
    (tmp_path / "config.json").write_text('{"model_type": "electra"}')
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        found(tmp_path, "x")


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_json_of_one_text(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(made[0] / "run", text=["The chef"], json_output=True)
    printed = shown(capsys)
    assert printed.keys() == {"tokens", "offsets", "replaced_probability"}
    assert "".join(token.removeprefix("##") for token in printed["tokens"]) == "thechef"
    assert printed["offsets"][0][0] == 0


def test_json_of_several_texts(made: tuple[Path, Objective], capsys: pytest.CaptureFixture[str]) -> None:
    detect_command(made[0] / "run", text=["The chef", "guests"], json_output=True)
    assert [len(text["tokens"]) > 0 for text in shown(capsys)["texts"]] == [True, True]


def test_json_of_a_file(made: tuple[Path, Objective], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_bytes("\ufeffThe chef\r\n\nnaïve\u2028guests".encode())
    detect_command(made[0] / "run", file=tmp_path / "lines.txt", json_output=True)
    texts = shown(capsys)["texts"]
    assert len(texts) == 3, "lines end at newlines only"
    assert texts[1] == {"tokens": [], "offsets": [], "replaced_probability": []}
    assert texts[0]["offsets"][0][0] == 0


@pytest.mark.parametrize("file", [None, Path("-")])
def test_json_of_the_standard_input(
    file: Path | None, made: tuple[Path, Objective], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    detect_command(made[0] / "run", file=file, json_output=True)
    assert len(shown(capsys)["texts"]) == 2


def test_no_line_is_no_text(made: tuple[Path, Objective], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    detect_command(made[0] / "run", file=tmp_path / "empty.txt", json_output=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"texts": []}
    assert "nothing to judge" in printed.err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"text": ["x"], "file": Path("y")}, 2, "both given"),
        ({"file": Path("nowhere.txt")}, 1, "nowhere.txt cannot be read"),
        ({"file": Path("latin.txt")}, 1, "latin.txt, line 2: not UTF-8"),
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
    assert (mark, token) == ("*", "the")
    assert "tokens look replaced (from 0 on)" in lines[-1]


DETECTION = Detection("a [b] c", ["a", "[", "b", "]", "c"], [(0, 1), (2, 3), (3, 4), (4, 5), (6, 7)], [0.0, 0.25, 0.9, 1.0, 0.5])


def test_colours_show_the_text_itself() -> None:
    """Brackets are text, not markup; and every token has the colour of its probability."""
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="truecolor").print(verb.coloured_text(DETECTION))
    assert "\x1b[30;48;2;255;85;70m]" in stream.getvalue()
    assert "\x1b[30;48;2;110;225;110ma" in stream.getvalue()
    assert "\x1b[30;48;2;250;220;40mc" in stream.getvalue()
    assert verb.coloured_text(DETECTION).plain == "a [b] c"


def test_the_most_suspicious_are_named() -> None:
    assert verb.verdict(DETECTION, 0.5).plain == "3 of 5 tokens look replaced (from 0.5 on): ']' 1.00, 'b' 0.90, 'c' 0.50"
    calm = Detection("a", ["a"], [(0, 1)], [0.2])
    assert verb.verdict(calm, 0.5).plain == "no token of 1 reaches 0.5; the highest: 'a' 0.20"


def test_the_legend_runs_from_0_to_1() -> None:
    assert verb.legend().plain.split() == ["probability", "replaced:", *(f"{step / 10:g}" for step in range(11))]
