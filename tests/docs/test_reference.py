"""The generated reference is complete: commands, settings, metrics; and the outputs of tutorials are those of their commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs._sphinx import reference
from docs._sphinx.build import build as build_site
from docs._sphinx.metrics import METRICS
from docs._sphinx.tutorials import NOT_RUN, NOT_RUN_CHINESE, with_output
from docs.tutorials.run import RECORDED, blocks, run

import discern
from discern.cli.main import VERBS
from discern.config.resolve import preset_names
from discern.config.schema import flatten
from discern.objectives import objectives
from discern.tasks import families, tasks as registry
from discern.tasks.contrastive import RETRIEVAL_METRICS, SIMILARITY_METRICS
from discern.training.config import load_pretrain_config
from discern.training.metrics import HELD_OUT, read_metrics
from tests.objectives.test_conformance import batch, build, randomness
from tests.support import run_python

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def test_the_reference_is_current() -> None:
    for page, text in reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page} is old: run python -m docs._sphinx.reference"


def test_every_option_of_a_command_is_listed() -> None:
    page = (REFERENCE / "commands.md").read_text(encoding="utf-8").partition("\n## discern detect\n")[2].partition("\n## ")[0]
    help_text = run_python("-m", "discern", "detect", "--help").stdout
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", help_text.partition("Options")[2])) - {"--help"}
    assert len(options) > 8
    assert all(f"`{option}" in page for option in options)


def test_every_setting_of_every_preset_and_family_is_listed() -> None:
    listed = set(re.findall(r"^### `([\w.]+)`$", (REFERENCE / "settings.md").read_text(encoding="utf-8"), flags=re.M))
    for preset in preset_names():
        assert set(flatten(load_pretrain_config(None, preset).config)) <= listed
    for family in families.names():
        assert {f"task.{name}" for name in families.load(family).Config.model_fields} <= listed, family
    assert {"finetune.epochs", "files.label", "equal"} <= listed


def test_a_setting_states_type_limits_default_and_presets() -> None:
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    about = text.partition("### `objective.mask_probability`")[2].partition("\n#")[0]
    assert "a number above 0 and below 1" in about
    assert "`0.15`" in about
    assert re.search(r"`0\.25` in [\w, -]*electra-large", about)


def test_every_public_name_is_documented() -> None:
    page = (REFERENCE / "python.md").read_text(encoding="utf-8")
    names = {name for name in discern.__all__ if name[0] != "_" and not name.endswith("Error")}
    assert names == set(re.findall(r"^### discern\.(\w+)$", page, flags=re.M))
    assert "discern.load(path: str | Path, *, device: str = 'auto') -> Model" in page
    assert "- `device`: `auto`, `cpu`" in page


def test_every_metric_of_a_run_is_in_the_catalog(small_model: Path) -> None:
    known = {metric.name for metric in METRICS}
    assert len(known) == len(METRICS)
    written = {key.removeprefix(HELD_OUT) for record in read_metrics(small_model) for key in record}
    assert written <= known


@pytest.mark.parametrize("name", registry.names())
def test_every_metric_of_a_task_is_in_the_catalog(name: str) -> None:
    assert {*registry.load(name).metrics, *RETRIEVAL_METRICS, *SIMILARITY_METRICS} <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("name", objectives.names())
def test_every_metric_of_an_objective_is_in_the_catalog(name: str) -> None:
    objective, tokens = build(name), batch()
    evaluator, numbers = objective.evaluator(), randomness(tokens)
    corrupted = objective.corrupt(tokens, numbers)
    evaluator.update(objective(corrupted, numbers), corrupted)
    assert set(evaluator.compute()) <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_recorded_output_belongs_to_the_commands_of_its_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert blocks(text)
    path = RECORDED / f"{page.stem}.json"
    shown = with_output(text, page.stem)
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert [block["commands"] for block in record["blocks"]] == blocks(text)
        assert record["machine"] in shown
    else:
        assert (NOT_RUN_CHINESE if page.stem == "chinese" else NOT_RUN) in shown


def test_commands_run_in_an_empty_folder_and_their_output_is_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# Title\n\n```sh\npwd > here; ls\n```\n\nThen\n\n```sh\ncat here\n```\n"
    record = run(page)
    assert [block["output"].strip() == "here" for block in record["blocks"]] == [True, False]
    monkeypatch.setattr("docs._sphinx.tutorials.RECORDED", tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps(record))
    shown = with_output(page, "mine")
    assert "*Run on " in shown
    assert "实际运行" in with_output(page.replace("Title", "标题"), "mine")
    assert shown.index("pwd > here") < shown.index("text\n:class: output\nhere") < shown.index("Then")
    with pytest.raises(ValueError, match=r"run\.py mine"):
        with_output(page.replace("cat here", "cat there"), "mine")
    (tmp_path / "text").write_text("given")
    assert run("```sh\ncat mine\n```\n", {"mine": tmp_path / "text"})["blocks"][0]["output"] == "given"
    with pytest.raises(SystemExit, match="exit code 3"):
        run("```sh\nexit 3\n```\n")


def test_a_site_replaces_nothing_but_a_site(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert build_site(tmp_path) == 1
    assert build_site(tmp_path / "mine.txt") == 1
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "docs._sphinx.build", "--out", str(site)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (site / "searchindex.js").is_file()
    reference = "".join(page.read_text() for page in (site / "docs" / "reference").rglob("*.html"))
    assert all(f"discern {verb}" in reference for verb in VERBS)


def test_the_messages_of_the_reference_are_those_of_the_code() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8").partition("Common messages")[2]
    rows = re.findall(r"^\| `(.*?)` \| ", page, flags=re.M)
    assert len(rows) >= 6
    for message in rows:
        # X, N and M stand for what a message names.
        parts = re.split(r"'?\b[XNM]\b'?|\.\.\.|manifest\.json", message)
        assert max(map(str.strip, parts), key=len) in source, message


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {discern.__version__}\n" in text
    assert 'name: "The discern authors"' in text
    assert "ELECTRA: Pre-training Text Encoders" in text
