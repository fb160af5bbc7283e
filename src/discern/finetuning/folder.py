"""The output folder of a fine-tuning: its record is written before training, and compared when the work is continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from discern import __version__
from discern.config.layers import parse_toml
from discern.config.schema import flatten, plain, to_toml
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.errors import ConfigError, DataError
from discern.finetuning.seed import FinetunePlan
from discern.finetuning.settings import FinetuneConfig
from discern.model_files.finetuned import (
    CONFIG_FILE,
    FORMAT,
    RECORD_FILE,
    SCORES_FILE,
    TOKENIZER_FILE,
    is_finetuned,
    read_finetuned,
    seed_folder,
)
from discern.model_files.folder import TEXT_LICENSE, LoadedEncoder
from discern.storage.checksums import CHECKSUMS_NAME, read_text, verify_folder, write_json, write_recorded
from discern.storage.files import cannot_write
from discern.storage.output import OutputFolder
from discern.tasks import families
from discern.tasks import tasks as registry
from discern.tasks.base import Source, Task
from discern.tasks.frames import FrameName
from discern.training.distributed import Ranks
from discern.training.precision import shared_precision

_ARITHMETIC = "arithmetic"
_COPY_BACK = "copy the file back, or choose another --out"
# Settings of the encoder that change its outputs without changing any weight.
_COMPUTES = {"encoder", "num_heads", "activation", "clamp_length", "normalization", "layer_norm_epsilon"}


def prepare_folder(plan: FinetunePlan, ranks: Ranks, folder: OutputFolder) -> None:
    """Lock the output folder, and write the tokenizer, the settings and the record of the fine-tuning.

    Raises:
        ConfigError, DataError: the folder holds something else, is in use by another process, or cannot be written.
    """
    ranks.run_on_rank_zero(lambda: _prepare(plan, folder))


def keep_precision(plan: FinetunePlan, ranks: Ranks) -> str:
    """The precision of all seeds: that of the folder's record, or else the one resolved now, which is recorded."""
    path, train = plan.out / RECORD_FILE, plan.config.train
    record = read_finetuned(plan.out) if ranks.writes else {}
    length = max(plan.config.task_config(name).sequence_length for name in plan.data)
    rows = train.micro_batch_size or train.sequences_per_step // ranks.world_size
    found = shared_precision(train.precision, ranks, plan.loaded.encoder.config, rows * length, record.get(_ARITHMETIC))
    computed = {"device": ranks.device.type, "precision": found.name, **found.record()}
    if ranks.writes and record.get(_ARITHMETIC) != computed:
        write_json(path, record | {_ARITHMETIC: computed})
    return found.name


def complete_seeds(out: Path) -> set[int]:
    """The seeds whose scores a folder holds."""
    return {int(path.parent.name.removeprefix("seed-")) for path in out.glob(f"seed-*/{SCORES_FILE}")}


def _prepare(plan: FinetunePlan, folder: OutputFolder) -> None:
    out, record = plan.out, _record_of(plan)
    folder.acquire()
    if is_finetuned(out):
        old = read_finetuned(out)
        for seed in complete_seeds(out):
            verify_folder(seed_folder(out, seed))
        _refuse_another(out, old, record, plan.config)
        if _ARITHMETIC in old:
            record[_ARITHMETIC] = old[_ARITHMETIC]
        for name, entry in record["tasks"].items():
            # A split that is not read this time may be read the next time.
            entry["digests"] = old["tasks"][name]["digests"] | entry["digests"]
    else:
        folder.refuse_others({TOKENIZER_FILE, CONFIG_FILE, RECORD_FILE, CHECKSUMS_NAME}, "fine-tuned model")
    folder.make()
    try:
        tokenizer = load_tokenizer(plan.loaded.tokenizer_path).to_str()
        write_recorded(out, {TOKENIZER_FILE: tokenizer, CONFIG_FILE: to_toml(plan.config)})
        write_json(out / RECORD_FILE, record)
    except OSError as problem:
        raise cannot_write(out, problem) from problem


def _record_of(plan: FinetunePlan) -> dict[str, Any]:
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
    """Raise an error if the folder holds another fine-tuning."""
    hint = "choose another --out; a folder holds one fine-tuned model"
    if list(old["tasks"]) != list(record["tasks"]):
        raise DataError(f"{out} holds results of {', '.join(old['tasks'])}, not of {', '.join(record['tasks'])}", hint=hint)
    if old["encoder_fingerprint"] != record["encoder_fingerprint"]:
        raise DataError(f"{out} was fine-tuned from a different model ({old['model']}), not from {record['model']}", hint=hint)
    _refuse_other_reading(out, old, record, hint)
    if old["debug"] != record["debug"]:
        how = "with --debug, on a hundred examples of each file" if old["debug"] else "without --debug, on the whole files"
        raise ConfigError(f"{out} was fine-tuned {how}", hint=f"choose another --out, or remove {out}")
    differing = [
        f"{name}.{key}"
        for name in record["tasks"]
        for key in ("labels", "files")
        if json.loads(json.dumps(record["tasks"][name][key])) != old["tasks"][name][key]
    ]
    # As TOML, which has no None, reads them back.
    now = {key: plain(value) for key, value in flatten(config).items() if value is not None}
    before = _leaves(parse_toml(read_text(out / CONFIG_FILE, hint=_COPY_BACK), str(out / CONFIG_FILE)))
    differing += sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if "finetune.recipe" in differing:
        hint = f"to continue with the earlier settings: --recipe {before['finetune.recipe']}; otherwise choose another --out"
    if differing:
        raise ConfigError(f"{out} was fine-tuned with different settings: {', '.join(differing)}", hint=hint)
    changed = [
        f"{name}: {split}"
        for name, entry in record["tasks"].items()
        for split, digest in entry["digests"].items()
        if old["tasks"][name]["digests"].get(split, digest) != digest
    ]
    if changed:
        raise DataError(
            f"{out} was fine-tuned on different examples: the files have changed since ({', '.join(changed)})",
            hint=f"choose another --out, or remove {out}",
        )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables, by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _refuse_other_reading(out: Path, old: dict[str, Any], record: dict[str, Any], hint: str) -> None:
    """Raise a DataError if the tokenizer or the arithmetic of the encoder differs."""
    before = old["tokenizer_fingerprint"]
    if before != record["tokenizer_fingerprint"]:
        raise DataError(
            f"{out} was fine-tuned with a different tokenizer ({before[:12]}) from that of {record['model']} "
            f"({record['tokenizer_fingerprint'][:12]})",
            hint=hint,
        )
    there, now = old["encoder"], record["encoder"]
    differing = [f"{key} was {there[key]}, is {now[key]}" for key in _COMPUTES & there.keys() if there[key] != now.get(key)]
    if differing:
        raise DataError(f"{out} was fine-tuned with a different encoder: {'; '.join(sorted(differing))}", hint=hint)


def make_record(
    loaded: LoadedEncoder,
    tasks: dict[str, Task[Any]],
    files: dict[str, Any],
    sources: dict[str, Source[Any]],
    frame: FrameName = "cls-first",
) -> dict[str, Any]:
    """The content of finetuned.json: the model, its sizes, and its tasks with labels, files and how they are read.

    Raises:
        ConfigError: the class of a task could not be found from the record.
    """
    for name, task in tasks.items():
        _check_found_again(name, task, sources[name])
    said = {"language": loaded.language, TEXT_LICENSE: loaded.text_license}
    return {
        "format": FORMAT,
        "discern": __version__,
        "model": loaded.description,
        "encoder_fingerprint": loaded.source_fingerprint,
        "vocab_size": loaded.vocabulary_size,
        "embedding_size": loaded.encoder.embeddings.embedding_size,
        "encoder": loaded.encoder.config.model_dump(),
        "frame": frame,
        "max_length": loaded.max_length,
        "tasks": {
            name: {
                "family": type(task).family,
                "metrics": list(task.metrics),
                "labels": asdict(task.labels),
                "config": task.config.model_dump(mode="json"),
                "files": files[name],
                "source": sources[name].record(),
            }
            for name, task in tasks.items()
        },
        "versions": {"torch": torch.__version__},
    } | {name: value for name, value in said.items() if value is not None}


def _check_found_again(name: str, task: Task[Any], source: Source[Any]) -> None:
    """Raise a ConfigError, before any training, if the trained network could not be loaded again."""
    kind = type(task)
    if not isinstance(getattr(kind, "family", None), str):
        raise ConfigError(f"{kind.__name__}, the family of task '{name}', has no name", hint='give it one: family = "my-family"')
    if name in registry.names() and registry.load(name).family is kind:
        return
    if not source.record() or kind.family not in families.names() or families.load(kind.family) is not kind:
        raise ConfigError(
            f"task '{name}' of the family '{kind.family}' is not registered under its name, so the trained model could not be "
            "used",
            hint="register the definition under its own name",
        )
