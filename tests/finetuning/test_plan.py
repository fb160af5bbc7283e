"""What is decided before any training: the model, the task of a user's files, the settings, the length, the held-out part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.compare.plan import FinetuneSpec
from discern.config.schema import flatten
from discern.errors import ConfigError, DataError
from discern.finetuning.plan import HELD_OUT, FinetunePlan, own_task
from discern.finetuning.settings import FinetuneConfig, Recipe, given_settings, load_finetune_config
from discern.model_files.finetuned import FinetunedFolder
from discern.model_files.folder import LoadedEncoder, choose_encoder
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.deberta.encoder import DebertaEncoder
from discern.models.electra.encoder import BertEncoder
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.models.xlnet.encoder import XLNetEncoder
from discern.progress import Silent
from discern.tasks import tasks
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.task import ROWS, Finetuning, Notes, prepare_finetuning, with_settings, write_csv
from tests.small.tokenizers import small_tokenizer
from tests.tasks.data_folder import write

MANY = [(f"{text} {n}", label) for n in range(80) for text, label in ROWS]
SENTENCES = ["the DT B-NP", "model NN I-NP", "reads VB O", "", "file NN B-NP", "returns VB O"]


@pytest.fixture
def unfixed(request_: Finetuning, tmp_path: Path) -> Finetuning:
    """240 rows to train on, 60 to evaluate on, and no length."""
    files = [
        f"files.{split}='{write_csv(tmp_path / f'{split}.csv', rows)}'" for split, rows in (("train", MANY), ("dev", MANY[:60]))
    ]
    return replace(request_, overrides=(*files, "train.sequences_per_step=12"))


def prepared(request: Finetuning, *overrides: str) -> FinetunePlan:
    return prepare_finetuning(with_settings(request, *overrides), Silent())


# ---- The model ----


def chosen(model: str | Path, tokenizer: Path | None = None, *, untrained: bool = False) -> LoadedEncoder:
    return choose_encoder(str(model), tokenizer, untrained=untrained, warn=lambda _: None)


def test_a_folder_gives_its_weights_or_its_sizes(small_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded, fresh = chosen(small_model), chosen(small_model, untrained=True)
    assert (loaded.trained, fresh.trained) == (True, False)
    assert (fresh.encoder.config, fresh.tokenizer_path) == (loaded.encoder.config, loaded.tokenizer_path)
    assert fresh.source_fingerprint != loaded.source_fingerprint
    (tmp_path / "tiny").symlink_to(small_model)
    monkeypatch.chdir(tmp_path)
    assert chosen("tiny").trained, "a folder comes before the preset of its name"


def test_a_fine_tuned_model_gives_the_encoder_of_its_best_seed(tmp_path: Path) -> None:
    tuned = FinetunedFolder(make_finetuned(tmp_path / "tuned", seeds=2, own=replace(SINGLE, settings={"sequence_length": 16})))
    loaded = chosen(tuned.folder)
    best = tuned.task_model(1).objective.encoder.state_dict()
    assert all(torch.equal(tensor, best[name]) for name, tensor in loaded.encoder.state_dict().items())
    assert loaded.description.endswith("tuned, seed 1")
    assert loaded.max_length == 32  # of the model that was fine-tuned; its task reads 16 tokens


def test_a_preset_takes_a_tokenizer_and_other_names_are_explained(small_model: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    small_tokenizer("wordpiece, lower-cased").save(str(tokenizer))
    loaded = chosen("tiny", tokenizer)
    assert (loaded.trained, loaded.tokenizer_path) == (False, tokenizer)
    for model, given, message in (
        ("tiny", None, "preset tiny has no tokenizer\n  hint: --tokenizer PATH"),
        (small_model, tokenizer, "a model has its own\n  hint: leave out --tokenizer"),
        ("electra-smal", None, "no folder electra-smal, and no preset .*\n.*did you mean the preset 'electra-small'?"),
        (tmp_path, None, r"holds neither a run nor a config\.json"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            chosen(model, given)


# ---- The files ----


@pytest.mark.parametrize(
    ("header", "rows", "family", "metric"),
    [
        ("text,label", ["x,a", "y,b"], "classification", "accuracy"),
        ("text,score", ["x,1.5", "y,2"], "classification", "spearman"),
        ("text,label", ['x,"[""a""]"', 'y,"[]"'], "classification", "micro_f1"),
        ("words,tags", ["it rains,O O"], "tagging", "f1"),
        ("question,context,answer", ["which?,the red one,red"], "squad1", "exact_match"),
        ("question,context,answer", ["which?,the red one,red", "who?,the red one,"], "squad2", "exact_match"),
    ],
)
def test_the_training_file_decides_family_and_metric(
    tmp_path: Path, header: str, rows: list[str], family: str, metric: str
) -> None:
    path = write(tmp_path / "a.csv", header, *rows)
    files = own_task(given_settings(write(tmp_path / "a.toml", "[files]", f"train = '{path}'"), ()), pytest.fail)
    assert (files.definition.family.family, files.definition.metrics[0], files.paths) == (family, metric, {"train": path})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "nothing to train on\n.*--train FILE"),
        (["files.txt=review"], r"unknown key 'txt' in \[files\]"),
        (["files.train=nowhere.csv"], r"nowhere\.csv"),
        (["files.train={conll}", "files.words=form"], "numbered columns, but --words is 'form'\n.*--words 0"),
        (["files.train={conll}", "files.text=text"], "one word per line, which is for tagging, .*\n.*--words N"),
    ],
)
def test_wrong_files_and_columns_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    conll = write(tmp_path / "a.conll", *SENTENCES)
    with pytest.raises((ConfigError, DataError), match=message):
        own_task(given_settings(None, [text.format(conll=conll) for text in overrides]), pytest.fail)


def test_labels_that_training_did_not_know_are_named_with_their_line(request_: Finetuning, tmp_path: Path) -> None:
    train = write(tmp_path / "train.conll", *[*SENTENCES, ""] * 4)
    dev = write(tmp_path / "dev.conll", *SENTENCES, "", "hello UH B-INTJ")
    with pytest.raises(DataError, match=r"dev\.conll:8: tag 'B-INTJ' \(1 in the file\) does not occur in the training file"):
        prepared(replace(request_, overrides=(f"files.train={train}", f"files.dev={dev}")))


@pytest.mark.parametrize(("tags", "warned"), [("B-PER I-PER 0", True), ("B-PER I-PER O", False), ("DT NN -LRB- O", False)])
def test_tags_that_nearly_mark_spans_and_small_files_are_warned_of(
    request_: Finetuning, tmp_path: Path, tags: str, warned: bool
) -> None:
    train = write(tmp_path / "train.conll", *(f"word {tag}" for tag in tags.split()))
    notes = Notes()
    prepare_finetuning(replace(request_, overrides=(f"files.train='{train}'", f"files.dev='{train}'")), notes)
    assert any("own: the scores come from 1 example (dev), so they are unreliable" in line for line in notes.lines)
    assert any(line.startswith("warning: own: tags such as") for line in notes.lines) == warned


def test_a_part_is_held_out_where_there_is_no_dev_file(unfixed: Finetuning, tmp_path: Path) -> None:
    def texts(split: Any) -> set[str]:
        return {example.text for example in split.examples}

    train, _, *others = unfixed.overrides
    labeled = write_csv(tmp_path / "test.csv", MANY[:3])
    request = replace(unfixed, overrides=(train, *others, f"files.test='{labeled}'"))
    data = prepared(request).data["own"]
    assert (data.dev_name, list(data.evaluated), list(data.unlabeled)) == (HELD_OUT, [HELD_OUT], ["test"])
    trained, held = texts(data.train), texts(data.evaluated[HELD_OUT])
    assert not trained & held
    assert len(trained) + len(held) == 240
    assert 10 <= len(held) <= 40
    assert any(note.startswith("train: ") and "3 labels" in note for note in data.notes), "of the whole file"
    least = prepared(request, "finetune.heldout_fraction=1e-6").data["own"]
    assert len(texts(least.evaluated[HELD_OUT])) == 1
    write_csv(tmp_path / "train.csv", [("the same text", label) for label in ("good", "bad") * 50])
    with pytest.raises(DataError, match="has 100 examples with 1 different text, too few to hold some of them out"):
        prepared(request)


# ---- The settings ----


@pytest.mark.parametrize(
    ("changes", "overrides", "steps"),
    [
        ({}, (), 400),  # at most twenty epochs of 240 rows, 12 a step
        ({}, ("finetune.min_steps=70",), 70),
        ({}, ("finetune.min_steps=0",), 60),  # three epochs
        ({}, ("finetune.train_rows=24",), 40),
        ({"debug": True}, (), 25),  # three epochs of a hundred rows
        ({"recipe": "paper"}, (), 60),
        ({"recipe": "google"}, ("finetune.train_rows=230",), 60),  # the last batch of an epoch is filled up
        ({}, ("finetune.epochs=2",), 40),
        ({}, ("train.max_steps=7",), 7),
    ],
)
def test_the_length_fits_the_data_unless_it_is_given(
    unfixed: Finetuning, changes: dict[str, Any], overrides: tuple[str, ...], steps: int
) -> None:
    config = prepared(replace(unfixed, **changes), *overrides).config
    assert (config.train.max_steps, config.optimizer.warmup_steps) == (steps, steps // 10)
    assert (config.finetune.keep, config.train.evaluate_every_steps) == ("last", 0)


def test_the_warm_up_has_to_leave_room_for_the_decay(unfixed: Finetuning) -> None:
    for warmup, decay, overrides in (
        (9, 86, ("optimizer.decay_fraction=0.95",)),
        (85, 10, ("optimizer.warmup_steps=85", "optimizer.decay_steps=10")),
    ):
        with pytest.raises(ConfigError, match=f"a warm-up of {warmup} steps and a decay of {decay} "):
            prepared(unfixed, "optimizer.schedule=wsd", "train.max_steps=90", *overrides)


def resolved(
    names: tuple[str, ...], *overrides: str, recipe: Recipe = "auto", encoder: type[Encoder] = Encoder, **model: Any
) -> FinetuneConfig:
    definitions = [tasks.load(name) for name in names]
    given = given_settings(None, overrides)
    return load_finetune_config(definitions, ModelConfig(**model), given, recipe=recipe, encoder=encoder).config


@pytest.mark.parametrize(
    ("recipe", "model", "rate", "decay", "dropout", "min_steps"),
    [
        ("auto", {"hidden_size": 256}, 3e-4, 0.8, 0.1, 300),
        ("auto", {"hidden_size": 768}, 1e-4, 0.8, 0.1, 300),
        ("auto", {"hidden_size": 1024}, 5e-5, 0.9, 0.1, 300),
        ("auto", {"num_layers": 11}, 1e-3, 1.0, 0.1, 1000),
        ("paper", {"num_layers": 11}, 1e-3, 1.0, 0.0, 0),
        ("google", {"hidden_size": 256}, 1e-4, 0.8, 0.1, 0),
    ],
)
def test_rates_go_by_recipe_and_size(
    recipe: Recipe, model: dict[str, int], rate: float, decay: float, dropout: float, min_steps: int
) -> None:
    config = resolved(("sst2",), recipe=recipe, **model)
    assert (config.optimizer.learning_rate, config.optimizer.layer_decay) == (rate, decay)
    assert (config.finetune.dropout, config.finetune.min_steps) == (dropout, min_steps)
    assert (config.finetune.retries > 0) == (recipe == "auto")


@pytest.mark.parametrize(
    ("names", "layers", "overrides", "expected"),
    [
        (("sst2",), 4, (), ("muon", 0.998, 1000)),
        (("stsb",), 4, ("optimizer.name=adamw",), ("adamw", 0.998, 1000)),
        (("chunk",), 4, (), ("adamw", 0.99, 1700)),
        (("sst2",), 12, (), ("adamw", 0, 300)),
        (("sst2",), 4, ("train.max_steps=7",), ("adamw", 0, 0)),
        (("squad1",), 4, (), ("adamw", 0, 1000)),
        (("sst2", "chunk"), 4, (), ("adamw", 0, 1000)),
    ],
)
def test_small_networks_have_the_optimizer_and_average_that_were_measured(
    names: tuple[str, ...], layers: int, overrides: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    config = resolved(names, *overrides, num_layers=layers)
    assert (config.optimizer.name, config.train.weight_average, config.finetune.min_steps) == expected


def test_the_average_spans_the_same_part_of_any_run(unfixed: Finetuning) -> None:
    """Half of 400 steps, as 0.998 is half of 1,000."""
    assert prepared(unfixed).config.train.weight_average == pytest.approx(1 - 1 / 200)
    assert prepared(unfixed, "train.weight_average=0.9").config.train.weight_average == 0.9


def test_settings_of_one_of_several_tasks_need_its_name() -> None:
    with pytest.raises(ConfigError, match=r"there are 2 tasks\n.*tasks\.sst2\.sequence_length or tasks\.ner"):
        resolved(("sst2", "ner"), "task.sequence_length=16")


def test_the_google_recipe_repeats_the_released_code() -> None:
    config = resolved(("mrpc",), recipe="google")
    optimizer = config.optimizer
    assert (optimizer.weight_decay, optimizer.schedule, optimizer.bias_correction) == (0.01, "released", False)
    assert (config.finetune.reduction, config.task_config("mrpc").model_dump()["swap_pairs"]) == ("sum", True)
    assert flatten(resolved(("mrpc",), "finetune.recipe=google")) == flatten(config)
    assert FinetuneSpec().recipe == "paper", "a comparison keeps the recipe of the paper"


@pytest.mark.parametrize(
    ("recipe", "overrides", "encoder", "heads"),
    [
        ("auto", (), Encoder, ["span", "linear", "linear"]),
        ("paper", (), Encoder, ["joint", "linear", "linear"]),
        ("auto", ("finetune.recipe=google",), Encoder, ["joint", "linear", "linear"]),
        ("google", ("tasks.squad2.head=span",), Encoder, ["span", "linear", "linear"]),
        ("auto", (), ModernBertEncoder, ["prediction"] * 3),
        ("paper", (), ModernBertEncoder, ["joint", "prediction", "prediction"]),
        ("auto", ("tasks.ner.head=linear",), ModernBertEncoder, ["prediction", "prediction", "linear"]),
    ],
)
def test_heads_go_by_recipe_encoder_and_user(
    recipe: Recipe, overrides: tuple[str, ...], encoder: type[Encoder], heads: list[str]
) -> None:
    names = ("squad2", "sst2", "ner")
    config = resolved(names, *overrides, recipe=recipe, encoder=encoder)
    assert [config.task_config(name).model_dump()["head"] for name in names] == heads


@pytest.mark.parametrize("encoder", [BertEncoder, ModernBertEncoder, DebertaEncoder, XLNetEncoder])
def test_a_cross_encoder_has_a_head_of_transformers_unless_the_user_chose_another(encoder: type[Encoder]) -> None:
    for names in (("rte",), ("rte", "mrpc")):
        for config in (resolved(names, "finetune.purpose=cross-encoder", encoder=encoder).task_config(name) for name in names):
            settings = config.model_dump()
            assert settings["head"] in encoder.architecture.task_heads["classification"]
            assert (settings["pooling"], settings["words"]) == ("cls", False)
    given = "finetune.purpose=cross-encoder", "task.pooling=pair"
    assert resolved(("rte",), *given, encoder=encoder).task_config("rte").model_dump()["pooling"] == "pair"


@pytest.mark.parametrize("name", ["sst2", "squad1", "ner"])
def test_a_cross_encoder_reads_two_texts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"a cross-encoder reads two texts\n.*--pair COLUMN"):
        resolved((name,), "finetune.purpose=cross-encoder")


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        (("train.evaluate_sequences=64",), {}, "but fine-tuning evaluates on the whole dev file"),
        (("train.batch_schedule=[[0, 64], [640, 128]]",), {}, r"train\.batch_schedule is for pre-training"),
        (("finetune.keep=best",), {}, r"keep=best needs evaluations .*\n.*train\.evaluate_every_steps=100"),
        (("task.sequence_length=4096",), {}, "sequence_length is 4096, but the model has"),
        (("finetune.recipe=gogle",), {}, r"finetune\.recipe"),
        (("finetune.recipe=paper",), {"recipe": "google"}, r"--recipe google, but finetune\.recipe is paper \(--set\)"),
        ((), {"tasks": [("chunk", Path())]}, r"its own files and columns, but the settings contain files\.train"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    unfixed: Finetuning,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    changes: dict[str, Any],
    message: str,
) -> None:
    write(tmp_path / "train.txt", "the DT B-NP", "reads VB O")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        prepared(replace(unfixed, **changes), *overrides)


def test_the_default_length_of_rows_is_lowered_to_that_of_the_model(unfixed: Finetuning) -> None:
    plan = prepared(unfixed)
    assert plan.config.task_config("own").sequence_length == plan.loaded.max_length
