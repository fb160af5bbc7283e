"""Chinese classification by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.tasks import tasks
from discern.tasks.base import Definition
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.examples import ClassificationExample
from tests.tasks.data_folder import data_folder, write


def test_chnsenticorp_and_tnews_from_their_files(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train.tsv", "label\ttext_a", "1\t很好", "0\t不好")
    definition: Definition[ClassificationExample] = tasks.load("chnsenticorp")
    paths = definition.source.splits(tmp_path / "a")
    assert list(paths) == ["train"]
    reading = definition.source.read(paths["train"], "train")
    assert [(example.text, example.label) for example in reading.examples] == [("很好", "1"), ("不好", "0")]
    assert (definition.metrics, definition.labels, definition.report_splits) == (("accuracy",), ("0", "1"), ("test",))
    assert definition.defaults == {"task.sequence_length": 256}
    path = write(tmp_path / "b" / "train.json", '{"label": 104, "sentence": "股市上涨"}')
    write(tmp_path / "b" / "dev.json", '{"label": 104, "sentence": "股市上涨"}')
    definition = tasks.load("tnews")
    assert definition.source.splits(tmp_path / "b") == {"train": path, "dev": tmp_path / "b" / "dev.json"}
    assert definition.source.read(path, "train").examples[0].label == "104"


@pytest.mark.parametrize(("name", "classes"), [("chnsenticorp", 2), ("tnews", 15)])
def test_real_files_hold_no_label_that_training_lacks(name: str, classes: int) -> None:
    definition: Definition[ClassificationExample] = tasks.load(name)
    paths = definition.source.splits(data_folder("zh", name))
    assert list(paths) == ["train", "dev", "test"]
    config = ClassificationConfig()
    train = definition.source.read(paths["train"], "train")
    task = Classification(name, config, definition.metrics, Classification.learn(train, config, definition.labels))
    assert len(task.labels.names) == classes
    for split in ("dev", "test"):
        task.check(definition.source.read(paths[split], split))


@pytest.mark.parametrize("name", ["afqmc", "ocnli", "cmnli"])
def test_tasks_on_pairs(tmp_path: Path, name: str) -> None:
    definition: Definition[ClassificationExample] = tasks.load(name)
    label = definition.labels[-1]
    path = write(tmp_path / "train.json", f'{{"sentence1": "股市上涨", "sentence2": "股市", "label": "{label}"}}')
    (example,) = definition.source.read(path, "train").examples
    assert (example.text, example.pair, example.label) == ("股市上涨", "股市", label)
    assert definition.source.text_names() == (("sentence1",), ("sentence2",))
