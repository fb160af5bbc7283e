"""`discern export`: a run becomes a folder that transformers loads, with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from discern import __version__
from discern.artifacts.export_folder import FILES
from discern.artifacts.opening import open_model
from discern.cli.export import export as export_command
from discern.convert.export import Exported, export
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.errors import CheckpointError, ConfigError, DataError, NumericsError
from discern.interop.config_json import ENCODER_KEYS, MARK
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from discern.objectives.base import Objective
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME, write_recorded
from discern.training import checkpoint
from discern.training.pretrain_config import load_pretrain_config
from tests.interop.small_tokenizers import HARD, KINDS
from tests.small.run import EVALUATION, TOKENS, make_run
from tests.support import run_python


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    make_run(folder)
    return folder


def exported(run: Path, out: Path, network: str | None = None, **options: Any) -> Exported:
    return export(run, out=out, network=network, progress=Silent(), warn=pytest.fail, **options)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def encoded(folder: Path, *texts: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)(*texts, return_tensors="pt")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_transformers_gives_our_logits(kind: str, tmp_path: Path) -> None:
    from transformers import ElectraForMaskedLM, ElectraForPreTraining

    objective = make_run(tmp_path / "run", tokenizer=kind, overrides=["data.sequence_length=128"])
    source = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    for name, network in objective.networks().items():
        folder = exported(tmp_path / "run", tmp_path / name, name).folder
        loader = ElectraForPreTraining if name == "discriminator" else ElectraForMaskedLM
        model, info = loader.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        inputs = encoded(folder, HARD[0], HARD[2])
        ours = source.encode(HARD[0], HARD[2])
        assert inputs["input_ids"].tolist() == [ours.ids]
        ids, types = torch.tensor([ours.ids]), torch.tensor([ours.type_ids])
        expected = network.head(network.encoder(ids, None, types))
        torch.testing.assert_close(model.eval()(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_first_network_is_the_default(run: Path, tmp_path: Path) -> None:
    done = exported(run, tmp_path / "out")
    assert (done.networks, done.architecture, done.step) == (("discriminator",), "ElectraForPreTraining", 20)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES, CHECKSUMS_NAME])


def test_a_masked_language_model(tmp_path: Path) -> None:
    from transformers import ElectraForMaskedLM

    objective = make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    done = exported(tmp_path / "run", tmp_path / "out")
    assert (done.networks, done.architecture) == (("encoder",), "ElectraForMaskedLM")
    assert done.parameters == sum(parameter.numel() for parameter in objective.parameters())
    inputs = encoded(tmp_path / "out", HARD[0])
    network = objective.networks()["encoder"]
    with torch.no_grad():
        theirs = ElectraForMaskedLM.from_pretrained(tmp_path / "out").eval()(**inputs).logits
        torch.testing.assert_close(theirs, network.head(network.encoder(inputs["input_ids"])), atol=1e-5, rtol=1e-5)


def test_the_card_and_settings_are_of_this_run(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "my-model")
    card = (tmp_path / "my-model" / "README.md").read_text()
    for line in (
        "# my-model",
        "| Documents | 1,611 |",
        f"| Tokens seen, repetitions included | {TOKENS:,} |",  # up to the step of the checkpoint
        "| Positions | 128, of which 32 were trained |",
        "WordPiece, lower-cased",
        "| `discriminator_auc` | 0.8125 |",
        "| `heldout_generator_loss` | 6.7500 |",
        "| `optimizer.learning_rate` | 0.001 | 0.0005 |",
        "Differences from preset `electra-small`",
        "at step 20",
    ):
        assert line in card, line
    assert "| `generator_loss` |" not in card, "a training metric among the held-out metrics"
    assert json.loads((tmp_path / "my-model" / "tokenizer_config.json").read_text())["model_max_length"] == 32
    config = json.loads((tmp_path / "my-model" / "config.json").read_text())
    assert config["discern"] == {
        "version": __version__,
        "objective": "rtd",
        "networks": ["discriminator"],
        "step": 20,
        "tokenizer_fingerprint": fingerprint(load_tokenizer(run / "tokenizer.json")),
    }


def test_the_settings_are_kept(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "out")
    kept = load_pretrain_config(tmp_path / "out" / "discern.toml", None).config
    assert kept == load_pretrain_config(run / "config.toml", None).config


@torch.no_grad()
def test_all_networks_stand_in_one_folder(tmp_path: Path) -> None:
    from transformers import AutoModel, ElectraForMaskedLM

    objective = make_run(tmp_path / "run")
    done = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    assert done.networks == ("discriminator", "generator")
    files = files_in(tmp_path / "out")
    assert sorted(files) == sorted([*FILES, CHECKSUMS_NAME, *(f"generator/{name}" for name in (*FILES[:4], CHECKSUMS_NAME))])
    for name in (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME):
        assert files[f"generator/{name}"] == files[name]
        assert name in json.loads(files[f"generator/{CHECKSUMS_NAME}"])
    assert done.num_bytes == sum(map(len, files.values()))
    for name, network in objective.networks().items():
        folder = tmp_path / "out" / ("" if name == "discriminator" else name)
        inputs = encoded(folder, HARD[0])
        hidden = AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state
        torch.testing.assert_close(hidden, network.encoder(inputs["input_ids"]), atol=1e-5, rtol=1e-5)
    model, info = ElectraForMaskedLM.from_pretrained(tmp_path / "out" / "generator", output_loading_info=True)
    assert not any(info.values()), info
    expected = objective.networks()["generator"].token_logits(inputs["input_ids"])
    torch.testing.assert_close(model.eval()(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
    assert exported(tmp_path / "run", tmp_path / "out").networks == ("discriminator",), "it may be replaced"
    assert sorted(files_in(tmp_path / "out")) == sorted([*FILES, CHECKSUMS_NAME])


def test_the_generator_at_the_root_and_all_networks_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the discriminator is at the root, not the generator"):
        exported(run, tmp_path / "out", "generator", all_networks=True)
    with pytest.raises(ConfigError, match="unknown precision 'bflaot16'") as caught:
        exported(run, tmp_path / "out", precision="bflaot16")
    assert caught.value.hint == "did you mean 'bfloat16'?"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bits_take_half_the_room(precision: str, run: Path, tmp_path: Path) -> None:
    sizes = []
    for name in ("float32", precision):
        folder = exported(run, tmp_path / name, all_networks=True, precision=name).folder
        sizes.append(sum((folder / part / "model.safetensors").stat().st_size for part in ("", "generator")))
        for part in ("", "generator"):
            assert json.loads((folder / part / "config.json").read_text())["dtype"] == name
            with safe_open(folder / part / "model.safetensors", framework="pt") as weights:
                kinds = {weights.get_slice(tensor).get_dtype() for tensor in weights.keys()}  # noqa: SIM118
            assert kinds == {{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[name]}
    assert sizes[1] < 0.6 * sizes[0]


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    objective: Objective = make_run(tmp_path / "run")
    with torch.no_grad():
        objective.networks()["discriminator"].head.output.bias[0] = 1e5
    contents = checkpoint.Contents(checkpoint.model_tensors(objective), {}, {}, {"step": 40})
    checkpoint.save(tmp_path / "run" / "checkpoints", contents, 2)
    exported(tmp_path / "run", tmp_path / "out", precision="bfloat16")
    with pytest.raises(NumericsError, match="not finite") as caught:
        exported(tmp_path / "run", tmp_path / "other", precision="float16")
    assert "--precision bfloat16" in str(caught.value.hint)


def test_evaluations_after_the_exported_step_are_not_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "run", metrics=[EVALUATION, {**EVALUATION, "step": 40, "discriminator_auc": 0.9}])
    exported(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "0.8125" in card
    assert "0.9" not in card


def test_the_checkpoint_of_a_generator_is_named_without_its_path(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.generator_checkpoint=/home/alice/words"])
    exported(tmp_path / "run", tmp_path / "out")
    for name, content in files_in(tmp_path / "out").items():
        assert b"alice" not in content, name
    assert "| `objective.generator_checkpoint` | words |" in (tmp_path / "out" / "README.md").read_text()


def test_no_path_of_this_machine_is_written(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", all_networks=True)
    for name, content in files_in(tmp_path / "out").items():
        assert str(run.parent).encode() not in content, name


def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        exported(run, tmp_path / name / "model", all_networks=True)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


@pytest.mark.parametrize(
    ("network", "precision"), [("discriminator", "float32"), ("generator", "float32"), ("discriminator", "bfloat16")]
)
def test_the_code_in_the_card_runs(run: Path, network: str, precision: str, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", network, precision=precision)
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = run_python("-c", code, cwd=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "[CLS]" in done.stdout if network == "discriminator" else done.stdout.startswith("[")


def test_a_bilinear_discriminator_goes_out_as_its_encoder_and_its_card_says_so(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.tying=gradient-disentangled", "objective.discriminator_head=bilinear"])
    exported(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the encoder alone" in card
    assert "`discern detect` uses the head" in card
    assert "fill-mask" not in card
    code = card.split("```python\n")[1].split("```")[0]
    done = run_python("-c", code, cwd=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "[CLS]" in done.stdout


def test_an_unknown_network_names_the_nearest(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no network 'discrimnator'") as caught:
        exported(run, tmp_path / "out", "discrimnator")
    assert caught.value.hint == "did you mean 'discriminator'?"
    assert not (tmp_path / "out").exists()


def test_another_folder_is_safe(run: Path) -> None:
    with pytest.raises(ConfigError, match="cannot replace itself"):
        exported(run, run)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run"):
        exported(tmp_path / "nowhere", tmp_path / "out")


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run")
    newer = checkpoint.Contents(checkpoint.model_tensors(objective), {}, {}, {"step": 40})
    path = checkpoint.save(tmp_path / "run" / "checkpoints", newer, 2) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    warnings: list[str] = []
    assert export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=warnings.append).step == 20
    assert "damaged" in warnings[0]


def test_a_run_without_a_sound_checkpoint_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    next((tmp_path / "run").rglob("model.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=lambda _: None)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    objective: Objective = make_run(tmp_path / "run")
    with torch.no_grad():
        objective.networks()["generator"].head.bias[3] = float("nan")
    contents = checkpoint.Contents(checkpoint.model_tensors(objective), {}, {}, {"step": 40})
    checkpoint.save(tmp_path / "run" / "checkpoints", contents, 2)
    with pytest.raises(NumericsError, match=r"model.safetensors: 'generator_head\.bias' holds NaN \(1 of"):
        exported(tmp_path / "run", tmp_path / "out", "generator")
    assert not (tmp_path / "out").exists()


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    export_command(run, out=out, network="generator", json_output=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "out": str(out),
        "network": "generator",
        "networks": ["generator"],
        "architecture": "ElectraForMaskedLM",
        "parameters": shown["parameters"],
        "precision": "float32",
        "step": 20,
        "bytes": sum(map(len, files_in(out).values())),
    }
    export_command(run, out=out, all_networks=True, precision="bfloat16")
    printed = capsys.readouterr().out
    assert "parameters in bfloat16" in printed
    assert "ElectraForPreTraining.from_pretrained" in printed
    assert f"discern evaluate {out} --data DATA" in printed
    with pytest.raises(SystemExit) as left:
        export_command(run, out=run)
    assert left.value.code == 2
    assert "hint: choose another path: --out" in capsys.readouterr().err


def test_the_language_of_the_text_goes_on_into_the_card_and_to_what_is_fine_tuned(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    record = tmp_path / "run" / "run.json"
    text = json.dumps(json.loads(record.read_text()) | {"language": "zh", "text_license": "CC0"})
    write_recorded(tmp_path / "run", {"run.json": text})
    exported(tmp_path / "run", tmp_path / "out")
    exported(tmp_path / "out", tmp_path / "again")
    for folder in ("out", "again"):
        card = (tmp_path / folder / "README.md").read_text()
        assert "\nlanguage: zh\n" in card.split("---")[1]
        assert "| License of the text | CC0 |" in card.partition("## Original model card")[0]
    for folder in ("run", "out", "again"):
        encoder = open_model(tmp_path / folder, warn=pytest.fail).encoder
        assert (encoder.language, encoder.text_license) == ("zh", "CC0")


def test_an_export_of_an_export_keeps_nothing_that_names_code(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCERN_VERIFY", "0")  # the export is edited
    exported(run, tmp_path / "one", all_networks=True)
    code = {
        "auto_map": {"AutoModel": "evil--modeling.Evil", "AutoConfig": "evil--config.Evil"},
        "custom_pipelines": {"x": {"impl": "evil.Pipeline"}},
        "_attn_implementation": "evil/kernel",
        "trust_remote_code": True,
    }
    for path in (*(tmp_path / "one").rglob("config.json"), tmp_path / "one" / "tokenizer_config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | code))
    card = tmp_path / "one" / "README.md"
    card.write_text(card.read_text() + "\n</blockquote><script>alert(1)</script>\n")
    export(tmp_path / "one", out=tmp_path / "two", all_networks=True, progress=Silent(), warn=pytest.fail)
    files = [*(tmp_path / "two").rglob("*.json")]
    assert len([path for path in files if path.name == "config.json"]) == 2
    for path in files:
        assert "evil" not in path.read_text(), path
        assert not code.keys() & json.loads(path.read_text()).keys(), path
    assert "<script>" not in (tmp_path / "two" / "README.md").read_text()
    settings = json.loads((tmp_path / "two" / "config.json").read_text())
    assert settings.keys() - {MARK} == ENCODER_KEYS
