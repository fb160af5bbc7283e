"""Each masking on a data set of `discern prepare`, and Chinese words from jieba; what a data set lacks is refused at once."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from discern.data.check import check
from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.languages import SegmenterName
from discern.data.prepare import prepare
from discern.data.sources.documents import CorpusOptions
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError
from discern.model_files.run import load_run
from discern.pretraining.estimate import estimate
from discern.pretraining.run import heldout_stream, plan, pretrain
from discern.progress import Silent
from discern.training.distributed import Ranks, choose_device
from discern.training.evaluation import evaluate
from tests.data.small_text import SPECIALS, made_up, plain, write_vocabulary

CHINESE = [
    "我们今天去北京大学看朋友。",
    "他在图书馆学习中文已经三年了。",
    "这家饭店的服务员非常热情。",
    "昨天晚上的电影没有意思。",
    "我来到北京清华大学。",
    "明天上午我们一起坐火车去上海。",
]


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose vocabulary cuts some words into pieces."""
    folder = tmp_path_factory.mktemp("english")
    (folder / "text.txt").write_text(plain(made_up(200, seed=1)).replace("cat", "wildcat"))
    build = PrepareOptions(heldout=0.1, workers=1)
    choice = TokenizerChoice(write_vocabulary(folder / "vocab.txt"))
    prepare([str(folder / "text.txt")], out=folder / "data", tokenizer=choice, options=build, progress=Silent())
    return folder / "data"


def chinese(folder: Path, segmenter: SegmenterName) -> dict[str, Any]:
    (folder / "zh.txt").write_text("\n".join(CHINESE * 10), encoding="utf-8")
    characters = sorted({letter for sentence in CHINESE for letter in sentence})
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *characters]) + "\n", encoding="utf-8")
    return {
        "inputs": (str(folder / "zh.txt"),),
        "out": folder / segmenter,
        "tokenizer": TokenizerChoice(folder / "vocab.txt"),
        "corpus": CorpusOptions(documents="line"),
        "options": PrepareOptions(segmenter, heldout=0.1, workers=1),
        "progress": Silent(),
    }


def train(data: Path, out: Path, masking: str, steps: int = 2) -> dict[str, Any]:
    settings = (f"objective.masking={masking}", f"train.max_steps={steps}", "train.evaluate_sequences=8")
    return {"data": data, "out": out, "preset": "tiny", "overrides": settings}


@pytest.mark.parametrize("masking", ["with-replacement", "whole-word", "span", "rarity"])
def test_training_on_a_prepared_data_set(english: Path, tmp_path: Path, masking: str) -> None:
    last = pretrain(**train(english, tmp_path / "run", masking), progress=Silent())
    assert last is not None
    assert last["step"] == 2
    assert np.isfinite([last["loss"], last["heldout_loss"]]).all()
    if masking == "rarity":  # a run can be measured on other text, with the counts that its masking needs
        run, data = load_run(tmp_path / "run", warn=pytest.fail), TokenData.open(english)
        assert run.vocabulary.token_counts is not None
        assert run.vocabulary.token_counts.tolist() == data.token_counts().tolist()
        stream = heldout_stream(data, run.config)
        assert stream is not None
        assert evaluate(run.objective, stream, Ranks(0, 1, choose_device("cpu")), sequences=4)["loss"] > 0


def test_chinese_words_come_from_jieba_and_the_ids_stay(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    words = [prepare(**chinese(tmp_path, name)).manifest.statistics.tokens_per_word for name in ("none", "jieba")]
    assert words[0] == 1 < 1.3 < words[1]
    splits = [TokenData.open(tmp_path / name).split("train") for name in ("none", "jieba")]
    ids, same = (split.read(0, split.num_tokens).tolist() for split in splits)
    assert ids == same
    single, several = (split.word_starts(0, split.num_tokens) for split in splits)
    assert single.all()
    assert not several.all()
    pretrain(**train(tmp_path / "jieba", tmp_path / "run", "whole-word"), progress=Silent())
    options = train(tmp_path / "none", tmp_path / "refused", "whole-word")
    for verb in (lambda: pretrain(**options, progress=Silent()), lambda: estimate(plan(**options, warn=pytest.fail))):
        with pytest.raises(ConfigError, match=r"nearly every token is one \(1.000 tokens per word\)") as refused:
            verb()
        assert "--segmenter jieba" in str(refused.value.hint)
    assert not (tmp_path / "refused").exists()


def test_a_missing_segmenter_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    arguments = chinese(tmp_path, "jieba")
    checked = {name: arguments[name] for name in ("inputs", "options", "progress")}
    for work in (partial(prepare, **arguments), partial(check, **checked)):
        with pytest.raises(ConfigError, match="jieba, which is not installed") as refused:
            work()  # type: ignore[operator]
        assert refused.value.hint == "pip install 'discern-nlp[zh]'"
    assert not (tmp_path / "jieba").exists()
