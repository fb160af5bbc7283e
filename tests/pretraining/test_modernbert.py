"""The modern encoder through the whole of discern: trained, measured, written, read, continued, filled and scored."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import discern
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.model_files.import_ import import_model
from discern.model_files.run import load_run
from discern.models.modernbert.config import ModernBertConfig
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.progress import Silent
from tests.pretraining.test_evaluate import prepared
from tests.small.tokenizers import GEMMA_NAMES, HARD, gemma

WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
MODEL = ["model.encoder=modernbert", "model.embedding_size=32", "model.local_window=8", "model.attention_bias=true"]
MODEL += ["model.initialization=local", "model.initializer_range=0.1"]
BILINEAR = ["objective.tying=gradient-disentangled", "objective.discriminator_head=bilinear"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in which the next word follows from the one before."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("modern")
    lines = []
    for _ in range(600):
        words = [rng.choice(WORDS)]
        while len(words) < 10:
            follows = WORDS[(WORDS.index(words[-1]) * 7 + 3) % len(WORDS)]
            words.append(follows if rng.random() < 0.8 else rng.choice(WORDS))
        lines.append(" ".join(words) + "." + ("\n" if len(lines) % 9 == 8 else ""))
    (folder / "text.txt").write_text("\n".join(lines))
    choice, build = TokenizerChoice(train="wordpiece", vocab_size=150), PrepareOptions(heldout=0.1, workers=1)
    prepare([str(folder / "text.txt")], out=folder / "data", tokenizer=choice, options=build, progress=Silent())
    return folder / "data"


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    settings = [*MODEL, *BILINEAR, "data.packing=packed", "train.max_steps=60", "train.checkpoint_every_steps=20"]
    settings += ["optimizer.learning_rate=3e-3"]
    pretrain(data=data, out=data.parent / "run", preset="tiny", overrides=settings, progress=Silent())
    return data.parent / "run"


def measured(model: Path, data: Path) -> dict[str, Any]:
    return evaluate(model, data=data, progress=Silent(), warn=pytest.fail)


def test_it_learns_and_both_networks_go_out_and_in(run: Path, data: Path, tmp_path: Path) -> None:
    before = measured(run, data)
    assert before["discriminator_auc"] > 0.7
    export(run, out=tmp_path / "all", all_networks=True, progress=Silent(), warn=pytest.fail)
    assert {"config.json", "discern_head.safetensors"} <= {path.name for path in (tmp_path / "all" / "generator").iterdir()}
    after = measured(tmp_path / "all", data)
    for key in ("discriminator_auc", "generator_loss", "discriminator_loss"):
        assert after[key] == pytest.approx(before[key], abs=1e-5)
    # An export of the export, of one network and in half precision.
    half: dict[str, Any] = {"out": tmp_path / "half", "network": "generator", "precision": "bfloat16"}
    export(tmp_path / "all", progress=Silent(), warn=pytest.fail, **half)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert open_model(tmp_path / "half", warn=pytest.fail).networks().keys() == {"generator"}


def written(folder: Path, tokenizer: Any, **settings: Any) -> None:
    """A masked language model that transformers wrote, with its tokenizer."""
    from transformers import ModernBertConfig as TheirConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "local_attention": 8}
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep", "bos", "eos")}
    ModernBertForMaskedLM(TheirConfig(vocab_size=len(tokenizer), **sizes, **ids, **settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_anybodys_model_is_imported_and_continued(run: Path, data: Path, tmp_path: Path) -> None:
    """In, on other text, with the objective and the sizes that it has."""
    from transformers import PreTrainedTokenizerFast

    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "cls", "sep", "unk", "mask")}
    written(tmp_path / "theirs", PreTrainedTokenizerFast(tokenizer_file=str(run / "tokenizer.json"), **names))
    done = import_model([tmp_path / "theirs"], out=tmp_path / "imported", progress=Silent(), warn=pytest.fail)
    assert done.folder == tmp_path / "imported"
    theirs, imported = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "imported"))
    assert all(torch.equal(imported[name], theirs[name]) for name in theirs)
    for source in ("theirs", "imported"):
        out = tmp_path / f"from {source}"
        pretrain(data=data, out=out, init_from=tmp_path / source, overrides=["train.max_steps=2"], progress=Silent())
        continued = load_run(out, warn=pytest.fail).config
        assert continued.objective.name == "mlm"
        assert isinstance(continued.model, ModernBertConfig)
        assert continued.model.local_window == 8


def test_a_model_whose_special_tokens_have_other_names(tmp_path: Path) -> None:
    """One with Gemma's tokenizer, as mmBERT: imported, exported, filled and trained further."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    names = {f"{role}_token": token for role, token in GEMMA_NAMES.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gemma(), **names, cls_token="<bos>", sep_token="<eos>")
    written(tmp_path / "theirs", tokenizer)
    import_model([tmp_path / "theirs"], out=tmp_path / "imported", progress=Silent(), warn=pytest.fail)
    export(tmp_path / "imported", out=tmp_path / "half", precision="bfloat16", progress=Silent(), warn=pytest.fail)
    data = prepared(tmp_path / "data", tmp_path / "theirs")
    few = ["train.max_steps=2", "train.sequences_per_step=4", "data.sequence_length=32"]
    pretrain(data=data, out=tmp_path / "run", init_from=tmp_path / "half", overrides=few, progress=Silent())
    export(tmp_path / "run", out=tmp_path / "exported", progress=Silent(), warn=pytest.fail)
    for name in ("imported", "half", "exported"):
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        roles = {role: getattr(again, f"{role}_token") for role in ("pad", "cls", "sep", "unk", "mask")}
        assert roles == {"pad": "<pad>", "cls": "<bos>", "sep": "<eos>", "unk": "<unk>", "mask": "<mask>"}
        for line in HARD:
            assert again(line)["input_ids"] == tokenizer(line)["input_ids"] == gemma().encode(line).ids
        assert again("a", "b")["input_ids"] == tokenizer("a", "b")["input_ids"]
        assert json.loads((tmp_path / name / "config.json").read_text())["pad_token_id"] == 0
    theirs, imported = (discern.load(tmp_path / name) for name in ("theirs", "imported"))
    assert theirs.fill("the [MASK] cooked") == theirs.fill("the <mask> cooked")
    assert theirs.encode(["the chef"])[0].tolist() == pytest.approx(imported.encode(["the chef"])[0].tolist(), abs=1e-6)
