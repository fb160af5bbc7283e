"""What no machine holds is refused before memory is asked for."""

from __future__ import annotations

import pytest
import torch

from discern.errors import ConfigError
from discern.objectives.base import Vocabulary
from discern.pretraining import resume
from discern.pretraining.resume import check_parameters
from discern.training.config import load_pretrain_config
from tests.support import SPECIAL

CPU = torch.device("cpu")


def test_parameters_beyond_the_memory_are_refused() -> None:
    sizes = ["model.num_layers=8", "model.hidden_size=65536", "model.feedforward_size=1000000"]
    huge = load_pretrain_config(None, "tiny", sizes).config
    with pytest.raises(ConfigError, match=r"model\.num_layers=8, model\.hidden_size=65536.* GB with gradients.*this machine has"):
        check_parameters(huge, Vocabulary(1000, SPECIAL), CPU)
    entropy = load_pretrain_config(None, "tiny", ["objective.masking=entropy"]).config
    with pytest.raises(ConfigError, match="'entropy' adds up in float64, which mps lacks"):
        check_parameters(entropy, Vocabulary(1000, SPECIAL), torch.device("mps"))
    check_parameters(load_pretrain_config(None, "electra-small", []).config, Vocabulary(30_522, SPECIAL), CPU)


def test_weights_that_are_divided_need_less_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "machine_memory", lambda _: 9 * 10**9)
    large = load_pretrain_config(None, "tiny", ["model.num_layers=64", "model.hidden_size=1536", "model.num_heads=16"]).config
    words, gpu = Vocabulary(1000, SPECIAL), torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"take \d\d\.\d GB with gradients.*cuda:0 has 9\.0 GB"):
        check_parameters(large, words, gpu)
    divided = large.model_copy(update={"train": large.train.model_copy(update={"parallel": "fsdp"})})
    check_parameters(divided, words, gpu, 4)
