"""An encoder of another package, with a setting of its own, is trained like ours."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from discern.models import encoders
from discern.models.electra.encoder import BertEncoder
from tests.pretraining.test_evaluate import prepared
from tests.small.tokenizers import small_tokenizer
from tests.support import run_python

# All that another package writes: settings, the module, its FLOPs; and one line in its entry points.
PACKAGE = """
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.layers import module_flops


class WindowConfig(ModelConfig):
    encoder: str = Field("windows", description="Architecture, by its name in the registry of encoders.")
    window: int = Field(3, ge=1, description="Tokens on either side that each token is averaged with.")


class WindowEncoder(Encoder):
    Config = WindowConfig

    def __init__(self, embeddings, config, *, gradient_checkpointing=False):
        super().__init__()
        self.config = config
        self.embeddings = embeddings
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size if number else embeddings.embedding_size, config.hidden_size)
            for number in range(config.num_layers)
        )
        self.register_buffer("scale", 1 / torch.arange(1, config.hidden_size + 1), persistent=False)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, document_ids=None):
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        for layer in self.layers:
            width = 2 * self.config.window + 1
            near = F.avg_pool1d(hidden.transpose(1, 2), width, 1, self.config.window).transpose(1, 2)
            hidden = layer(near).relu()
        return hidden * self.scale

    def forward_flops(self, length, *, query_share=0.0, remembered=0):
        return module_flops(self.layers, length)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    small_tokenizer("wordpiece, lower-cased").save(str(folder / "tokenizer.json"))
    return prepared(folder / "data", folder / "tokenizer.json")


@pytest.fixture(autouse=True, scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package, installed as far as entry points go."""
    folder = tmp_path_factory.mktemp("packages")
    about = folder / "windows-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: windows\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[discern.encoders]\nwindows = window_encoder:WindowEncoder\n")
    (folder / "window_encoder.py").write_text(PACKAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(encoders, "_targets", dict(encoders._targets))
        patch.setattr(encoders, "_entry_points_read", False)
        yield
    sys.modules.pop("window_encoder", None)


discern = partial(run_python, "-m", "discern")


def detected(model: Path) -> dict[str, Any]:
    """What a model finds in a text."""
    done = discern("detect", model, "--text", "the cat sat on the mat", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_trained_with_its_own_setting(data: Path, tmp_path: Path) -> None:
    chosen = "--preset", "tiny", "--set", "model.encoder=windows", "--set", "model.window=2"
    run = "--data", data, "--out", tmp_path / "run", "--device", "cpu", "--json"
    planned = discern("pretrain", *chosen, *run, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["flops"] > 0
    done = discern("pretrain", *chosen, *run, "--set", "train.max_steps=3")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 3
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]
    assert (written["encoder"], written["window"]) == ("windows", 2)
    assert not written.keys() & {"normalization", "initialization", "clamp_length", "activation"}
    evaluated = discern("evaluate", tmp_path / "run", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    exported = discern("export", tmp_path / "run", "--out", tmp_path / "model")
    assert exported.returncode == 0, exported.stderr
    assert detected(tmp_path / "model") == detected(tmp_path / "run")


def test_one_that_is_derived_from_ours_takes_nothing_over() -> None:
    class Derived(BertEncoder):
        pass

    assert not Derived.architecture.titles
    assert BertEncoder.architecture.titles


def test_its_setting_is_checked_and_its_own() -> None:
    wrong = discern("config", "show", "--preset", "tiny", "--set", "model.encoder=windows", "--set", "model.window=0")
    assert wrong.returncode == 2
    assert "model.window is 0; expected a whole number of at least 1" in wrong.stderr
    other = discern("config", "show", "--preset", "tiny", "--set", "model.window=2")
    assert other.returncode == 2
    assert "encoder 'windows' has it: --set model.encoder=windows" in other.stderr
