"""Warm start: the weights of a run that continues from a model.

Weights are used wherever the model has them; the rest keeps its initial weights. A generator alone may also start from the
weights of a masked language model.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from discern.config.resolve import (
    InvalidConfigError,
    Origin,
    Problem,
    Resolved,
    Setting,
    Settings,
    collect,
    parse_overrides,
    quoted,
    read_file,
)
from discern.config.schema import flatten
from discern.data.curation.filters import Rules
from discern.data.dataset.manifest import ADDED_NAME
from discern.data.dataset.shards import TokenData
from discern.data.executors import available_cores
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions
from discern.data.tables import numbered_lines
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.training import extend_tokenizer, frequent_splits, pieces_of_added, word_form
from discern.data.tokenizer.words import word_forms
from discern.errors import CheckpointError, ConfigError, DataError, counted
from discern.model_files.folder import ModelFolder, open_model
from discern.models.base import Network, load_networks, named_parameters
from discern.objectives.base import Objective, Vocabulary
from discern.pretraining.resume import another_tokenizer, meta_objective
from discern.progress import Progress
from discern.storage.checksums import read_json, write_json
from discern.storage.files import utf8_name
from discern.training.config import PretrainConfig, resolve_pretrain_config, step_sizes
from discern.training.process import require_single_process

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
    pieces = pieces_of_added(start.tokenizer, data.tokenizer())
    if pieces is None:
        raise another_tokenizer(data.folder, data.tokenizer_fingerprint, start)
    return pieces


@torch.no_grad()
def fill(objective: Objective, start: ModelFolder, pieces: Sequence[Sequence[int]]) -> WarmStartResult:
    """Copy the weights of a model into an initialized objective. Parts that the model lacks keep the weights of step 0.

    The embedding and output bias of an added token are initialized with the means over its pieces.

    Args:
        pieces: for each added token, the ids of its pieces in the model.

    Raises:
        ConfigError: a network of the model has other sizes, or shares fewer weights than the objective's.
    """
    # A run of the same objective has all parameters
    if start.whole_objective is not None:
        parameters = dict(objective.named_parameters())
        whole = {name: resized(name, p, start.num_entries, pieces) for name, p in start.whole_objective.named_parameters()}
        if {name: value.shape for name, value in whole.items()} == {name: p.shape for name, p in parameters.items()}:
            for name, parameter in parameters.items():
                parameter.copy_(whole[name])
            return WarmStartResult((), len(pieces))

    # Fill network by network
    networks = objective.networks()
    sources = _sources(networks, start)
    fresh: list[str] = []
    copied: dict[str, dict[str, Tensor]] = {}
    for name, network in networks.items():
        source = sources[name]
        if source is None:
            # A new generator with layers as wide as those of the model starts as its first layers.
            theirs, ours = named_parameters(main_network(start)), named_parameters(network)
            same = [key for key in ours if key.startswith("encoder.") and key in theirs and name == GENERATOR]
            first = {key: resized(key, theirs[key], start.num_entries, pieces) for key in same}
            if any("blocks" in key for key in first) and all(value.shape == ours[key].shape for key, value in first.items()):
                copied[name] = first
                fresh.append(f"the head of the {name}, which starts as the first layers of the model")
            else:
                fresh.append(f"the {name}")
            continue
        copied[name] = values = _values(name, network, source, start, pieces)
        if not any(key.startswith("head.") for key in values):
            fresh.append(f"the head of the {name}")
        elif network.bilinear is not None and source.bilinear is None:
            fresh.append(f"the bilinear term of the {name}")
    overwritten = load_networks(networks, copied, with_shared=sources.get(GENERATOR) is None)
    if overwritten is not None:
        raise ConfigError(
            f"the networks of {start.folder} each have '{overwritten[1].partition('.')[2]}' of their own, and with the "
            f"configured objective.tying they would share it: the {overwritten[0]} would lose its own",
            hint="set objective.tying=none, as in those networks",
        )
    return WarmStartResult(tuple(fresh), len(pieces))


def _sources(networks: Mapping[str, Network], start: ModelFolder) -> dict[str, Network | None]:
    """The network of the model for each network of the objective: by name, or else the main one for the main one.

    A masked language model of the generator's sizes is the source of the generator as well.
    """
    main, sources = main_network(start), dict[str, Network | None]()
    for number, (name, network) in enumerate(networks.items()):
        generates = name == GENERATOR and main.predicts == network.predicts == "words"
        fallback = main if number == 0 or (generates and _sizes(main) == _sizes(network)) else None
        source = start.networks_to_train.get(name, fallback)
        sources[name] = source if source is not None and type(source.encoder) is type(network.encoder) else None
    return sources


def _values(
    name: str, network: Network, source: Network, start: ModelFolder, pieces: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Values from the source for the parameters of a network, by name; a head of another kind is left out.

    Raises:
        ConfigError: the sizes differ, or the head would lose a term.
    """
    same_head = type(source.head) is type(network.head)
    if source.bilinear is not None and network.bilinear is None and same_head:
        raise ConfigError(
            f"the {name} of {start.folder} has a bilinear term in its head, which the configured objective does not have: "
            "without it, the head would compute something different",
            hint="set objective.discriminator_head=bilinear",
        )
    theirs, prefixes = named_parameters(source), ("encoder.", "head.", "bilinear.") if same_head else ("encoder.",)
    ours = {
        key: value
        for key, value in named_parameters(network).items()
        if key.startswith(prefixes) and (key in theirs or key.startswith("encoder."))
    }
    values = {key: resized(key, theirs[key], start.num_entries, pieces) for key in ours if key in theirs}
    _check_shapes(f"the {name} of {start.folder}", values, ours, source, network)
    return values


def _check_shapes(what: str, theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], source: Network, network: Network) -> None:
    """Raise a ConfigError if a network and its source differ in their settings, or the names or shapes of their parameters."""
    shapes = [{name: value.shape for name, value in values.items()} for values in (theirs, ours)]
    there, here = _sizes(source), _sizes(network)
    skipped = _SHOWN_BY_SHAPES if shapes[0] == shapes[1] else ()
    unequal = [key for key in there if there[key] != here.get(key) and key not in skipped]
    if unequal or shapes[0] != shapes[1]:
        listed = [f"{key} is {there[key]} there and {here.get(key)} here" for key in unequal]
        listed += [f"'{name}' has another shape" for name, shape in sorted(shapes[0].items()) if shapes[1].get(name) != shape][:1]
        raise ConfigError(
            f"{what} does not fit the configured one: {', '.join(listed)}",
            hint="leave out the settings of [model], and objective.generator, generator_size, generator_depth and tying, or set "
            "them to the values of that model",
        )


def _sizes(network: Network) -> dict[str, Any]:
    """The settings that the weights of a network fix."""
    return network.encoder.config.fixed() | {"embedding_size": network.encoder.embeddings.embedding_size}


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
    rows = value[:entries]
    return torch.cat([rows, *(rows[list(ids)].mean(0, keepdim=True) for ids in pieces)])


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
    model = open_model(folder, warn=warn)
    if tokenizer_fingerprint not in model.tokenizer_fingerprints:
        raise another_tokenizer("the data set", tokenizer_fingerprint, model)
    source, target = model.masked_language_model, objective.networks()[GENERATOR]
    values, parameters = named_parameters(source), named_parameters(target)
    _check_shapes(f"the generator of {folder}", values, parameters, source, target)
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


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
    # Use the data set of an earlier call
    data = TokenData.open(folder)
    target = out.resolve().with_name(f"{out.resolve().name}-data")
    words = None if added.file is None else hashlib.sha256(added.file.read_bytes()).hexdigest()
    source = {"data_fingerprint": data.fingerprint, "number": added.number, "words": words}
    if (target / ADDED_NAME).is_file():
        hint = f"remove {target}, which is then prepared again; or choose another --out"
        if not source.items() <= read_json(target / ADDED_NAME, hint=hint).items():
            raise ConfigError(f"{target} was made from another text or with other added tokens", hint=hint)
        return target
    require_single_process("--add-tokens, which first prepares a data set,")

    # Choose the tokens, with the options that the data set was made with: the same documents, the same ones held out
    inputs, settings = data.manifest.inputs, cast(Any, data.manifest.configuration)
    if "-" in inputs:
        raise DataError(
            f"to add tokens, the text of {folder} is read again, which standard input cannot be", hint="prepare it from a file"
        )
    kinds: tuple[Any, ...] = (CorpusOptions, PrepareOptions)
    corpus, options = (
        kind(**{name: value for name, value in settings.items() if name in kind.__dataclass_fields__}) for kind in kinds
    )
    options = replace(options, workers=available_cores())
    tokenizer = data.tokenizer()
    if added.file is not None:
        lines = [line.strip() for _, line in numbered_lines(added.file)]
        new = dict.fromkeys(word_form(tokenizer, line) for line in lines if line)
        forms = [form for form in new if tokenizer.token_to_id(form) is None]
        reason = (
            f"the vocabulary already has all {len(new):,} words of {added.file}" if new else f"{added.file} contains no words"
        )
    else:
        assert added.number is not None
        counts: Counter[str] = Counter()
        rules = Rules(options.filters)
        for document in Corpus(inputs, corpus, exclude=target).read(progress, "counting words"):
            for sentences in rules.apply([document])[0]:
                for sentence in sentences or ():
                    counts.update(word_forms(tokenizer, sentence))
        forms = frequent_splits(counts, tokenizer, added.number)
        reason = f"no word that occurs at least three times in the text of {data.folder} is split or unknown"
    if not forms:
        raise ConfigError(f"there are no tokens to add: {reason}", hint="leave out --add-tokens")
    progress.note(f"adding {counted(len(forms), 'token')}: {', '.join(forms[:8])}{', ...' if len(forms) > 8 else ''}")

    # Prepare the text again
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        with utf8_name(path.parent) as named:
            extend_tokenizer(tokenizer, forms).save(str(named / path.name))
        prepare(
            inputs,
            out=target,
            tokenizer=TokenizerChoice(path=path),
            corpus=corpus,
            options=options,
            progress=progress,
        )
    write_json(target / ADDED_NAME, {**source, "added": forms})
    return target


STEPS = 10_000
WARMUP_SHARE = 0.06
"""Fraction of the steps: Gururangan et al. 2020, table 13."""
GENERATOR_WARMUP_SHARE = 0.1
LEARNING_RATE = 1e-4
"""Learning rate for a model that does not record its own."""

_OWN = Origin("preset", "continued training")
_GENERATOR_WARMUP = "objective.generator_warmup_steps"
_OF_THE_SCHEDULE = ("optimizer.warmup_steps", "optimizer.decay_steps", _GENERATOR_WARMUP, "train.max_hours")


def start_config(
    start: ModelFolder,
    vocabulary: Vocabulary,
    preset: str | None,
    file: Path | None,
    overrides: Sequence[str],
    earlier: PretrainConfig | None,
) -> Resolved[PretrainConfig]:
    """Resolve the configuration: the model's own or a preset's, then the file, then `--set`.

    Settings that the model was trained with are kept, except for schedules: that of the learning rate starts again, and settings
    that changed during training keep their last value.

    Args:
        vocabulary: vocabulary of the data set.
        preset: recipe to use instead of the model's own; the sizes remain those of the model.
        file: TOML file.
        overrides: values of `--set`.
        earlier: configuration of the run that is resumed, which keeps the steps that fractions of the run became.

    Raises:
        ConfigError: a setting is invalid, or a size differs from that of the model.
    """
    if preset is not None:
        settings = collect(preset, file, overrides)
    else:
        settings = _of_model(start) | ({} if file is None else read_file(file)) | parse_overrides(overrides)

    # The sizes are those of the model
    sizes, problems = _sizes(main_network(start)), []
    for name, size in sizes.items():
        setting = settings.get(key := f"model.{name}")
        if setting is not None and setting.origin.by_user and setting.value != size:
            text = (
                f"{setting.origin.where}: {key} is {quoted(setting.value)}, but the weights of {start.folder} have {quoted(size)}"
            )
            problems.append(Problem(key, text, f"leave out {key}: the model determines the sizes"))
    if problems:
        raise InvalidConfigError(problems)
    origin = Origin("preset", f"model {start.folder}")
    settings |= {f"model.{name}": Setting(size, origin) for name, size in sizes.items()}

    settings = {"optimizer.warmup_steps": Setting(WARMUP_SHARE, _OWN)} | settings
    resolved = resolve_pretrain_config(settings, earlier=earlier)
    objective = resolved.config.objective
    if not objective.can_warm_up_generator or _GENERATOR_WARMUP in settings or resolved.config.train.max_steps == 1:
        return resolved
    # A new generator is first trained alone, beside the trained discriminator.
    networks = meta_objective(resolved.config, vocabulary).networks()
    if GENERATOR not in networks or _sources(networks, start)[GENERATOR] is not None:
        return resolved
    return resolve_pretrain_config(settings | {_GENERATOR_WARMUP: Setting(GENERATOR_WARMUP_SHARE, _OWN)}, earlier=earlier)


def _of_model(start: ModelFolder) -> Settings:
    """Settings that the model was trained with, or a recipe for a foreign model, with a new schedule."""
    origin = Origin("preset", f"model {start.folder}")
    if start.config is None:
        values = _recipe(start)
    else:
        values = {key: value for key, value in flatten(start.config).items() if key not in _OF_THE_SCHEDULE}
        step = start.config.train.max_steps if start.step is None else start.step
        values |= {f"objective.{name}": value for name, value in start.config.objective.continued_at(step).items()}
        size = step_sizes(start.config.train, start.config.data).at(max(step - 1, 0))
        values |= {"train.batch_schedule": (), "data.length_schedule": (), "data.mixture": ()}
        values |= {"train.sequences_per_step": size.rows, "data.sequence_length": size.length}
        # With the previous seed, the same rows would come in the same order with the same masks.
        values["train.seed"] = start.config.train.seed + 1
    settings = {key: Setting(value, origin) for key, value in values.items() if value is not None}
    return settings | {"train.max_steps": Setting(STEPS, _OWN)}


def _recipe(start: ModelFolder) -> dict[str, Any]:
    """Recipe for a foreign model: the objective that suits its heads, a low learning rate, and the defaults of the paper."""
    main = main_network(start)
    encoder, model = main.encoder, main.encoder.config
    values = {f"model.{name}": value for name, value in flatten(model).items()}
    values["optimizer.learning_rate"] = LEARNING_RATE
    if encoder.has_query_stream or main.predicts == "words":
        # If an objective has a memory, without it, as no folder records its length.
        return {**values, **encoder.architecture.objective}
    values |= {"objective.name": "rtd", **encoder.architecture.detection}
    if main.bilinear is not None:
        values["objective.discriminator_head"] = "bilinear"
    generator = start.networks_to_train.get(GENERATOR)
    if generator is None:
        return values

    # Relative size of the generator, and what it shares with the discriminator
    sizes = generator.encoder.config
    width, depth = sizes.hidden_size / model.hidden_size, sizes.num_layers / model.num_layers
    shrunk = model.shrunk(width, depth) if width <= 1 and depth <= 1 else None
    names = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
    if shrunk is None or any(getattr(shrunk, name) != getattr(sizes, name) for name in names):
        listed = ", ".join(f"{name} {getattr(sizes, name)}" for name in names)
        raise CheckpointError(
            f"the generator of {start.folder} has {listed}, which is not a fraction of the discriminator",
            hint=f"continue from the discriminator alone, with a new generator: discern export {start.folder} --out DIR "
            "--network discriminator",
        )
    own, theirs = named_parameters(main), named_parameters(generator)
    prefix = "encoder.embeddings."
    same = {key: own[key].shape == theirs[key].shape and torch.equal(own[key], theirs[key]) for key in own if prefix in key}
    differing = generator.encoder.architecture.detection.get("objective.tying", "none")
    tying = "embeddings" if all(same.values()) else "token" if same[f"{prefix}word.weight"] else differing
    return {**values, "objective.generator_size": width, "objective.generator_depth": depth, "objective.tying": tying}
