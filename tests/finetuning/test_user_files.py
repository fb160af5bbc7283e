"""A task from one's own files: which family, which columns, and what is refused; sentences with a word a line included."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.finetuning.evaluate import evaluate_finetuned
from discern.finetuning.settings import given_settings, load_finetune_config
from discern.finetuning.task_files import TaskFiles
from discern.finetuning.user_files import UserFileSource, user_task
from discern.inference.predict import predict
from discern.models.config import ModelConfig
from discern.progress import Silent
from discern.tasks.readers.user_columns import NumberedColumns, TaggingColumns
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune, prepare_finetuning
from tests.tasks.data_folder import write

SENTENCES = ["the DT B-NP", "model NN I-NP", "reads VB O", "", "file NN B-NP", "returns VB O"]
UNIVERSAL = [
    "# text = don't read",
    "1-2\tdon't\t_\t_",
    "1\tdo\tdo\tAUX",
    "2\tn't\tnot\tPART",
    "2.1\tx\tx\tX",
    "3\tread\tread\tVERB",
]


def described(*overrides: str) -> TaskFiles:
    return user_task(given_settings(None, overrides))


def words_of(files: TaskFiles) -> list[tuple[tuple[str, ...], tuple[str, ...] | None]]:
    reading = files.definition.source.read(files.paths["train"], "train")
    return [(example.words, example.tags) for example in reading.examples]


@pytest.mark.parametrize(
    ("header", "rows", "family", "metric"),
    [
        ("text,label", ["x,a", "y,b"], "classification", "accuracy"),
        ("text,score", ["x,1.5", "y,2"], "classification", "spearman"),
        ("text,label", ['x,"[""a""]"', 'y,"[]"'], "classification", "micro_f1"),
        ("words,tags", ["it rains,O O"], "tagging", "f1"),
        ("question,context,answer", ["which?,the red one,red"], "squad1", "exact_match"),
        ("question,context,answer", ["which?,the red one,red", "who?,the red one,"], "squad2", "exact_match"),
    ],
)
def test_the_columns_decide_the_family(tmp_path: Path, header: str, rows: list[str], family: str, metric: str) -> None:
    path = write(tmp_path / "a.csv", header, *rows)
    named = {"tagging": ["files.words=words"], "squad1": ["files.answer=answer"], "squad2": ["files.answer=answer"]}
    found = described(f"files.train={path}", *named.get(family, []))
    assert (found.definition.family.family, found.definition.metrics[0]) == (family, metric)
    assert found.paths == {"train": path}


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ([], "nothing to train on", "--train FILE"),
        (["files.train={csv}", "files.txt=review"], "unknown key 'txt' in [files]", "text"),
        (["files.train={csv}", "files.text=reviw"], "no column 'reviw'; its columns: review, stars", "did you mean 'review'"),
        (["files.train={csv}", "files.text=review", "files.tags=stars"], "tags and a label", "one kind of task"),
        (["files.train={csv}", "files.format=cvs"], "unknown format of files 'cvs'", "did you mean 'csv'"),
        (["files.train={csv}", "files.label_kind=numbr"], "label_kind", "number"),
        (["files.train={conll}", "files.words=form"], "numbered columns, but --words is 'form'", "--words 0"),
        (["files.train={conll}", "files.text=text"], "has one word per line, which is for tagging", "--words N"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, overrides: list[str], message: str, hint: str) -> None:
    paths = {"csv": write(tmp_path / "a.csv", "review,stars", "x,1"), "conll": write(tmp_path / "a.conll", *SENTENCES)}
    with pytest.raises(ConfigError) as caught:
        described(*(each.format(**paths) for each in overrides))
    assert message in caught.value.message
    assert hint in str(caught.value)


@pytest.mark.parametrize(("kind", "hint"), [("", "--set files.label_kind=number"), ("x", "--label COLUMN")])
def test_a_class_a_row_is_refused_unless_it_is_asked_for(tmp_path: Path, kind: str, hint: str) -> None:
    path = write(tmp_path / "a.csv", "text,label", *(f"text {n},{kind}{n}" for n in range(30)))
    files = described(f"files.train={path}")
    with pytest.raises(
        DataError, match=r"the column 'label' has 30 different labels in 30 examples, such as .*; that is too many"
    ) as caught:
        files.definition.source.read(path, "train")
    assert hint in str(caught.value.hint)
    assert len(files.definition.source.read(path, "dev").examples) == 30
    sure = described(f"files.train={path}", "files.label_kind=label")
    assert len(sure.definition.source.read(path, "train").examples) == 30
    half = write(tmp_path / "b.csv", "text,label", *(f"text {n},{n % 20}" for n in range(40)))
    assert len(described(f"files.train={half}").definition.source.read(half, "train").examples) == 40


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        described(f"files.train={tmp_path / 'nowhere.csv'}")


def test_settings_may_stand_in_a_file(tmp_path: Path) -> None:
    train = write(tmp_path / "a.conll", *SENTENCES)
    config = write(tmp_path / "a.toml", "[files]", f"train = '{train}'", "words = 1", "tags = -1")
    source = user_task(given_settings(config, ())).definition.source
    assert source == UserFileSource(NumberedColumns(1, -1), "conll")


@pytest.mark.parametrize("name", ["a.conll", "a.bio", "a.conll.gz", "a.txt"])
def test_a_word_a_line_is_recognized_or_said(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = "\n".join([*SENTENCES, ""]).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    said = ["files.format=conll"] if name == "a.txt" else []
    found = described(f"files.train={path}", *said)
    assert found.definition.family.family == "tagging"
    assert words_of(found) == [(("the", "model", "reads"), ("B-NP", "I-NP", "O")), (("file", "returns"), ("B-NP", "O"))]
    middle = described(f"files.train={path}", "files.tags=1", *said)
    assert [tags for _, tags in words_of(middle)] == [("DT", "NN", "VB"), ("NN", "VB")]
    reading = middle.definition.source.read(path, "train")
    assert reading.notes[0] == "columns: words = 0, tags = 1"
    assert reading.places == (f"{path}:1", f"{path}:5")


def test_universal_dependencies_give_their_words_and_parts_of_speech(tmp_path: Path) -> None:
    found = described(f"files.train={write(tmp_path / 'a.conllu', *UNIVERSAL)}")
    assert words_of(found) == [(("do", "n't", "read"), ("AUX", "PART", "VERB"))]
    problems = found.definition.source.read(found.paths["train"], "train").problems
    assert [problem.count for problem in problems] == [1, 2]


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", *SENTENCES)
    with pytest.raises(ConfigError, match="has 3 columns, but no tag column 3") as caught:
        words_of(described(f"files.train={path}", "files.tags=3"))
    assert "choose 0 to 2" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="the column of the tags") as caught:
        words_of(described(f"files.train={path}", "files.tags=0"))
    assert "--words N --tags M" in str(caught.value.hint)


def test_the_columns_of_named_tasks_are_refused_and_theirs_named(tmp_path: Path) -> None:
    files = described(f"files.train={write(tmp_path / 'a.conll', *SENTENCES)}")
    config = load_finetune_config(
        [files.definition], ModelConfig(hidden_size=32), given_settings(None, ["task.tag_column=1"])
    ).config
    with pytest.raises(ConfigError, match=r"task\.tag_column is 1") as caught:
        files.definition.source.configured(config.task_config("own"))
    assert caught.value.hint == "for your own files, use --tags 1"
    usual = load_finetune_config(
        [files.definition], ModelConfig(hidden_size=32), given_settings(None, ["task.tag_column=-1"])
    ).config
    assert files.definition.source.configured(usual.task_config("own")) == files.definition.source


def test_what_is_recorded_reads_the_same(tmp_path: Path) -> None:
    conll = write(tmp_path / "a.conll", *SENTENCES)
    table = write(tmp_path / "a.csv", "words,tags", "it rains,O B-X")
    for overrides, kind in (
        ([f"files.train={conll}", "files.tags=1"], "tags"),
        ([f"files.train={table}", "files.words=words"], "tags"),
    ):
        source = described(*overrides).definition.source
        assert UserFileSource.of_record(kind, json.loads(json.dumps(source.record()))) == source


def test_tables_and_columns_may_stand_side_by_side_where_names_tell(tmp_path: Path) -> None:
    conll = write(tmp_path / "dev.conll", *SENTENCES)
    from_table = UserFileSource(TaggingColumns("words", "tags"))
    assert len(from_table.read(conll, "dev").examples) == 2
    table = write(tmp_path / "dev.csv", "words,tags", "it rains,O B-X")
    with pytest.raises(ConfigError, match="is a table, judging by its name") as caught:
        UserFileSource(NumberedColumns(), "conll").read(table, "dev")
    assert "one format" in str(caught.value.hint)


def test_a_tag_that_training_did_not_know_is_named_with_its_line(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    train = write(tmp_path / "train.conll", *[*SENTENCES, ""] * 4)
    dev = write(tmp_path / "dev.conll", *SENTENCES, "", "hello UH B-INTJ")
    request = Finetuning(str(tmp_path / "run"), tmp_path / "out", overrides=(f"files.train={train}", f"files.dev={dev}"))
    with pytest.raises(DataError, match=r"dev\.conll:8: tag 'B-INTJ' \(1 in the file\) is of a type that does not occur"):
        prepare_finetuning(request, Silent())


def test_a_word_a_line_from_training_to_prediction(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    # The words stand second here, so that nothing works by chance.
    lines = ["B-NP the", "I-NP model", "O reads", "", "B-NP file", "O returns", ""]
    train = write(tmp_path / "train.txt", *lines * 12)
    dev = write(tmp_path / "dev.txt", *lines * 2)
    files = (f"files.train={train}", f"files.dev={dev}", "files.format=conll", "files.words=1", "files.tags=0")
    fast = ("train.max_steps=60", "optimizer.learning_rate=3e-3", "finetune.dropout=0", "train.sequences_per_step=12")
    out = tmp_path / "out"
    results = finetune(Finetuning(str(tmp_path / "run"), out, overrides=(*files, *fast)), Silent())
    assert (results["metric"], results["median"], results["selected_on"]) == ("f1", 1.0, None)
    assert evaluate_finetuned(out, dev, progress=Silent())["score"] == 1.0

    def tags(path: Path, **columns: str) -> list[Any]:
        said: list[dict[str, Any]] = []
        predict(out, path, said.extend, Silent(), columns=columns)
        return [each["tags"] for each in said]

    wanted = [["B-NP", "I-NP", "O"], ["B-NP", "O"]]
    assert tags(write(tmp_path / "new.txt", *["_" + line[line.find(" ") :] if line else "" for line in lines])) == wanted
    assert tags(write(tmp_path / "new.conll", "the", "model", "reads", "", "file", "returns"), words="0") == wanted
    assert tags(write(tmp_path / "new.txt", "the model reads")) == wanted[:1]  # a sentence, not a line of three columns
    assert tags(write(tmp_path / "new.txt", "the model reads", "file returns")) == wanted
    assert tags(write(tmp_path / "new.csv", "words,x", "the model reads,1", "file returns,2")) == wanted
    with pytest.raises(ConfigError, match="no word column 1") as caught:
        tags(write(tmp_path / "bare.conll", "the", "model"))
    assert "choose 0 to 0" in str(caught.value.hint)


def test_words_without_tags_are_no_file_to_evaluate_on(tmp_path: Path) -> None:
    train, words = write(tmp_path / "train.conll", *SENTENCES), write(tmp_path / "dev.conll", "the", "model", "", "file")
    files = described(f"files.train={train}", f"files.dev={words}")
    with pytest.raises(DataError, match=r"dev\.conll has a single column, so there are no tags to evaluate on"):
        files.definition.source.read(files.paths["dev"], "dev")
