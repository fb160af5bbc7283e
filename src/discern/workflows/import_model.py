"""Somebody else's model as a folder that every verb takes: from Hugging Face, or of the released TensorFlow code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from discern import __version__
from discern.artifacts.files import write_file
from discern.config.tree import to_toml
from discern.data.tokenizer import fingerprint
from discern.errors import ConfigError
from discern.interop.adopted import Adopted
from discern.interop.adopted_card import AdoptedFacts, adopted_card
from discern.interop.config_json import MARK
from discern.interop.families import FAMILIES
from discern.interop.folder import CARD_NAME, SETTINGS_NAME, check_target, publish
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, tokenizer_files
from discern.interop.vocabulary import FoundTokenizer
from discern.progress import Progress
from discern.workflows.adopted_settings import settings_for
from discern.workflows.export import check_finite, write_networks
from discern.workflows.import_source import ImportRequest, join, read_source
from discern.workflows.settings import PretrainConfig

__all__ = ["ImportRequest", "Imported", "import_model"]


@dataclass(frozen=True)
class Imported:
    """What was written.

    Attributes:
        folder: where.
        adopted: the networks, and what was left behind.
        tokenizer: in words.
        measurable: whether `discern evaluate` takes the folder.
        num_bytes: size of the whole folder.
    """

    folder: Path
    adopted: Adopted
    tokenizer: str
    measurable: bool
    num_bytes: int


def import_model(request: ImportRequest, progress: Progress, warn: Callable[[str], None]) -> Imported:
    """Bring a model in, weights, tokenizer and all.

    Args:
        warn: told what had to be guessed.

    Raises:
        ConfigError: the sources are none that are brought in, or don't make one model.
        DataError: there is no tokenizer, or that of another model; or `out` holds something else or cannot be written.
        CheckpointError: a file is missing or damaged, could run code, or is that of another kind of model.
        NumericsError: a weight is not finite.
    """
    check_target(request.out, *request.sources)
    if not 1 <= len(request.sources) <= 2:
        raise ConfigError(
            f"{len(request.sources)} sources are given", hint="give one, or a discriminator and its generator from Hugging Face"
        )
    read = [read_source(source, request, progress) for source in request.sources]
    found = read[0][1]
    adopted = read[0][0] if len(read) == 1 else join(read, request.sources)
    for source, (each, _) in zip(request.sources, read, strict=True):
        for model in each.models.values():
            check_finite(model, source)
    if found.judged:
        adopted = replace(
            adopted, remarks=[*adopted.remarks, f"the texts are {found.manner}; --lowercase or --cased says otherwise"]
        )
    config = settings_for(adopted)
    if config is None and "discriminator" in adopted.models and "generator" in adopted.models:
        warn("no setting of discern describes what these two networks share, so `discern evaluate` cannot measure them together")
    for remark in adopted.remarks:
        warn(remark)
    _write(request.out, adopted, found, config)
    size = sum(path.stat().st_size for path in request.out.rglob("*") if path.is_file())
    return Imported(request.out, adopted, found.manner, config is not None, size)


def _write(out: Path, adopted: Adopted, found: FoundTokenizer, config: PretrainConfig | None) -> None:
    """The folder, which appears whole or not at all."""
    (_, first), *others = adopted.models.items()
    table = first.config.get("max_position_embeddings")  # an XLNet has none, and says how long its rows are
    length = min(known for known in (adopted.max_length, table) if known)
    first.config[MARK] = _mark(adopted, fingerprint(found.tokenizer))
    facts = AdoptedFacts(
        title=out.resolve().name,
        origin=adopted.kind,
        models=adopted.models,
        version=__version__,
        tokenizer=f"{type(found.tokenizer.model).__name__}, {found.manner}",
        max_length=length,
        step=adopted.step,
        settings=config is not None,
        left_out=adopted.left_out,
        remarks=adopted.remarks,
    )
    frame = next(family.frame for family in FAMILIES if first.config["model_type"] in family.model_types)
    files, card = tokenizer_files(found.tokenizer, length, frame), adopted_card(facts)

    def write(folder: Path) -> None:
        write_networks(folder, first, others)
        write_file(folder / TOKENIZER_NAME, files.tokenizer)
        write_file(folder / TOKENIZER_CONFIG_NAME, files.config)
        if config is not None:
            write_file(folder / SETTINGS_NAME, to_toml(config).encode())
        write_file(folder / CARD_NAME, card.encode())

    publish(out, write)


def _mark(adopted: Adopted, tokenizer: str) -> dict[str, object]:
    """What discern must know of an import to go on with it; no path, no name of a machine."""
    mark: dict[str, object] = {
        "version": __version__,
        "imported": adopted.kind,
        "networks": list(adopted.models),
        "tokenizer_fingerprint": tokenizer,
    }
    if adopted.step is not None:
        mark["step"] = adopted.step
    return mark
