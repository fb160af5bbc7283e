"""The verbs as functions of Python: the options and results of the commands, and errors that name parameters."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import pkgutil
import threading
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer

import discern
from discern.api.verb import VERBS, in_python, overrides_of, python_errors
from discern.cli.main import application
from tests.small.task import FAST, ROWS, write_csv
from tests.support import run_discern

SETTINGS = {"train.max_steps": 3, "train": {"log_every_steps": 1, "evaluate_every_steps": 3}, "data.sequence_length": 16}
LICENSE = "CC BY-SA 3.0"
FUNCTIONS = {name: verb.function.__name__ for name, verb in VERBS.items()}
PARAMETERS = {"as": "as_", "for": "for_", "lambda": "lambda_", "push": "push_to_hub", "set": "settings"}
COMMAND_ONLY = {"json", "nproc"}
PYTHON_ONLY = {"progress", "on_result"}


@pytest.mark.parametrize("name", VERBS)
def test_every_option_is_a_parameter_of_the_function(name: str) -> None:
    command: Any = typer.main.get_command(application())
    for part in name.split():
        command = command.commands[part]
    names = {flag for each in command.params for flag in (each.opts if each.param_type_name == "option" else [each.name])}
    flags = {each.removeprefix("--").replace("-", "_") for each in names}
    options = {PARAMETERS.get(flag, flag) for flag in flags - COMMAND_ONLY}
    signature = inspect.signature(getattr(discern, FUNCTIONS[name]))
    assert set(signature.parameters) - PYTHON_ONLY == options
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())
    described = VERBS[name].python_help.partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert all(f"    {parameter}: " in described for parameter in options)


@pytest.mark.parametrize("name", VERBS)
def test_arguments_of_wrong_types_are_refused_by_name(name: str) -> None:
    function = getattr(discern, FUNCTIONS[name])
    parameters = inspect.signature(function).parameters.values()
    required = {each.name: "x" for each in parameters if each.default is inspect.Parameter.empty}
    for parameter in parameters:
        if parameter.name not in required:
            with pytest.raises(discern.ConfigError, match=f"^{parameter.name} is <object object .*>, expected "):
                function(**required, **{parameter.name: object()})
    with pytest.raises(TypeError, match=rf"^{FUNCTIONS[name]}\(\): got an unexpected keyword argument 'colour'"):
        function(**required, colour="red")
    if required:
        with pytest.raises(TypeError, match=rf"^{FUNCTIONS[name]}\(\): missing a required argument: '{next(iter(required))}'"):
            function()


@pytest.mark.parametrize("name", ["compare", "demo", "doctor", "report", "serve"])
def test_a_package_with_the_name_of_a_verb_is_the_verb(name: str) -> None:
    package = importlib.import_module(f"discern.{name}")
    importlib.import_module(f"discern.{name}.{next(pkgutil.iter_modules(package.__path__)).name}")
    function: Any = getattr(discern, name)
    assert isinstance(function, ModuleType)
    assert {"progress"} < set(inspect.signature(function).parameters)
    with pytest.raises(TypeError, match=rf"^{name}\(\): "):
        function(colour="red")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, for a data set and a run of three steps."""
    folder = tmp_path_factory.mktemp("verbs")
    (folder / "text.txt").write_text("\n\n".join(f"the model {number} reads the file of a tensor" for number in range(200)))
    (folder / "known.txt").write_text("The model 7 reads the file of a tensor.\nNobody ever saw the file of this old tensor\n")
    return folder


@pytest.fixture(scope="module")
def data(work: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"train_tokenizer": "bpe", "vocab_size": 300, "heldout": 0.1, "workers": 1}
    about: dict[str, Any] = {"language": "en", "license": LICENSE, "against": work / "known.txt"}
    return discern.prepare(work / "text.txt", out=work / "data", **options, **about)


@pytest.fixture(scope="module")
def run(work: Path, data: dict[str, Any]) -> dict[str, Any]:
    return discern.pretrain(data=work / "data", out=str(work / "run"), preset="tiny", settings=SETTINGS, device="cpu")


def test_from_text_to_an_export(work: Path, data: dict[str, Any], run: dict[str, Any]) -> None:
    assert (data["documents"], data["vocab_size"], run["step"]) == (200, 300, 3)
    assert discern.evaluate(work / "run", device="cpu")["discriminator_auc"] > 0
    assert discern.export(work / "run", out=work / "exported")["out"] == work / "exported"
    assert discern.load(work / "exported").encode(["a tensor"]).shape == (1, 32)
    card = (work / "exported" / "README.md").read_text()
    assert f"The text is in English. Its license is {LICENSE}, as stated" in card
    assert [each["share"] for each in data["overlap"]] == [0.5]
    assert "known.txt`: 50.00% of 2 examples do." in card
    recorded = json.loads((work / "run" / "run.json").read_text())["overlap"]
    assert [each.keys() & {"share", "found"} for each in recorded] == [{"share"}], "no text of evaluation sets in the run"
    again = discern.export(work / "exported", out=work / "again")["out"]
    assert json.loads((again / "config.json").read_text())["discern"]["provenance"]["licenses"] == [LICENSE]
    assert discern.pretrain(data=work / "data", out=work / "never", preset="tiny", dry_run=True)["parameters"]
    assert not (work / "never").exists()


def test_the_command_prints_what_the_function_returns(work: Path, run: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="discern"):
        again = discern.pretrain(data=work / "data", out=work / "run", preset="tiny", settings=SETTINGS, device="cpu")
    assert again == run
    assert "nothing to do" in caplog.text, "lines about the progress are logged"
    sets = [part for override in overrides_of(SETTINGS) for part in ("--set", override)]
    paths = ("--data", work / "data", "--out", work / "run", "--device", "cpu")
    assert json.loads(run_discern("pretrain", "--preset", "tiny", *paths, *sets, "--json").stdout) == run


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
    assert discern.evaluate(tmp_path / "out", data=dev)["score"] == done[0]["median"]
    predictions = discern.predict(tmp_path / "out", dev)["predictions"]
    texts = [text for text, _ in ROWS * 2]
    assert [each["label"] for each in predictions] == [each["label"] for each in discern.load(tmp_path / "out").predict(texts)]
    received: list[dict[str, Any]] = []
    assert discern.predict(tmp_path / "out", dev, on_result=received.extend)["predictions"] == []
    assert received == predictions
    card = (discern.export(tmp_path / "out", out=tmp_path / "exported")["out"] / "README.md").read_text()
    assert f"The text that the model was pre-trained on is in English. Its license is {LICENSE}," in card


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("prepare", {"engine": "sparc"}, "^engine is 'sparc', expected 'local' or 'ray'$"),
        ("prepare", {"train_tokenizer": "bp"}, "^train_tokenizer is 'bp', expected 'wordpiece', 'bpe' or 'unigram'$"),
        ("prepare", {"heldout": 1.0}, "^heldout is 1.0, expected 0 to 0.99"),
        ("prepare", {"workers": 0}, "^workers is 0, expected 1 or more"),
        ("prepare", {"license": "x\ny"}, "the license is"),
        ("pretrain", {"settings": {"train.max_stepz": 1}}, r"^settings: unknown key 'max_stepz' in \[train\]"),
        ("pretrain", {"resume": "autto"}, "expected 'auto', 'never' or 'must'"),
        ("adapt", {"replay_share": 0.1}, "needs the text to replay"),
        ("finetune", {"task": "sst2"}, "found 1 task and 0 data"),
        ("export", {"seed": 1}, "is not one"),
    ],
)
def test_impossible_values_write_nothing(
    name: str, options: dict[str, Any], says: str, work: Path, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    usual: dict[str, dict[str, Any]] = {
        "prepare": {"inputs": "text.txt", "train_tokenizer": "bpe", "vocab_size": 300},
        "pretrain": {"data": "data", "preset": "tiny"},
        "evaluate": {"model": "run"},
        "adapt": {"model": "run", "data": "data"},
        "finetune": {"model": "run"},
        "export": {"model": "run"},
    }
    out = {} if name == "evaluate" else {"out": "new"}
    with pytest.raises(discern.DiscernError, match=says):
        getattr(discern, name)(**usual[name] | out | options)
    assert not (work / "new").exists()


def test_settings_become_toml() -> None:
    given = {
        "a.b": 3,
        "a": {"c": True, "d": {"e": 1e-4}},
        "words": 'a "text" = 3\nand more',
        "path": Path("/some where"),
        "array": np.arange(3)[2],
    }
    pairs = [override.partition("=")[::2] for override in overrides_of(given)]
    assert {key: tomllib.loads(f"v = {value}")["v"] for key, value in pairs} == {
        "a.b": 3,
        "a.c": True,
        "a.d.e": 1e-4,
        "words": 'a "text" = 3\nand more',
        "path": "/some where",
        "array": 2,
    }
    assert (overrides_of(None), overrides_of(["a=1"])) == ((), ("a=1",))
    with pytest.raises(discern.ConfigError, match=r"train\.seed is of the type NoneType"):
        overrides_of({"train.seed": None})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--set: unknown key 'x' in [train]", "settings: unknown key 'x' in [train]"),
        (
            "--set train.max_steps=10, or --set train.compile=true",
            'settings={"train.max_steps": 10}, or settings={"train.compile": True}',
        ),
        ("--set 'data.length_schedule=[[0, 1], [9, 2]]' or", 'settings={"data.length_schedule": [[0, 1], [9, 2]]} or'),
        ("give a dev file: --dev FILE", "give a dev file: eval_set=FILE"),
        ("another --batch-size; --as bert", "another batch_size; as_ bert"),
        ("`discern export --out DIR`; pip install --user x; --data", "`discern export --out DIR`; pip install --user x; data"),
    ],
)
def test_errors_name_parameters_instead_of_options(message: str, expected: str) -> None:
    with pytest.raises(discern.DataError) as raised, python_errors(lambda text: in_python(text, {"dev": "eval_set"})):
        raise discern.DataError(message, hint=message)
    assert (raised.value.message, raised.value.hint) == (expected, expected)
