"""What a pre-training run is asked to be, and what that comes down to before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from discern.artifacts.guard import check_folder
from discern.config.resolve import Resolved
from discern.data.extension import pieces_of_added
from discern.data.manifest import TOKENIZER_NAME
from discern.data.mixture import replay_fraction
from discern.data.shards import TokenData
from discern.errors import ConfigError, DataError
from discern.training import checkpoint
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.runs import CHECKPOINTS, CONFIG_FILE, is_run, vocabulary_of
from discern.workflows.settings import PretrainConfig
from discern.workflows.start import Start, read_start
from discern.workflows.start_settings import start_config


@dataclass(frozen=True)
class Replay:
    """Text from before, so that it is not forgotten.

    Attributes:
        data: data set of the same tokenizer, or of the one that it was extended from.
        share: of the examples, in [0, 1).
    """

    data: Path
    share: float


@dataclass(frozen=True)
class PretrainRequest:
    """What to train, on what, into which folder.

    Attributes:
        config: TOML file, or None.
        preset: name of a preset, or None.
        overrides: "section.key=value".
        resume: 'auto' continues a run that is there, 'never' starts over (an old run is moved aside), 'must' continues only.
        device: 'auto', 'cpu', 'cuda', ...
        init_from: folder of a model whose weights the run begins with; it then has no need of a preset.
        replay: other text to mix in; only with `init_from`.
        like: arithmetic of a run whose precision a new one takes where train.precision is 'auto', as of `settle_precision`.
    """

    data: Path
    out: Path
    config: Path | None = None
    preset: str | None = None
    overrides: Sequence[str] = ()
    resume: Literal["auto", "never", "must"] = "auto"
    device: str = "auto"
    init_from: Path | None = None
    replay: Replay | None = None
    like: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Settled:
    """What a request comes down to, before anything is written.

    Attributes:
        start: the model that the run begins with, if any.
        replayed: the data set that is mixed in, if any.
    """

    request: PretrainRequest
    resolved: Resolved[PretrainConfig]
    data: TokenData
    start: Start | None = None
    replayed: TokenData | None = None

    @property
    def config(self) -> PretrainConfig:
        """Of the run."""
        return self.resolved.config


def settle(request: PretrainRequest, warn: Callable[[str], None]) -> Settled:
    """Read what a request names, and make sure that it fits together.

    Args:
        warn: told of damaged checkpoints that were passed over.

    Raises:
        ConfigError, DataError, CheckpointError: it does not.
    """
    check_folder("--out", request.out, request.data, request.init_from, request.replay.data if request.replay else None)
    if request.init_from is None:
        resolved = load_pretrain_config(request.config, request.preset, request.overrides)
        return Settled(request, resolved, TokenData.open(request.data))
    data = TokenData.open(request.data)
    start = read_start(request.init_from, warn=warn)
    start.added_pieces(data)
    earlier = (
        load_pretrain_config(request.out / CONFIG_FILE, None).config
        if request.resume != "never" and is_run(request.out) and checkpoint.found(request.out / CHECKPOINTS)
        else None
    )
    resolved = start_config(start, vocabulary_of(data), request.preset, request.config, request.overrides, earlier)
    return Settled(request, resolved, data, start, _replayed(request, resolved.config, data))


def _replayed(request: PretrainRequest, config: PretrainConfig, data: TokenData) -> TokenData | None:
    """The data set to mix in.

    Raises:
        ConfigError: the share is none, or rows are cut so that two texts do not mix.
        DataError: its ids mean other words.
    """
    if request.replay is None:
        return None
    replay_fraction(request.replay.share)
    if config.data.packing == "two-part":
        raise ConfigError(
            f"--replay mixes whole rows, and objective '{config.objective.name}' makes its rows of two parts of one text",
            hint="leave out --replay, or prepare one data set of both texts: discern prepare DOMAIN GENERAL --out DATA",
        )
    replayed = TokenData.open(request.replay.data)
    same = replayed.tokenizer_fingerprint == data.tokenizer_fingerprint
    if not same and pieces_of_added(replayed.tokenizer(), data.tokenizer()) is None:
        raise DataError(
            f"{replayed.folder} was made with another tokenizer ({replayed.tokenizer_fingerprint[:12]}) than {data.folder} "
            f"({data.tokenizer_fingerprint[:12]}): they cannot be mixed",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {data.folder / TOKENIZER_NAME}",
        )
    return replayed
