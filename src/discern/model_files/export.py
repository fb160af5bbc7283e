"""Write networks of a run, of an earlier export, or of a fine-tuned model as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from discern import __version__
from discern.config.schema import to_toml
from discern.data.tokenizer import fingerprint, load_tokenizer, special_tokens
from discern.errors import CheckpointError, ConfigError, DataError, NumericsError, did_you_mean
from discern.model_files.cards import exported_again_card, model_card, task_card, without_paths
from discern.model_files.finetuned import FORMAT, RESULTS_FILE, FinetunedFolder
from discern.model_files.folder import PROVENANCE, ModelFolder, open_model
from discern.model_files.hub import CALIBRATION_NAME, CONFIG_NAME, HEAD_NAME, WEIGHTS_NAME, create_repository, push
from discern.model_files.huggingface import (
    PRECISIONS,
    PROBLEMS,
    SETTINGS_NAME,
    TASK_HEAD,
    TASK_RECORD,
    HuggingFaceFolder,
    HuggingFaceModel,
    as_stored,
    network_to_huggingface,
    read_mark,
    weights_outside_networks,
)
from discern.model_files.onnx import ONNX_NAME
from discern.model_files.run import RunFolder
from discern.model_files.serving import CARD_NAME, MODULES_NAME, TRANSFORMER_NAME, VERSIONS_NAME, Serving
from discern.model_files.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, tokenizer_files
from discern.models.architecture import MARK
from discern.models.base import Network
from discern.parsing import json_value
from discern.progress import Progress
from discern.storage.checksums import CHECKSUMS_NAME, read_text, record_checksums, understood, write_recorded
from discern.storage.files import OutputFolder, cannot_write, check_apart, listed, sync_folder, write_bytes
from discern.tasks.answer_heads import SpanHead
from discern.tasks.classification import ClassificationHead
from discern.tasks.contrastive import ContrastiveConfig
from discern.tasks.tagging import TaggingHead

FILES = (CONFIG_NAME, WEIGHTS_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, CARD_NAME, SETTINGS_NAME)
"""The files of every export of a run. If several networks are exported, each but the first has a subfolder. Each folder has the
checksums of its files, except for the card, which users are meant to edit."""
_FURTHER = (MODULES_NAME, TRANSFORMER_NAME, VERSIONS_NAME, ONNX_NAME, HEAD_NAME, CALIBRATION_NAME, CHECKSUMS_NAME)
_SENTENCE_FOLDERS = ("1_Pooling", "1_WordWeights", "2_Pooling")
_COPY = "copy the file again from where the export came from, or remove it; the new export is then written without it"
_KINDS = {"tags": "tagging", "spans": "span", "vectors": "vectors"}
_BIO = {"S": "B", "E": "I"}
# Largest accepted error of a stored offset, as a fraction of the scores' spread.
_ROUNDING = 0.01


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        folder: the folder.
        networks: names of the networks; the first is at the root, and the other attributes describe it.
        loads_as: class of transformers that loads it.
        parameters: number of parameters; a tied matrix counts once.
        num_bytes: size of the whole folder.
        step: step of the checkpoint; None if unknown.
        task: name of the task of a fine-tuned model; None for others.
        seed: seed of its weights.
        kind: kind of its head: 'classification', 'tagging', 'span', or 'vectors', which is a model of sentence-transformers.
        whole: whether the class of transformers includes the head; otherwise it is in a file of its own, for discern.
        parity: report of the ONNX file; None: there is none.
        pushed: address on the Hugging Face Hub; None: it was not pushed.
    """

    folder: Path
    networks: tuple[str, ...]
    loads_as: str
    parameters: int
    num_bytes: int
    step: int | None = None
    task: str | None = None
    seed: int | None = None
    kind: str | None = None
    whole: bool = True
    parity: dict[str, Any] | None = None
    pushed: str | None = None

    def values(self) -> dict[str, Any]:
        """What was written, as `--json` prints it."""
        of_run = {"network": self.networks[0], "networks": self.networks, "step": self.step}
        return {
            "out": self.folder,
            **(of_run if self.task is None else {"task": self.task, "seed": self.seed}),
            "kind": self.kind,
            "architecture": self.loads_as,
            "has_head": self.whole,
            "parameters": self.parameters,
            "bytes": self.num_bytes,
            **{name: each for name, each in (("onnx", self.parity), ("pushed", self.pushed)) if each is not None},
        }


@dataclass(frozen=True)
class _Contents:
    """The content of the folder to write.

    Attributes:
        models: the networks by name; the first goes to the root.
        settings: content of discern.toml; None: no such file.
        about: further attributes of `Exported`.
    """

    models: Mapping[str, HuggingFaceModel]
    tokenizer: Mapping[str, bytes]
    card: str
    settings: bytes | None
    serving: Serving
    about: Mapping[str, Any]


def export(
    source: Path | ModelFolder,
    *,
    out: Path,
    network: str | None = None,
    all_networks: bool = False,
    task: str | None = None,
    seed: int | None = None,
    precision: str = "float32",
    serving: Serving = Serving(),
    push_to_hub: str | None = None,
    progress: Progress,
    warn: Callable[[str], None],
) -> Exported:
    """Write a model as a folder that transformers loads, with tokenizer, settings and model card.

    Args:
        source: a run, whose newest intact checkpoint is exported, a fine-tuned model, or what `discern export` or `discern
            import` wrote.
        out: new or empty folder, or an earlier export, which is replaced as a whole.
        network: name of the network; None: the first of the objective, which is the one to fine-tune.
        all_networks: also write the other networks, each in a folder of its name, so that the export can be evaluated.
        task: name of the task of a fine-tuned model; None: the only one.
        seed: seed of a fine-tuned model whose weights are exported; None: the best.
        precision: type that the weights are stored in: 'float32', 'bfloat16' or 'float16'.
        serving: further forms of the model, for those who serve it.
        push_to_hub: USER/NAME[@REVISION] to push the folder to, where "{step}" stands for the step; None: nowhere.
        warn: receives a message for every damaged checkpoint that was skipped, and one if the networks of an export that holds
            them all are not enough to evaluate it.

    Raises:
        ConfigError: there is no such network or task, transformers has no class for it, or the options contradict each other.
        DataError: `source` holds no model, or `out` holds something else or cannot be written.
        CheckpointError: the run has no intact checkpoint, or the weights are missing or damaged.
        NumericsError: a weight is not finite, or too large for the precision; or eight bits lose more than is allowed.
    """
    check_target(out, source.folder if isinstance(source, ModelFolder) else source, serving.texts)
    opened = open_model(source, warn=warn)
    serving.check()
    if serving.form is not None and all_networks:
        raise ConfigError("--all-networks writes networks for discern, --as one for other software", hint="leave out one of them")
    if (network is not None or all_networks) and isinstance(opened, FinetunedFolder):
        raise ConfigError(
            "--network and --all-networks are for runs; a fine-tuned model has one network with its head", hint="leave them out"
        )
    if (task is not None or seed is not None) and not isinstance(opened, FinetunedFolder):
        raise ConfigError(f"--task and --seed are for fine-tuned models, but {opened.folder} is not one", hint="leave them out")
    if push_to_hub is not None:
        if opened.step is not None:
            push_to_hub = push_to_hub.replace("{step}", str(opened.step))
        create_repository(push_to_hub)
    progress.start("exporting", 2, "parts")
    title, examples = out.resolve().name, None
    if isinstance(opened, FinetunedFolder):
        if serving.int8 and not serving.sentence_transformers and serving.labeled is not None:
            examples = serving.labeled(opened, serving.texts, task=task, seed=seed)
        contents = _of_task(opened, title, task, seed, precision, serving)
    else:
        contents = _of_pretrained(opened, title, network, all_networks, precision, serving)
    if all_networks and isinstance(opened, RunFolder) and (lost := weights_outside_networks(opened.objective)):
        warn(f"{out} lacks weights that belong to none of the networks ({', '.join(lost[:3])}): evaluate the run instead")
    progress.advance(1)
    first = next(iter(contents.models.values()))
    about: dict[str, Any] = {"step": opened.step, **contents.about}

    def write(folder: Path) -> None:
        write_networks(folder, contents.models, contents.tokenizer, contents.card, contents.settings)
        about["parity"] = contents.serving.add(folder, progress, examples)

    size = publish(out, write)
    progress.advance(1)
    progress.finish()
    if push_to_hub is not None:
        at = "" if opened.step is None else f" at step {opened.step:,}"
        about["pushed"] = push(out, push_to_hub, f"Export of a {opened.kind}{at}")
    return Exported(out, tuple(contents.models), first.loads_as, first.num_parameters, size, **about)


def write_networks(
    folder: Path, models: Mapping[str, HuggingFaceModel], tokenizer: Mapping[str, bytes], card: str, settings: bytes | None
) -> None:
    """Write the networks: the first at the root of the folder, the others in folders of their names, each with the tokenizer."""
    for number, (name, model) in enumerate(models.items()):
        path = folder / name if number else folder
        path.mkdir(exist_ok=True)
        model.write(path)
        write_recorded(path, tokenizer)
    if settings is not None:
        write_recorded(folder, {SETTINGS_NAME: settings})
    write_bytes(folder / CARD_NAME, card.encode())


def check_finite(model: HuggingFaceModel, source: Path) -> None:
    """Raise a NumericsError if a weight is not finite, or too large for the precision."""
    for name, tensor in (model.tensors | model.head).items():
        if not tensor.isfinite().all():
            raise NumericsError(
                f"{source}: '{name}' contains values that are not finite in {model.config['dtype']}",
                hint="export another run, or an earlier copy of this one; the largest float16 is 65504: use --precision bfloat16",
            )


def _of_pretrained(
    opened: ModelFolder, title: str, network: str | None, all_networks: bool, precision: str, serving: Serving
) -> _Contents:
    """The networks of a run, or of an earlier export or import."""
    # What later commands need to know about an export, in addition to its settings. No paths and no host names.
    if isinstance(opened, RunFolder):
        found, source = opened.networks(), f"objective '{opened.config.objective.name}'"
        names = _chosen(list(found), network, all_networks, source)
        networks = {name: found[name] for name in names}
        mark = {"objective": opened.config.objective.name, "step": opened.step, PROVENANCE: opened.provenance}
        mark["tokenizer_fingerprint"] = opened.record["tokenizer_fingerprint"]
        settings: bytes | None = to_toml(without_paths(opened.config)).encode()
    else:
        assert isinstance(opened, HuggingFaceFolder)
        if "networks" not in opened.mark:
            raise CheckpointError(
                f"{opened.folder / CONFIG_NAME} does not name the networks of an export",
                hint="export the run again; convert a model that discern did not write with `discern import`",
            )
        names = _chosen(opened.names, network, all_networks, str(opened.folder))
        networks = {name: opened.folders[name].stored.network for name in names}
        mark = {key: value for key, value in opened.mark.items() if key not in ("head", "gives")}
        path = opened.folder / SETTINGS_NAME
        # The settings of an import were made for all of its networks; those of a run apply to each.
        keeps = path.is_file() and ("objective" in mark or names == opened.names)
        settings = read_text(path, hint=_COPY).encode() if keeps else None
    special = special_tokens(opened.tokenizer)
    models = {name: network_to_huggingface(each, special, precision) for name, each in networks.items()}
    for model in models.values():
        check_finite(model, opened.folder)
    root = models[names[0]]
    if root.kind.architecture.beside_only:
        raise ConfigError(
            f"the {names[0]} has two towers, and transformers has no such model",
            hint="leave out --network and add --all-networks, which stores it beside the discriminator, for discern only",
        )
    root.config[MARK] = mark | {"version": __version__, "networks": names} | root.config.get(MARK, {})
    models[names[0]] = root = root.in_form(serving.form)
    tokenizer = tokenizer_files(load_tokenizer(opened.tokenizer_path), opened.max_length, root.kind.architecture)
    if isinstance(opened, RunFolder):
        card = model_card(opened, models, title)
    else:
        with understood(opened.folder / CONFIG_NAME, hint="export the run again", error=CheckpointError):
            card = exported_again_card(opened, models, title)
    return _Contents(models, tokenizer, card, settings if "networks" in root.config[MARK] else None, serving, {})


def _chosen(present: Sequence[str], network: str | None, all_networks: bool, source: str) -> list[str]:
    """Names of the networks to write; the first goes to the root."""
    if network is not None and network not in present:
        raise ConfigError(f"{source} has no network '{network}'", hint=did_you_mean(network, present))
    if all_networks and network not in (None, present[0]):
        raise ConfigError(
            f"with all networks, the {present[0]} is at the root, not the {network}",
            hint=f"leave out --network; the {network} will be in the folder '{network}'",
        )
    return list(present) if all_networks else [network or present[0]]


def _of_task(
    opened: FinetunedFolder, title: str, name: str | None, seed: int | None, precision: str, serving: Serving
) -> _Contents:
    loaded = opened.task_model(seed)
    task, encoder = loaded.task(name), loaded.objective.encoder
    labels, architecture = task.labels, encoder.architecture
    head: Any = loaded.objective.heads[task.name]
    kind: Any = _KINDS.get(labels.kind, "classification")
    form: Any = getattr(task.config, "head", None)
    pooling: str = getattr(head, "pooling", "cls")
    names = labels.names if kind != "span" else ()
    if labels.scheme != "none":  # the pipelines of transformers read BIO, not BIOES
        names = tuple(_BIO.get(name[:1], name[:1]) + name[1:] for name in names)
    # Exact types, as a subclass may compute something else. transformers has neither ELECTRA's joint head, in which the end of
    # an answer depends on its start, nor a head that compares two texts, nor one with n-grams.
    known = type(head) in (ClassificationHead, TaggingHead, SpanHead) and getattr(head, "ngrams", None) is None
    represents = known and pooling != "pair" and bool(architecture.titles)
    if represents:
        for setting, value, allowed in (
            ("pooling", pooling, architecture.poolings),
            ("head", form, architecture.task_heads[kind]),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"{architecture.class_of(encoder.config, kind)} cannot represent the head of task.{setting} '{value}'",
                    hint=f"fine-tune with --set task.{setting}={allowed[0]}; `discern predict` accepts this model as it is",
                )
    model = network_to_huggingface(Network(encoder, nn.Identity()), special_tokens(loaded.tokenizer), precision)
    config, tensors, weights = model.config, model.tensors, head.state_dict()
    if represents:
        named = names or tuple(f"LABEL_{number}" for number in range(head.output.out_features))
        config |= {
            "architectures": [architecture.class_of(encoder.config, kind)],
            "num_labels": len(named),
            "id2label": {str(number): label for number, label in enumerate(named)},
            # If several outputs have the same label, this is the first of them.
            "label2id": {label: named.index(label) for label in named},
        }
        config |= {"problem_type": PROBLEMS[labels.kind]} if kind == "classification" else {}
        if labels.kind == "number":  # a CrossEncoder would apply a sigmoid
            config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
        config |= architecture.task_config(encoder.config, form, pooling, loaded.frame)
        # The offset of the scores is part of the stored bias. bfloat16 stores 2005 as 2008: scores that differ by a few units
        # would all be off by about as much as they differ.
        bias = head.output.bias.detach().cpu()
        offset = (labels.scale * bias.float() + labels.shift).to(PRECISIONS[precision]).double()
        lost = float((offset - labels.scale * bias.double() - labels.shift).abs().max())
        if labels.kind == "number" and lost > _ROUNDING * abs(labels.scale):
            raise ConfigError(
                f"{precision} would shift all scores by {lost:.3g}: they lie around {labels.shift:.6g} and vary by "
                f"{labels.scale:.3g}",
                hint="export with --precision float32, or fine-tune on labels from which a constant is subtracted",
            )
        tensors |= as_stored(architecture.task_tensors(weights, kind, labels.scale, labels.shift), precision)
    elif architecture.strips_prefix:
        tensors = {name.removeprefix(architecture.prefixes[0]): tensor for name, tensor in tensors.items()}
    model = HuggingFaceModel(config, tensors, {} if represents else as_stored(weights, precision))
    check_finite(model, opened.folder)
    if isinstance(task.config, ContrastiveConfig):
        serving = serving.of_vectors(task.config.pooling, task.config.sequence_length)
    # What `HuggingFaceFolder.task_model` reads. No key `objective`: its presence marks a pre-trained model.
    record = loaded.record
    of_task = {key: value for key, value in record["tasks"][task.name].items() if key != "files"}
    if represents and kind == "classification":
        # The weights include the unit of a score, and the class decides the layers of the head.
        of_task["labels"] = of_task["labels"] | {"scale": 1.0, "shift": 0.0}
        of_task["config"] = of_task["config"] | architecture.task_settings(config, kind)
    mark: dict[str, Any] = {
        "version": __version__,
        "task": task.name,
        "seed": loaded.seed,
        "tokenizer_fingerprint": fingerprint(loaded.tokenizer),
        PROVENANCE: record[PROVENANCE],
        TASK_RECORD: {"format": FORMAT, "frame": loaded.frame, "tasks": {task.name: of_task}},
    }
    if not represents:
        mark[TASK_HEAD] = HEAD_NAME if model.head else ""
    model.config[MARK] = mark
    model = model.in_form(serving.form)
    files = tokenizer_files(load_tokenizer(opened.tokenizer_path), task.config.sequence_length, architecture, loaded.frame)
    hint = "remove it for a card without scores, or run the same `discern finetune` command, which writes it again"
    with understood(opened.folder / RESULTS_FILE, hint=hint):
        card = task_card(loaded, task, kind, model, names, title)
    about = {"task": task.name, "seed": loaded.seed, "kind": kind, "whole": not model.head}
    return _Contents({"encoder": model}, files, card, None, serving, about)


def check_target(out: Path, *reads: Path | None) -> None:
    """Make sure that an export may be written to `out`: it is free, empty, or an earlier export and nothing else.

    Args:
        reads: the models that the export is made from.

    Raises:
        ConfigError: `out` is, contains or lies inside a model that is read.
        DataError: `out` holds something else, which would be lost.
    """
    folder = OutputFolder(out)
    check_apart(out, *reads)
    if folder.is_free and not (out.is_symlink() and not out.exists()):
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file", hint="choose another --out")
    try:
        mark = read_mark(json_value((out / CONFIG_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        mark = {}
    known = {*FILES, *_FURTHER, *mark.get("networks", ()), *_SENTENCE_FOLDERS} if mark else set()
    paths = sorted(path.relative_to(out) for path in (out.rglob("*") if mark else out.iterdir()))
    if others := [str(path) for path in paths if not known.issuperset(path.parts)]:
        what = "an earlier export, but also" if mark else "not empty and not an earlier export: it"
        raise DataError(f"{out} is {what} holds {listed(others)}, which would be lost", hint="choose another --out, or empty it")


def publish(out: Path, write: Callable[[Path], None]) -> int:
    """Let `write` fill a new folder, then replace `out` with it; on failure `out` is unchanged. Return its size in bytes.

    Raises:
        DataError: `out` cannot be written, is being written by another process, or has become something other than an export.
    """
    try:
        with OutputFolder(out).staged() as folder:
            check_target(out)
            write(folder.path)
            folders = sorted(path for path in folder.path.rglob("*") if path.is_dir())
            for each in (*reversed(folders), folder.path):  # a folder lists the checksums of those in it
                files = [path for path in each.iterdir() if path.is_file() and path.name not in (CARD_NAME, CHECKSUMS_NAME)]
                files += each.glob(f"*/{CHECKSUMS_NAME}")
                record_checksums(each, (str(path.relative_to(each)) for path in files))
                sync_folder(each)
            folder.publish(replace=True)
    except SafetensorError as problem:
        raise cannot_write(out, problem) from problem
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
