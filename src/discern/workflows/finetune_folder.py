"""The folder of a fine-tuning before anything is trained: what it says of itself, and whether it is of the same one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discern.artifacts.files import cannot_write
from discern.artifacts.locks import Claim
from discern.checksums import CHECKSUMS_NAME, write_recorded
from discern.config.layers import parse_toml
from discern.config.tree import flatten, plain, to_toml
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.errors import ConfigError, DataError
from discern.records import read_text
from discern.training.parallel import Ranks
from discern.training.precision import settle_precision, shape_of
from discern.workflows.finetune_seed import Plan
from discern.workflows.finetune_settings import FinetuneConfig
from discern.workflows.finetuned import (
    CONFIG_FILE,
    RECORD_FILE,
    SCORES_FILE,
    TOKENIZER_FILE,
    make_record,
    read_finetuned,
    write_json,
)
from discern.workflows.runs import is_finetuned

_ARITHMETIC = "arithmetic"
# Of the encoder's settings those that no weight shows, and that change what it computes.
_COMPUTES = {"encoder", "num_heads", "activation", "clamp_length", "normalisation", "layer_norm_epsilon"}


def prepare_folder(plan: Plan, ranks: Ranks, claim: Claim) -> None:
    """Claim the folder, and write the files that say what the fine-tuning is.

    Raises:
        ConfigError, DataError: the folder holds something else, another fine-tuning or process, or cannot be written.
    """
    ranks.by_first(lambda: _prepare(plan, claim))


def keep_precision(plan: Plan, ranks: Ranks) -> str:
    """The precision of all seeds: as the folder's record has it, or as it is found now and written there."""
    path, train = plan.out / RECORD_FILE, plan.config.train
    record = json.loads(path.read_text(encoding="utf-8")) if ranks.writes else {}
    length = max(plan.config.task_config(name).sequence_length for name in plan.data)
    rows = train.micro_batch_size or train.sequences_per_step // ranks.world
    shape = shape_of(plan.loaded.encoder.config, rows * length)
    found = settle_precision(train.precision, ranks, shape, record.get(_ARITHMETIC))
    computed = {"device": ranks.device.type, "precision": found.name, **found.record()}
    if ranks.writes and record.get(_ARITHMETIC) != computed:
        write_json(path, record | {_ARITHMETIC: computed})
    return found.name


def complete_seeds(out: Path) -> set[int]:
    """The seeds that a folder has scores of."""
    return {int(path.parent.name.removeprefix("seed-")) for path in out.glob(f"seed-*/{SCORES_FILE}")}


def _prepare(plan: Plan, claim: Claim) -> None:
    out, record = plan.out, _record_of(plan)
    claim.take(out)
    if is_finetuned(out):
        old = read_finetuned(out)
        _refuse_another(out, old, record, plan.config)
        if _ARITHMETIC in old:
            record[_ARITHMETIC] = old[_ARITHMETIC]
        for name, entry in record["tasks"].items():
            # A split that is not read this time may be the next time.
            entry["digests"] = old["tasks"][name].get("digests", {}) | entry["digests"]
    elif not _may_hold_finetuning(out):
        raise DataError(f"{out} is not empty and holds no fine-tuning", hint="choose another --out, or empty the folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        claim.take(out)
        tokenizer = load_tokenizer(plan.loaded.tokenizer_path).to_str()
        write_recorded(out, {TOKENIZER_FILE: tokenizer, CONFIG_FILE: to_toml(plan.config)})
        write_json(out / RECORD_FILE, record)
    except OSError as problem:
        raise cannot_write(out, problem) from problem


def _may_hold_finetuning(out: Path) -> bool:
    """Whether a folder is free: absent, empty, or left by a fine-tuning that was stopped while it began."""
    if not out.exists():
        return True
    own = {TOKENIZER_FILE, CONFIG_FILE, RECORD_FILE, CHECKSUMS_NAME}
    return out.is_dir() and {path.name.removeprefix(".").removesuffix(".partial") for path in out.iterdir()} <= own


def _record_of(plan: Plan) -> dict[str, Any]:
    record = make_record(
        plan.loaded,
        {name: data.task for name, data in plan.data.items()},
        {name: data.files for name, data in plan.data.items()},
        {name: data.source for name, data in plan.data.items()},
        plan.config.finetune.frame,
    )
    for name, data in plan.data.items():
        record["tasks"][name]["digests"] = data.digests
    return record | {"debug": plan.debug, "tokenizer_fingerprint": fingerprint(load_tokenizer(plan.loaded.tokenizer_path))}


def _refuse_another(out: Path, old: dict[str, Any], record: dict[str, Any], config: FinetuneConfig) -> None:
    """What a record does not say, having been written before such things were, counts as unchanged."""
    hint = "choose another --out; a folder holds one fine-tuning"
    if list(old["tasks"]) != list(record["tasks"]):
        raise DataError(f"{out} holds results of {', '.join(old['tasks'])}, not of {', '.join(record['tasks'])}", hint=hint)
    if old["encoder_fingerprint"] != record["encoder_fingerprint"]:
        raise DataError(f"{out} was fine-tuned from another model ({old['model']}) than {record['model']}", hint=hint)
    _refuse_other_reading(out, old, record, hint)
    if old.get("debug", record["debug"]) != record["debug"]:
        how = "with --debug, on a hundred examples of each file" if old["debug"] else "without --debug, on the whole files"
        raise ConfigError(f"{out} was fine-tuned {how}", hint=f"choose another --out, or remove {out}")
    differing = [
        f"{name}.{key}"
        for name in record["tasks"]
        for key in ("labels", "files")
        if json.loads(json.dumps(record["tasks"][name][key])) != old["tasks"][name][key]
    ]
    # A setting that there was not yet had the value that it now has by default.
    usual = _plain(flatten(type(config)()))
    before = usual | _leaves(parse_toml(read_text(out / CONFIG_FILE, hint=hint), str(out / CONFIG_FILE)))
    differing += sorted(_differing(before, usual | _plain(flatten(config))))
    if "finetune.recipe" in differing:
        hint = f"to continue this fine-tuning: --recipe {before['finetune.recipe']}; otherwise choose another --out"
    if differing:
        raise ConfigError(f"{out} holds a fine-tuning with other settings: {', '.join(differing)}", hint=hint)
    changed = [
        f"{name}: {split}"
        for name, entry in record["tasks"].items()
        for split, digest in entry["digests"].items()
        if old["tasks"][name].get("digests", {}).get(split, digest) != digest
    ]
    if changed:
        raise DataError(
            f"{out} holds a fine-tuning on other examples: the files have changed since ({', '.join(changed)})",
            hint=f"choose another --out, or remove {out}",
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they are read back from TOML, which has no None."""
    return {key: plain(value) for key, value in values.items() if value is not None}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _refuse_other_reading(out: Path, old: dict[str, Any], record: dict[str, Any], hint: str) -> None:
    """Raise where the same weights are now given other ids, or are computed with in another way."""
    before = old.get("tokenizer_fingerprint") or fingerprint(load_tokenizer(out / TOKENIZER_FILE))
    if before != record["tokenizer_fingerprint"]:
        raise DataError(
            f"{out} was fine-tuned with another tokenizer ({before[:12]}) than that of {record['model']} "
            f"({record['tokenizer_fingerprint'][:12]})",
            hint=hint,
        )
    there, now = old["encoder"], record["encoder"]
    differing = [f"{key} {there[key]} there, {now[key]} now" for key in _COMPUTES & there.keys() if there[key] != now.get(key)]
    if differing:
        raise DataError(f"{out} was fine-tuned with another encoder: {'; '.join(sorted(differing))}", hint=hint)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]
