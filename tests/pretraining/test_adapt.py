"""Going on with a model on other text: what it begins as, what moves, what is measured, and that a cut run goes on exactly."""

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from discern.artifacts.run import load_run, read_record
from discern.convert.export import export
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.shards import TokenData
from discern.data.prepare import prepare
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.checks import examine
from discern.errors import CheckpointError, ConfigError, DataError
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.pretraining import adapt as module
from discern.pretraining.adapt import adapt, perplexity
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import Replay, plan, pretrain
from discern.pretraining.warm_start import AddedTokens, extended_data
from discern.progress import Silent
from discern.storage.checksums import write_recorded
from discern.training import checkpoint
from discern.training import metrics_log as trackers
from discern.training.metrics_log import read_metrics
from tests.objectives.test_conformance import build

GENERAL = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
GENERAL += ["alphabetical", "scientific"]  # letters that the words of the domain are spelt with
DOMAIN = "the a patient with acute fibrillation tachycardia stenosis lesion chronic atrial ventricular and after dose".split()
STEPS = 8


def write_data(folder: Path, words: list[str], tokenizer: TokenizerChoice, lines: int = 500) -> Path:
    rng = random.Random(len(words))
    folder.mkdir()
    texts = [" ".join(rng.choices(words, k=rng.randint(4, 12))) + "." + ("\n" if n % 9 == 8 else "") for n in range(lines)]
    (folder / "text.txt").write_text("\n".join(texts))
    options = BuildOptions(heldout=0.1, workers=1, filters=("words:2-99",))
    said = {"language": "en", "license": "CC0"}
    prepare([str(folder / "text.txt")], out=folder / "data", tokenizer=tokenizer, build=options, progress=Silent(), **said)
    return folder / "data"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets of one tokenizer, and a run on the first."""
    folder = tmp_path_factory.mktemp("adapt")
    general = write_data(folder / "general", GENERAL, TokenizerChoice(train="wordpiece", vocab_size=150))
    write_data(folder / "domain", DOMAIN, TokenizerChoice(path=general / "tokenizer.json"))
    pretrain(data=general, out=folder / "run", preset="tiny", overrides=["train.max_steps=30"], progress=Silent())
    return folder


def go(world: Path, out: Path, *overrides: str, model: Path | None = None, **more: Any) -> dict[str, Any]:
    fast = [f"train.max_steps={STEPS}", "train.checkpoint_every_steps=4", "train.log_every_steps=1", "train.keep_checkpoints=9"]
    data = more.pop("data", world / "domain" / "data")
    options = {"progress": Silent(), **more}
    found = adapt(model or world / "run", data=data, out=out, overrides=[*fast, *overrides], **options)
    assert found is not None
    return found


def tensors(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def weights(objective: Objective) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def test_before_is_the_model_and_after_is_the_run(world: Path, tmp_path: Path) -> None:
    more = ("train.max_steps=40", "train.weight_average=0.5")  # the run is the average of its weights, not the last ones
    found = go(world, tmp_path / "out", *more, replay=Replay(world / "general" / "data", 0.25))
    for when, model in (("before", world / "run"), ("after", tmp_path / "out")):
        for text, data in (("domain", "domain"), ("general", "general")):
            figures = evaluate(model, data=world / data / "data", progress=Silent(), warn=pytest.fail)
            measured = found[when][text]
            assert {name: figures[name] for name in measured if name != "perplexity"} == {
                name: value for name, value in measured.items() if name != "perplexity"
            }
            assert measured["perplexity"] == pytest.approx(2.718281828 ** measured["generator_loss"], rel=1e-6)
    before, after = found["before"]["domain"], found["after"]["domain"]
    assert after["generator_loss"] < before["generator_loss"] - 0.1
    assert after["discriminator_loss"] < before["discriminator_loss"]
    assert json.loads((tmp_path / "out" / "adaptation.json").read_text()) == found
    record = read_record(tmp_path / "out")
    assert record["start"]["model"] == str((world / "run").resolve())
    assert record["replay"]["share"] == 0.25


@pytest.mark.parametrize(("rate", "texts"), [(1e-4, []), (1.0, ["domain", "general"])])
def test_a_model_that_has_become_worse_is_warned_of(rate: float, texts: list[str], world: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign]
    more = (f"optimizer.learning_rate={rate}", "optimizer.warmup_steps=1")
    found = go(world, tmp_path / "out", *more, replay=Replay(world / "general" / "data", 0.0), progress=progress)
    warnings = [note for note in notes if "made the model worse" in note]
    assert [note.split()[4] for note in warnings] == texts, notes
    for note, text in zip(warnings, texts, strict=True):
        assert note.startswith(f"warning: perplexity on the {text} text rose from {found['before'][text]['perplexity']:,.4g} to ")
        assert "lower optimizer.learning_rate" in note


def test_the_perplexity_of_an_even_guess_is_the_vocabulary() -> None:
    assert perplexity({"mlm_loss": 4.605170185988092}) == pytest.approx(100)
    assert perplexity({"generator_loss": 0.0, "mlm_loss": 3.0}) == 1.0


@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_measures_words(name: str) -> None:
    assert perplexity(build(name).evaluator().compute()) == 1.0


def test_an_objective_that_measures_no_words_is_refused_before_work(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WORD_LOSSES", ("another_loss",))
    with pytest.raises(ConfigError, match=r"objective 'rtd' has no loss over words"):
        go(world, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["run", "export"])
def test_an_xlnet_is_adapted(source: str, world: Path, tmp_path: Path) -> None:
    settings = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32", "data.packing=two-part"]
    settings += ["objective.memory_length=24", "train.max_steps=2"]
    model = tmp_path / "run"
    pretrain(data=world / "general" / "data", out=model, preset="tiny", overrides=settings, progress=Silent())
    if source == "export":
        model = export(model, out=tmp_path / "export", progress=Silent(), warn=pytest.fail).folder
    found = go(world, tmp_path / "out", model=model, sequences=8)
    assert found["fresh"] == []
    for when in ("before", "after"):
        figures = found[when]["domain"]
        assert figures["perplexity"] == pytest.approx(2.718281828 ** figures["permutation_lm_loss"], rel=1e-6)


def test_growth_of_the_embeddings_is_not_judged_after_another_start(world: Path, tmp_path: Path) -> None:
    go(world, tmp_path / "out")
    (drift,) = (each for each in examine(tmp_path / "out", 4, "cpu", Silent(), pytest.fail).findings if "drift" in each.name)
    assert (drift.value, drift.verdict) == (None, "unknown")


def test_optimizer_and_schedule_begin_anew(world: Path, tmp_path: Path) -> None:
    go(world, tmp_path / "out", "optimizer.learning_rate=1e-3", "train.max_steps=50", "train.checkpoint_every_steps=50")
    config = load_run(tmp_path / "out", warn=pytest.fail).config
    # 6 % of 50 steps; the run before it had 10.
    assert config.optimizer.warmup_steps == 3
    rates = [record["learning_rate"] for record in read_metrics(tmp_path / "out")]
    assert rates[:4] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert rates[-1] == pytest.approx(1e-3 / 47)
    state = checkpoint.load(tmp_path / "out" / "checkpoints" / "step-00000050").state
    assert state["updates"] == 50
    assert config.train.seed == 1, "another order of rows and other masks than the run before it"


def test_a_fresh_generator_warms_up_beside_a_frozen_discriminator(world: Path, tmp_path: Path) -> None:
    export(world / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    more = ["objective.generator_warmup_steps=4", "objective.tying=embeddings", "optimizer.warmup_steps=2"]
    found = go(world, tmp_path / "out", *more, model=tmp_path / "export")
    assert found["fresh"] == ["the generator"]
    source = weights(load_run(world / "run", warn=pytest.fail).objective)
    warm, end = tensors(tmp_path / "out", 4), tensors(tmp_path / "out", STEPS)
    assert moved({name: value for name, value in source.items() if name.startswith("discriminator")}, warm) == set()
    assert {"generator", "generator_head"} <= moved(source, warm)
    assert moved(warm, end) == {"discriminator", "discriminator_head", "generator", "generator_head"}
    rates = [record["learning_rate"] for record in read_metrics(tmp_path / "out")]
    # Both phases rise over two steps, and reach their own last step.
    assert rates[:4] == pytest.approx(rates[4:])
    assert rates[0] == pytest.approx(rates[1] / 2)
    assert checkpoint.load(tmp_path / "out" / "checkpoints" / "step-00000008").state["updates"] == 4


@pytest.mark.parametrize("tying", ["none", "token", "gradient-disentangled"])
def test_a_lone_discriminator_is_kept_whatever_is_shared(world: Path, tmp_path: Path, tying: str) -> None:
    export(world / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    more = ["objective.generator_warmup_steps=4", f"objective.tying={tying}"]
    go(world, tmp_path / "out", *more, model=tmp_path / "export", resume="never")
    start, end = load_run(world / "run", warn=pytest.fail), load_run(tmp_path / "out", warn=pytest.fail)
    checkpoint.load_model_tensors(end.objective, tensors(tmp_path / "out", 4), "here")
    ids = torch.randint(5, start.vocabulary.size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        judged = [run.objective.networks()["discriminator"].token_logits(ids) for run in (start, end)]
    torch.testing.assert_close(judged[0], judged[1], rtol=0, atol=1e-6)


def test_a_warm_up_needs_steps_to_come_after_it(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names step 8, which is not within the 8 steps of train\.max_steps"):
        go(world, tmp_path / "out", "objective.generator_warmup_steps=8")
    with pytest.raises(ConfigError, match="networks that are never frozen"):
        go(
            world,
            tmp_path / "out",
            "objective.generator_warmup_steps=2",
            "objective.freeze_discriminator_at=5",
            "objective.tying=none",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tying", ["embeddings", "gradient-disentangled"])
def test_added_tokens_begin_as_the_mean_of_their_pieces(world: Path, tmp_path: Path, tying: str) -> None:
    model = world / "run"
    if tying != "embeddings":
        more = ["train.max_steps=4", f"objective.tying={tying}", "objective.discriminator_head=bilinear"]
        pretrain(data=world / "general" / "data", out=tmp_path / "run", preset="tiny", overrides=more, progress=Silent())
        model = tmp_path / "run"
    (tmp_path / "words.txt").write_text("fibrillation\n\nStenosis\nthe\n")
    more = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"]  # nothing moves
    added = AddedTokens.of(str(tmp_path / "words.txt"))
    found = go(world, tmp_path / "out", *more, model=model, added=added)
    assert found["added_tokens"] == 2
    before, after = load_run(model, warn=pytest.fail), load_run(tmp_path / "out", warn=pytest.fail)
    size, tokenizer = before.vocabulary.size, load_tokenizer(before.tokenizer_path)
    pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in ("fibrillation", "stenosis")]
    assert all(len(ids) > 1 for ids in pieces)
    grown = load_tokenizer(after.tokenizer_path)
    assert [grown.token_to_id(word) for word in ("fibrillation", "stenosis")] == [size, size + 1]
    old, new = weights(before.objective), weights(after.objective)
    changed = {name for name in old if old[name].shape != new[name].shape}
    tables = {name for name in old if name.endswith(("embeddings.word.weight", "shared.word.weight", "difference.weight"))}
    assert changed == {*tables, "generator_head.bias"}
    for name in changed:
        torch.testing.assert_close(new[name][:size], old[name], rtol=0, atol=1e-7)
        for place, ids in enumerate(pieces):
            torch.testing.assert_close(new[name][size + place], old[name][ids].mean(0), rtol=0, atol=1e-7)
    assert moved({name: value for name, value in old.items() if name not in changed}, new) == set()
    assert found["before"] == found["after"]
    # The text is that of before under the new vocabulary, with the same documents held out.
    data = TokenData.open(tmp_path / "out-data")
    before = TokenData.open(world / "domain" / "data").manifest.configuration
    assert {**data.manifest.configuration, "lowercase": before["lowercase"]} == before
    assert data.split("heldout").num_documents == TokenData.open(world / "domain" / "data").split("heldout").num_documents
    assert data.token_counts()[size:].min() > 100


def test_the_words_that_the_text_suggests(world: Path, tmp_path: Path) -> None:
    replay = Replay(world / "general" / "data", 0.5)  # made with the vocabulary of before: its ids mean the same
    found = go(world, tmp_path / "out", added=AddedTokens(number=3), replay=replay)
    assert found["added_tokens"] == 3
    added = json.loads((tmp_path / "out-data" / "added-tokens.json").read_text())["added"]
    assert set(added) <= set(DOMAIN)
    assert found["before"]["general"].keys() == found["after"]["general"].keys()
    export(tmp_path / "out", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    assert load_tokenizer(tmp_path / "export").encode(added[0], add_special_tokens=False).tokens == [added[0]]
    again = go(world, tmp_path / "out", added=AddedTokens(number=3), replay=replay)
    assert again == found
    with pytest.raises(ConfigError, match="other added tokens"):
        go(world, tmp_path / "out", added=AddedTokens(number=4), replay=replay)


def test_a_data_set_of_the_extended_vocabulary_is_taken_as_it_is(world: Path, tmp_path: Path) -> None:
    go(world, tmp_path / "first", added=AddedTokens(number=3))
    found = go(world, tmp_path / "second", data=tmp_path / "first-data")
    assert found["added_tokens"] == 3


@pytest.mark.parametrize("options", [{}, {"replay": 0.4}, {"lone": True, "replay": 0.4}])
def test_a_cut_run_goes_on_to_the_bit(world: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model, more = world / "run", list[str]()
    if options.get("lone"):
        export(world / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
        model, more = tmp_path / "export", ["objective.generator_warmup_steps=6"]
    replay = Replay(world / "general" / "data", options["replay"]) if "replay" in options else None
    whole = go(world, tmp_path / "whole", *more, model=model, replay=replay)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{STEPS:08d}")
    # What was measured before comes from the folder, or where it is lost is measured again.
    (tmp_path / "cut" / "adaptation.json").unlink()
    cut = go(world, tmp_path / "cut", *more, model=model, replay=replay)
    assert cut == whole
    end = [
        (tmp_path / name / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors").read_bytes() for name in ("whole", "cut")
    ]
    assert end[0] == end[1]


def test_more_steps_go_on_with_what_followed_from_the_fewer(world: Path, tmp_path: Path) -> None:
    go(world, tmp_path / "out", "train.max_steps=50", "train.checkpoint_every_steps=50")
    go(world, tmp_path / "out", "train.max_steps=54", "train.checkpoint_every_steps=50")
    run = load_run(tmp_path / "out", warn=pytest.fail)
    assert (run.step, run.config.optimizer.warmup_steps) == (54, 3)
    options: dict[str, Any] = {"data": world / "domain" / "data", "init_from": world / "run", "config": tmp_path / "out"}
    shorter = plan(out=tmp_path / "out", overrides=["train.max_steps=2"], warn=pytest.fail, **options)
    assert shorter.config.optimizer.warmup_steps == 3
    with pytest.raises(ConfigError, match="names step 3, which is not within the 2 steps"):
        plan(out=tmp_path / "new", overrides=["train.max_steps=2"], warn=pytest.fail, **options)


def test_what_is_complete_is_not_measured_again(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = go(world, tmp_path / "out")
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: pytest.fail("measured again"))
    assert go(world, tmp_path / "out") == found


def test_what_is_measured_again_is_the_same(world: Path, tmp_path: Path) -> None:
    export(world / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    more = [f"objective.generator_checkpoint={world / 'run'}", "train.weight_average=0.9"]
    found = go(world, tmp_path / "out", *more, model=tmp_path / "export")
    (tmp_path / "out" / "adaptation.json").unlink()
    assert go(world, tmp_path / "out", *more, model=tmp_path / "export") == found


def test_all_else_is_checked_before_a_data_set_is_made(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_stepz"):
        go(world, tmp_path / "out", "train.max_stepz=3", added=AddedTokens(number=3))
    assert not list(tmp_path.iterdir())


def test_a_missing_tracker_is_named_before_the_folder_is_claimed(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        go(world, tmp_path / "run", "train.tracker=wandb")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_another_beginning_is_another_run(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "run", tmp_path / "model")
    out, general = tmp_path / "out", world / "general" / "data"
    go(world, out, model=tmp_path / "model")
    held = (out / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"was trained with no --replay, but this command has --replay-share 0\.2 of"):
        go(world, out, model=tmp_path / "model", replay=Replay(general, 0.2))
    shutil.move(tmp_path / "model", tmp_path / "elsewhere")
    go(world, out, model=tmp_path / "elsewhere")  # the same weights at another place are the same model
    with pytest.raises(CheckpointError, match="but this command names no model") as caught:
        pretrain(data=world / "domain" / "data", out=out, config=out, progress=Silent())
    assert "--init-from" in (caught.value.hint or "")
    pretrain(
        data=general,
        out=tmp_path / "elsewhere",
        config=tmp_path / "elsewhere",
        overrides=["train.max_steps=32"],
        progress=Silent(),
    )
    with pytest.raises(CheckpointError, match="at step 32, which has different weights"):
        go(world, out, model=tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="began with random weights"):
        go(world, Path(shutil.copytree(world / "run", tmp_path / "begun")), data=general)
    assert json.loads(held)["start"]["weights"] == read_record(out)["start"]["weights"]


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        (["model.hidden_size=64"], ConfigError, "model.hidden_size is 64, but the weights of .* have 32"),
        (["model.normalization=pre"], ConfigError, "'pre', but the weights"),
        (["objective.generator_size=1.0"], ConfigError, r"2 layers of 16.*2 layers of 32"),
        (["objective.discrimnator_weight=1"], ConfigError, "discrimnator_weight"),
    ],
)
def test_what_the_weights_fix_cannot_be_set(
    world: Path, tmp_path: Path, overrides: Sequence[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        go(world, tmp_path / "out", *overrides)
    assert not (tmp_path / "out").exists()


def test_data_that_does_not_fit(world: Path, tmp_path: Path) -> None:
    other = write_data(tmp_path / "other", DOMAIN, TokenizerChoice(train="bpe", vocab_size=300))
    with pytest.raises(DataError, match="a different tokenizer") as caught:
        go(world, tmp_path / "out", data=other)
    assert f"--tokenizer {world / 'run' / 'tokenizer.json'}" in (caught.value.hint or "")
    with pytest.raises(DataError, match="a different tokenizer"):
        go(world, tmp_path / "out", replay=Replay(other, 0.2))
    with pytest.raises(ConfigError, match="share of replayed text is 1"):
        go(world, tmp_path / "out", replay=Replay(world / "general" / "data", 1.0))
    options = BuildOptions(heldout=0, workers=1)
    tokenizer = TokenizerChoice(path=world / "run" / "tokenizer.json")
    prepare([str(tmp_path / "other" / "text.txt")], out=tmp_path / "all", tokenizer=tokenizer, build=options, progress=Silent())
    with pytest.raises(DataError, match="has no held-out split"):
        go(world, tmp_path / "out", data=tmp_path / "all")
    assert not (tmp_path / "out").exists()


def test_tokens_that_cannot_be_added(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file, and it is not a number above 0"):
        AddedTokens.of("0")
    words = tmp_path / "words.txt"
    for text, says in (("the\n", "has all 1 words"), ("\n", "contains no words"), ("atrial flutter\n", "2 words")):
        words.write_text(text)
        with pytest.raises(ConfigError, match=says):
            go(world, tmp_path / "out", added=AddedTokens(file=words))
    data = tmp_path / "moved"
    shutil.copytree(world / "domain" / "data", data)
    manifest = (data / "manifest.json").read_text()
    edited = manifest.replace(str(world / "domain" / "text.txt"), str(tmp_path / "gone.txt"))
    write_recorded(data, {"manifest.json": edited})
    with pytest.raises(DataError, match=r"gone\.txt' does not exist"):
        go(world, tmp_path / "out", data=data, added=AddedTokens(number=3))
    assert not (tmp_path / "out-data").exists()


def test_text_on_a_server_is_read_again_for_added_tokens(world: Path, tmp_path: Path) -> None:
    text = (world / "domain" / "text.txt").read_bytes()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_refused = self.path == "/signed.txt"
            self.send_response(403 if is_refused else 200)
            self.send_header("Content-Length", str(0 if is_refused else len(text)))
            self.end_headers()
            if not (is_refused or self.command == "HEAD"):
                self.wfile.write(text)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{running.server_address[1]}"
        for name in ("plain", "signed"):
            options: dict[str, Any] = {"build": BuildOptions(workers=1), "progress": Silent()}
            choice = TokenizerChoice(path=world / "domain" / "data" / "tokenizer.json")
            prepare([f"{address}/{name}.txt?signature=1"], out=tmp_path / name, tokenizer=choice, **options)
        made = extended_data(tmp_path / "plain", tmp_path / "out", AddedTokens(number=3), Silent())
        assert TokenData.open(made).manifest.inputs == (f"{address}/plain.txt",)
        assert TokenData.open(made).vocab_size == TokenData.open(tmp_path / "plain").vocab_size + 3
        with pytest.raises(DataError, match=r"is read again: access to http://.*/signed\.txt is refused") as caught:
            extended_data(tmp_path / "signed", tmp_path / "other", AddedTokens(number=3), Silent())
        assert "recorded without its query" in str(caught.value.hint)
        running.shutdown()


def test_a_word_file_in_another_encoding_is_refused_by_its_line(world: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_bytes("atrial\nl\u00e9sion\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"words\.txt:2: not UTF-8: byte 0xe9") as caught:
        go(world, tmp_path / "out", added=AddedTokens(file=words))
    assert "iconv" in (caught.value.hint or "")
    assert not (tmp_path / "out-data").exists()


@pytest.mark.parametrize("content", [b'{"number": 3', b"", b"\xff\xfe", b"[" * 100_000, b"[1]"])
def test_a_damaged_list_of_added_tokens_is_named(content: bytes, world: Path, tmp_path: Path) -> None:
    (tmp_path / "out-data").mkdir()
    (tmp_path / "out-data" / "added-tokens.json").write_bytes(content)
    with pytest.raises(DataError, match=r"added-tokens\.json is damaged") as caught:
        go(world, tmp_path / "out", added=AddedTokens(number=3))
    assert f"remove {tmp_path / 'out-data'}" in (caught.value.hint or "")


def test_a_preset_gives_the_recipe_and_the_model_the_sizes(world: Path, tmp_path: Path) -> None:
    def options(steps: int) -> dict[str, Any]:
        overrides = [f"train.max_steps={steps}", "train.sequences_per_step=4", "data.sequence_length=32"]
        paths = {"data": world / "domain" / "data", "out": tmp_path / "run", "init_from": world / "run"}
        return {**paths, "preset": "mlm-small", "overrides": overrides}

    pretrain(**options(2), progress=Silent())
    run = load_run(tmp_path / "run", warn=pytest.fail)
    assert (run.config.objective.name, run.config.model.hidden_size, run.config.model.max_positions) == ("mlm", 32, 128)
    assert run.config.optimizer.warmup_steps == 1, "a preset's schedule, fitted to the run"
    longer = plan(**options(200), warn=pytest.fail).config
    assert (longer.train.max_steps, longer.optimizer.warmup_steps) == (200, 1), "as when it began"


def test_networks_that_have_parted_go_on_apart(world: Path, tmp_path: Path) -> None:
    overrides = ["train.max_steps=8", "objective.algorithm=two-stage", "objective.copy_weights=false", "train.seed=7"]
    pretrain(data=world / "general" / "data", out=tmp_path / "run", preset="tiny", overrides=overrides, progress=Silent())
    found = go(world, tmp_path / "out", model=tmp_path / "run")
    figures = evaluate(tmp_path / "run", data=world / "domain" / "data", progress=Silent(), warn=pytest.fail)
    assert found["before"]["domain"]["discriminator_loss"] == pytest.approx(figures["discriminator_loss"], rel=1e-6)
    assert found["before"]["domain"]["generator_loss"] == pytest.approx(figures["generator_loss"], rel=1e-6)
    config: Any = load_run(tmp_path / "out", warn=pytest.fail).config.objective
    assert (config.algorithm, config.tying) == ("joint", "none")
    with pytest.raises(ConfigError, match="would share it"):
        go(world, tmp_path / "tied", "objective.tying=embeddings", model=tmp_path / "run")


def test_what_changed_on_the_way_stays_where_it_ended(world: Path, tmp_path: Path) -> None:
    overrides = [
        "train.max_steps=6",
        "objective.mask_probability_end=0.3",
        "objective.mask_probability_steps=4",
        "objective.generator_weight_schedule=[[0, 0.0], [3, 1.0]]",
        "objective.discriminator_weight_schedule=[[2, 1.0], [4, 0.5]]",
    ]
    pretrain(data=world / "general" / "data", out=tmp_path / "run", preset="tiny", overrides=overrides, progress=Silent())
    go(world, tmp_path / "out", model=tmp_path / "run")
    config: Any = load_run(tmp_path / "out", warn=pytest.fail).config.objective
    assert (config.mask_probability, config.mask_probability_end) == (0.3, None)
    assert config.generator_weight_schedule == ()
    assert config.discriminator_weight_schedule == ((0, 0.5),)


@pytest.mark.parametrize("kind", ["discriminator", "generator", "bert", "pair", "bare"])
def test_hugging_face_folders(world: Path, tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    run = load_run(world / "run", warn=pytest.fail)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    # Released models have rows that no token names.
    sizes |= {"vocab_size": run.vocabulary.size + 6, "max_position_embeddings": 64}
    torch.manual_seed(3)
    electra = transformers.ElectraConfig(**sizes, embedding_size=16)
    made = {
        "discriminator": lambda: transformers.ElectraForPreTraining(electra),
        "pair": lambda: transformers.ElectraForPreTraining(electra),
        "generator": lambda: transformers.ElectraForMaskedLM(electra),
        "bare": lambda: transformers.ElectraModel(electra),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
    }[kind]()
    made.eval().save_pretrained(tmp_path / "model")
    shutil.copy(run.tokenizer_path, tmp_path / "model" / "tokenizer.json")
    data = TokenData.open(world / "domain" / "data")
    frozen = [
        "optimizer.learning_rate=1e-30",
        "optimizer.weight_decay=0",
        "data.sequence_length=32",
        "train.sequences_per_step=4",
    ]
    found = go(world, tmp_path / "out", *frozen, model=tmp_path / "model")
    after = load_run(tmp_path / "out", warn=pytest.fail)
    name, network = next(iter(after.objective.networks().items()))
    expected = {
        "discriminator": ("rtd", ["the generator"]),
        "pair": ("rtd", ["the generator"]),
        "bare": ("rtd", ["the head of the discriminator", "the generator"]),
        "generator": ("mlm", []),
        "bert": ("mlm", []),
    }[kind]
    assert (after.config.objective.name, found["fresh"]) == expected
    ids = torch.randint(5, data.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = made(input_ids=ids)[0]
        ours = network.encoder(ids) if kind == "bare" else network.token_logits(ids)
    torch.testing.assert_close(ours, theirs if name == "discriminator" else theirs[..., : data.vocab_size], rtol=0, atol=1e-5)
    if name == "discriminator":
        warmup: Any = after.config.objective
        assert warmup.generator_warmup_steps == 1


@pytest.mark.slow
def test_killed_it_ends_with_the_same_weights(world: Path, tmp_path: Path) -> None:
    def command(name: str) -> list[str]:
        options = [
            "--data",
            world / "domain" / "data",
            "--out",
            tmp_path / name,
            "--replay",
            world / "general" / "data",
            "--json",
        ]
        settings = ["train.max_steps=60", "train.checkpoint_every_steps=3"]
        return [str(part) for part in (*START, world / "run", *options)] + [f"--set={setting}" for setting in settings]

    whole = subprocess.run(command("whole"), capture_output=True, text=True, timeout=180)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(command("cut"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (tmp_path / "cut" / "checkpoints" / "step-00000006").exists() and process.poll() is None:
        assert time.time() < deadline
        time.sleep(0.005)
    assert process.poll() is None, "too fast to be killed; give it more steps"
    process.kill()
    process.wait()
    resumed = subprocess.run(command("cut"), capture_output=True, text=True, timeout=180)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stderr
    found = [json.loads(done.stdout) for done in (whole, resumed)]
    assert found[0] == found[1]
    assert {"before", "after"} <= found[0].keys()
    assert moved(tensors(tmp_path / "whole", 60), tensors(tmp_path / "cut", 60)) == set()


def test_a_pair_that_was_imported(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both networks of somebody else's model: nothing is fresh, and the sizes and the sharing are read off them."""
    monkeypatch.setenv("DISCERN_VERIFY", "0")  # the export is edited
    export(world / "run", out=tmp_path / "model", all_networks=True, progress=Silent(), warn=pytest.fail)
    (tmp_path / "model" / "discern.toml").unlink()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["discern"] = {"networks": config["discern"]["networks"], "version": "0.1.0"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    same = ["data.sequence_length=32", "optimizer.learning_rate=1e-30", "train.sequences_per_step=4"]
    found = go(world, tmp_path / "out", *same, model=tmp_path / "model")
    assert (found["fresh"], found["start"]) == ([], f"import {tmp_path / 'model'}")
    objective: Any = load_run(tmp_path / "out", warn=pytest.fail).config.objective
    assert (objective.generator_size, objective.generator_depth, objective.tying) == (0.5, 1.0, "embeddings")
    assert objective.generator_warmup_steps == 0
    figures = evaluate(world / "run", data=world / "domain" / "data", progress=Silent(), warn=pytest.fail)
    for name in ("generator_loss", "discriminator_loss", "discriminator_auc"):
        assert found["before"]["domain"][name] == pytest.approx(figures[name], rel=1e-6), name


START = [sys.executable, "-m", "discern", "adapt"]


def test_wrong_commands_are_refused_in_words(world: Path, tmp_path: Path) -> None:
    options = ["--data", str(world / "domain" / "data"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*START, str(tmp_path / "nothing"), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr
