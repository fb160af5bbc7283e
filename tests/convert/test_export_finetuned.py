"""`discern export` of a fine-tuned model: transformers gives the probabilities that `discern predict` gives."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.artifacts.export_folder import FILES, SETTINGS_NAME
from discern.artifacts.finetuned import FinetunedFolder
from discern.artifacts.opening import open_model
from discern.cli.main import main
from discern.convert.export_finetuned import ExportedTask, export_task
from discern.errors import CheckpointError, DataError
from discern.inference.predict import predict
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME
from tests.interop.small_tokenizers import HARD
from tests.small.finetuned import MODERN, MULTI, NUMBER, PAIR, SINGLE, SPANS, TAGS, Made, make_finetuned

# Without those that spell out a special token, which to transformers is one.
TEXTS = [text for text in HARD if "[" not in text] + ["the chef cooked the meal " * 20]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finetuned")
    kinds = {"single": SINGLE, "pair": PAIR, "multi": MULTI, "number": NUMBER, "tags": TAGS, "spans": SPANS}
    for name, made in kinds.items():
        make_finetuned(root / name, own=made)
    make_finetuned(root / "joint", own=replace(SPANS, settings={"head": "joint"}))
    make_finetuned(root / "compared", own=replace(PAIR, settings={"pooling": "pair"}))
    for name in ("single", "pair", "number", "tags", "spans"):
        settings = {**(kinds[name].settings or {}), "head": "prediction", **({"pooling": "mean"} if name == "single" else {})}
        make_finetuned(root / f"modern-{name}", model=MODERN, own=replace(kinds[name], settings=settings))
    make_finetuned(root / "modern-joint", model=MODERN, own=replace(SPANS, settings={"head": "joint"}))
    make_finetuned(root / "several", seeds=2, first=SINGLE, sst2=Made("classification", PAIR.labels, ("accuracy",)))
    return root


def exported(model: Path, out: Path, **options: Any) -> ExportedTask:
    return export_task(model, out=out, progress=Silent(), **options)


def said(model: Path, path: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: list[dict[str, Any]] = []
    predict(model, path, found.extend, Silent())
    return found


def probabilities(records: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([list(record["probabilities"].values()) for record in records])


@torch.no_grad()
def logits(folder: Path, *texts: list[str]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    inputs = tokenizer(*texts, truncation=True, padding=True, return_tensors="pt")
    result: torch.Tensor = model.eval()(**inputs).logits
    return result


def test_transformers_gives_our_probabilities(folders: Path, tmp_path: Path) -> None:
    done = exported(folders / "single", tmp_path / "single")
    assert done.architecture == "ElectraForSequenceClassification"
    ours = probabilities(said(folders / "single", tmp_path / "a.jsonl", *({"review": text} for text in TEXTS)))
    torch.testing.assert_close(logits(done.folder, TEXTS).softmax(-1), ours, atol=1e-5, rtol=0)
    assert ours.std(0).min() > 1e-3, "predictions that hardly differ would prove nothing"
    exported(folders / "multi", tmp_path / "multi")
    ours = probabilities(said(folders / "multi", tmp_path / "b.jsonl", *({"text": text} for text in TEXTS)))
    torch.testing.assert_close(logits(tmp_path / "multi", TEXTS).sigmoid(), ours, atol=1e-5, rtol=0)
    for name in ("number", "modern-number"):
        exported(folders / name, tmp_path / name)
        scores = [record["score"] for record in said(folders / name, tmp_path / "c.jsonl", *({"text": text} for text in TEXTS))]
        torch.testing.assert_close(logits(tmp_path / name, TEXTS)[:, 0], torch.tensor(scores), atol=1e-4, rtol=0)


def test_the_mean_of_the_states_of_a_modernbert(folders: Path, tmp_path: Path) -> None:
    done = exported(folders / "modern-single", tmp_path / "out")
    assert done.architecture == "ModernBertForSequenceClassification"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["classifier_pooling"] == "mean"
    assert "token_type_ids" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_input_names"]
    ours = probabilities(said(folders / "modern-single", tmp_path / "a.jsonl", *({"review": text} for text in TEXTS)))
    torch.testing.assert_close(logits(done.folder, TEXTS).softmax(-1), ours, atol=1e-5, rtol=0)
    assert ours.std(0).min() > 1e-3, "predictions that hardly differ would prove nothing"


@pytest.mark.parametrize("name", ["pair", "modern-pair"])
def test_pairs_are_framed_and_cut_alike(folders: Path, tmp_path: Path, name: str) -> None:
    exported(folders / name, tmp_path / "out")
    # Where both are too long and the second is the longer, transformers keeps one token more of it; the card says so.
    firsts = [*TEXTS[:4], "the chef " * 30, "hello", "the chef " * 30]
    seconds = [*TEXTS[4:8], "the meal", "guests ate " * 30, "the meal " * 20]
    rows = ({"a": first, "b": second} for first, second in zip(firsts, seconds, strict=True))
    ours = probabilities(said(folders / name, tmp_path / "a.jsonl", *rows))
    torch.testing.assert_close(logits(tmp_path / "out", firsts, seconds).softmax(-1), ours, atol=1e-5, rtol=0)


@torch.no_grad()
def test_taggers_and_finders_of_spans(folders: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification, AutoTokenizer

    assert exported(folders / "tags", tmp_path / "tags").architecture == "ElectraForTokenClassification"
    tokenizer, tagger = (
        AutoTokenizer.from_pretrained(tmp_path / "tags"),
        AutoModelForTokenClassification.from_pretrained(tmp_path / "tags"),
    )
    words = ["the", "purple", "elephants", "ate", "hello"]
    inputs = tokenizer([words], is_split_into_words=True, return_tensors="pt")
    each = tagger.eval()(**inputs).logits[0].softmax(-1)
    places = inputs.word_ids()
    best = torch.stack([each[places.index(number)] for number in range(len(words))]).max(-1)
    (record,) = said(folders / "tags", tmp_path / "t.jsonl", {"words": words})
    torch.testing.assert_close(best.values, torch.tensor(record["probabilities"]), atol=1e-5, rtol=0)

    assert exported(folders / "spans", tmp_path / "spans").architecture == "ElectraForQuestionAnswering"
    tokenizer, finder = (
        AutoTokenizer.from_pretrained(tmp_path / "spans"),
        AutoModelForQuestionAnswering.from_pretrained(tmp_path / "spans"),
    )
    assert tokenizer.model_max_length == 48
    question, context = "who ate the meal?", "purple elephants ate the meal"
    inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets = inputs.pop("offset_mapping")[0]
    found = finder.eval()(**inputs)
    (record,) = said(folders / "spans", tmp_path / "q.jsonl", {"question": question, "context": context})
    answer = record["nbest"][0]
    in_context = inputs["token_type_ids"][0] == 1
    first = int(((offsets[:, 0] == answer["start"]) & in_context).nonzero()[0])
    last = int(((offsets[:, 1] == answer["start"] + len(answer["text"])) & in_context).nonzero()[0])
    assert float(found.start_logits[0, first] + found.end_logits[0, last]) == pytest.approx(answer["score"], abs=1e-4)


def test_a_joint_head_stands_beside_the_encoder(folders: Path, tmp_path: Path) -> None:
    done = exported(folders / "joint", tmp_path / "out")
    assert done.architecture == "ElectraModel"
    card = (done.folder / "README.md").read_text()
    assert "`ElectraModel` (the encoder alone); the head is stored in `discern_head.safetensors`" in card
    assert "discern.load" in card
    exported(folders / "joint", tmp_path / "out"), "an export with a head beside it is replaced like any other"


def test_a_head_that_compares_texts_predicts_alike_from_an_export(folders: Path, tmp_path: Path) -> None:
    assert exported(folders / "compared", tmp_path / "out").architecture == "ElectraModel"
    rows = [{"a": first, "b": second} for first, second in zip(TEXTS[:4], TEXTS[4:8], strict=True)]
    ours, theirs = (probabilities(said(model, tmp_path / "a.jsonl", *rows)) for model in (folders / "compared", tmp_path / "out"))
    torch.testing.assert_close(theirs, ours)
    assert ours.std(0).min() > 1e-3, "predictions that hardly differ would prove nothing"


def test_what_the_folder_holds(folders: Path, tmp_path: Path) -> None:
    done = exported(folders / "several", tmp_path / "my-model", task="first", seed=0)
    assert sorted(path.name for path in done.folder.iterdir()) == sorted({*FILES, CHECKSUMS_NAME} - {SETTINGS_NAME})
    assert (done.task, done.seed) == ("first", 0)
    assert done.num_bytes == sum(path.stat().st_size for path in done.folder.iterdir())
    config = json.loads((done.folder / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good", "2": "so-so"}
    assert config["problem_type"] == "single_label_classification"
    assert "objective" not in config["discern"]
    assert json.loads((done.folder / "tokenizer_config.json").read_text())["model_max_length"] == 32
    card = (done.folder / "README.md").read_text()
    for line in (
        "# my-model",
        "| Labels | `bad`, `good`, `so-so` |",
        "| Maximum row length | 32 tokens",
        "| `accuracy` | 0.5000 |",
        "Measured on dev (321 examples), over 2 seeds (0, 1).",
        "The weights are those of seed 0: 0.5000.",
        "Fine-tuned on 1,234 examples: 60 steps, which are 26.6 passes; the weights are those of step 40.",
        "\nlanguage: de\n",
        "License of the text that the model was pre-trained on: CC0.",
        "| `optimizer.learning_rate` | 0.0003 |",
        "AutoModelForSequenceClassification",
    ):
        assert line in card, line
    assert "/home/" not in card
    assert "epochs" not in card, "a setting that the minimum number of steps overrides"
    assert str(folders) not in card
    again = open_model(done.folder, warn=pytest.fail)
    assert (again.language, again.text_license) == ("de", "CC0")
    named = exported(folders / "several", tmp_path / "named", task="sst2")
    assert named.seed == 1
    assert "| Task | sst2 |" in (named.folder / "README.md").read_text()


def test_the_code_on_the_card_runs(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modern = [f"modern-{kind}" for kind in ("single", "pair", "number", "tags", "spans", "joint")]
    for name in ("single", "pair", "compared", "multi", "number", "tags", "spans", "joint", *modern):
        folder = exported(folders / name, tmp_path / name, precision="bfloat16").folder
        code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
        monkeypatch.chdir(folder)
        exec(compile(code, name, "exec"), {})


def test_the_encoder_can_be_fine_tuned_again(folders: Path, tmp_path: Path) -> None:
    exported(folders / "single", tmp_path / "out")
    again = open_model(tmp_path / "out", warn=pytest.fail).encoder
    before = FinetunedFolder(folders / "single").task_model().objective.encoder
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        torch.testing.assert_close(again.encoder(ids), before(ids))
    assert again.max_length == 32
    with pytest.raises(CheckpointError, match="a bare encoder or a fine-tuned model"):
        open_model(tmp_path / "out", warn=pytest.fail).networks()


def test_weights_are_stored_as_asked_and_targets_are_guarded(folders: Path, tmp_path: Path) -> None:
    exported(folders / "single", tmp_path / "out", precision="float16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}
    exported(folders / "single", tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"also holds notes\.txt"):
        exported(folders / "single", tmp_path / "out")


def test_the_verb(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["discern", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    assert call(folders / "single", "--out", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"out", "task", "seed", "architecture", "parameters", "precision", "bytes"}
    assert call(folders / "single", "--out", tmp_path / "out") == 0
    assert "AutoModelForSequenceClassification.from_pretrained" in capsys.readouterr().out
    assert call(folders / "single", "--out", tmp_path / "out", "--network", "generator") == 2
    assert call(folders / "several", "--out", tmp_path / "other") == 2
    assert "--task first" in capsys.readouterr().err
    assert call(tmp_path, "--out", tmp_path / "other", "--seed", 1) == 2
