"""Going on with a model on other text: what it begins as, what moves, what is measured, and that a cut run goes on exactly."""

import json
import random
import shutil
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.checks import examine
from discern.errors import CheckpointError, ConfigError, DataError
from discern.model_files.export import export
from discern.model_files.run import load_run, read_record
from discern.objectives.base import Objective
from discern.pretraining import adapt as module
from discern.pretraining.adapt import adapt, perplexity
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.pretraining.warm_start import AddedTokens, extended_data
from discern.progress import Silent
from discern.training import checkpoint
from discern.training.metrics import read_metrics
from tests.pretraining.commands import Notes, weights

GENERAL = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
GENERAL += ["alphabetical", "scientific"]  # letters that the words of the domain are spelt with
DOMAIN = "the a patient with acute fibrillation tachycardia stenosis lesion chronic atrial ventricular and after dose".split()
STEPS = 8
LONG = ("train.max_steps=50", "train.checkpoint_every_steps=25", "train.weight_average=0.5", "optimizer.learning_rate=1e-3")
STILL = ("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "data.sequence_length=32", "train.sequences_per_step=4")


def write_data(folder: Path, words: list[str], tokenizer: TokenizerChoice, heldout: float = 0.1) -> Path:
    rng = random.Random(len(words))
    folder.mkdir()
    texts = [" ".join(rng.choices(words, k=rng.randint(4, 12))) + "." + ("\n" if n % 9 == 8 else "") for n in range(500)]
    (folder / "text.txt").write_text("\n".join(texts))
    said: dict[str, Any] = {"language": "en", "license": "CC0" if words is GENERAL else "MIT"}
    options = PrepareOptions(heldout=heldout, workers=1, filters=("words:2-99",), **said)
    prepare([str(folder / "text.txt")], out=folder / folder.name, tokenizer=tokenizer, options=options, progress=Silent())
    return folder / folder.name


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets of one tokenizer, a run on the first, and its export."""
    folder = tmp_path_factory.mktemp("adapt")
    general = write_data(folder / "general", GENERAL, TokenizerChoice(train="wordpiece", vocab_size=150))
    write_data(folder / "domain", DOMAIN, TokenizerChoice(path=general / "tokenizer.json"))
    trained(folder, folder / "run", "train.max_steps=30")
    export(folder / "run", out=folder / "export", progress=Silent(), warn=pytest.fail)
    return folder


@pytest.fixture(scope="module")
def adapted(world: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """A run of 50 steps on text of the domain, with a quarter of general text: its folder, results and notes."""
    notes = Notes()
    results = go(world, world / "adapted", *LONG, **replayed(world, 0.25), progress=notes)
    return world / "adapted", results, notes.lines


def replayed(world: Path, share: float) -> dict[str, Any]:
    return {"replay": world / "general" / "general", "replay_share": share}


def trained(world: Path, out: Path, *overrides: str) -> Path:
    pretrain(data=world / "general" / "general", out=out, preset="tiny", overrides=overrides, progress=Silent())
    return out


def go(world: Path, out: Path, *overrides: str, model: Path | None = None, **options: Any) -> dict[str, Any]:
    fast = [f"train.max_steps={STEPS}", "train.checkpoint_every_steps=4", "train.log_every_steps=1", "train.keep_checkpoints=9"]
    options = {"data": world / "domain" / "domain", "progress": Silent()} | options
    results = adapt(model or world / "run", out=out, overrides=[*fast, *overrides], **options)
    assert results is not None
    return results


def objective_of(run: Path) -> Any:
    return load_run(run, warn=pytest.fail).config.objective


def tensors(objective: Objective) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}


def tensors_at(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    # Zero is changed even by the smallest rate.
    return {name.split(".")[0] for name in before if not torch.allclose(before[name], after[name], rtol=0, atol=1e-20)}


def test_before_is_the_model_and_after_is_the_average_of_the_run(world: Path, adapted: Any) -> None:
    out, results, notes = adapted
    for when, model in (("before", world / "run"), ("after", out)):
        for text in ("domain", "general"):
            figures = evaluate(model, data=world / text / text, progress=Silent(), warn=pytest.fail)
            measured = dict(results[when][text])
            assert measured.pop("perplexity") == pytest.approx(exp(measured["generator_loss"]), rel=1e-6)
            assert measured.items() <= figures.items()
    before, after = results["before"]["domain"], results["after"]["domain"]
    assert after["generator_loss"] < before["generator_loss"] - 0.1
    assert after["discriminator_loss"] < before["discriminator_loss"]
    assert json.loads((out / "adaptation.json").read_text()) == results
    record = read_record(out)
    assert record["start"]["model"] == str((world / "run").resolve())
    assert record["mixture"] == {"domain": 0.75, "general": 0.25}
    assert record["provenance"] == {"languages": ["en"], "licenses": ["CC0", "MIT"]}, "of the model and of both texts"
    by_source = read_metrics(out)[-1]["heldout_by_source"]
    assert {name for name in by_source if "heldout_generator_loss" in by_source[name]} == record["mixture"].keys()
    assert not any("made the model worse" in note for note in notes)
    findings = examine(out, 4, "cpu", Silent(), pytest.fail)["findings"]
    (drift,) = (finding for finding in findings if "drift" in finding["name"])
    assert (drift["value"], drift["verdict"]) == (None, "unknown"), "the embeddings did not begin as those of step 0"


def test_optimizer_and_schedule_begin_anew(adapted: Any) -> None:
    config = load_run(adapted[0], warn=pytest.fail).config
    assert config.optimizer.warmup_steps == 3  # 6 % of 50 steps; the run before it had 10
    rates = [record["learning_rate"] for record in read_metrics(adapted[0])]
    assert rates[:4] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert rates[-1] == pytest.approx(1e-3 / 47)
    assert checkpoint.load(adapted[0] / "checkpoints" / "step-00000050").state["updates"] == 50
    assert config.train.seed == 1, "another order of rows and other masks than the run before it"


def test_a_model_that_has_become_worse_is_warned_of(world: Path, tmp_path: Path) -> None:
    notes = Notes()
    settings = ("optimizer.learning_rate=1.0", "optimizer.warmup_steps=1")
    before = go(world, tmp_path / "out", *settings, **replayed(world, 0.0), progress=notes)["before"]
    warnings = [note for note in notes.lines if "made the model worse" in note]
    for note, text in zip(warnings, ("domain", "general"), strict=True):
        assert note.startswith(f"warning: perplexity on the {text} text rose from {before[text]['perplexity']:,.4g} to ")
        assert "lower optimizer.learning_rate" in note


@pytest.mark.parametrize("name", ["generator_loss", "mlm_loss", "permutation_lm_loss"])
def test_the_perplexity_of_an_even_guess_is_the_vocabulary(name: str) -> None:
    assert perplexity({name: log(100), "loss": 7.0}) == pytest.approx(100)


@pytest.mark.parametrize("tying", ["embeddings", "none", "token", "gradient-disentangled"])
def test_a_fresh_generator_warms_up_beside_a_frozen_discriminator(world: Path, tmp_path: Path, tying: str) -> None:
    settings = ["objective.generator_warmup_steps=4", f"objective.tying={tying}", "optimizer.warmup_steps=2"]
    out = tmp_path / "out"
    assert go(world, out, *settings, model=world / "export", sequences=8)["fresh"] == ["the generator"]
    start, end = load_run(world / "run", warn=pytest.fail), load_run(out, warn=pytest.fail)
    warm = tensors_at(out, 4)
    assert {"discriminator", "discriminator_head", "generator", "generator_head"} <= moved(warm, tensors_at(out, STEPS))
    checkpoint.load_model_tensors(end.objective, warm, "here")
    ids = torch.randint(5, start.vocabulary.size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [run.objective.networks()["discriminator"].token_logits(ids) for run in (start, end)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-6)
    rates = [record["learning_rate"] for record in read_metrics(out)]
    assert rates[:4] == pytest.approx(rates[4:]), "both phases rise over two steps, and reach their own last step"
    assert rates[0] == pytest.approx(rates[1] / 2)
    assert checkpoint.load(out / "checkpoints" / "step-00000008").state["updates"] == 4


@pytest.mark.parametrize("tying", ["embeddings", "gradient-disentangled"])
def test_added_tokens_begin_as_the_mean_of_their_pieces(world: Path, tmp_path: Path, tying: str) -> None:
    model = world / "run"
    if tying != "embeddings":
        settings = ("train.max_steps=2", f"objective.tying={tying}", "objective.discriminator_head=bilinear")
        model = trained(world, tmp_path / "run", *settings)
    (tmp_path / "words.txt").write_text("fibrillation\n\nStenosis\nthe\n")
    added = AddedTokens.of(str(tmp_path / "words.txt"))
    results = go(world, tmp_path / "out", *STILL[:2], "train.max_steps=2", model=model, added=added)
    assert (results["added_tokens"], results["before"]) == (2, results["after"])
    before, after = load_run(model, warn=pytest.fail), load_run(tmp_path / "out", warn=pytest.fail)
    size, tokenizer, grown = before.vocabulary.size, *(load_tokenizer(run.tokenizer_path) for run in (before, after))
    words = ("fibrillation", "stenosis")
    pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    assert all(len(ids) > 1 for ids in pieces)
    assert [grown.token_to_id(word) for word in words] == [size, size + 1]
    old, new = tensors(before.objective), tensors(after.objective)
    changed = {name for name in old if old[name].shape != new[name].shape}
    tables = {name for name in old if name.endswith(("embeddings.word.weight", "shared.word.weight", "difference.weight"))}
    assert changed == {*tables, "generator_head.bias"}
    for name in changed:
        expected = torch.cat([old[name], *(old[name][ids].mean(0, keepdim=True) for ids in pieces)])
        torch.testing.assert_close(new[name], expected, rtol=0, atol=1e-7)
    assert moved({name: value for name, value in old.items() if name not in changed}, new) == set()
    # The text is that of before under the new vocabulary, with the same documents held out.
    data, source = TokenData.open(tmp_path / "out-data"), TokenData.open(world / "domain" / "domain")
    assert data.manifest.configuration.items() >= source.manifest.configuration.items()
    assert data.manifest.splits["heldout"].num_documents == source.manifest.splits["heldout"].num_documents
    assert data.token_counts()[size:].min() > 100


def test_the_words_that_the_text_suggests(world: Path, tmp_path: Path, unverified: None) -> None:
    replay = replayed(world, 0.5)  # made with the vocabulary of before: its ids mean the same
    results = go(world, tmp_path / "out", added=AddedTokens(number=3), **replay)
    listed = tmp_path / "out-data" / "added-tokens.json"
    words = json.loads(listed.read_text())["added"]
    assert (results["added_tokens"], set(words) <= set(DOMAIN)) == (3, True)
    assert results["before"].keys() == results["after"].keys() == {"out-data", "general"}
    export(tmp_path / "out", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    assert load_tokenizer(tmp_path / "export").encode(words[0], add_special_tokens=False).tokens == [words[0]]
    assert go(world, tmp_path / "out", added=AddedTokens(number=3), **replay) == results
    # A data set of the extended vocabulary is taken as it is.
    assert go(world, tmp_path / "second", "train.max_steps=2", data=tmp_path / "out-data")["added_tokens"] == 3
    with pytest.raises(ConfigError, match="other added tokens"):
        go(world, tmp_path / "out", added=AddedTokens(number=4), **replay)
    listed.write_bytes(b'{"number": 3')
    with pytest.raises(DataError, match=r"added-tokens\.json is damaged") as caught:
        go(world, tmp_path / "out", added=AddedTokens(number=3), **replay)
    assert f"remove {listed.parent}" in (caught.value.hint or "")


@pytest.mark.parametrize("generator", ["generator_warmup_steps=6", "generator_checkpoint={run}"])
def test_a_cut_run_goes_on_to_the_bit(world: Path, tmp_path: Path, generator: str) -> None:
    settings = (f"objective.{generator.format(run=world / 'run')}", "train.weight_average=0.9")
    options: dict[str, Any] = {"model": world / "export", "sequences": 8, **replayed(world, 0.4)}
    whole = go(world, tmp_path / "whole", *settings, **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{STEPS:08d}")
    assert go(world, tmp_path / "cut", *settings, **options) == whole
    assert weights(tmp_path / "cut", STEPS) == weights(tmp_path / "whole", STEPS)
    (tmp_path / "cut" / "adaptation.json").unlink()
    with pytest.raises(ConfigError, match="has no metrics before training on these texts with --sequences 8"):
        go(world, tmp_path / "cut", *settings, **options)


def test_what_is_complete_is_not_measured_again_and_more_steps_keep_the_warm_up(
    world: Path, adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(adapted[0], tmp_path / "out"))
    replay = replayed(world, 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(module, "evaluate", lambda *_, **__: pytest.fail("measured again"))
        assert go(world, out, *LONG, **replay) == adapted[1]
    go(world, out, *LONG, "train.max_steps=54", **replay)
    run = load_run(out, warn=pytest.fail)
    assert (run.step, run.config.optimizer.warmup_steps) == (54, 3)


def test_another_beginning_is_another_run(world: Path, adapted: Any, tmp_path: Path) -> None:
    out, replay = Path(shutil.copytree(adapted[0], tmp_path / "out")), replayed(world, 0.25)
    with pytest.raises(
        DataError, match=r"was trained on .*domain/domain, .*general/general, but .*domain/domain is a different data set"
    ):
        go(world, out, *LONG)
    elsewhere = Path(shutil.copytree(world / "run", tmp_path / "elsewhere"))
    assert go(world, out, *LONG, model=elsewhere, **replay) == adapted[1], "the same weights are the same model"
    with pytest.raises(CheckpointError, match="but this command names no model") as caught:
        pretrain(data=[world / "domain" / "domain", world / "general" / "general"], out=out, config=out, progress=Silent())
    assert "--init-from" in (caught.value.hint or "")
    trained(world, elsewhere, "train.max_steps=32")
    with pytest.raises(CheckpointError, match="at step 32, which has different weights"):
        go(world, out, *LONG, model=elsewhere, **replay)
    with pytest.raises(CheckpointError, match="began with random weights"):
        go(world, elsewhere, data=world / "general" / "general")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("model.hidden_size=64", "model.hidden_size is 64, but the weights of .* have 32"),
        ("model.normalization=pre", "'pre', but the weights"),
        ("train.max_stepz=1", "max_stepz"),
        ("objective.generator_warmup_steps=8", r"names step 8, which is not within the 8 steps of train\.max_steps"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_data_set_is_made(
    world: Path, tmp_path: Path, overrides: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        go(world, tmp_path / "out", *overrides.split(), added=AddedTokens(number=3))
    assert not list(tmp_path.iterdir())


def test_data_that_does_not_fit(world: Path, tmp_path: Path) -> None:
    other = write_data(tmp_path / "other", DOMAIN, TokenizerChoice(train="bpe", vocab_size=300))
    whole = write_data(tmp_path / "whole", DOMAIN, TokenizerChoice(path=world / "run" / "tokenizer.json"), heldout=0)
    with pytest.raises(DataError, match="a different tokenizer") as caught:
        go(world, tmp_path / "out", data=other)
    assert f"--tokenizer {world / 'run' / 'tokenizer.json'}" in (caught.value.hint or "")
    with pytest.raises(DataError, match="a different tokenizer"):
        go(world, tmp_path / "out", replay=other)
    with pytest.raises(ConfigError, match="needs the text to replay"):
        go(world, tmp_path / "out", replay_share=0.2)
    both = [world / name / name for name in ("domain", "general")]
    with pytest.raises(ConfigError, match="--add-tokens extends one data set"):
        go(world, tmp_path / "out", data=both, added=AddedTokens(number=3))
    with pytest.raises(ConfigError, match="is mixed with one data set"):
        go(world, tmp_path / "out", data=both, **replayed(world, 0.2))
    with pytest.raises(DataError, match="has no held-out split"):
        go(world, tmp_path / "out", data=whole)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"the\n", ConfigError, "has all 1 words"),
        (b"\n", ConfigError, "contains no words"),
        (b"atrial flutter\n", ConfigError, "2 words"),
        (b"atrial\nl\xe9sion\n", DataError, r"words\.txt:2: not UTF-8: byte 0xe9"),
    ],
)
def test_tokens_that_cannot_be_added(world: Path, tmp_path: Path, content: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(ConfigError, match="no such file, and it is not a number above 0"):
        AddedTokens.of("0")
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(error, match=says):
        go(world, tmp_path / "out", added=AddedTokens(file=tmp_path / "words.txt"))
    assert not (tmp_path / "out-data").exists()


def test_text_that_is_gone_cannot_be_read_again_for_added_tokens(world: Path, tmp_path: Path) -> None:
    text = Path(shutil.copy(world / "domain" / "text.txt", tmp_path))
    choice = TokenizerChoice(path=world / "domain" / "domain" / "tokenizer.json")
    prepare([str(text)], out=tmp_path / "data", tokenizer=choice, options=PrepareOptions(workers=1), progress=Silent())
    text.unlink()
    with pytest.raises(DataError, match=r"text\.txt does not exist"):
        extended_data(tmp_path / "data", tmp_path / "out", AddedTokens(number=3), Silent())


def same_figures(world: Path, model: Path, results: dict[str, Any]) -> None:
    figures = evaluate(model, data=world / "domain" / "domain", progress=Silent(), warn=pytest.fail)
    for name in ("generator_loss", "discriminator_loss", "discriminator_auc"):
        assert results["before"]["domain"][name] == pytest.approx(figures[name], rel=1e-6), name


def test_networks_that_have_parted_go_on_apart(world: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=8", "objective.algorithm=two-stage", "objective.copy_weights=false", "train.seed=7")
    model = trained(world, tmp_path / "run", *settings)
    same_figures(world, model, go(world, tmp_path / "out", "train.max_steps=2", model=model))
    config = objective_of(tmp_path / "out")
    assert (config.algorithm, config.tying) == ("joint", "none")
    with pytest.raises(ConfigError, match="would share it"):
        go(world, tmp_path / "tied", "objective.tying=embeddings", model=model)


def test_a_pair_that_was_imported(world: Path, tmp_path: Path, unverified: None) -> None:
    """Both networks of somebody else's model: nothing is fresh, and the sizes and the sharing are read off them."""
    model = export(world / "run", out=tmp_path / "model", all_networks=True, progress=Silent(), warn=pytest.fail).folder
    (model / "discern.toml").unlink()
    config = json.loads((model / "config.json").read_text())
    config["discern"] = {"networks": config["discern"]["networks"], "version": "0.1.0"}
    (model / "config.json").write_text(json.dumps(config))
    results = go(world, tmp_path / "out", *STILL, "train.max_steps=2", model=model)
    assert (results["fresh"], results["start"]) == ([], f"import {model}")
    same_figures(world, world / "run", results)
    objective = objective_of(tmp_path / "out")
    assert (objective.generator_size, objective.generator_depth, objective.tying) == (0.5, 1.0, "embeddings")
    assert objective.generator_warmup_steps == 0


@pytest.mark.parametrize(
    ("architecture", "objective", "fresh"),
    [
        ("ElectraForPreTraining", "rtd", ["the generator"]),
        ("ElectraModel", "rtd", ["the head of the discriminator", "the generator"]),
        ("ElectraForMaskedLM", "mlm", []),
        ("BertForMaskedLM", "mlm", []),
    ],
)
def test_hugging_face_folders(world: Path, tmp_path: Path, architecture: str, objective: str, fresh: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    run = load_run(world / "run", warn=pytest.fail)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    # Released models have rows that no token names.
    sizes |= {"vocab_size": run.vocabulary.size + 6, "max_position_embeddings": 64}
    torch.manual_seed(3)
    is_bert = architecture.startswith("Bert")
    config = transformers.BertConfig(**sizes) if is_bert else transformers.ElectraConfig(**sizes, embedding_size=16)
    model = getattr(transformers, architecture)(config).eval()
    model.save_pretrained(tmp_path / "model")
    shutil.copy(run.tokenizer_path, tmp_path / "model" / "tokenizer.json")
    results = go(world, tmp_path / "out", *STILL, model=tmp_path / "model", sequences=8)
    after = load_run(tmp_path / "out", warn=pytest.fail)
    assert (after.config.objective.name, results["fresh"]) == (objective, fresh)
    if objective == "rtd":
        assert objective_of(tmp_path / "out").generator_warmup_steps == 1
    network = next(iter(after.objective.networks().values()))
    ids = torch.randint(5, run.vocabulary.size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(input_ids=ids)[0]
        ours = network.encoder(ids) if architecture == "ElectraModel" else network.token_logits(ids)
    theirs = theirs if objective == "rtd" else theirs[..., : run.vocabulary.size]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
