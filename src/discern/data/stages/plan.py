"""The plan: what is to be made of which files, written to shared storage before the first task.

Every task reads the plan and compares its checksum with that of who asked for the task. So a machine that does not see the
shared folder, or sees another one of the same path, is named instead of doing something else.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter
from tokenizers import Tokenizer

from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import Setting
from discern.data.dataset.publish import library_versions
from discern.data.remote import shown
from discern.data.sources.corpus import Corpus, Input
from discern.data.sources.documents import CorpusOptions, DocumentRule
from discern.data.tokenizer import prepared
from discern.errors import DataError
from discern.parsing import json_value
from discern.storage.files import partial_name, write_bytes

PLAN_NAME = "plan.json"
TOKENIZER_NAME = "tokenizer.json"

# A piece is what one task reads: small enough that many machines have work, large enough that starting it costs little.
SMALLEST_PIECE, LARGEST_PIECE, _PIECES = 1 << 20, 1 << 28, 256

Piece = tuple[Input, ...]


@dataclass(frozen=True)
class Plan:
    """What the tasks make.

    Attributes:
        inputs: the inputs as the user gave them.
        settings: settings of the data set, as its manifest has them.
        pieces: consecutive inputs that one task reads.
        parts: number of shares that are run one by one; None if one command runs all of them.
        trained_on: sentences and characters that the tokenizer was trained on; None for an existing tokenizer.
        tokenizer: checksum of the tokenizer.
        documents, text_field: see `CorpusOptions`.
        build: how documents become shards.
        versions: versions of discern, tokenizers and what filters need, which must be the same on every machine.
        format: changes with the fields of the plan and with the files of the tasks.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    inputs: tuple[str, ...]
    settings: dict[str, Setting]
    pieces: tuple[Piece, ...]
    parts: int | None
    trained_on: tuple[int, int] | None
    tokenizer: str
    documents: DocumentRule
    text_field: str | None
    build: BuildOptions
    versions: dict[str, str]
    format: Literal["discern-plan-5"] = "discern-plan-5"

    @property
    def corpus(self) -> CorpusOptions:
        """How the input becomes documents."""
        return CorpusOptions(self.documents, self.text_field)

    def share(self, part: int, parts: int) -> list[int]:
        """The pieces of one of several shares."""
        return list(range(part, len(self.pieces), parts))

    def serialized(self) -> bytes:
        """The plan as JSON. A byte of a file name that is not UTF-8 becomes an escape."""
        return json.dumps(asdict(self), indent=1, default=str).encode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(self.serialized()).hexdigest()


def make_plan(
    inputs: Sequence[str],
    text: Corpus,
    tokenizer: Tokenizer,
    trained_on: tuple[int, int] | None,
    build: BuildOptions,
    settings: dict[str, Setting],
    parts: int | None,
) -> Plan:
    """The plan for an input. It depends on neither the engine nor the number of machines."""
    return Plan(
        inputs=tuple(inputs),
        settings=settings,
        pieces=tuple(_pieces(text)),
        parts=parts,
        trained_on=trained_on,
        tokenizer=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        documents=text.options.documents,
        text_field=text.options.text_field,
        # Validated, so that 0 becomes 0.0, as it does when the plan is read: the fingerprint stays the same.
        build=TypeAdapter(BuildOptions).validate_python(asdict(build) | {"workers": 1}),
        versions=library_versions(build.filters),
    )


def work_folder(target: Path) -> Path:
    """The folder of the plan and of the results of the tasks, beside the data set."""
    return target.with_name(f"{partial_name(target.name).removesuffix('.partial')}.parts")


def write_plan(work: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Write the plan and its tokenizer."""
    work.mkdir(parents=True, exist_ok=True)
    write_bytes(work / TOKENIZER_NAME, tokenizer.to_str().encode())
    write_bytes(work / PLAN_NAME, plan.serialized())


def read_plan(work: Path) -> Plan | None:
    """The plan in a folder; None if there is none.

    Raises:
        DataError: it is damaged, or another version of discern has written it.
    """
    try:
        return TypeAdapter(Plan).validate_python(json_value((work / PLAN_NAME).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as problem:
        damaged = f"{work / PLAN_NAME} is damaged, or of another version of discern"
        raise DataError(damaged, hint=f"to start over: rm -r '{work}'") from problem


@dataclass(frozen=True)
class PrepareJob:
    """What the tasks of a data set share.

    Attributes:
        folder: folder of the plan and of the results. It stays until the data set is published.
        plan: the plan.
        tokenizer: tokenizer of the data set.
    """

    folder: Path
    plan: Plan
    tokenizer: Tokenizer


@lru_cache(maxsize=2)
def job_of_task(work: str, fingerprint: str) -> PrepareJob:
    """The job of a task, on the machine that runs it.

    Raises:
        DataError: this machine does not see the folder, sees another plan there, or has other versions.
    """
    here, folder = socket.gethostname(), Path(work)
    shared = "give an --out on storage that every machine mounts at the same path"
    plan = read_plan(folder)
    if plan is None:
        raise DataError(f"{here} does not see {folder / PLAN_NAME}", hint=shared)
    if plan.fingerprint != fingerprint:
        raise DataError(f"{here} sees another plan in {folder}", hint=shared)
    if plan.versions != (found := library_versions(plan.build.filters)):
        raise DataError(
            f"{here} has {_listed(found)}, but the work was started with {_listed(plan.versions)}",
            hint="install the same versions on every machine",
        )
    content = (folder / TOKENIZER_NAME).read_bytes()
    if hashlib.sha256(content).hexdigest() != plan.tokenizer:
        raise DataError(f"{folder / TOKENIZER_NAME} is not the tokenizer that the work was started with", hint=shared)
    return PrepareJob(folder, plan, prepared(Tokenizer.from_str(content.decode()), "the tokenizer"))


def differences(before: Plan, now: Plan) -> list[str]:
    """What distinguishes two plans, for a message."""
    one, other = ({**plan.settings, **vars(plan)} for plan in (before, now))
    found = []
    for name in {**one, **other}:
        if one.get(name) == other.get(name) or name in ("settings", "build"):
            continue
        if name == "inputs":
            found.append(_other_inputs(before.inputs, now.inputs))
        elif name == "pieces":
            found += _other_pieces(before.pieces, now.pieces)
        elif name == "versions":
            found.append(f"versions: {_listed(before.versions)} -> {_listed(now.versions)}")
        elif name == "tokenizer":
            found.append(f"tokenizer: {before.tokenizer[:12]} -> {now.tokenizer[:12]}")
        else:
            found.append(f"{name}: {one.get(name)} -> {other.get(name)}")
    return found


def _other_inputs(before: Sequence[str], now: Sequence[str]) -> str:
    one, other = (" ".join(map(shown, inputs)) for inputs in (before, now))
    return f"inputs: {one} -> {other}" if one != other else f"inputs: the query or signature of an address in {one}"


def _other_pieces(before: Iterable[Piece], now: Iterable[Piece]) -> list[str]:
    one, other = ({item.name: item for piece in pieces for item in piece} for pieces in (before, now))
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return [f"input {name} is {'new' if name in other else 'gone'}"]
        if (what := _changed(one[name], other[name])) is not None:
            return [f"input {name} has changed since: {what}"]
    if [item.name for piece in before for item in piece] == [item.name for piece in now for item in piece]:
        return []  # only their addresses differ, as the inputs do
    return ["the files of the input are in another order"]


def check_unchanged(work: Path, inputs: Iterable[Input]) -> None:
    """Check that inputs are those of the plan.

    Raises:
        DataError: one has changed, or does not exist any more.
    """
    for item in inputs:
        now = item.now()
        known = None not in (item.version, now.version)  # a server may have been too busy to tell
        if known and (what := _changed(item, now)) is not None:
            raise DataError(
                f"input {item.name} has changed since the work was started: {what}", hint=f"to start over: rm -r '{work}'"
            )


def _changed(before: Input, now: Input) -> str | None:
    """What tells the content of an input from that of before; None if nothing does."""
    if before.size != now.size:
        return f"{before.size} -> {now.size} bytes"
    if before.version != now.version:
        return f"modified {before.version} -> {now.version}" if now.path else f"version {before.version} -> {now.version}"
    return None


def _pieces(text: Corpus) -> Iterable[Piece]:
    """Consecutive inputs of about the same number of bytes. An input of unknown size is a piece of its own."""
    known = sum(item.size or 0 for item in text.inputs)
    target = min(max(known // _PIECES, SMALLEST_PIECE), LARGEST_PIECE)
    piece: list[Input] = []
    size = 0
    for item in text.inputs:
        if piece and (item.size is None or size + item.size > target):
            yield tuple(piece)
            piece, size = [], 0
        # Names stay as the user gave them, because messages and the manifest have them. A task may run in another folder.
        piece.append(item if item.path is None else replace(item, path=Path(os.path.abspath(item.path))))
        size += target if item.size is None else item.size
    if piece:
        yield tuple(piece)


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())
