"""The verb `discern finetune`: its options, its streams, and what it says of bad input before anything is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from torch.distributed.launcher.api import LaunchConfig

from discern.cli.finetune import _task_lines
from discern.cli.main import main
from discern.config.layers import parse_overrides
from discern.finetuning import run as finetuning
from discern.model_files.export import export
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME
from tests.small.run import make_run
from tests.small.task import Finetuning
from tests.small.tokenizers import small_tokenizer
from tests.tasks.data_folder import write

ROWS = ["the model reads the file,good", "a tensor of shape,bad", "returns none,so-so"]
FEW = ("--set", "train.max_steps=2", "--set", "train.sequences_per_step=6")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "run"
    make_run(folder)
    return folder


@pytest.fixture
def reviews(tmp_path: Path) -> tuple[str, ...]:
    """Options that name a training and a dev file."""
    train = write(tmp_path / "train.csv", "review,stars", *ROWS * 4)
    dev = write(tmp_path / "dev.csv", "review,stars", *ROWS * 2)
    return ("--train", str(train), "--dev", str(dev), "--text", "review", "--label", "stars")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of `discern finetune ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["discern", "finetune", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Finetuning]:
    """What the verb asks of the workflow, which does nothing here."""
    requests: list[Finetuning] = []

    def finetune(model: str, *, progress: object, **options: Any) -> Mapping[str, Any]:
        requests.append(Finetuning(model, **options))
        entry = {"task": "own", "metric": "accuracy", "split": "dev", "examples": 6, "median": 0.5, "metrics": {"accuracy": 0.5}}
        return entry | {"failed_seeds": {}, "seeds": [0], "selected_on": None, "settings": {}}

    monkeypatch.setattr(finetuning, "finetune", finetune)
    return requests


def test_every_option_arrives(asked: list[Finetuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--train", "a.csv", "--label", "it's", "--seeds", "3", "--recipe", "google", "--untrained", "--debug"]
    options += ["--tokenizer", "t.json", "--config", "c.toml", "--set", "finetune.epochs=2", "--device", "cpu"]
    assert call(monkeypatch, "tiny", *options, "--out", tmp_path / "out") == 0
    (request,) = asked
    assert (request.model, request.out, request.tasks) == ("tiny", tmp_path / "out", [])
    assert request.overrides == ('files.train="a.csv"', 'files.label="it\'s"', "finetune.epochs=2")
    assert (request.seeds, request.recipe, request.untrained, request.debug) == (3, "google", True, True)
    assert (request.tokenizer, request.config, request.device) == (Path("t.json"), Path("c.toml"), "cpu")


def test_columns_keep_their_characters(asked: list[Finetuning], monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"--text": "review\u00a0text", "--label": 'it\'s "x" \\ 中'}
    options = [part for pair in names.items() for part in pair]
    assert call(monkeypatch, "m", "--train", "a.csv", *options, "--out", "o") == 0
    said = parse_overrides(asked[0].overrides)
    assert [said[f"files.{option[2:]}"].value for option in names] == list(names.values())


def test_columns_by_number_may_be_negative(asked: list[Finetuning], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "m", "--train", "a.conll", "--words", "0", "--tags", "-1", "--out", "o") == 0
    assert asked[0].overrides == ('files.train="a.conll"', 'files.words="0"', 'files.tags="-1"')


def test_tasks_go_with_their_folders(asked: list[Finetuning], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "m", "--task", "rte", "--data", "a", "--task", "chunk", "--data", "b", "--out", "o") == 0
    assert call(monkeypatch, "m", "--task", "rte", "--task", "qnli", "--data", "glue", "--submission", "zip", "--out", "o") == 0
    assert asked[0].tasks == [("rte", Path("a")), ("chunk", Path("b"))]
    assert asked[1].tasks == [("rte", Path("glue")), ("qnli", Path("glue"))]
    assert asked[1].submission == Path("zip")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "rte"], ["found 1 --task and 0 --data", "once for each task"]),
        (["--task", "rte", "--data", "x", "--text", "a"], ["a named task has its own files", "leave out --task"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--nproc", "0"], ["--nproc"]),
        (["--recipe", "gogle"], ["--recipe"]),
        (["--trian", "a.csv"], ["--trian", "--train"]),
    ],
)
def test_wrong_questions(
    arguments: list[str],
    says: list[str],
    asked: list[Finetuning],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "m", *arguments, "--out", "o") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(word in captured.err for word in says)
    assert asked == []


def test_several_processes_get_the_same_command(asked: list[Finetuning], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[list[str], int]] = []

    def launch(config: LaunchConfig, program: str, arguments: list[str]) -> None:
        launched.append((arguments, config.nproc_per_node))

    monkeypatch.setattr("torch.distributed.launcher.api.launch_agent", launch)
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("WORLD_SIZE", "2")  # left by a cluster: by itself it says nothing
    assert call(monkeypatch, "m", "--train", "a.csv", "--nproc", "2", "--out", "o") == 0
    assert launched == [(["-m", "discern", "finetune", "m", "--train", "a.csv", "--out", "o"], 2)]
    assert asked == []
    for name, value in (("RANK", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)  # one of those processes
    assert call(monkeypatch, "m", "--train", "a.csv", "--nproc", "2", "--out", "o") == 0
    assert len(asked) == 1


def test_json_is_one_object_and_what_is_on_disk(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, model, *reviews, *FEW, "--out", tmp_path / "out", "--json") == 0
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"task", "metric", "median", "scores", "metrics", "failed_seeds", "selected_on", "baselines"} <= results.keys()
    assert {"majority", "tfidf"} == results["baselines"].keys()
    # Columns and labels were shown before anything was trained.
    assert "columns: text = 'review', label = 'stars'" in captured.err
    assert "3 labels: bad 4, good 4, so-so 4" in captured.err


def test_the_text_names_what_chose_the_weights(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = ("--set", "finetune.keep=best")
    assert call(monkeypatch, model, *reviews, *FEW, *best, "--out", tmp_path / "out") == 2
    assert "--set train.evaluate_every_steps=100" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    every = ("--set", "train.evaluate_every_steps=1")
    assert call(monkeypatch, model, *reviews, *FEW, *best, *every, "--seeds", "2", "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert said.startswith("own: median accuracy ")
    assert "of 2 seeds on dev (6 examples; 95 % interval " in said
    assert "  the weights of each seed were selected on dev, so its scores are slightly optimistic" in said
    assert json.loads((tmp_path / "out" / "results.json").read_text())["selected_on"] == "dev"


def test_the_text_says_what_baselines_score_and_when_they_are_not_beaten(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, model, *reviews, *FEW, "--out", tmp_path / "out") == 0
    captured = capsys.readouterr()
    # Before the training, so that one knows what there is to beat.
    assert "own: baseline, TF-IDF with logistic regression: accuracy 1.0000" in captured.err
    lines = captured.out.splitlines()
    assert "  baseline 0.3333, the most frequent class" in lines
    assert "  baseline 1.0000, TF-IDF with logistic regression" in lines
    verdict = next(line for line in lines if "no difference" in line or "does not reach" in line)
    assert "TF-IDF with logistic regression (accuracy 1.0000): " in verdict
    assert "--sweep-rates" in verdict
    assert call(monkeypatch, model, *reviews, *FEW, "--out", tmp_path / "without", "--no-baselines") == 0
    captured = capsys.readouterr()
    assert "baseline" not in captured.out + captured.err


def test_a_sweep_prints_a_line_for_each_value(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert call(monkeypatch, model, *reviews, *FEW, "--sweep", "learning_rate=1e-4,3e-4", "--out", out) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].split() == ["setting", "median", "accuracy", "standard", "deviation"]
    for line, value in zip(lines[1:3], ("1e-4", "3e-4"), strict=True):
        median = json.loads((out / f"learning_rate={value}" / "results.json").read_text())["median"]
        assert line.startswith(f"learning_rate={value}  {median:.4f}")
        assert "+-" not in line  # one seed has no standard deviation
    assert lines[3] in ("best: learning_rate=1e-4", "best: learning_rate=3e-4")
    assert lines[4] == "  selected by its scores on dev, so these are slightly optimistic"
    assert f"discern predict {out / lines[3].removeprefix('best: ')} FILE" in said
    assert call(monkeypatch, model, *reviews, "--sweep", "learning_rate", "--out", out) == 2
    assert "--sweep learning_rate=1e-4,3e-4" in capsys.readouterr().err


def test_without_a_seed_that_has_a_score_it_failed(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    rate = ("--set", "optimizer.learning_rate=1e30", "--set", "optimizer.warmup_steps=0")
    assert call(monkeypatch, model, *reviews, *FEW, *rate, "--out", out) == 1
    said = capsys.readouterr().out
    assert "own: no seed has a score" in said
    assert "next:" not in said
    assert "--set optimizer.learning_rate=" in said.splitlines()[-1]
    assert (out / "seed-0" / "debug" / "failure.json").is_file()
    monkeypatch.setattr(sys, "argv", ["discern", "predict", str(out), reviews[3]])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert f"seed 0 of {out} diverged: step 1: the gradient is not finite" in said
    assert "lower the learning rate" in said


def question(context: str, answer: str) -> str:
    return json.dumps({"question": "which?", "context": context, "answer": answer})


# Files, options, exit code, what is said.
BAD: dict[str, tuple[dict[str, list[str]], list[str], int, list[str]]] = {
    "a label unseen in training": (
        {"a.csv": ["review,stars", *ROWS], "b.csv": ["review,stars", *ROWS, "what,god"]},
        ["--train", "a.csv", "--dev", "b.csv"],
        1,
        [
            "b.csv:5: label 'god'",
            "does not occur in the training file, whose labels are bad, good, so-so",
            "did you mean 'good'?",
        ],
    ),
    "an empty text": (
        {"a.csv": ["review,stars", *ROWS, ",good"]},
        ["--train", "a.csv"],
        1,
        ["a.csv:5: 'review' is empty", "remove the row"],
    ),
    "a missing column": (
        {"a.csv": ["review,stars", *ROWS]},
        ["--train", "a.csv", "--text", "reviw"],
        2,
        ["a.csv has no column 'reviw'; its columns: review, stars", "--text: did you mean 'review'?"],
    ),
    "a column missing in the dev file": (
        {"a.csv": ["review,stars", *ROWS], "b.csv": ["reviews,stars", *ROWS]},
        ["--train", "a.csv", "--dev", "b.csv"],
        2,
        ["b.csv has no column 'review'; its columns: reviews, stars", "did you mean 'reviews'?"],
    ),
    "unbalanced quotes": (
        {"a.csv": ["review,stars", "fine,good", '"open,bad', "more,good"]},
        ["--train", "a.csv"],
        1,
        ["a.csv:3: unbalanced quotation marks", "detected in line 4", 'double them inside a quoted field: "he said ""yes"""'],
    ),
    "no answer that occurs": (
        {"a.jsonl": [question("the red one", "blue"), question("the red one", "green")]},
        ["--train", "a.jsonl", "--question", "question"],
        1,
        ["a.jsonl has no answers to learn from", "a.jsonl:1 question 0: 'blue'", "must occur in its context exactly"],
    ),
    "tags of unequal length": (
        {"a.csv": ["words,tags", "it rains,O O", "it rains,O"]},
        ["--train", "a.csv", "--tags", "tags"],
        1,
        ["a.csv:3: 2 words in 'words' but 1 tags in 'tags'", "every word needs a tag"],
    ),
    "columns of unequal number": (
        {"a.conll": ["it O", "rains"]},
        ["--train", "a.conll"],
        1,
        ["a.conll:2 has 1 columns, but line 1 has 2", "every word needs the same number of columns"],
    ),
    "a score that is none": (
        {"a.csv": ["text,score", "x,1.5", "y,nan"]},
        ["--train", "a.csv"],
        1,
        ["a.csv:3: 'score' is 'nan', expected a finite number", "--set files.label_kind=label"],
    ),
    "one class alone": (
        {"a.csv": ["text,label", "x,a", "y,a"]},
        ["--train", "a.csv"],
        1,
        ["every example of", "is 'a': there is nothing to learn", "--label COLUMN"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained_before_training(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, options, code, says = BAD[name]
    for file, lines in files.items():
        write(tmp_path / file, *lines)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, model, *options, "--out", "out") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    error, _, hint = captured.err[captured.err.index("error: ") :].partition("\n  hint: ")
    assert hint
    assert [word for word in says if word not in f"{error}\n{hint}"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_answers_that_do_not_occur_are_counted_listed_and_skipped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path / "a.jsonl", *[question(f"the red one {n}", "red") for n in range(6)], question("the red one", "blue"))
    dev = write(tmp_path / "b.jsonl", question("the red one", "red"), question("a tensor", "of shape"))
    columns = ("--question", "question", "--context", "context", "--answer", "answer")
    assert call(monkeypatch, model, "--train", train, "--dev", dev, *columns, *FEW, "--out", tmp_path / "out", "--json") == 0
    captured = capsys.readouterr()
    assert "own: train: answer that does not occur in its context, left out: 1" in captured.err
    assert f"{train}:7 question 6: 'blue'" in captured.err
    results = json.loads(captured.out)
    # What is judged counts a question whose answer cannot be found: the metric would flatter otherwise.
    assert (results["train_examples"], results["examples"]) == (6, 2)


@pytest.mark.usefixtures("unverified")
def test_a_tokenizer_that_does_not_fit_is_refused(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export(model, out=tmp_path / "model", progress=Silent(), warn=lambda _: None)
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"more{n}" for n in range(999)])
    tokenizer.save(str(path))
    (tmp_path / "model" / CHECKSUMS_NAME).unlink()  # which would tell first
    assert call(monkeypatch, tmp_path / "model", *reviews, "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "the tokenizer has " in said
    assert "entries, but the embeddings " in said
    assert "use the tokenizer that the model was trained with" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(
    model: Path,
    reviews: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert call(monkeypatch, model, *reviews, *FEW, "--out", out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    scores = write(tmp_path / "scores.csv", "text,score", *["x,1.5", "y,2"] * 4)
    capsys.readouterr()
    assert call(monkeypatch, model, "--train", scores, "--dev", scores, *FEW, "--out", out) == 1
    said = capsys.readouterr().err
    assert "; labels of own; layout of own; the examples of own, dev; the examples of own, train\n" in said
    assert "choose another --out, or --overwrite" in said
    rte = tmp_path / "RTE"
    for split in ("train", "dev"):
        lines = ["0\ta\tb\tentailment", "1\ta\tc\tnot_entailment"] * 4
        write(rte / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *lines)
    assert call(monkeypatch, model, "--task", "rte", "--data", rte, *FEW, "--out", out) == 1
    assert "; the tasks" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    write(tmp_path / "mine" / "notes.txt", "precious")
    assert call(monkeypatch, model, *reviews, *FEW, "--out", tmp_path / "mine") == 1
    assert "is not empty and holds no fine-tuned model" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_modernbert_from_its_folder_to_an_export(
    reviews: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuned from a masked language model of transformers, exported, and the same to transformers as to `predict`."""
    import transformers

    start, tuned, done = (tmp_path / name for name in ("start", "tuned", "done"))
    config = transformers.ModernBertConfig(
        vocab_size=220, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, pad_token_id=0
    )
    transformers.ModernBertForMaskedLM(config).save_pretrained(start)
    small_tokenizer("wordpiece, lower-cased").save(str(start / "tokenizer.json"))
    rate = ("--set", "optimizer.learning_rate=1e-2", "--set", "task.pooling=mean")
    assert call(monkeypatch, start, *reviews, *FEW, *rate, "--out", tuned) == 0
    record = json.loads((tuned / "finetuned.json").read_text())["tasks"]["own"]["config"]
    assert (record["head"], record["pooling"]) == ("prediction", "mean")
    capsys.readouterr()
    for arguments in (["export", tuned, "--out", done], ["predict", tuned, reviews[3]]):
        monkeypatch.setattr(sys, "argv", ["discern", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        said = capsys.readouterr().out
    ours = [list(json.loads(line)["probabilities"].values()) for line in said.splitlines()]
    classify = transformers.pipeline("text-classification", model=str(done), top_k=None)
    texts = [row.split(",")[0] for row in ROWS * 2]
    theirs = [[each["score"] for each in sorted(scores, key=lambda each: each["label"])] for scores in classify(texts)]
    assert ours == [pytest.approx(row, abs=2e-6) for row in theirs]
    assert len({row[0] for row in ours}) == 3, "predictions that hardly differ would prove nothing"
    assert call(monkeypatch, done, *reviews, *FEW, "--out", tmp_path / "again") == 0


def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "discern finetune MODEL --train reviews.csv --text review --label stars --out OUT" in said


def test_a_single_score_of_several_seeds_has_no_deviation() -> None:
    scores = {"median": 0.5, "mean": 0.5, "standard_deviation": None, "best": 0.5, "metrics": {}, "failed_seeds": {}}
    entry = {"task": "own", "metric": "accuracy", "split": "dev", "examples": 1, **scores}
    assert _task_lines(entry, 2)[0] == "own: median accuracy 0.5000 of 2 seeds on dev (1 example); mean 0.5000, best 0.5000"
