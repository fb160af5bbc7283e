"""What a source of `discern import` holds: its networks and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from discern.data.tokenizer import special_tokens
from discern.errors import ConfigError, DataError
from discern.interop.adopted import Adopted
from discern.interop.config_json import read_huggingface_config, read_mark
from discern.interop.families import ENCODER_TYPES
from discern.interop.huggingface_source import read_huggingface
from discern.interop.names import CONFIG_NAME
from discern.interop.tensorflow.bundle import find_checkpoint
from discern.interop.tensorflow.electra import read_released
from discern.interop.vocabulary import FoundTokenizer, check_fits, find_tokenizer
from discern.interop.xlnet_source import read_xlnet
from discern.objectives.base import Vocabulary
from discern.progress import Progress
from discern.workflows.runs import is_run


@dataclass(frozen=True)
class ImportRequest:
    """What to bring in, and where to.

    Attributes:
        sources: a Hugging Face folder, or two, the discriminator and the generator of one model in any order; or a checkpoint
            of the released TensorFlow code: one of its files, their common prefix, or the folder they are in.
        out: new or empty folder, or an earlier export or import, which is replaced as a whole.
        tokenizer: a tokenizer.json, a vocab.txt, or a folder that holds either; None: the one beside the weights.
        lowercase: whether texts are lower-cased; None: as the files say, or else as the vocabulary's entries tell.
        heads: attention heads of a TensorFlow discriminator; None: one for 64 of its width.
    """

    sources: Sequence[Path]
    out: Path
    tokenizer: Path | None = None
    lowercase: bool | None = None
    heads: int | None = None


def read_source(source: Path, request: ImportRequest, progress: Progress) -> tuple[Adopted, FoundTokenizer]:
    """A source's networks and tokenizer.

    Raises:
        ConfigError: it is of discern already, or an option does not go with it.
        DataError: it is no model, or has no tokenizer or another's.
        CheckpointError: a file is missing or damaged, could run code, or is that of another kind of model.
    """
    if not source.exists() and find_checkpoint(source) is None:
        raise DataError(f"{source} does not exist", hint=_WHAT)
    if source.is_dir() and is_run(source):
        raise ConfigError(
            f"{source} is a run of discern, which every verb takes as it is", hint=f"discern export {source} --out DIR"
        )
    if source.is_dir() and (source / CONFIG_NAME).is_file():
        config = read_huggingface_config(source, ENCODER_TYPES)
        if read_mark(config):
            raise ConfigError(
                f"{source} is an export of discern, which every verb takes as it is", hint=f"discern export {source} --out DIR"
            )
        if request.heads is not None:
            raise ConfigError(f"--heads is for TensorFlow checkpoints, and {source / CONFIG_NAME} says it", hint="leave it out")
        tokenizer = find_tokenizer(source, request.tokenizer, request.lowercase)
        read = read_xlnet if config["model_type"] == "xlnet" else read_huggingface
        adopted = read(source, _vocabulary(tokenizer))
    elif (prefix := find_checkpoint(source)) is not None:
        tokenizer = find_tokenizer(prefix, request.tokenizer, request.lowercase)
        adopted = read_released(prefix, _vocabulary(tokenizer), request.heads, progress)
    else:
        what = "no folder and no file of a TensorFlow checkpoint" if source.is_file() else "no model: "
        lacking = "" if source.is_file() else f"neither {CONFIG_NAME} nor the .index of a TensorFlow checkpoint is there"
        raise DataError(f"{source} is {what}{lacking}", hint=_WHAT)
    for model in adopted.models.values():
        check_fits(tokenizer.tokenizer, model.config["vocab_size"], str(request.tokenizer or source))
    return adopted, tokenizer


_WHAT = (
    "give a folder that save_pretrained() wrote, of an ELECTRA, a BERT or an XLNet, or the model.ckpt-N.index of the released "
    "ELECTRA code"
)


def _vocabulary(found: FoundTokenizer) -> Vocabulary:
    size = max(found.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Vocabulary(size, special_tokens(found.tokenizer))


def join(read: Sequence[tuple[Adopted, FoundTokenizer]], sources: Sequence[Path]) -> Adopted:
    """A discriminator and a generator that come from two folders, in either order.

    Raises:
        ConfigError: they are something else.
        DataError: their vocabularies differ.
    """
    (one, its_tokenizer), (other, other_tokenizer) = read
    names = [*one.models, *other.models]
    if sorted(names) != ["discriminator", "generator"]:
        raise ConfigError(
            f"{sources[0]} holds {' and '.join(one.models)}, {sources[1]} holds {' and '.join(other.models)}; two sources make "
            "one model where one is the discriminator and the other the generator",
            hint="bring each in by itself, or give the two that were trained together",
        )
    if its_tokenizer.tokenizer.get_vocab() != other_tokenizer.tokenizer.get_vocab():
        raise DataError(
            f"{sources[0]} and {sources[1]} have different vocabularies, so they are not of one model",
            hint="give the discriminator and the generator that were trained together",
        )
    first, second = (one, other) if "discriminator" in one.models else (other, one)
    return replace(
        first,
        models={**first.models, **second.models},
        sizes={**first.sizes, **second.sizes},
        left_out=[*first.left_out, *second.left_out],
        remarks=[*first.remarks, *second.remarks],
    )
