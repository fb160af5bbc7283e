"""Two towers in a folder: the names of ELECTRA, and a `model_type` of their own, which transformers rejects."""

from __future__ import annotations

from discern.errors import ConfigError
from discern.models.architecture import Predicts
from discern.models.config import ModelConfig
from discern.models.electra.huggingface import ElectraArchitecture


class TwoTowerArchitecture(ElectraArchitecture):
    """Two towers of encoder 'bert', stored beside a discriminator."""

    titles = {"discern-two-tower": "two towers"}
    beside_only = True
    parts = (*ElectraArchitecture.parts, "left.", "right.")  # type: ignore[assignment]
    classes = {"words": "DiscernTwoTowerForMaskedLM"}

    def check(self, sizes: ModelConfig, predicts: Predicts, *, bilinear: bool) -> None:
        if sizes.encoder != self.encoder:
            raise ConfigError(
                f"two towers of encoder '{sizes.encoder}' cannot be exported: transformers has no class for it",
                hint="leave out --all-networks, or choose another network with --network; discern takes the run as it is",
            )
        super().check(sizes, predicts, bilinear=bilinear)
