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
from discern.artifacts.opening import open_model
from discern.artifacts.run import load_run
from discern.convert.export import export
from discern.convert.import_ import import_model
from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.models.heads import ReplacedTokenHead
from discern.models.modernbert.config import ModernBertConfig
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.progress import Silent
from tests.interop.small_tokenizers import CORPUS, GEMMA_NAMES, HARD, gemma

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
    choice, build = TokenizerChoice(train="wordpiece", vocab_size=150), BuildOptions(heldout=0.1, workers=1)
    prepare([str(folder / "text.txt")], out=folder / "data", tokenizer=choice, build=build, progress=Silent())
    return folder / "data"


def trained(data: Path, out: Path, *overrides: str, steps: int = 60) -> Path:
    settings = [
        "data.packing=packed",
        f"train.max_steps={steps}",
        "train.checkpoint_every_steps=20",
        "optimizer.learning_rate=3e-3",
    ]
    pretrain(data=data, out=out, preset="tiny", overrides=[*MODEL, *settings, *overrides], progress=Silent())
    return out


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    return trained(data, data.parent / "run", *BILINEAR)


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
    export(
        tmp_path / "all", out=tmp_path / "half", network="generator", precision="bfloat16", progress=Silent(), warn=pytest.fail
    )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert open_model(tmp_path / "half", warn=pytest.fail).networks().keys() == {"generator"}


def test_a_dense_discriminator_and_a_narrow_generator_are_ordinary_folders(data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification

    run = trained(data, tmp_path / "run", "objective.generator_size=0.5", steps=20)
    export(run, out=tmp_path / "out", all_networks=True, progress=Silent(), warn=pytest.fail)
    for folder, kind in (("out", AutoModelForTokenClassification), ("out/generator", AutoModelForMaskedLM)):
        _, info = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not info["missing_keys"]
    assert isinstance(open_model(tmp_path / "out", warn=pytest.fail).networks()["discriminator"].head, ReplacedTokenHead)
    assert not open_model(tmp_path / "out", warn=pytest.fail).has_task_head
    assert measured(tmp_path / "out", data)["loss"] == pytest.approx(measured(run, data)["loss"], rel=1e-5)


def test_it_resumes_to_the_same_bytes(data: Path, tmp_path: Path) -> None:
    whole = trained(data, tmp_path / "whole", *BILINEAR, steps=40)
    cut = trained(data, tmp_path / "cut", *BILINEAR, "train.keep_checkpoints=5", steps=40)
    newest = max((cut / "checkpoints").iterdir())
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    trained(data, cut, *BILINEAR, "train.keep_checkpoints=5", steps=40)
    assert (newest / "model.safetensors").read_bytes() == (whole / "checkpoints" / newest.name / "model.safetensors").read_bytes()


def test_anybodys_model_is_imported_continued_and_fine_tuned(run: Path, data: Path, tmp_path: Path) -> None:
    """A masked language model that transformers wrote: in, on other text, with the objective and the sizes that it has."""
    from transformers import ModernBertConfig as TheirConfig
    from transformers import ModernBertForMaskedLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(run / "tokenizer.json"), mask_token="[MASK]", pad_token="[PAD]")
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"})
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3, "local_attention": 8}
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{like}_token_id")
        for name, like in [("pad", "pad"), ("cls", "cls"), ("sep", "sep")]
    }
    theirs = ModernBertForMaskedLM(TheirConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, **sizes, **ids))
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    done = import_model([tmp_path / "theirs"], out=tmp_path / "imported", progress=Silent(), warn=pytest.fail)
    assert done.folder == tmp_path / "imported"
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "imported"))
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    for source in ("theirs", "imported"):
        out = tmp_path / f"from {source}"
        pretrain(data=data, out=out, init_from=tmp_path / source, overrides=["train.max_steps=2"], progress=Silent())
        continued = load_run(out, warn=pytest.fail)
        assert continued.config.objective.name == "mlm"
        assert isinstance(continued.config.model, ModernBertConfig)
        assert continued.config.model.local_window == 8
        assert isinstance(open_model(out, warn=pytest.fail).encoder.encoder, ModernBertEncoder)


def test_a_model_whose_special_tokens_have_other_names(tmp_path: Path) -> None:
    """One with Gemma's tokenizer, as mmBERT: imported, exported, filled and trained further."""
    from transformers import AutoTokenizer, ModernBertForMaskedLM, PreTrainedTokenizerFast
    from transformers import ModernBertConfig as TheirConfig

    torch.manual_seed(0)
    names = {f"{role}_token": token for role, token in GEMMA_NAMES.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gemma(), **names)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "local_attention": 8}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 1}
    ModernBertForMaskedLM(TheirConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    import_model([tmp_path / "theirs"], out=tmp_path / "imported", progress=Silent(), warn=pytest.fail)
    export(tmp_path / "imported", out=tmp_path / "half", precision="bfloat16", progress=Silent(), warn=pytest.fail)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(CORPUS * 5))
    choice, build = TokenizerChoice(path=tmp_path / "theirs"), BuildOptions(heldout=0.1, workers=1)
    prepare([str(text)], out=tmp_path / "data", tokenizer=choice, build=build, progress=Silent())
    few = ["train.max_steps=2", "train.sequences_per_step=4", "data.sequence_length=32"]
    pretrain(data=tmp_path / "data", out=tmp_path / "run", init_from=tmp_path / "half", overrides=few, progress=Silent())
    export(tmp_path / "run", out=tmp_path / "exported", progress=Silent(), warn=pytest.fail)
    for name in ("imported", "half", "exported"):
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        roles = {role: getattr(again, f"{role}_token") for role in ("pad", "cls", "sep", "unk", "mask")}
        assert roles == {"pad": "<pad>", "cls": "<bos>", "sep": "<eos>", "unk": "<unk>", "mask": "<mask>"}
        for line in HARD:
            assert again(line)["input_ids"] == tokenizer(line)["input_ids"] == gemma().encode(line).ids
        assert again("a", "b")["input_ids"] == tokenizer("a", "b")["input_ids"]
        assert json.loads((tmp_path / name / "config.json").read_text())["pad_token_id"] == 0
    model = discern.load(tmp_path / "theirs")
    assert model.fill("the [MASK] cooked") == model.fill("the <mask> cooked")
    embedded = [discern.load(tmp_path / name).encode(["the chef"])[0] for name in ("theirs", "imported")]
    assert embedded[0].tolist() == pytest.approx(embedded[1].tolist(), abs=1e-6)
