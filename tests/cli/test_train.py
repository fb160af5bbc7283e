"""What the commands that train receive, print and refuse."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from discern.cli import train
from discern.cli.console import Console
from discern.cli.train import after_pretrain, shell_path
from discern.config.resolve import parse_overrides
from discern.config.schema import to_toml
from discern.data import prepare as preparing
from discern.errors import ConfigError
from discern.finetuning import run as finetuning
from discern.training.config import load_pretrain_config
from tests.data.small_text import write_vocabulary
from tests.support import run_discern
from tests.tasks.data_folder import write

# `discern config`


def test_a_configuration_is_shown_with_its_origins(tmp_path: Path) -> None:
    given = ("--preset", "electra-small", "--set", "train.seed=3", "--set", "train.max_hours=2")
    shown = run_discern("config", "show", *given).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert {"seed = 3 # --set", "num_layers = 12 # preset electra-small", "# micro_batch_size is none # default"} <= set(lines)
    (tmp_path / "again.toml").write_text(shown)
    expected = load_pretrain_config(None, "electra-small", ["train.seed=3", "train.max_hours=2"]).config
    assert load_pretrain_config(tmp_path / "again.toml", None).config == expected


def test_it_states_what_was_dropped_and_clamped() -> None:
    given = ("--preset", "tiny", "--set", "objective.name=mlm", "--set", "model.max_positions=16")
    shown = run_discern("config", "show", *given).stdout
    assert "# dropped: objective.generator_size = 0.5, from preset tiny" in shown
    assert "# preset tiny, at most model.max_positions" in shown
    assert tomllib.loads(shown)["data"]["sequence_length"] == 16
    values = json.loads(run_discern("config", "show", *given, "--json").stdout)
    assert values["model"]["num_layers"] == {"value": 2, "origin": "preset tiny", "set_by_user": False}
    assert values["train"]["max_hours"]["value"] is None
    assert [item["key"] for item in values["dropped"]] == ["objective.generator_size"]


def test_a_check_reports_every_problem(tmp_path: Path) -> None:
    good = run_discern("config", "check", "--preset", "tiny", "--set", "train.seed=1")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("valid: ")
    assert "1 --set" in good.stdout
    file = write(tmp_path / "run.toml", 'extends = "tiny"', "", "[train]", "learning_rate = 1", "max_step = 3")
    bad = run_discern("config", "check", file)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == (
        "error: 2 problems in the configuration\n"
        f"- {file}, line 4: unknown key 'learning_rate' in [train]\n"
        "    hint: did you mean 'optimizer.learning_rate'?\n"
        f"- {file}, line 5: unknown key 'max_step' in [train]\n"
        "    hint: did you mean 'max_steps'?\n"
    )
    as_json = run_discern("config", "check", file, "--json")
    assert as_json.returncode == 2
    checked = json.loads(as_json.stdout)
    assert (checked["valid"], checked["problems"][1]["key"]) == (False, "train.max_step")


def test_a_check_finds_values_that_do_not_fit_together() -> None:
    settings = ("--set", "objective.name=electric", "--set", "model.encoder=xlnet")
    bad = run_discern("config", "check", "--preset", "tiny", *settings, "--json")
    assert bad.returncode == 2
    assert "encoder 'xlnet' cannot share its embeddings" in json.loads(bad.stdout)["problems"][0]["text"]


def test_a_difference_between_presets_files_and_runs(tmp_path: Path) -> None:
    run, file = tmp_path / "run", write(tmp_path / "mine.toml", 'extends = "tiny"')
    write(run / "config.toml", to_toml(load_pretrain_config(None, "tiny", ["objective.name=mlm", "train.max_hours=1"]).config))
    differences = json.loads(run_discern("config", "diff", file, run, "--json").stdout)["differences"]
    assert {"key": "objective.generator_size", "left": 0.5} in differences
    table = [line.split() for line in run_discern("config", "diff", "tiny", run).stdout.splitlines()]
    assert table[0] == ["key", "tiny", str(run)]
    assert ["objective.generator_size", "0.5", "-"] in table
    assert ["train.max_hours", "none", "1.0"] in table
    assert run_discern("config", "diff", "tiny", file).stdout == f"tiny and {file} are the same\n"
    assert "did you mean 'electra-base'?" in run_discern("config", "diff", "tiny", "electra-bas").stderr


def test_presets_to_start_with_are_listed_first() -> None:
    names = json.loads(run_discern("config", "presets", "--json").stdout)["presets"]
    listed = [line.split()[0] for line in run_discern("config", "presets").stdout.splitlines() if line.startswith("  ")]
    assert listed[:3] == ["modern-cpu", "gpu-minutes", "electra-small"]
    assert sorted(listed) == sorted(names)


# `discern prepare`


@pytest.mark.parametrize("installed", [False, True])
def test_a_language_chooses_tokenizer_and_segmenter(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if installed:
        pytest.importorskip("jieba")
    else:
        monkeypatch.setattr(preparing, "find_spec", lambda name: None)
    text = write(tmp_path / "reviews.tsv", "label\ttext", *(f"{n % 2}\t这家酒店的服务很好{n}" for n in range(60)))
    done = run_discern("prepare", text, "--out", tmp_path / "data", "--language", "zh", "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert ("pip install 'discern-nlp[zh]'" in done.stderr) != installed
    assert ("objective.masking=whole-word" in done.stdout) == installed
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    chosen = {"language": "zh", "train": "wordpiece", "vocab_size": 21_128, "segmenter": "jieba" if installed else "none"}
    assert manifest["configuration"].items() >= chosen.items()
    vocabulary = json.loads((tmp_path / "data" / "tokenizer.json").read_text())["model"]["vocab"]
    assert ("酒" in vocabulary, "label" in vocabulary) == (True, False)


def test_a_check_describes_the_input_and_writes_nothing(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    text = write(tmp_path / "text.txt", "a ☂ cat", "", "a dog")
    asked = ("prepare", text, "--check", "--workers", 1, "--tokenizer", vocabulary)
    done = run_discern(*asked)
    assert done.returncode == 0
    assert "unknown are '☂' (U+2602): 100%" in done.stdout
    assert "no problems found" not in done.stdout
    counted = run_discern(*asked, "--filter", "words:3", "--json")
    assert json.loads(counted.stdout)["filtered"] == {"words: fewer than 3 words": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "vocab.txt"]


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("", [], "the input contains no text\n  hint: give files with text"),
        (" \n\n", [], "the input contains no text"),
        ("a cat\n", ["--filter", "words:4"], "the filters leave out every document"),
    ],
)
def test_a_check_fails_where_preparing_would(tmp_path: Path, content: str, options: list[str], says: str) -> None:
    (tmp_path / "text.txt").write_text(content)
    done = run_discern("prepare", tmp_path / "text.txt", "--check", "--workers", 1, *options)
    assert done.returncode == 1
    assert f"error: `discern prepare` would stop: {says}" in done.stderr
    assert "no problems found" not in done.stdout


def test_the_overlap_with_evaluation_files(tmp_path: Path) -> None:
    text = write(tmp_path / "text.txt", "Once more: a cat sat", "on the mat, near the old house.", "", "Another document.")
    dev = write(tmp_path / "dev.csv", "id,sentence", "1,A cat sat on THE mat near the", "2,no")
    asked = ("prepare", text, "--check", "--against", dev, "--workers", 1)
    shown = " ".join(run_discern(*asked).stdout.split())
    assert "dev.csv: 1 of 1 examples (100.00%); 1 of fewer than 8 words not checked" in shown
    assert "line 2: '1 a cat sat on the mat near the'" not in shown, "each field is a text of its own"
    assert f"line 2: 'a cat sat on the mat near the' in {text}, document 1 ('Once more: a cat sat" in shown
    assert "did you mean 'sentence'?" in run_discern(*asked, "--against-field", "sentense").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("TEXT --train-tokenizer bpe", 2, "no output folder is given"),
        ("TEXT --out data --tokenizer VOCABULARY --near-duplicates 0.2", 2, "greater than or equal to 0.5"),
        ("- --out data --tokenizer VOCABULARY --engine ray", 2, "--engine ray cannot read standard input"),
        ("TEXT --check --engine ray", 2, "--engine ray cannot be combined with --check"),
        ("TEXT --out data --tokenizer VOCABULARY --filter gopher", 2, "unknown filter 'gopher'"),
        ("TEXT --check --against-field a", 2, "add --against FILE"),
        ("TEXT --out data --tokenizer VOCABULARY --filter words:9", 1, "(words: fewer than 9 words: 1)"),
    ],
)
def test_impossible_requests_write_no_data_set(tmp_path: Path, arguments: str, code: int, says: str) -> None:
    write(tmp_path / "TEXT", "a line of text")
    write_vocabulary(tmp_path / "VOCABULARY")
    done = run_discern("prepare", *arguments.split(), "--workers", 1, cwd=tmp_path)
    assert done.returncode == code
    assert says in " ".join(done.stderr.split())
    assert not (tmp_path / "data").exists()


# `discern finetune`

ROWS = ["the model reads the file,good", "a tensor of shape,bad", "returns none,so-so"]
FEW = ("--set", "train.max_steps=2", "--set", "train.sequences_per_step=6")


@pytest.fixture
def reviews(tmp_path: Path) -> tuple[str, ...]:
    """Options that name a training and a dev file."""
    train = write(tmp_path / "train.csv", "review,stars", *ROWS * 4)
    dev = write(tmp_path / "dev.csv", "review,stars", *ROWS * 2)
    return ("--train", str(train), "--dev", str(dev), "--text", "review", "--label", "stars")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that the fine-tuning gets, which does nothing here."""
    received: list[dict[str, Any]] = []

    def finetune(model: str, **options: Any) -> dict[str, Any]:
        received.append(options | {"model": model})
        return {}  # as on ranks that print nothing

    monkeypatch.setattr(finetuning, "finetune", finetune)
    return received


def test_every_option_arrives(requests: list[dict[str, Any]]) -> None:
    given = "finetune tiny --train a.conll --out o --recipe google --untrained --tokenizer t.json --set finetune.epochs=2".split()
    columns = {"text": "review\u00a0text", "label": 'it\'s "x" \\ 中', "words": "0", "tags": "-1"}
    options = [part for name, column in columns.items() for part in (f"--{name}", column)]
    assert run_discern(*given, *options, "--sweep-rates").returncode == 0
    (request,) = requests
    overrides = {key: each.value for key, each in parse_overrides(request.pop("overrides")).items()}
    files = {f"files.{name}": value for name, value in {"train": "a.conll", **columns}.items()}
    assert overrides == files | {"finetune.rate_search": True, "finetune.epochs": 2}
    plain = {"model": "tiny", "out": Path("o"), "tasks": [], "recipe": "google", "untrained": True, "tokenizer": Path("t.json")}
    assert request.items() >= plain.items()


def test_tasks_belong_to_their_folders(requests: list[dict[str, Any]]) -> None:
    run_discern(*"finetune m --task rte --data a --task chunk --data b --out o".split())
    run_discern(*"finetune m --task rte --task qnli --data glue --submission zip --out o".split())
    assert [each["tasks"] for each in requests] == [
        [("rte", Path("a")), ("chunk", Path("b"))],
        [("rte", Path("glue")), ("qnli", Path("glue"))],
    ]
    assert requests[1]["submission"] == Path("zip")
    wrong = run_discern(*"finetune m --task rte --out o".split())
    assert wrong.returncode == 2
    assert "found 1 --task and 0 --data\n  hint: give --task NAME --data DIR once for each task" in wrong.stderr


def test_json_is_the_results_on_the_disk(small_model: Path, reviews: tuple[str, ...], tmp_path: Path) -> None:
    done = run_discern("finetune", small_model, *reviews, *FEW, "--out", tmp_path / "out", "--json")
    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"majority", "tfidf"} == results["baselines"].keys()
    # Columns and labels are shown before the training.
    assert "columns: text = 'review', label = 'stars'" in done.stderr
    assert "3 labels: bad 4, good 4, so-so 4" in done.stderr


def test_the_text_names_baselines_and_what_selected_the_weights(
    small_model: Path, reviews: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    best = ("finetune", small_model, *reviews, *FEW, "--set", "finetune.keep=best", "--out", out)
    refused = run_discern(*best)
    assert refused.returncode == 2
    assert "--set train.evaluate_every_steps=100" in refused.stderr
    assert not out.exists()
    shown = run_discern(*best, "--set", "train.evaluate_every_steps=1", "--seeds", 2).stdout
    assert shown.startswith("own: median accuracy ")
    assert "of 2 seeds on dev (6 examples; 95 % interval " in shown
    assert "  the weights of each seed were selected on dev, so its scores are slightly optimistic" in shown
    lines = shown.splitlines()
    assert "  baseline 0.3333, the most frequent class" in lines
    assert "  baseline 1.0000, TF-IDF with logistic regression" in lines
    (verdict,) = (line for line in lines if "no difference" in line or "does not reach" in line)
    assert "TF-IDF with logistic regression (accuracy 1.0000): " in verdict
    assert "--sweep-rates" in verdict
    assert f"  discern predict {out} FILE" in lines
    assert f"  discern report {out}" in lines


def test_a_sweep_prints_a_line_for_each_value(small_model: Path, reviews: tuple[str, ...], tmp_path: Path) -> None:
    command = ("finetune", small_model, *reviews, *FEW, "--no-baselines", "--out", tmp_path / "out")
    done = run_discern(*command, "--sweep", "learning_rate=1e-4,3e-4")
    heading, *rows, best, note = done.stdout.splitlines()[:5]
    assert heading.split() == ["setting", "median", "accuracy"]
    for row, value in zip(rows, ("1e-4", "3e-4"), strict=True):
        median = json.loads((tmp_path / "out" / f"learning_rate={value}" / "results.json").read_text())["median"]
        assert row.split()[:2] == [f"learning_rate={value}", f"{median:.4f}"]
    assert best in ("best: learning_rate=1e-4", "best: learning_rate=3e-4")
    assert note == "  selected by its scores on dev, so these are slightly optimistic"
    assert f"discern predict {tmp_path / 'out' / best.removeprefix('best: ')} FILE" in done.stdout
    assert "baseline" not in done.stdout + done.stderr


def test_a_fine_tuning_without_any_score_fails(small_model: Path, reviews: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    rate = ("--set", "optimizer.learning_rate=1e30", "--set", "optimizer.warmup_steps=0")
    done = run_discern("finetune", small_model, *reviews, *FEW, *rate, "--out", out)
    assert done.returncode == 1
    assert "own: no seed has a score" in done.stdout
    assert "next:" not in done.stdout
    assert "--set optimizer.learning_rate=" in done.stdout.splitlines()[-1]
    assert f"seed 0 of {out} diverged: step 1: the gradient is not finite" in run_discern("predict", out, reviews[3]).stderr


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("--train a.csv --dev b.csv", 1, "b.csv:2: label 'god'|whose labels are bad, good, so-so|hint: did you mean 'good'?"),
        (
            "--train a.csv --text reviw",
            2,
            "a.csv has no column 'reviw'; its columns: review, stars|--text: did you mean 'review'?",
        ),
        ("--train a.conll", 1, "a.conll:2 has 1 columns, but line 1 has 2|hint: every word needs the same number of columns"),
    ],
)
def test_bad_rows_are_explained_before_anything_is_written(
    options: str, code: int, says: str, small_model: Path, tmp_path: Path
) -> None:
    write(tmp_path / "a.csv", "review,stars", *ROWS)
    write(tmp_path / "b.csv", "review,stars", "what,god")
    write(tmp_path / "a.conll", "it O", "rains")
    done = run_discern("finetune", small_model, *options.split(), "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert [words for words in says.split("|") if words not in done.stderr] == []
    assert not (tmp_path / "out").exists()


# Which commands are suggested next


@pytest.mark.parametrize(("gpu", "preset"), [(False, "modern-cpu"), (True, "gpu-minutes")])
def test_after_prepare_a_preset_for_the_machine_is_suggested(
    gpu: bool, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "has_gpu", lambda: gpu)
    text, vocabulary = write(tmp_path / "text.txt", "a line of text"), write_vocabulary(tmp_path / "vocab.txt")
    shown = run_discern("prepare", text, "--tokenizer", vocabulary, "--out", "my data", "--workers", 1, cwd=tmp_path).stdout
    assert shown.splitlines()[-2:] == ["next:", f"  discern pretrain --preset {preset} --data 'my data' --out RUN"]


def test_text_for_an_existing_model_is_suggested_to_adapt(small_model: Path, tmp_path: Path) -> None:
    text, model = write(tmp_path / "text.txt", "the model reads"), tmp_path / "model"
    assert run_discern("export", small_model, "--out", model).returncode == 0
    shown = run_discern("prepare", text, "--tokenizer", model, "--out", tmp_path / "data", "--workers", 1).stdout
    assert f"  discern adapt {model} --data {tmp_path / 'data'} --out RUN" in shown.splitlines()


@pytest.mark.parametrize("is_evaluated", [True, False])
@pytest.mark.parametrize(
    ("metrics", "verb"),
    [
        ({"discriminator_loss": 0.1}, "detect"),
        ({"mlm_loss": 7.0}, "fill"),
        ({"discriminator_loss": 0.1, "energy": 0.0}, "score"),
        ({"permutation_lm_loss": 7.0}, "score"),
    ],
)
def test_a_run_is_tried_by_what_its_objective_can_do(metrics: dict[str, float], verb: str, is_evaluated: bool) -> None:
    suggested = after_pretrain(Path("run"), metrics, is_evaluated=is_evaluated)
    assert f"discern {verb} " in suggested
    assert ("discern evaluate" in suggested) == is_evaluated, "only held-out text can be evaluated on"


def test_suggested_paths_can_be_copied() -> None:
    assert [shell_path(path) for path in ("a/b", "my model", "-model")] == ["a/b", "'my model'", "./-model"]


def test_an_address_reaches_the_reader_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def check(inputs: list[str], **_: object) -> None:
        given.extend(inputs)
        raise ConfigError("seen")

    monkeypatch.setattr("discern.data.check.check", check)
    addresses = ("https://example.org/a.txt", "hf://datasets/x/y")
    assert run_discern("prepare", *addresses, "--check").stderr == "error: seen\n"
    assert given == [*addresses]


def test_the_demo_ends_in_ten_lines_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        "text": {"characters": 4_000_000, "modules": 900, "packages": 12},
        "step": 57,
        "generator_accuracy": 0.1,
        "discriminator_auc": 0.6,
        "wrong_words": {"most_suspicious": 20, "sentences": 200},
        "labeled_task": {"examples": 600, "pretrained": [0.6, 0.7], "untrained": [0.5], "verdict": "no difference"},
        "baseline": {"title": "TF-IDF with logistic regression", "metrics": {"accuracy": 0.668}},
        "note": "This machine was too slow.",
        "seconds_by_stage": {"collect": 3.0, "pretrain": 180.0},
        "report": "demo/report.html",
    }
    train.demo(Console(json_output=False), result, {"out": "demo"})
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 10
    assert "0.650 pre-trained, 0.500 untrained, 0.668 for TF-IDF" in shown[3]
    assert shown[4:6] == ["This machine was too slow.", "183 seconds: collect 3, pretrain 180."]


def test_what_adapting_changed_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        "start": "run m at step 3",
        "step": 2,
        "before": {"d": {"x": 1.0, "loss": 9.0}},
        "after": {"d": {"x": 1.5, "loss": 8.0}},
    }
    train.adapt(Console(json_output=False), result, {"out": "o"})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "o: run m at step 3, trained for 2 more steps"
    assert [each.split() for each in shown[3:5]] == [["loss", "9", "8", "-1.0000"], ["x", "1", "1.5", "+0.5000"]]
    assert "  discern evaluate o" in shown
