"""Tagging tasks by their names, on made-up files and on real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import ConfigError
from discern.tasks import tasks
from discern.tasks.base import Definition, TextEncoder
from discern.tasks.conll import ConllSource
from discern.tasks.examples import TaggingExample
from discern.tasks.features import IGNORED
from discern.tasks.tagging import Tagging, TaggingConfig
from tests.tasks.data_folder import data_folder, write


def test_names_and_defaults() -> None:
    for name in ("chunk", "ner", "weibo-ner"):
        definition: Definition[TaggingExample] = tasks.load(name)
        assert (definition.name, definition.family, definition.metrics[0]) == (name, Tagging, "f1")
        assert definition.defaults == {"task.sequence_length": 256}


def test_a_folder_gives_the_splits_that_it_has(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", "a O")
    write(tmp_path / "test.txt", "a O")
    assert tasks.load("chunk").source.splits(tmp_path) == {"train": tmp_path / "train.txt", "test": tmp_path / "test.txt"}
    write(tmp_path / "valid.txt", "a O")
    assert tasks.load("ner").source.splits(tmp_path)["dev"] == tmp_path / "valid.txt"
    with pytest.raises(ConfigError, match="does not exist"):
        tasks.load("ner").source.splits(tmp_path / "nowhere")


def test_the_settings_say_which_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", "1 Ada NNP B-PER x", "2 sings VBZ O x")
    source = tasks.load("ner").source.configured(TaggingConfig(word_column=1, tag_column=-2))
    (example,) = source.read(path, "train").examples
    assert (example.words, example.tags) == (("Ada", "sings"), ("B-PER", "O"))
    assert source.read(path, "test", labeled=False).examples[0].tags is None
    assert tasks.load("weibo-ner").source.configured(TaggingConfig()).characters
    with pytest.raises(ConfigError, match="no tag column 7"):
        source.configured(TaggingConfig(tag_column=7)).read(path, "train")


def test_a_file_of_words_alone_has_no_tags(tmp_path: Path) -> None:
    path = write(tmp_path / "test.txt", "Ada", "sings")
    assert ConllSource().read(path, "test").examples[0].tags is None
    with pytest.raises(ConfigError, match=r"the column of the tags \(-1\) is also that of the words \(0\)") as error:
        ConllSource().read(path, "train")
    assert "--set task.tag_column" in str(error.value)


def encoded(name: str, folder: Path, split: str, vocabulary: str) -> tuple[Tagging, tuple[TaggingExample, ...], int]:
    """The task and the examples of a real split, with the number of its rows; every word has a target and gets its tag back."""
    definition: Definition[TaggingExample] = tasks.load(name)
    paths = definition.source.splits(folder)
    tokenizer = load_tokenizer(data_folder("vocab", vocabulary))
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    config = TaggingConfig(sequence_length=64)
    train = definition.source.read(paths["train"], "train")
    task = Tagging(name, config, definition.metrics, Tagging.learn(train, config, ()))
    reading = definition.source.read(paths[split], split)
    task.check(reading)
    features = task.encode(reading.examples, text, labeled=True)
    words = sum(len(example.words) for example in reading.examples)
    assert int((features.targets["tags"].values != IGNORED).sum()) == words
    assert features.input_ids.lengths.max() <= 64
    targets = features.targets["tags"]
    sure = np.eye(len(task.labels.names), dtype=np.float32)
    outputs = [{"logits": sure[np.maximum(targets[row], 0)]} for row in range(len(features))]
    predictions = task.predict(reading.examples, features, outputs)
    assert task.score(reading.examples, predictions).values == dict.fromkeys(definition.metrics, 1.0)
    assert task.mistakes(reading.examples, predictions) == []
    return task, reading.examples, len(features)


def test_real_conll_2000() -> None:
    task, examples, rows = encoded("chunk", data_folder("conll2000"), "test", "bert-uncased-en.txt")
    # Eleven types of chunk, each with four prefixes, and O.
    assert len(task.labels.names) == 45
    assert task.labels.scheme == "iob2"
    assert len(examples) == 2012 < rows


def test_real_weibo() -> None:
    for split, sentences in (("dev", 270), ("test", 270)):
        task, examples, rows = encoded("weibo-ner", data_folder("zh", "weibo-ner"), split, "bert-zh.txt")
        assert len(task.labels.names) == 33
        assert len(examples) == sentences < rows
