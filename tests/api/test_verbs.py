"""The commands as functions of Python: the names of the options, the values of `--json`."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import discern
from discern.api.verbs import overrides_of
from discern.cli.adapt import adapt as adapt_command
from discern.cli.evaluate import evaluate as evaluate_command
from discern.cli.export import export as export_command
from discern.cli.finetune import finetune as finetune_command
from discern.cli.main import main
from discern.cli.predict import predict as predict_command
from discern.cli.prepare import prepare as prepare_command
from discern.cli.pretrain import pretrain as pretrain_command
from tests.small.task import FAST, ROWS, write_csv

SETTINGS = {"train.max_steps": 3, "train": {"log_every_steps": 1, "evaluate_every_steps": 3}, "data.sequence_length": 16}

LICENSE = "CC BY-SA 3.0"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set and a run of three steps."""
    folder = tmp_path_factory.mktemp("verbs")
    (folder / "text.txt").write_text("\n\n".join(f"the model {number} reads the file of a tensor" for number in range(200)))
    return folder


@pytest.fixture(scope="module")
def data(work: Path) -> dict[str, Any]:
    (folder := work / "dev").mkdir()
    (folder / "known.txt").write_text("The model 7 reads the file of a tensor.\nNobody ever saw the file of this old tensor\n")
    options: dict[str, Any] = {"train_tokenizer": "bpe", "vocab_size": 300, "heldout": 0.1, "workers": 1}
    return discern.prepare(
        work / "text.txt", out=work / "data", language="en", license=LICENSE, against=folder / "known.txt", **options
    )


@pytest.fixture(scope="module")
def run(work: Path, data: dict[str, Any]) -> dict[str, Any]:
    return discern.pretrain(data=work / "data", out=str(work / "run"), preset="tiny", settings=SETTINGS, device="cpu")


def test_from_text_to_an_export(work: Path, data: dict[str, Any], run: dict[str, Any]) -> None:
    assert data["documents"] == 200
    assert data["vocab_size"] == 300
    assert run["step"] == 3
    assert {"loss", "heldout_loss", "tokens_per_second"} <= set(run)
    again = discern.pretrain(data=work / "data", out=work / "run", preset="tiny", settings=SETTINGS, device="cpu")
    assert again == run, "a complete run has nothing to do"
    assert discern.evaluate(work / "run", device="cpu")["discriminator_auc"] > 0
    assert discern.export(work / "run", out=work / "exported") == work / "exported"
    assert discern.load(work / "exported").encode(["a tensor"]).shape == (1, 32)
    card = (work / "exported" / "README.md").read_text()
    assert f"| License of the text | {LICENSE} |" in card
    assert [each["share"] for each in data["overlap"]] == [0.5]
    assert "| examples that share 13 words in a row with the text: `dev/known.txt`: 50.00% of 2 |" in card
    recorded = json.loads((work / "run" / "run.json").read_text())["overlap"]
    assert [each.keys() & {"share", "found"} for each in recorded] == [{"share"}], "no text of evaluation sets in the run"
    again = discern.export(work / "exported", out=work / "again")
    assert json.loads((again / "config.json").read_text())["discern"]["text_license"] == LICENSE
    planned = discern.pretrain(data=work / "data", out=work / "never", preset="tiny", settings=SETTINGS, dry_run=True)
    assert planned["parameters"]
    assert not (work / "never").exists()


def test_the_command_prints_what_the_function_returns(
    work: Path, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for override in overrides_of(SETTINGS) for part in ("--set", override)]
    paths = ["--data", str(work / "data"), "--out", str(work / "run"), "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["discern", "pretrain", "--preset", "tiny", *paths, *sets])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out) == run


def test_fine_tuning_and_prediction(work: Path, run: dict[str, Any], tmp_path: Path) -> None:
    train, dev = write_csv(tmp_path / "train.csv", ROWS * 5), write_csv(tmp_path / "dev.csv", ROWS * 2)
    fast = dict(setting.split("=") for setting in FAST) | {"train.max_steps": 2}
    options: dict[str, Any] = {"train": train, "dev": dev, "text": "review", "label": "stars", "device": "cpu"}
    # Python may train in a thread of its own, where no signal can be handled.
    done: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: done.append(discern.finetune(work / "run", out=tmp_path / "out", settings=fast, **options))
    )
    thread.start()
    thread.join()
    assert done[0]["metric"] == "accuracy"
    assert discern.evaluate(tmp_path / "out", data=dev)["score"] == done[0]["median"]
    lines = discern.predict(tmp_path / "out", dev)
    texts = [text for text, _ in ROWS * 2]
    assert [line["label"] for line in lines] == [each["label"] for each in discern.load(tmp_path / "out").predict(texts)]
    card = (discern.export(tmp_path / "out", out=tmp_path / "exported") / "README.md").read_text()
    assert f"License of the text that the model was pre-trained on: {LICENSE}." in card
    with pytest.raises(discern.ConfigError, match="has its own files"):
        discern.finetune(work / "run", out=tmp_path / "o", task="sst2", data=tmp_path, train=train)
    with pytest.raises(discern.ConfigError, match="found 1 task and 0 data"):
        discern.finetune(work / "run", out=tmp_path / "o", task="sst2")
    with pytest.raises(discern.ConfigError, match="has one"):
        discern.export(tmp_path / "out", out=tmp_path / "o", network="generator")
    with pytest.raises(discern.ConfigError, match="is not one"):
        discern.export(work / "run", out=tmp_path / "o", seed=1)


def test_settings_become_toml() -> None:
    made = {
        "a.b": 3,
        "a": {"c": True, "d": {"e": 1e-4}},
        "words": 'a "text" = 3\nand more',
        "list": ["x", "y"],
        "path": Path("/some where"),
        "array": np.arange(3)[2],
    }
    read: dict[str, Any] = {}
    for override in overrides_of(made):
        key, _, value = override.partition("=")
        read[key] = tomllib.loads(f"v = {value}")["v"]
    assert read == {
        "a.b": 3,
        "a.c": True,
        "a.d.e": 1e-4,
        "words": 'a "text" = 3\nand more',
        "list": ["x", "y"],
        "path": "/some where",
        "array": 2,
    }
    assert overrides_of(None) == ()
    with pytest.raises(discern.ConfigError, match=r"train\.seed is of the type NoneType"):
        overrides_of({"train.seed": None})


def test_what_is_wrong_is_an_error_and_what_is_told_is_logged(
    work: Path, run: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for license in ("", "x\ny"):
        with pytest.raises(discern.ConfigError, match="the license is"):
            discern.prepare(work / "text.txt", out=work / "q", tokenizer=work / "data", license=license)
    with pytest.raises(discern.ConfigError, match=r"^settings: unknown key 'max_stepz' in \[train\]"):
        discern.pretrain(data=work / "data", out=work / "q", preset="tiny", settings={"train.max_stepz": 1})
    with caplog.at_level(logging.INFO, logger="discern"):
        discern.pretrain(data=work / "data", out=work / "run", preset="tiny", settings=SETTINGS, device="cpu")
    assert "nothing to do" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heldout": 1.0}, "^heldout is 1, expected a fraction"),
        ({"heldout": -0.1}, "^heldout is -0.1, expected a fraction"),
        ({"workers": 0}, "^workers is 0, expected at least 1"),
        ({"vocab_size": 0}, "vocabulary needs at least 261 entries, not 0"),
        ({"filters": "words:few"}, "filter"),
        ({"near_duplicates": 2.0}, "expected a similarity"),
    ],
)
def test_numbers_out_of_range_write_no_data_set(work: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(discern.ConfigError, match=says):
        discern.prepare(work / "text.txt", out=work / "none", **{"train_tokenizer": "bpe", "vocab_size": 300, **options})
    assert not (work / "none").exists()


def test_numbers_and_arguments_that_do_not_fit_the_model(work: Path, run: dict[str, Any], tmp_path: Path) -> None:
    data, model = work / "data", work / "run"
    for options in ({"sequences": -1}, {"batch_size": 0}, {"batch_size": -2}):
        with pytest.raises(discern.ConfigError, match=r"^(sequences|batch_size) is .*, expected"):
            discern.evaluate(model, data=data, **options)
    for task in ({"task": "cola"}, {"seed": 0}):
        with pytest.raises(discern.ConfigError, match="task and seed are for fine-tuned models"):
            discern.evaluate(model, data=data, **task)
    with pytest.raises(discern.ConfigError, match=r"^sequences is -3, expected"):
        discern.adapt(model, data=data, out=tmp_path / "adapted", sequences=-3)
    with pytest.raises(discern.ConfigError, match="needs the text to replay"):
        discern.adapt(model, data=data, out=tmp_path / "adapted", replay_share=0.1)
    train = write_csv(tmp_path / "train.csv", ROWS)
    with pytest.raises(discern.ConfigError, match=r"^seeds is 0, expected at least 1"):
        discern.finetune(model, out=tmp_path / "tuned", train=train, dev=train, seeds=0)
    with pytest.raises(discern.ConfigError, match="task"):
        discern.finetune(model, out=tmp_path / "tuned", data=data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.csv"]


# Options of the command that are no keywords: what only a terminal needs, processes to start, files for others.
_ONLY_THERE = {
    "prepare": {"check", "part", "merge"},
    "pretrain": {"nproc", "set_"},
    "adapt": {"nproc", "set_"},
    "finetune": {"nproc", "set_", "sweep", "submission"},
    "evaluate": {"suite", "limit", "scorer"},
    "predict": {"out", "append"},
    "export": {"run"},
}
_ONLY_HERE = {"progress", "settings"}
_COMMANDS = {
    "prepare": prepare_command,
    "pretrain": pretrain_command,
    "adapt": adapt_command,
    "finetune": finetune_command,
    "evaluate": evaluate_command,
    "predict": predict_command,
    "export": export_command,
}


@pytest.mark.parametrize("name", _COMMANDS)
def test_keywords_are_the_options_of_the_command(name: str) -> None:
    options = set(inspect.signature(_COMMANDS[name]).parameters) - {"json_output"} - _ONLY_THERE[name]
    signature = inspect.signature(getattr(discern, name))
    assert set(signature.parameters) - _ONLY_HERE - {"model"} == options - {"model"}
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())
    assert inspect.getdoc(getattr(discern, name))
