"""The rows of a run: those to train on, and the held-out ones."""

from __future__ import annotations

from discern.data.batching.mixture import MixedStream
from discern.data.batching.rows import RowStream, SuccessiveRows, heldout_rows, scheduled_rows
from discern.data.batching.stream import ExampleStream
from discern.data.batching.two_part import TwoPartStream
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError
from discern.pretraining.resolved_run import ResolvedRun
from discern.training.distributed import Ranks
from discern.training.pretrain_config import PretrainConfig
from discern.training.schedule import step_sizes
from discern.training.state import BatchSource

# With a smaller fraction of rows in which B follows A (half is intended), the next-sentence task is hardly learned.
_LEAST_FOLLOWING = 0.4


def training_source(resolved: ResolvedRun) -> BatchSource:
    """Rows to train on: those of the data set, mixed with those of the replayed one if there is one."""
    config, replay = resolved.config, resolved.replay
    own = training_stream(resolved.data, config)
    if resolved.replayed is None or replay is None:
        return own
    other = training_stream(resolved.replayed, config)
    assert isinstance(own, ExampleStream)  # other objectives are refused when the run is resolved
    assert isinstance(other, ExampleStream)
    return MixedStream(own, other, replay.share)


def training_stream(data: TokenData, config: PretrainConfig) -> RowStream:
    """Rows to train on: shuffled, or in order within each slot of the batch if the objective has a memory."""
    stretches = step_sizes(config.train, config.data).row_stretches
    in_slots = config.objective.reads_in_order
    split, seed = data.split("train"), config.train.seed
    return scheduled_rows(split, data.special_tokens, config.data, seed, stretches, in_slots=in_slots)


def heldout_stream(data: TokenData, config: PretrainConfig) -> RowStream | None:
    """Held-out rows in their own order; None if the data set has no held-out split."""
    split = data.split("heldout")
    if split.num_tokens == 0:
        return None
    return heldout_rows(split, data.special_tokens, config.data)


def epochs_of(rows: RowStream, examples: int) -> float:
    """Number of times that the first `examples` rows read the text."""
    return rows.epochs(examples) if isinstance(rows, SuccessiveRows) else examples / rows.num_rows


def notes_on_rows(data: TokenData, config: PretrainConfig) -> list[str]:
    """Notes about the rows, for the user to read before training."""
    rows = training_stream(data, config)
    if isinstance(rows, SuccessiveRows):
        rows = rows.streams[0]  # of the shortest rows, in which sentences end least often
    if not isinstance(rows, TwoPartStream) or not config.objective.predicts_next_sentence:
        return []
    share = rows.follows_share()
    if share > _LEAST_FOLLOWING:
        return []
    return [
        f"next-sentence prediction: segment B follows segment A in about {share:.0%} of the rows instead of half. A must end "
        f"with a sentence, and in most rows no sentence ends early enough, so the answer 'no' is nearly always right. Prepare "
        f"the text with one sentence per line, or set a longer data.sequence_length, or objective.next_sentence_weight=0"
    ]


def check_shares(config: PretrainConfig, ranks: Ranks) -> None:
    """Check that the sequences of a step can be divided evenly among the ranks.

    Raises:
        ConfigError: they cannot be divided evenly.
    """
    for stretch in step_sizes(config.train, config.data).stretches:
        if stretch.rows % ranks.world_size:
            what = f"train.sequences_per_step {stretch.rows}"
            if config.train.batch_schedule or config.data.length_schedule:
                tokens = stretch.rows * stretch.length
                what = f"the {stretch.rows} rows of {stretch.length} in an update of {tokens:,} tokens"
            raise ConfigError(
                f"{what} cannot be divided evenly among {ranks.world_size} processes",
                hint=f"set a number of rows that is a multiple of {ranks.world_size}",
            )
