"""Additional files of an export, for serving it with other software: sentence-transformers, ONNX, eight bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from discern.data.tables import numbered_lines
from discern.data.tokenizer import special_tokens, vocab_size
from discern.errors import CheckpointError, ConfigError, NumericsError
from discern.model_files.cards import render
from discern.model_files.huggingface import HuggingFaceFolder
from discern.model_files.onnx import ONNX_NAME, Graph, VectorPooling, add_onnx, check_onnx
from discern.models.architecture import AGAIN
from discern.parsing import json_value
from discern.progress import Progress
from discern.storage.checksums import Record, read_json, read_text, understood
from discern.storage.files import sync_folder, write_bytes

CARD_NAME = "README.md"
MODULES_NAME, TRANSFORMER_NAME, VERSIONS_NAME = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
"""The files of a sentence-transformers model, besides the folders of its modules."""
_MOST_TEXTS = 256
# The names that every version of sentence-transformers reads. Other servers read them too, in 1_Pooling.
_MODULES = "sentence_transformers.models."
_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_POOLINGS = {"mean_tokens": "mean-all", "mean": "mean-all", "cls_token": "cls", "cls": "cls"}


@dataclass(frozen=True)
class Serving:
    """Forms of an export, besides the weights that transformers loads.

    Attributes:
        form: `model_type` to export as; None: the natural one.
        sentence_transformers: also write what sentence-transformers reads, with `pooling` and `normalize`.
        pooling: see `discern.model_files.onnx.VectorPooling`.
        normalize: scale vectors to length 1.
        onnx: also write the model as ONNX.
        int8: with weights of eight bits, compared with the model on `texts` or `labeled`.
        max_loss: largest drop that they may cause: in the task's score, or in the fraction of decisions that stay the same.
        texts: file with one text per line to compare on; None: English sentences.
        labeled: gives the examples of a fine-tuned model's task to compare on instead, which also give its score, and the name of
            their file; it gives None where there are none.
        max_length: longest text in tokens that sentence-transformers reads; None: as long as the model can.
    """

    form: str | None = None
    sentence_transformers: bool = False
    pooling: VectorPooling | None = None
    normalize: bool = False
    onnx: bool = False
    int8: bool = False
    max_loss: float | None = None
    texts: Path | None = None
    labeled: Callable[..., tuple[str, Sequence[Any]] | None] | None = None
    max_length: int | None = None

    def check(self) -> None:
        """Raise a ConfigError if options contradict each other or a package is missing, before any work."""
        if (self.pooling is not None or self.normalize) and not self.sentence_transformers:
            raise ConfigError("--pooling and --normalize are for text embeddings", hint="add --sentence-transformers")
        if self.int8 and not self.onnx:
            raise ConfigError("--int8 is the precision of an ONNX file, but --onnx is not given", hint="add --onnx")
        for option, value in (("--max-loss", self.max_loss), ("--compare-on", self.texts)):
            if value is not None and not self.int8:
                raise ConfigError(f"{option} is for --int8, but --int8 is not given", hint="add --onnx --int8, or leave it out")
        if self.onnx:
            check_onnx()

    def of_vectors(self, pooling: VectorPooling, max_length: int) -> Serving:
        """The same forms, for a model that was trained for vectors of length 1.

        Raises:
            ConfigError: another pooling is asked for than the one that it was trained with.
        """
        if self.pooling is not None and self.pooling != pooling:
            raise ConfigError(
                f"--pooling is '{self.pooling}', but the model was trained with '{pooling}'",
                hint="leave it out, or train with --set task.pooling=" + self.pooling,
            )
        return replace(self, sentence_transformers=True, pooling=pooling, normalize=True, max_length=max_length)

    def add(self, folder: Path, progress: Progress, examples: tuple[str, Sequence[Any]] | None = None) -> dict[str, Any] | None:
        """Write these forms to an export that is otherwise complete.

        Args:
            folder: the folder that is being written.
            examples: what `labeled` gave.

        Returns:
            How far the ONNX file is from the model; None without one.

        Raises:
            ConfigError: the model cannot be expressed so.
            NumericsError: eight bits lose more than `max_loss`, or the outputs of the graph differ from those of the model.
        """
        if not (self.sentence_transformers or self.onnx):
            return None
        opened = HuggingFaceFolder(folder)
        pooling: VectorPooling | None = (self.pooling or "mean") if self.sentence_transformers else None
        if pooling is not None:
            write_sentence_transformers(opened, pooling, normalize=self.normalize, max_length=self.max_length)
        graph = parity = None
        if self.onnx:
            progress.note("writing ONNX, which takes a minute or so")
            graph = Graph(opened, pooling, normalize=self.normalize)
            texts = None
            if examples is None and self.texts is not None:
                lines = (line for _, line in numbered_lines(self.texts) if line.strip())
                texts = list(islice(lines, _MOST_TEXTS))
            name, labeled = examples or (self.texts.name if self.texts else "English sentences of discern", None)
            parity = add_onnx(graph, folder / ONNX_NAME, int8=self.int8, texts=texts, labeled=labeled, source=name)
            if self.max_loss is not None and not parity["loss"] <= self.max_loss:
                what = f"of {parity['metric']}" if parity["scores"] else "of the agreement with float32"
                raise NumericsError(
                    f"int8 loses {parity['loss']:.4f} {what} on {name}, more than --max-loss {self.max_loss:g}",
                    hint="nothing was written; allow a larger --max-loss, leave out --int8, or give --compare-on FILE with texts "
                    "like those that the model will read",
                )
        section = render("serving.md.j2", serving=self, pooling=pooling, graph=graph, parity=parity)
        card = folder / CARD_NAME
        card.write_text(f"{card.read_text(encoding='utf-8').rstrip()}\n\n{section.strip()}\n", encoding="utf-8")
        return parity


def write_sentence_transformers(
    opened: HuggingFaceFolder, pooling: VectorPooling = "mean", *, normalize: bool = False, max_length: int | None = None
) -> None:
    """Add what `SentenceTransformer(folder)` needs to a folder that has an encoder and its tokenizer.

    sentence-transformers truncates a text to `max_length` tokens, where `Model.encode` reads all of it in windows.

    Args:
        normalize: scale the vectors to length 1.
        max_length: number of tokens that are read of a text, including [CLS] and [SEP]; None: that of the tokenizer.
    """
    folder, tokenizer = opened.folder, opened.tokenizer
    modules: list[tuple[str, dict[str, Any] | None]] = []
    if pooling == "mean":
        # A module for idf weights, which looks up ids by their place in this list: 0 for [CLS] and [SEP], 1 for others.
        special = special_tokens(tokenizer)
        words = [tokenizer.id_to_token(number) or "" for number in range(vocab_size(tokenizer))]
        weights = {words[special.cls]: 0.0, words[special.sep]: 0.0}
        modules.append(("WordWeights", {"vocab": words, "word_weights": weights, "unknown_word_weight": 1.0}))
    summary = "lasttoken" if opened.architecture.frame == "cls-last" else "cls_token"
    mode = summary if pooling == "cls" else "mean_tokens"
    sizes = {"word_embedding_dimension": opened.sizes.hidden_size}
    modules.append(("Pooling", sizes | {f"pooling_mode_{name}": name == mode for name in _MODES} | {"include_prompt": True}))
    if normalize:
        modules.append(("Normalize", None))

    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}Transformer"}]
    for number, (kind, settings) in enumerate(modules, 1):
        place = f"{number}_{kind}"
        listed.append({"idx": number, "name": str(number), "path": place, "type": f"{_MODULES}{kind}"})
        if settings is not None:  # Normalize has none, and then no folder either
            (folder / place).mkdir()
            _write(folder / place / "config.json", settings)
            sync_folder(folder / place)
    _write(folder / MODULES_NAME, listed)
    _write(folder / TRANSFORMER_NAME, {"max_seq_length": max_length or opened.max_length, "do_lower_case": False})
    _write(folder / VERSIONS_NAME, {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"})


def _write(path: Path, content: object) -> None:
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


@dataclass(frozen=True)
class StoredPooling:
    """The pooling that a folder of sentence-transformers names.

    Attributes:
        pooling: 'mean-all', 'mean' or 'cls'.
        normalize: whether vectors are scaled to length 1.
        max_length: number of tokens that are read at a time, including [CLS] and [SEP]; None: as many as the encoder takes.
    """

    pooling: str
    normalize: bool
    max_length: int | None = None


def read_pooling(folder: Path, frame: str) -> StoredPooling | None:
    """The pooling of a folder; None if sentence-transformers did not write it.

    Args:
        frame: position of [CLS] in the input.

    Raises:
        CheckpointError: its files are damaged.
        ConfigError: it has a pooling or a layer that discern does not have.
    """
    if not (folder / MODULES_NAME).is_file():
        return None
    with understood(folder / MODULES_NAME, hint=AGAIN, error=CheckpointError):
        kinds = [(str(each["type"]).rpartition(".")[2], folder / each["path"]) for each in _json(folder / MODULES_NAME)]
        pooled: dict[str, Any] = next((_json(path / "config.json") for kind, path in kinds if kind == "Pooling"), {})
        modes = [
            name.removeprefix("pooling_mode_") for name, on in pooled.items() if name.startswith("pooling_mode_") and on is True
        ]
    modes = modes or [str(pooled.get("pooling_mode"))]
    poolings = _POOLINGS | ({"lasttoken": "cls"} if frame == "cls-last" else {})
    named = {kind for kind, _ in kinds}
    unknown = sorted(named - {"Transformer", "WordWeights", "Pooling", "Normalize"})
    if unknown or len(modes) != 1 or modes[0] not in poolings:
        what = f"the module {unknown[0]}" if unknown else f"pooling by {', '.join(modes)}"
        raise ConfigError(
            f"{folder} is a model of sentence-transformers with {what}, which discern does not have",
            hint="use it with sentence-transformers; for its encoder alone, remove modules.json from a copy",
        )
    path = folder / TRANSFORMER_NAME
    settings = read_json(path, _Settings, hint=AGAIN, error=CheckpointError) if path.is_file() else {}
    # discern writes WordWeights only to leave out [CLS] and [SEP].
    pooling = "mean" if "WordWeights" in named else poolings[modes[0]]
    return StoredPooling(pooling, "Normalize" in named, settings.get("max_seq_length"))


def _json(path: Path) -> Any:
    return json_value(read_text(path, hint=AGAIN, error=CheckpointError))


class _Settings(Record):
    max_seq_length: Annotated[int, Field(ge=3)] | None = None
