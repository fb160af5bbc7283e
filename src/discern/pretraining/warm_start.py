"""Warm start: the weights of a run that continues from a model.

Weights are used wherever the model has them; the rest keeps its initial weights. A generator alone may also start from the
weights of a masked language model.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.parameter import Parameter

from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.opening import open_model
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import ADDED_NAME, Manifest
from discern.data.dataset.shards import TokenData
from discern.data.filters import Rules
from discern.data.prepare import prepare
from discern.data.processes import available_cores
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.problems import ProblemLog
from discern.data.sources.remote import is_remote, open_remote, remote_files
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.extension import extend_tokenizer, frequent_splits, pieces_of_added, word_form, word_forms
from discern.errors import ConfigError, DataError
from discern.interop.names import named_parameters
from discern.models.base import Network
from discern.models.embeddings import Disentangled, DisentangledEmbeddings
from discern.models.heads import LanguageHead, MaskedLMHead
from discern.objectives.base import Objective
from discern.progress import Progress
from discern.storage.checksums import read_object, write_recorded
from discern.storage.files import utf8_name
from discern.tasks.readers.files import numbered_lines
from discern.training.rank_environment import rank_environment
from discern.wording import counted

GENERATOR = "generator"

# Parameters with one row or number per token: word tables, and the bias of heads that predict words.
_OF_VOCABULARY = re.compile(r"(\.|^)(word|difference|word_embeddings)\.weight$|(^|generator_)head(\.words)?\.bias$")
# Settings that the shapes of the weights show.
_SHOWN_BY_SHAPES = frozenset({"embedding_size", "max_positions"})


@dataclass(frozen=True)
class WarmStartResult:
    """How the weights of a model were used.

    Attributes:
        fresh: parts that keep the weights of step 0, in words: "the generator", "the head of the discriminator".
        added_tokens: number of tokens that the vocabulary has in addition to the model's.
    """

    fresh: tuple[str, ...]
    added_tokens: int


def main_network(start: ModelFolder) -> Network:
    """The first network of the model, which determines the sizes."""
    return next(iter(start.networks_to_train.values()))


def added_pieces(start: ModelFolder, data: TokenData) -> list[list[int]]:
    """Tokens that only the data set's tokenizer has, not the model's, each as the ids of its pieces in the model.

    Raises:
        DataError: its tokenizer is neither the model's nor an extension of it.
    """
    if data.tokenizer_fingerprint in start.tokenizer_fingerprints:
        return []
    found = pieces_of_added(start.tokenizer, data.tokenizer())
    if found is None:
        raise DataError(
            f"{data.folder} was made with a different tokenizer ({data.tokenizer_fingerprint[:12]}) from that of {start.folder} "
            f"({start.tokenizer_fingerprints[0][:12]}): the same ids stand for other tokens",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {start.tokenizer_path}",
        )
    return found


def lacks_generator(objective: Objective, start: ModelFolder) -> bool:
    """Whether the objective has a generator for which the model has no weights."""
    networks = objective.networks()
    return GENERATOR in networks and _sources(networks, start)[GENERATOR] is None


@torch.no_grad()
def fill(objective: Objective, start: ModelFolder, pieces: Sequence[Sequence[int]]) -> WarmStartResult:
    """Copy the weights of a model into an initialized objective. Parts that the model lacks keep the weights of step 0.

    The embedding and output bias of an added token are initialized with the means over its pieces.

    Args:
        pieces: for each added token, the ids of its pieces in the model.

    Raises:
        ConfigError: a network of the model has other sizes, or shares fewer weights than the objective's.
    """
    if start.whole_objective is not None and (whole := _resized_all(objective, start, pieces)) is not None:
        for name, parameter in objective.named_parameters():
            parameter.copy_(whole[name])
        return WarmStartResult((), len(pieces))
    networks = objective.networks()
    sources = _sources(networks, start)
    fresh: list[str] = []
    wanted: dict[str, dict[str, Tensor]] = {}
    # Networks that read the embeddings of another come last.
    for name in sorted(networks, key=lambda name: isinstance(networks[name].encoder.embeddings, Disentangled)):
        source = sources[name]
        if source is None:
            fresh.append(f"the {name}")
            continue
        values = _values(name, networks[name], source, start, pieces)
        _copy(networks[name], values, lone=sources.get(GENERATOR) is None)
        wanted[name] = values
        if not any(key.startswith("head.") for key in values):
            fresh.append(f"the head of the {name}")
        elif networks[name].bilinear is not None and source.bilinear is None:
            fresh.append(f"the bilinear term of the {name}")
    _check_kept(networks, wanted, start)
    return WarmStartResult(tuple(fresh), len(pieces))


def _resized_all(objective: Objective, start: ModelFolder, pieces: Sequence[Sequence[int]]) -> dict[str, Tensor] | None:
    """All parameters of a run, for an objective with the same parameters; None if they differ."""
    whole = start.whole_objective
    assert whole is not None
    own, theirs = dict(objective.named_parameters()), dict(whole.named_parameters())
    if own.keys() != theirs.keys():
        return None
    values = {name: resized(name, theirs[name], start.num_entries, pieces) for name in own}
    return values if all(values[name].shape == own[name].shape for name in own) else None


def _sources(networks: Mapping[str, Network], start: ModelFolder) -> dict[str, Network | None]:
    """The network of the model for each network of the objective: by name, or else the main one for the main one."""
    found: dict[str, Network | None] = {}
    main = next(iter(networks))
    for name, network in networks.items():
        source = start.networks_to_train.get(name)
        if source is None and name == main:
            source = main_network(start)
        if source is None and name == GENERATOR and _could_generate(main_network(start), network):
            source = main_network(start)
        if source is not None and type(source.encoder) is not type(network.encoder):
            source = None
        found[name] = source
    return found


def _could_generate(source: Network, generator: Network) -> bool:
    """Whether a masked language model has the sizes of the generator."""
    if not isinstance(source.head, MaskedLMHead) or not isinstance(generator.head, MaskedLMHead):
        return False
    return _generator_sizes(source) == _generator_sizes(generator)


def _values(
    name: str, network: Network, source: Network, start: ModelFolder, pieces: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Values from the source for the parameters of a network, by name; a head of another kind is left out.

    Raises:
        ConfigError: the sizes differ, or the head would lose a term.
    """
    if source.bilinear is not None and network.bilinear is None and type(source.head) is type(network.head):
        raise ConfigError(
            f"the {name} of {start.folder} has a bilinear term in its head, which the configured objective does not have: "
            "without it, the head would compute something different",
            hint="set objective.discriminator_head=bilinear",
        )
    own, theirs = named_parameters(network), named_parameters(source)
    kept = ("encoder.", "head.", "bilinear.") if type(source.head) is type(network.head) else ("encoder.",)
    values = {key: resized(key, theirs[key], start.num_entries, pieces) for key in own if key.startswith(kept) and key in theirs}
    lost = [key for key in own if key.startswith("encoder.") and key not in values]
    differing = [*lost, *(key for key, value in values.items() if value.shape != own[key].shape)]
    if differing:
        key = differing[0]
        there = str(tuple(theirs[key].shape)) if key in theirs else "absent"
        raise ConfigError(
            f"the {name} of {start.folder} ({_sizes_text(source)}) does not fit the configured one ({_sizes_text(network)}): "
            f"{len(differing)} weights differ, the first is {key}, of shape {there} in the model and {tuple(own[key].shape)} "
            f"here",
            hint="leave out the settings of [model], and objective.generator_size, generator_depth and tying: the model "
            "determines them",
        )
    return values


def resized(name: str, value: Tensor, entries: int, pieces: Sequence[Sequence[int]]) -> Tensor:
    """A parameter of the model resized to the present vocabulary; the row of an added token is the mean of its pieces' rows.

    Parameters without one row per token are returned unchanged.

    Args:
        name: name of the parameter.
        value: its value in the model, with at least one row per token of the model's vocabulary.
        entries: number of entries of the model's tokenizer.
        pieces: for each added token, the ids of its pieces in the model.
    """
    if not _OF_VOCABULARY.search(name):
        return value
    kept = value[:entries]
    return torch.cat([kept, *(kept[list(ids)].mean(0, keepdim=True) for ids in pieces)])


def _copy(network: Network, values: Mapping[str, Tensor], *, lone: bool) -> None:
    """Set the parameters of a network, by the names of `named_parameters`.

    Args:
        lone: the generator is fresh, so the shared weights are those of the discriminator.
    """
    embeddings = network.encoder.embeddings
    own = named_parameters(network)
    if isinstance(embeddings, Disentangled):
        prefix = "encoder.embeddings."
        words = values[f"{prefix}word.weight"]
        if lone:
            for key, parameter in embeddings.shared.named_parameters():
                parameter.copy_(values[prefix + key])
        embeddings.difference.weight.copy_(words - embeddings.shared.word.weight)
        if isinstance(embeddings, DisentangledEmbeddings):
            embeddings.norm.weight.copy_(values[f"{prefix}norm.weight"])
            embeddings.norm.bias.copy_(values[f"{prefix}norm.bias"])
        values = {key: value for key, value in values.items() if not key.startswith(prefix)}
    for key, value in values.items():
        own[key].copy_(value)


def _check_kept(networks: Mapping[str, Network], wanted: Mapping[str, Mapping[str, Tensor]], start: ModelFolder) -> None:
    """Raise an error if the weights of a network were overwritten by those of another that shares them."""
    for name, values in wanted.items():
        own = named_parameters(networks[name])
        for key, value in values.items():
            if not torch.allclose(own[key], value, rtol=1e-5, atol=1e-6):
                raise ConfigError(
                    f"the networks of {start.folder} each have '{key.partition('.')[2]}' of their own, and with the "
                    f"configured objective.tying they would share it: the {name} would lose its own",
                    hint="set objective.tying=none, as in those networks",
                )


def _generator_sizes(network: Network) -> tuple[int, ...]:
    config, embeddings = network.encoder.config, network.encoder.embeddings
    return (
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.feedforward_size,
        config.max_positions,
        config.num_token_types,
        embeddings.embedding_size,
    )


def _sizes_text(network: Network) -> str:
    config = network.encoder.config
    return f"{config.num_layers} layers of {config.hidden_size}, embeddings of {network.encoder.embeddings.embedding_size}"


@torch.no_grad()
def start_generator(objective: Objective, folder: Path, tokenizer_fingerprint: str, warn: Callable[[str], None]) -> None:
    """Copy the masked language model of a folder into the objective's generator, including the embeddings that it reads.

    Args:
        folder: a run, an export or a Hugging Face ELECTRA. From a run, the generator or the encoder of objective `mlm` is used.
        tokenizer_fingerprint: fingerprint of the data set's tokenizer.
        warn: called for each damaged checkpoint that was skipped.

    Raises:
        ConfigError: the folder has no masked language model, or one with other sizes.
        DataError: the folder holds no model, or one with another tokenizer.
        CheckpointError: its weights are missing or damaged.
    """
    loaded = open_model(folder, warn=warn)
    _check_generator_tokenizer(folder, loaded, tokenizer_fingerprint)
    source, target = _masked_language_model(folder, loaded), objective.networks()["generator"]
    values, own = _by_part(source), _by_part(target)
    differing = sorted(
        name
        for name in values.keys() | own.keys()
        if name not in values or name not in own or values[name].shape != own[name].shape
    )
    if differing:
        name = differing[0]
        there, here = (str(tuple(each[name].shape)) if name in each else "absent" for each in (values, own))
        raise ConfigError(
            f"the generator of {folder} ({_sizes_text(source)}) does not fit this one ({_sizes_text(target)}): "
            f"{len(differing)} weights differ, the first is {name}, of shape {there} in the model and {here} here",
            hint="set [model] and objective.generator, generator_size, generator_depth and tying to the values of that model",
        )
    theirs, ours = source.encoder.config.fixed(), target.encoder.config.fixed()
    unequal = [key for key in theirs if key not in _SHOWN_BY_SHAPES and theirs[key] != ours.get(key)]
    if unequal:
        settings = ", ".join(f"{key} {theirs[key]} there and {ours.get(key)} here" for key in unequal)
        raise ConfigError(
            f"the generator of {folder} has weights of the same shapes but computes something else: {settings}",
            hint=f"set [model] and objective.generator_size so that {', '.join(unequal)} are those of that model",
        )
    for name, parameter in own.items():
        parameter.copy_(values[name])


def _check_generator_tokenizer(folder: Path, loaded: ModelFolder, wanted: str) -> None:
    """Raise a DataError if the model was trained with another tokenizer."""
    found = loaded.tokenizer_fingerprints
    if wanted not in found:
        raise DataError(
            f"the generator of {folder} was trained with a different tokenizer ({found[0][:12]}) from that of the data set "
            f"({wanted[:12]})",
            hint=f"prepare the data again: discern prepare TEXT --out DATA --tokenizer {loaded.tokenizer_path}",
        )


def _masked_language_model(folder: Path, loaded: ModelFolder) -> Network:
    ordered = sorted(loaded.networks().items(), key=lambda item: item[0] != "generator")
    for _, network in ordered:
        if isinstance(network.head, LanguageHead):
            return network
    raise ConfigError(
        f"{folder} has no masked language model: its {' and '.join(loaded.networks())} cannot predict words",
        hint="give a run of objective 'rtd' or 'mlm', or what `discern export RUN --out DIR --network generator` writes",
    )


def _by_part(network: Network) -> dict[str, Parameter]:
    """Parameters of encoder and head under the names of the modules, shared ones included."""
    parts = {"encoder": network.encoder, "head": network.head}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in module.named_parameters()}


@dataclass(frozen=True)
class AddedTokens:
    """Words to add to the vocabulary: either the words of a file, one per line, or a number of words of the text."""

    file: Path | None = None
    number: int | None = None

    @classmethod
    def of(cls, text: str) -> AddedTokens:
        """Parse the value of `--add-tokens`: a number or a path.

        Raises:
            ConfigError: it is neither.
        """
        if text.isdecimal() and int(text) > 0:
            return cls(number=int(text))
        if not Path(text).is_file():
            raise ConfigError(
                f"--add-tokens {text}: there is no such file, and it is not a number above 0",
                hint="give a file with one word per line, or a number of words of the text, for example --add-tokens 500",
            )
        return cls(file=Path(text))


def extended_data(folder: Path, out: Path, added: AddedTokens, progress: Progress) -> Path:
    """Data set beside `out` with the text of another one, tokenized by the extended tokenizer; it is created if missing.

    Args:
        folder: the current data set, whose inputs are read again.
        out: folder of the run; the data set becomes `<out>-data`.

    Raises:
        ConfigError: no token can be added, or the data set there was made with other added tokens.
        DataError: the text has moved, the file of words is not UTF-8, or a file of an earlier call is damaged.
    """
    data = TokenData.open(folder)
    target = out.resolve().with_name(f"{out.resolve().name}-data")
    asked = {"data_fingerprint": data.fingerprint, "number": added.number, "words": _digest(added.file)}
    if (target / ADDED_NAME).is_file():
        made = _made(target)
        if {key: made.get(key) for key in asked} != asked:
            raise ConfigError(
                f"{target} was made from another text or with other added tokens",
                hint="choose another --out, or remove that folder",
            )
        return target
    if rank_environment().world_size > 1:
        raise ConfigError(
            "--add-tokens first prepares a data set, which needs a single process",
            hint="use --nproc, or run the command once without torchrun",
        )
    _check_rereadable(data.manifest, folder)
    tokenizer = data.tokenizer()
    forms = _forms(data, tokenizer, added, target, progress)
    progress.note(f"adding {counted(len(forms), 'token')}: {', '.join(forms[:8])}{', ...' if len(forms) > 8 else ''}")
    told: dict[str, Any] = data.manifest.configuration
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        with utf8_name(path.parent) as folder:
            extend_tokenizer(tokenizer, forms).save(str(folder / path.name))
        prepare(
            data.manifest.inputs,
            out=target,
            tokenizer=TokenizerChoice(path=path),
            corpus=_corpus_options(data.manifest),
            build=_build_options(data.manifest),
            language=told.get("language"),
            license=told.get("license"),
            progress=progress,
        )
    write_recorded(target, {ADDED_NAME: json.dumps({**asked, "added": forms}, indent=1, ensure_ascii=False) + "\n"})
    return target


def _made(target: Path) -> dict[str, Any]:
    """The record of what the data set was made from."""
    path = target / ADDED_NAME
    return read_object(path, hint=f"remove {target}, which is then prepared again; or choose another --out")


def _forms(data: TokenData, tokenizer: Tokenizer, added: AddedTokens, target: Path, progress: Progress) -> list[str]:
    """The words to add, in the form that the tokenizer's model gets."""
    if added.file is not None:
        lines = [line.strip() for _, line in numbered_lines(added.file)]
        forms = list(dict.fromkeys(word_form(tokenizer, line) for line in lines if line))
        found = [form for form in forms if tokenizer.token_to_id(form) is None]
        reason = (
            f"the vocabulary already has all {len(forms):,} words of {added.file}" if forms else f"{added.file} contains no words"
        )
    else:
        assert added.number is not None
        found = frequent_splits(_count_words(data.manifest, tokenizer, target, progress), tokenizer, added.number)
        reason = f"no word that occurs at least three times in the text of {data.folder} is split or unknown"
    if not found:
        raise ConfigError(f"there are no tokens to add: {reason}", hint="leave out --add-tokens")
    return found


def _count_words(manifest: Manifest, tokenizer: Tokenizer, target: Path, progress: Progress) -> Counter[str]:
    """How often each word occurs in the text."""
    counts: Counter[str] = Counter()
    meter = CorpusProgress(progress, "counting words", Corpus(manifest.inputs, _corpus_options(manifest), exclude=target))
    rules = Rules(_build_options(manifest).filters)
    for document in meter.read(ProblemLog()):
        for sentence in (sentence for kept in rules.apply([document])[0] for sentence in kept):
            counts.update(word_forms(tokenizer, sentence))
        meter.show()
    meter.finish()
    return counts


def _check_rereadable(manifest: Manifest, folder: Path) -> None:
    for name in filter(is_remote, manifest.inputs):
        _check_address(name, folder)
    local = [name for name in manifest.inputs if not (is_remote(name) or name.startswith("hf:"))]
    gone = [name for name in local if name == "-" or not _exists(name)]
    if gone:
        raise DataError(
            f"to add tokens, the text of {folder} is read again, but '{gone[0]}' does not exist",
            hint="run the command in the folder where `discern prepare` was run; standard input cannot be read again",
        )


def _check_address(name: str, folder: Path) -> None:
    """Open the first file at an address. Its query, which may have been a signature, is not recorded."""
    try:
        stream = open_remote(next(remote_files(name)).address)
        try:
            stream.read(1)
        finally:
            stream.close()
    except DataError as problem:
        signed = "an address is recorded without its query; if it needs one, download the text and prepare it from the files"
        raise DataError(
            f"to add tokens, the text of {folder} is read again: {problem.message}",
            hint=signed if name.lower().startswith("http") else problem.hint,
        ) from problem


def _exists(name: str) -> bool:
    return Path(name).exists() or any(sign in name for sign in "*?[")


def _corpus_options(manifest: Manifest) -> CorpusOptions:
    """Options with which the data set was made."""
    settings: Any = manifest.configuration
    field = settings["text_field"]
    return CorpusOptions(settings["documents"], None if field == "text" else field)  # 'text' is the default name


def _build_options(manifest: Manifest) -> BuildOptions:
    """Options with which the data set was made, so that it has the same documents and holds the same out."""
    settings: Any = manifest.configuration
    return BuildOptions(
        near_duplicates=settings.get("near_duplicates"),
        filters=tuple(filter(None, (settings.get("filters") or "").split(","))),
        segmenter=settings["segmenter"],
        heldout=settings["heldout"],
        seed=settings["seed"],
        shard_tokens=settings["shard_tokens"],
        workers=available_cores(),
    )


def _digest(file: Path | None) -> str | None:
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
