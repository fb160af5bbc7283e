"""`discern export`: networks of a run become a folder that transformers loads, with the same numbers, a tokenizer and a card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

import discern
from discern import __version__
from discern.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, special_ids
from discern.errors import CheckpointError, ConfigError, DataError, NumericsError
from discern.model_files.cards import cell, code, escaped, imported_card, model_card, quoted, task_card
from discern.model_files.export import FILES, Exported, export, publish
from discern.model_files.folder import open_model
from discern.model_files.hub import CONFIG_NAME, WEIGHTS_NAME
from discern.model_files.huggingface import network_to_huggingface
from discern.model_files.run import load_run
from discern.model_files.serving import Serving
from discern.model_files.tokenizer import tokenizer_files
from discern.models.base import encoders_by_type
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME, write_recorded
from discern.tasks.base import Labels
from discern.training import checkpoint
from tests.parity.small_networks import VOCABULARY, build, sizes
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import EVALUATION, make_run
from tests.small.tokenizers import HARD, KINDS, reading_special
from tests.support import run_python

XLNET = ("objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32")
CASES = {kind: (kind, ()) for kind in KINDS} | {
    "BERT": ("wordpiece, lower-cased", ("objective.name=mlm",)),
    "XLNet": ("unigram", XLNET),
    "ModernBERT": ("bpe", ("model.encoder=modernbert", "model.local_window=8")),
}
WHOLE = {*FILES, CHECKSUMS_NAME}


def exported(source: Path, out: Path, network: str | None = None, **options: Any) -> Exported:
    return export(source, out=out, network=network, progress=Silent(), **{"warn": pytest.fail, **options})


def opened(folder: Path) -> Any:
    return open_model(folder, warn=pytest.fail)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text())
    return content


def add_to(path: Path, **values: Any) -> None:
    write_recorded(path.parent, {path.name: json.dumps(json.loads(path.read_text()) | values)})


@pytest.fixture(params=CASES, scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, (tokenizer, overrides) = tmp_path_factory.mktemp("export"), CASES[request.param]
    objective = make_run(folder / "run", tokenizer=tokenizer, overrides=["data.sequence_length=128", *overrides])
    return objective, exported(folder / "run", folder / "out", all_networks=True)


@torch.no_grad()
def test_transformers_computes_the_same(made: Any) -> None:
    networks, done = made[0].networks(), made[1]
    assert done.networks == tuple(networks)
    root = networks[done.networks[0]]
    assert done.parameters == sum(value.numel() for value in {*root.encoder.parameters(), *root.head.parameters()})
    for number, (name, network) in enumerate(networks.items()):
        folder = done.folder / name if number else done.folder
        kind = getattr(transformers, config_of(folder)["architectures"][0])
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        inputs = AutoTokenizer.from_pretrained(folder)([HARD[0], "x"], [HARD[2], "x"], padding=True, return_tensors="pt")
        real = inputs["attention_mask"].bool()
        expected = network.token_logits(inputs["input_ids"], real, inputs.get("token_type_ids"))
        logits = model.eval()(**inputs).logits.view_as(expected)
        torch.testing.assert_close(logits[real], expected[real])


def test_transformers_reads_texts_as_training_did(made: Any) -> None:
    folder = made[1].folder
    theirs, source = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder.parent / "run" / "tokenizer.json")
    source, special, last = reading_special(source), special_ids(source), config_of(folder)["model_type"] == "xlnet"
    for texts in [*((text,) for text in [*HARD, "", "  "]), *((HARD[0], text) for text in HARD)]:
        parts = [[*source.encode(text, add_special_tokens=False).ids, special["sep"]] for text in texts]
        ids, types = [each for part in parts for each in part], [number for number, part in enumerate(parts) for _ in part]
        ids, types = ([*ids, special["cls"]], [*types, 2]) if last else ([special["cls"], *ids], [0, *types])
        found = theirs(*texts)
        assert (found["input_ids"], found.get("token_type_ids", types)) == (ids, types), texts
    source.encode_special_tokens = True
    plain = {"add_special_tokens": False}
    assert theirs("a [MASK]", split_special_tokens=True, **plain)["input_ids"] == source.encode("a [MASK]", **plain).ids
    assert {role: getattr(theirs, f"{role}_token_id") for role in special} == special
    assert len(theirs) == source.get_vocab_size(), "no token is added"
    assert len(theirs("x " * 300, truncation=True)["input_ids"]) == 128


def test_declarations_of_special_tokens(tmp_path: Path) -> None:
    """A vocabulary may hold "[MASK]" as an ordinary entry; what it declares is kept, except for truncation."""
    entries = [*SPECIAL_TOKENS.values(), "a", "mask", "[", "]"]
    tokenizer = Tokenizer(models.WordPiece({entry: number for number, entry in enumerate(entries)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True, normalized=False, rstrip=True)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = tokenizer_files(load_tokenizer(tmp_path), 8, encoders_by_type()["electra"].architecture)
    after = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert after.encode("a a [MASK]").ids == [2, 5, 5, 4, 3]
    assert after.get_added_tokens_decoder()[3].rstrip


def test_the_same_run_gives_the_same_bytes_without_paths(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.generator_checkpoint=/home/alice/words"])
    one, two = (exported(tmp_path / "run", tmp_path / name / "model", all_networks=True) for name in ("one", "two"))
    files = files_in(one.folder)
    assert files == files_in(two.folder)
    assert files.keys() == WHOLE | {f"generator/{name}" for name in (*FILES[:4], CHECKSUMS_NAME)}
    assert one.num_bytes == sum(map(len, files.values()))
    assert not any(word in content for content in files.values() for word in (b"alice", str(tmp_path).encode()))
    assert 'generator_checkpoint = "words"' in files["discern.toml"].decode()


@pytest.mark.usefixtures("unverified")
def test_an_export_of_an_export_is_the_same_and_nothing_in_it_names_code(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    provenance = {"languages": ["zh", "no"], "licenses": ["CC0"]}
    add_to(tmp_path / "run" / "run.json", provenance=provenance)
    one, two = (tmp_path / name for name in ("one", "two"))
    exported(tmp_path / "run", one, all_networks=True)
    before, card = files_in(one), one / "README.md"
    evil = {"auto_map": {"AutoModel": "evil--modeling.Evil"}, "_attn_implementation": "evil/kernel", "trust_remote_code": True}
    for name in before:
        if name.endswith("config.json"):
            add_to(one / name, **evil)
    card.write_text(card.read_text() + "\n</blockquote><script>alert(1)</script>\n")
    exported(one, two, all_networks=True)
    after = files_in(two)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {"README.md"}
    assert "<script>" not in after["README.md"].decode()
    done = exported(two, tmp_path / "half", "generator", precision="bfloat16")
    assert (done.loads_as, done.step) == ("ElectraForMaskedLM", 20)
    for folder in (one, two, done.folder):
        ours = (folder / "README.md").read_text().partition("## Original model card")[0]
        assert "\nlicense: cc0-1.0\nlanguage:\n- zh\n- 'no'\n" in ours
        assert "is in Chinese and Norwegian. Its license is CC0, as stated" in ours
        assert opened(folder).provenance == provenance


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bits(precision: str, small_model: Path, tmp_path: Path) -> None:
    whole, half = (
        exported(small_model, tmp_path / name, all_networks=True, precision=name).folder for name in ("float32", precision)
    )
    for part in ("", "generator"):
        assert config_of(half / part)["dtype"] == precision
        tensors = load_file(half / part / WEIGHTS_NAME)
        for name, tensor in load_file(whole / part / WEIGHTS_NAME).items():
            assert torch.equal(tensors[name], tensor.to(getattr(torch, precision)))


def test_weights_too_large_for_float16_are_refused_and_damaged_ones_skipped(tmp_path: Path) -> None:
    run, warnings = tmp_path / "run", list[str]()
    objective: Any = make_run(run)
    with torch.no_grad():
        objective.networks()["discriminator"].head.output.bias[0] = 1e5
    contents = checkpoint.Contents(checkpoint.model_tensors(objective), {}, {}, {"step": 40})
    path = checkpoint.save(run / "checkpoints", contents, 2) / WEIGHTS_NAME
    with pytest.raises(NumericsError, match="not finite") as caught:
        exported(run, tmp_path / "out", precision="float16")
    assert "--precision bfloat16" in str(caught.value.hint)
    assert exported(run, tmp_path / "out", precision="bfloat16").step == 40
    path.write_bytes(path.read_bytes()[:-10])
    assert exported(run, tmp_path / "out", warn=warnings.append).step == 20
    assert "damaged" in warnings[0]


def test_what_an_export_tells_of_its_run(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "my-model"
    hours = {"seconds": 600.0}
    make_run(run, metrics=[EVALUATION | hours, {**EVALUATION, "step": 40, "discriminator_auc": 0.9}])
    share = {"checked": 8, "too_short": 1, "overlapping": 2, "share": 0.25}
    overlap = [{"file": "/home/me/RTE/dev.tsv", **share}, {"file": "/home/me/a|b/dev.tsv", **share, "share": None}]
    start = {"model": "/home/me/medical", "description": "", "weights": ""}
    further = {"start": start, "mixture": {"wiki": 0.75, "a|b": 0.25}, "overlap": overlap}
    cards = []
    for more in ({}, further):
        add_to(run / "run.json", **more)
        assert exported(run, out).loads_as == "ElectraForPreTraining"
        cards.append((out / "README.md").read_text())
        limited = (run / "config.toml").read_text().replace("[train]\nseed", "[train]\nmax_hours = 1.0\nseed")
        write_recorded(run, {"config.toml": limited})
    for line in (
        "# my-model",
        "It was pre-trained from scratch with discern",
        "trained on 1,611 documents with 111,597 tokens, of which 0.123% are unknown",
        "The run made 20 of 50 steps, each on 8 rows of 32 tokens (packing `segments`), and read 4,444 tokens",
        "| Positions | 128, of which 32 were trained |",
        "WordPiece, lower-cased",
        "| `discriminator_auc` | 0.8125 |",
        "at step 20",
        "discern config diff electra-small discern.toml",
        "It was made with discern 0.1.0, torch 2.13.0.",
        "The language and the license of the text are not recorded.",
        "The text was not checked for overlap with evaluation sets.",
    ):
        assert line in cards[0], line
    assert "`generator_loss`" not in cards[0], "a metric of training"
    assert "0.9" not in cards[0], "of a later step"
    for line in (
        "further from the weights of `medical` by",
        "their shares of the tokens are `wiki` (75.0%), `a|b` (25.0%).",
        "`RTE/dev.tsv`: 25.00% of 8 examples do, besides 1 too short",
        "`a|b/dev.tsv`: no example is long enough",
        "The run made 20 steps in 10 minutes, each",
    ):
        assert line in cards[1], line
    assert "/home/me" not in cards[1]
    assert opened(out).config == opened(run).config
    own = {"version": __version__, "objective": "rtd", "networks": ["discriminator"], "step": 20}
    assert config_of(out)["discern"] == own | {
        "provenance": {},
        "tokenizer_fingerprint": opened(run).record["tokenizer_fingerprint"],
    }


@pytest.mark.parametrize(
    ("overrides", "options", "said", "absent", "shown"),
    [
        ((), {}, "discern detect .", "fill-mask", r"0\.\d\d \[CLS\]"),
        ((), {"network": "generator", "precision": "bfloat16"}, "pipeline_tag: fill-mask", "discern detect", r"\["),
        (
            ("objective.tying=gradient-disentangled", "objective.discriminator_head=bilinear"),
            {},
            "`discern detect` uses the head",
            "fill-mask",
            r"\['\[CLS\]'",
        ),
        (("objective.name=electric",), {}, "pseudo-log-likelihood", "discern detect", r"-?\d+\.\d\d the\n"),
        (("objective.name=all-tokens-mlm",), {}, "the copy gate of the head", "the whole head", r"\["),
        (XLNET, {}, "predicts a token from any subset", "pipeline_tag", r"\["),
    ],
)
def test_the_code_in_the_card_runs(
    overrides: Sequence[str], options: dict[str, Any], said: str, absent: str, shown: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", overrides=overrides)
    card = (exported(tmp_path / "run", tmp_path / "out", **options).folder / "README.md").read_text()
    assert said in card
    assert absent not in card
    done = run_python("-c", card.split("```python\n")[1].split("```")[0], cwd=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert re.match(shown, done.stdout)


@pytest.mark.parametrize(
    ("setting", "lost"),
    [
        ("objective.sentence_contrastive_weight=1.0", "sentence_contrast.head"),
        ("objective.generator=unigram", "generator_frequencies"),
    ],
)
def test_what_an_export_lacks_is_named(setting: str, lost: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=[setting])
    warnings: list[str] = []
    exported(tmp_path / "run", tmp_path / "out", all_networks=True, warn=warnings.append)
    assert [lost in warning for warning in warnings] == [True]
    assert "discern evaluate" not in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ConfigError, match=lost):
        assert opened(tmp_path / "out").objective


@pytest.mark.parametrize("setting", ["objective.name=electric", "objective.generator=two-tower"])
def test_a_generator_of_two_towers_is_only_stored_beside(setting: str, tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=[setting])
    exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    state = opened(tmp_path / "out").objective.state_dict()
    assert all(torch.equal(state[name], value) for name, value in objective.state_dict().items())
    assert "transformers cannot" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ConfigError, match="transformers has no such model"):
        exported(tmp_path / "run", tmp_path / "alone", "generator")
    beside = tmp_path / "out" / "generator"
    with pytest.raises(ConfigError, match="cannot be trained further"):
        assert opened(beside).encoder
    add_to(beside / CONFIG_NAME, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="unexpected tensor"):
        opened(beside).networks()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"network": "discrimnator"}, "did you mean 'discriminator'"),
        ({"network": "generator", "all_networks": True}, "the discriminator is at the root"),
        ({"task": "sst2"}, "is not one"),
        ({"all_networks": True, "serving": Serving(form="bert")}, "leave out one"),
        ({"serving": Serving(form="bert")}, "embedding_size"),
        ({"serving": Serving(form="modernbert")}, "compute something different"),
    ],
)
def test_options_that_contradict_the_model_are_refused(
    options: dict[str, Any], said: str, small_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        exported(small_model, tmp_path / "out", **options)
    assert said in f"{caught.value} {caught.value.hint}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("objective", "kind"), [("rtd", "BertModel"), ("mlm", "BertForMaskedLM")])
@torch.no_grad()
def test_an_electra_as_a_bert(objective: str, kind: str, tmp_path: Path) -> None:
    overrides = [f"objective.name={objective}", "model.embedding_size=32"]
    network = next(iter(make_run(tmp_path / "run", overrides=overrides).networks().values()))
    done = exported(tmp_path / "run", tmp_path / "out", serving=Serving(form="bert"))
    assert done.loads_as == kind
    ids = torch.tensor([load_tokenizer(done.folder).encode(HARD[0]).ids])
    expected = network.encoder(ids) if objective == "rtd" else network.token_logits(ids)
    torch.testing.assert_close(getattr(transformers, kind).from_pretrained(done.folder).eval()(ids)[0], expected)
    ours = opened(done.folder).encoder.encoder(ids)
    torch.testing.assert_close(ours, network.encoder(ids))


def fill(folder: Path) -> None:
    for name in FILES:
        (folder / name).write_text(json.dumps({"discern": {"networks": ["first", "second"]}}))


@pytest.mark.parametrize("name", ["new/folder", "empty", "earlier", "link"])
def test_a_target_that_is_free_or_an_export_is_filled(name: str, tmp_path: Path) -> None:
    out, second = tmp_path / name, tmp_path / "earlier" / "second"
    (tmp_path / "empty").mkdir()
    second.mkdir(parents=True)
    (second / WEIGHTS_NAME).touch()
    fill(second.parent)
    (tmp_path / "link").symlink_to(second.parent)
    publish(out, fill)
    assert files_in(out).keys() == WHOLE
    assert {path.name for path in tmp_path.iterdir()} <= {"new", "empty", "earlier", "link"}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("added", ["notes.txt", "second/notes.txt", "third/model.safetensors", "config.json", ""])
def test_a_target_that_holds_something_else_stays_as_it_is(added: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if added:  # otherwise it is a file itself
        publish(out, fill)
    (out / added).parent.mkdir(exist_ok=True)
    (out / added).write_text('{"model_type": "electra"}')
    before = files_in(tmp_path)
    with pytest.raises(DataError, match=r"also holds|not an earlier export|is a file"):
        publish(out, fill)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interruption_leaves_the_earlier_export(problem: BaseException, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / CONFIG_NAME).write_text("half")
        raise problem

    publish(tmp_path / "out", fill)
    before = files_in(tmp_path)
    with pytest.raises((KeyboardInterrupt, DataError), match=r"No space|^$"):
        publish(tmp_path / "out", write)
    assert files_in(tmp_path) == before


def test_the_command(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot replace itself"):
        exported(small_model, small_model)
    out = tmp_path / "out"
    shown = json.loads(run_python("-m", "discern", "export", small_model, "--out", out, "--all-networks", "--json").stdout)
    assert (shown["out"], shown["networks"], shown["step"]) == (str(out), ["discriminator", "generator"], 20)
    assert shown["bytes"] == sum(map(len, files_in(out).values()))


@pytest.mark.parametrize(
    ("make", "value", "shown"),
    [
        (escaped, "_no_ *emphasis*", r"\_no\_ \*emphasis\*"),
        (escaped, "<script>&amp;", "&lt;script&gt;&amp;amp;"),
        (escaped, "[click](javascript:x) ![i](u)", r"\[click\](javascript:x) !\[i\](u)"),
        (escaped, "two\nlines\r\n\x1b[31m \u202eevil 好", "two lines \\[31m \ufffdevil 好"),
        (code, "a``b```", "```` a``b``` ````"),
        (code, "a\n| b", "`a | b`"),
        (code, " \n", "(empty)"),
        (cell, "1|2\n## *a*", r"1\|2 ## \*a\*"),
        (
            quoted,
            "---\nlicense: x\n---\n# T\n</b>\n```\na > b\n```\n\x1b<i>",
            "> # T\n> &lt;/b>\n> ```\n> a > b\n> ```\n>  &lt;i>",
        ),
    ],
)
def test_text_is_escaped(make: Callable[[Any], str], value: str, shown: str) -> None:
    assert make(value) == shown


HOSTILE = "x`<script>[a](b)|{{ 7 * 7 }}\n## not a heading\n---\nlicense: mit | *"
TOLD = {"provenance": {key: [HOSTILE] for key in ("languages", "licenses", "datasets", "base_models")}}
MODELS = dict.fromkeys(
    ("discriminator", HOSTILE), network_to_huggingface(build(sizes()).networks()["discriminator"], VOCABULARY.special)
)


def card_of_run(folder: Path) -> str:
    make_run(folder / "run", metrics=[{**EVALUATION, f"heldout_{HOSTILE}": 0.5}])
    start = {"model": HOSTILE, "description": "", "weights": ""}
    add_to(folder / "run" / "run.json", discern=HOSTILE, versions={"torch": HOSTILE}, start=start, **TOLD)
    return model_card(load_run(folder / "run", warn=pytest.fail), MODELS, HOSTILE)


def card_of_import(folder: Path) -> str:
    parts: dict[str, Any] = {"left_out": [HOSTILE] * 9, "remarks": [HOSTILE], "source_card": f"# Theirs\n{HOSTILE}", **TOLD}
    return imported_card(MODELS, title=HOSTILE, origin=escaped(HOSTILE), tokenizer=HOSTILE, max_length=16, **parts)


def card_of_task(folder: Path) -> str:
    out = make_finetuned(folder / "out", seeds=2, own=replace(SINGLE, labels=Labels((HOSTILE, "b"))))
    add_to(out / "finetuned.json", model=HOSTILE, versions={"torch": HOSTILE}, **TOLD)
    told: dict[str, Any] = {"split": HOSTILE, "metric": HOSTILE, "metrics": {HOSTILE: 0.5}, "failed_seeds": {HOSTILE: HOSTILE}}
    add_to(out / "results.json", settings={f"task.{HOSTILE}": HOSTILE}, standard_deviation=None, **told)
    loaded = opened(out).task_model()
    return task_card(loaded, loaded.task(), "classification", MODELS[HOSTILE], [HOSTILE, "b"], HOSTILE)


@pytest.mark.parametrize("make", [card_of_run, card_of_import, card_of_task])
def test_what_others_wrote_stays_text_in_a_card(make: Callable[[Path], str], tmp_path: Path) -> None:
    card = make(tmp_path)
    own, _, theirs = card.partition("## Original model card")
    assert not re.search(r"<script>", re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", card)), "HTML only in code spans"
    for part in ("49", "None", "{%", "\n## not a heading", "\nlicense: mit", "\n\n\n"):
        assert part not in card, part
    assert huggingface_hub.ModelCard(own).data.license == "other"
    assert own.count("\n---\n") == 1, "the end of the front matter"
    assert all(line.startswith(">") for line in theirs.splitlines() if line)
    for table in re.findall(r"(?:^\|.*\n)+", own, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


@pytest.mark.parametrize("labels", [("no", "yes", "no"), (0.5, 2.5, 1.0)])
def test_a_cross_encoder_elsewhere_says_what_predict_says(labels: tuple[Any, ...], small_model: Path, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    pairs = [(f"a {word}", f"{word} again") for word in ("file", "model", "tensor")]
    lines = [f"{a},{b},{label}" for (a, b), label in zip(pairs, labels, strict=True)]
    (tmp_path / "pairs.csv").write_text("\n".join(["a,b,label", *lines * 20]) + "\n")
    tuned = tmp_path / "tuned"
    discern.finetune(
        small_model,
        train=tmp_path / "pairs.csv",
        text="a",
        pair="b",
        label="label",
        for_="cross-encoder",
        out=tuned,
        settings={"train.max_steps": 3, "optimizer.learning_rate": 3e-3},
        baselines=False,
    )
    discern.export(tuned, out=tmp_path / "out")
    theirs: Any = CrossEncoder(str(tmp_path / "out"), device="cpu", local_files_only=True)
    scores = theirs.predict(pairs)
    ours = discern.load(tuned).predict(pairs)
    if scores.ndim == 2:
        assert [theirs.config.id2label[number] for number in scores.argmax(-1)] == [each["label"] for each in ours]
    else:
        torch.testing.assert_close(scores.tolist(), [each["score"] for each in ours], atol=1e-5, rtol=1e-5)
