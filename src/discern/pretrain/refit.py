"""A dense head for a discriminator that was trained with a bilinear term, fitted on its frozen states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from discern.artifacts.dense_head import DenseHead
from discern.artifacts.opening import open_model
from discern.artifacts.run import RunFolder
from discern.corruption.randomness import Randomness, key_of
from discern.data.batching.rows import training_rows
from discern.errors import ConfigError, DataError
from discern.models.heads import ReplacedTokenHead
from discern.objectives.base import Objective
from discern.objectives.losses import replaced_token_loss
from discern.pretrain.evaluate import change_since, open_data
from discern.pretrain.rows import heldout_stream
from discern.progress import Progress
from discern.training import evaluation
from discern.training.parallel import Ranks, choose_device

NETWORK, _HEAD, _TERM = "discriminator", "discriminator_head", "discriminator_bilinear"
_RATE, _TOKENS_PER_UPDATE = 1e-3, 4096


def check_refit(wanted: bool, network: str | None, data: object) -> None:
    """Check the options of an export that concern the head.

    Raises:
        ConfigError: a data set is given and no head is to be fitted, or the network has no such head.
    """
    if data is not None and not wanted:
        raise ConfigError("--data is for --refit-head, which is not given", hint="add --refit-head, or leave out --data")
    if wanted and network not in (None, NETWORK):
        raise ConfigError(f"--refit-head is for the {NETWORK}, not the {network}", hint="leave out --refit-head")


def refit_head(
    run: Path, *, data: Path | None = None, updates: int = 200, progress: Progress, warn: Callable[[str], None]
) -> DenseHead:
    """Fit a dense head on the states of a discriminator, whose weights stay as they are.

    No class of transformers has the bilinear term, so a discriminator with it is exported without its head. With this head it
    is exported whole.

    The head starts as the dense part of the trained head, and learns replaced token detection from new rows of the training
    text, corrupted by the run's own generator.

    Args:
        run: folder of a run.
        data: data set; None: the one that the run was trained on.
        updates: number of updates, of 4,096 tokens each.
        warn: called if checkpoints were skipped, or if the run's data set has changed since it was trained.

    Raises:
        ConfigError: the discriminator has no bilinear term, or does not detect replaced tokens.
        DataError: the data set is missing, has no held-out split, or was made with another tokenizer.
        CheckpointError: the run has no intact checkpoint.
    """
    trained = open_model(run, warn=warn)
    if not isinstance(trained, RunFolder):
        raise ConfigError(
            f"{run} is not a run, and fitting a head needs the run's generator and settings",
            hint="give the run itself, or leave out --refit-head",
        )
    objective, config = trained.objective, trained.config
    network = objective.networks().get(NETWORK)
    if network is None or network.bilinear is None or not isinstance(network.head, ReplacedTokenHead):
        raise ConfigError(
            f"{run} has no discriminator of replaced tokens with a bilinear term, so its head is exported as it is",
            hint="leave out --refit-head",
        )
    opened = open_data(run, trained, data)
    if data is None and (change := change_since(opened, run, trained.record)) is not None:
        warn(change)
    heldout = heldout_stream(opened, config)
    if heldout is None:
        raise DataError(
            f"{opened.folder} has no held-out split, on which to measure how much the new head costs",
            hint="give a data set that has one: --data DATA; made by: discern prepare TEXT --out DATA --heldout 0.5",
        )
    ranks = Ranks(0, 1, choose_device("auto"))
    objective.to(ranks.device).eval()
    rows = max(1, _TOKENS_PER_UPDATE // config.data.sequence_length)
    seed = key_of(config.train.seed, "refitted head") % 2**31
    stream = training_rows(opened.split("train"), opened.special_tokens, config.data, seed)
    head = copy.deepcopy(network.head).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, weight_decay=0.01)
    states: list[Tensor] = []
    watching = network.encoder.register_forward_hook(lambda _, given, found: states.append(found))
    progress.start("fitting the head", updates, "updates")
    for update in range(updates):
        places = np.arange(update * rows, (update + 1) * rows)
        batch = stream.batch(places, places)
        randomness = Randomness(seed, trained.step + update, batch.example_index)
        corrupted = objective.corrupt(batch, randomness).to(ranks.device)
        with torch.no_grad():
            seen = objective(corrupted, randomness.to(ranks.device)).observations
        hidden = states[-1]  # of the discriminator's pass, which is the last one of an encoder that is the generator's too
        states.clear()
        counted = seen.get("loss_mask", corrupted.tokens.attention_mask)
        term = replaced_token_loss(head(hidden), seen["is_replaced"], counted, int(counted.sum()), 1.0)
        optimizer.param_groups[0]["lr"] = _RATE * (1 - update / updates)
        optimizer.zero_grad()
        (term.total / max(term.count, 1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        progress.advance(1)
    watching.remove()
    before = _auc(objective, heldout, ranks)
    setattr(objective, _HEAD, head.eval())
    setattr(objective, _TERM, None)
    after = _auc(objective, heldout, ranks)
    return DenseHead(head.cpu(), after, before, updates)


def _auc(objective: Objective, heldout: evaluation.HeldoutRows, ranks: Ranks) -> float:
    return evaluation.evaluate(objective, heldout, ranks)["discriminator_auc"]
