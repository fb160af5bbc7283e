"""The folder of a pre-training run: whose it is, and the files that say so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from discern.artifacts.files import cannot_write, write_text
from discern.artifacts.locks import Claim
from discern.checksums import CHECKSUMS_NAME, write_recorded
from discern.config.tree import flatten, to_toml
from discern.data.manifest import TOKENIZER_NAME
from discern.data.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.progress import Progress
from discern.training import checkpoint
from discern.workflows.configuration import read_written_config
from discern.workflows.request import PretrainRequest, Settled
from discern.workflows.runs import (
    CHECKPOINTS,
    CONFIG_FILE,
    COUNTS_FILE,
    RECORD_FILE,
    TOKENIZER_FILE,
    counts_text,
    is_run,
    read_record,
)
from discern.workflows.settings import PretrainConfig

# What may change from one session of a run to the next; anything else makes it another run.
MAY_CHANGE = {
    f"train.{key}"
    for key in (
        "max_steps",
        "max_hours",
        "log_every_steps",
        "evaluate_every_steps",
        "evaluate_sequences",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "tensorboard",
    )
}


def make_folder(request: PretrainRequest, claim: Claim, progress: Progress) -> None:
    """A folder of this process alone; an earlier run is moved aside if it is to be started over.

    Raises:
        DataError: another process is using it, or it cannot be made.
    """
    out = request.out.resolve()
    try:
        if request.resume == "never" and is_run(out):
            aside = next(path for number in itertools.count(1) if not (path := out.with_name(f"{out.name}.{number}")).exists())
            out.rename(aside)
            progress.note(f"moved the earlier run to {aside}")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _refused(out, problem) from problem
    claim.take(out)


def fill_folder(out: Path, config: PretrainConfig, record: dict[str, Any], data: TokenData) -> None:
    """The files that say what the run is.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        checkpoint.clean(out / CHECKPOINTS)
        data.tokenizer()  # it is the one that the ids are of
        tokenizer = (data.folder / TOKENIZER_NAME).read_bytes()
        write_recorded(out, {TOKENIZER_FILE: tokenizer, COUNTS_FILE: counts_text(data), CONFIG_FILE: to_toml(config)})
        write_text(out / RECORD_FILE, json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        raise _refused(out, problem) from problem


def _refused(out: Path, problem: OSError) -> DataError:
    return cannot_write(out, problem)


def may_hold_run(out: Path) -> bool:
    """Whether a folder is free for a run: absent, empty, or left by one that was killed while it began."""
    if not out.exists():
        return True
    own = {CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, COUNTS_FILE, CHECKSUMS_NAME}
    return out.is_dir() and {path.name.removeprefix(".").removesuffix(".partial") for path in out.iterdir()} <= own


def refuse_another_run(out: Path, settled: Settled) -> None:
    """Raise where the folder's run differs in anything that decides what it computes."""
    record, config, data = read_record(out), settled.config, settled.data
    hint = "choose another --out for a new run, or --resume never to start over here (the old run is moved aside)"
    if record["data_fingerprint"] != data.fingerprint:
        raise DataError(f"{out} was trained on another data set ({record['data']}) than {data.folder}", hint=hint)
    _refuse_another_beginning(out, record, settled, hint)
    old, new = flatten(read_written_config(out / CONFIG_FILE)), flatten(config)
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in MAY_CHANGE)
    if differing:
        lines = [f"  {key}: {old.get(key)} there, {new.get(key)} now" for key in differing]
        raise ConfigError("\n".join([f"{out} holds a run of another configuration:", *lines]), hint=hint)


def _refuse_another_beginning(out: Path, record: dict[str, Any], settled: Settled, hint: str) -> None:
    """Raise where the folder's run began with other weights, or mixes in other text."""
    now = began_with(settled)
    there, here = record.get("start"), now.get("start")
    if (there and there["weights"]) != (here and here["weights"]):
        began = "with weights of its own" if there is None else f"with {there['description']}"
        wanted = "no other model is given now" if here is None else f"{here['description']} has other weights"
        more = "" if there is None or here is not None else f"add --init-from {there['model']}, or "
        raise CheckpointError(f"{out} began {began}, but {wanted}", hint=more + hint)
    replays = [each.get("replay") or {} for each in (record, now)]
    differing = [key for key in ("data_fingerprint", "share") if replays[0].get(key) != replays[1].get(key)]
    if differing:
        texts = [f"{each['share']:g} of {each['data']}" if each else "nothing" for each in replays]
        raise ConfigError(f"{out} replays {texts[0]}, not {texts[1]}", hint=hint)


def began_with(settled: Settled) -> dict[str, Any]:
    """What run.json says of the model and of the text that is mixed in; nothing where there is neither."""
    found: dict[str, Any] = {}
    if settled.start is not None:
        found["start"] = settled.start.mark()
    if settled.replayed is not None and settled.request.replay is not None:
        replayed, share = settled.replayed, settled.request.replay.share
        found["replay"] = {"data": str(replayed.folder.resolve()), "data_fingerprint": replayed.fingerprint, "share": share}
    return found
