"""What no machine holds is refused before memory is asked for."""

from __future__ import annotations

import pytest
import torch

from discern.artifacts.run import check_parameters
from discern.errors import ConfigError
from discern.objectives.base import Vocabulary
from discern.training.memory import machine_memory
from discern.training.pretrain_config import load_pretrain_config
from tests.support import SPECIAL

CPU = torch.device("cpu")


def test_parameters_beyond_the_memory_are_refused() -> None:
    sizes = ["model.num_layers=8", "model.hidden_size=65536", "model.feedforward_size=1000000"]
    huge = load_pretrain_config(None, "tiny", sizes).config
    with pytest.raises(ConfigError, match=r"model\.num_layers=8, model\.hidden_size=65536.* GB with gradients.*this machine has"):
        check_parameters(huge, Vocabulary(1000, SPECIAL), CPU)
    check_parameters(load_pretrain_config(None, "electra-small", []).config, Vocabulary(30_522, SPECIAL), CPU)


def test_the_machine_has_memory() -> None:
    present = machine_memory(CPU)
    assert present is None or present > 2**28
