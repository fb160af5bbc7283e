"""The machinery on the real configuration, and every preset that is shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from discern.config.resolve import preset_names, preset_path, preset_summary
from discern.config.schema import diff, flatten, to_toml
from discern.errors import ConfigError
from discern.finetuning.settings import given_settings, load_finetune_config
from discern.models.config import ModelConfig
from discern.objectives.rtd import RTDConfig
from discern.storage.checksums import write_recorded
from discern.tasks import tasks
from discern.training.config import PretrainConfig, differences, learning_rate, load_pretrain_config, read_written_config

SOURCES = ["Clark et al. 2020", "google-research/electra", "He et al. 2021", "Warner et al. 2024", "Yang et al. 2019"]


def load(preset: str, *overrides: str) -> PretrainConfig:
    return load_pretrain_config(None, preset, overrides).config


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_resolves_whole_and_survives_its_own_toml(name: str, tmp_path: Path) -> None:
    resolved = load_pretrain_config(None, name)
    assert (resolved.dropped, resolved.user_set) == ([], set())
    assert not any("at most" in origin for origin in resolved.origins.values())
    (tmp_path / "config.toml").write_text(to_toml(resolved.config))
    assert diff(load_pretrain_config(tmp_path, None).config, resolved.config) == []
    assert 20 < len(preset_summary(name)) <= 130
    assert name in ("tiny", "demo") or any(source in preset_path(name).read_text() for source in SOURCES)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("objective", ["rtd", "mlm", "replace-mlm", "all-tokens-mlm"])
def test_a_preset_takes_any_objective(name: str, objective: str) -> None:
    resolved = load_pretrain_config(None, name, [f"objective.name={objective}"])
    assert resolved.config.objective.name == objective
    assert all(item.key.startswith("objective.") for item in resolved.dropped)


SIZES = "num_layers hidden_size feedforward_size num_heads embedding_size".split()
STEPS = "optimizer.learning_rate optimizer.warmup_steps train.sequences_per_step train.max_steps data.sequence_length".split()
# ELECTRA, table 6, and XLNet, table 7 (large), with their released code; base and small XLNets have the other recipes.
SHARED = {"optimizer.weight_decay": 0.01, "optimizer.epsilon": 1e-6, "optimizer.clip_norm": 1.0, "model.hidden_dropout": 0.1}
SHARED |= {"model.attention_dropout": 0.1, "optimizer.schedule": "linear", "optimizer.bias_correction": True}
RTD = {"objective.generator_depth": 1.0, "objective.generator_weight": 1.0, "objective.discriminator_weight": 50.0}
RTD |= {"objective.mask_token_probability": 1.0, "optimizer.beta2": 0.999, "data.overflow": "carry", "model.max_positions": 512}
XLNET = {"model.encoder": "xlnet", "data.packing": "two-part", "data.reversed_rows": True, "objective.prediction_ratio": 6}
XLNET |= {"objective.span_targets": True, "objective.legacy_spans": False}
RTD_KEYS, XLNET_KEYS = ("generator_size", "mask_probability"), ("memory_length", "permutation_size")
RECIPES = {
    "electra-small": ((12, 256, 1024, 4, 128), (5e-4, 10_000, 128, 1_000_000, 128), (0.25, 0.15)),
    "electra-base": ((12, 768, 3072, 12, 768), (2e-4, 10_000, 256, 766_000, 512), (0.33333, 0.15)),
    "electra-large": ((24, 1024, 4096, 16, 1024), (2e-4, 10_000, 2048, 400_000, 512), (0.25, 0.25)),
    "electra-small-plusplus": ((12, 256, 1024, 4, 128), (5e-4, 10_000, 128, 4_000_000, 512), (1.0, 0.15)),
    "xlnet-base": ((12, 768, 3072, 12, 768), (1e-4, 10_000, 256, 1_000_000, 512), (384, 256)),
    "xlnet-large": ((24, 1024, 4096, 16, 1024), (4e-4, 40_000, 8192, 500_000, 512), (384, 256)),
    "xlnet-small": ((12, 256, 1024, 4, 256), (5e-4, 10_000, 128, 1_000_000, 128), (96, 64)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_that_of_the_paper(name: str) -> None:
    sizes, steps, of_objective = RECIPES[name]
    keys, shared = (XLNET_KEYS, XLNET) if name.startswith("xlnet") else (RTD_KEYS, RTD)
    expected = {f"model.{key}": size for key, size in zip(SIZES, sizes, strict=True)}
    expected |= dict(zip(STEPS, steps, strict=True))
    expected |= {f"objective.{key}": value for key, value in zip(keys, of_objective, strict=True)}
    expected |= SHARED | shared
    values = flatten(load(name))
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("electra-small", (64, 1, 256, 12)), ("electra-base", (256, 4, 1024, 12)), ("electra-large", (256, 4, 1024, 24))],
)
def test_the_generators_have_the_released_sizes(name: str, sizes: tuple[int, ...]) -> None:
    shrunk = load(name).model.shrunk(RECIPES[name][2][0], 1.0)
    assert (shrunk.hidden_size, shrunk.num_heads, shrunk.feedforward_size, shrunk.num_layers) == sizes


@pytest.mark.parametrize("size", ["small", "base"])
def test_the_released_code_and_the_control_differ_from_the_paper_in_these_keys_only(size: str) -> None:
    assert {key for key, *_ in differences(f"electra-{size}", f"electra-{size}-google")} == {
        "data.overflow",
        "objective.masking",
        "objective.mask_token_probability",
        "optimizer.bias_correction",
        "optimizer.schedule",
        "train.precision",
    }
    keys = {key for key, *_ in differences(f"electra-{size}", f"mlm-{size}")}
    assert {key for key in keys if not key.startswith("objective.")} == {"train.max_steps"}


def test_settings_that_follow_from_others_are_lowered_or_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.sequence_length is 100000, beyond model\.max_positions, which is 128"):
        load("tiny", "data.sequence_length=100000")
    lowered = load_pretrain_config(None, "electra-base", ["model.max_positions=128", "train.sequences_per_step=8"])
    assert (lowered.config.data.sequence_length, lowered.config.train.micro_batch_size) == (128, 8)
    assert lowered.origins["data.sequence_length"] == "preset electra-base, at most model.max_positions"
    assert lowered.origins["train.micro_batch_size"] == "preset electra-base, at most train.sequences_per_step"


def test_a_warm_up_and_a_decay_longer_than_the_run() -> None:
    said = r"--set: optimizer\.warmup_steps and decay do not fit: a warm-up of 90 steps and a decay of 20"
    with pytest.raises(ConfigError, match=said):
        load("tiny", "optimizer.schedule=wsd", "train.max_steps=100", "optimizer.warmup_steps=90", "optimizer.decay_fraction=0.2")
    with pytest.raises(ConfigError, match="max_hours allows is not known in advance"):
        load("tiny", "optimizer.schedule=wsd", "optimizer.decay_steps=10", "train.max_hours=1")


@pytest.mark.parametrize("schedule", ["linear", "released", "constant", "wsd"])
def test_the_rate_of_a_short_run_of_a_preset_reaches_its_peak(schedule: str) -> None:
    resolved = load_pretrain_config(None, "electra-small", [f"optimizer.schedule={schedule}", "train.max_steps=1000"])
    optimizer = resolved.config.optimizer
    assert optimizer.warmup_steps == 10, "a hundredth of the run"
    assert resolved.origins["optimizer.warmup_steps"] == "preset electra-small, 0.01 of train.max_steps"
    highest = max(learning_rate(optimizer, step, 1000) for step in range(1000))
    assert highest > 0.98 * optimizer.learning_rate, "that of the released code decays during the warm-up"


def test_a_configuration_that_discern_wrote_keeps_its_warm_up(tmp_path: Path) -> None:
    text = to_toml(load("tiny", "optimizer.warmup_steps=40")).replace("max_steps = 50", "max_steps = 9")
    write_recorded(tmp_path, {"run.json": "{}", "config.toml": text})
    config = read_written_config(tmp_path / "config.toml")  # of a run that was resumed with fewer steps
    assert (config.train.max_steps, config.optimizer.warmup_steps) == (9, 40)
    said = r"config\.toml, line \d+: optimizer\.warmup_steps names step 40, which is not within the 8 steps of train\.max_steps"
    with pytest.raises(ConfigError, match=said):  # a new run of another length
        load_pretrain_config(tmp_path, None, ["train.max_steps=8"])


def test_another_objective_drops_what_the_preset_has_for_the_first() -> None:
    resolved = load_pretrain_config(None, "modern-cpu", ["objective.name=replace-mlm"])
    (tying,) = (item for item in resolved.dropped if item.key == "objective.tying")
    assert (tying.value, tying.reason.endswith("does not accept it")) == ("gradient-disentangled", True)
    assert flatten(resolved.config)["objective.tying"] == "embeddings"
    with pytest.raises(ConfigError, match="tying"):
        load("modern-cpu", "objective.name=replace-mlm", "objective.tying=gradient-disentangled")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.max_seq_length=64", "did you mean 'data.sequence_length'?"),
        ("train.batch_size=64", "did you mean 'train.sequences_per_step'?"),
        ("train.batch_schedule=[0,1]", "expected a list of pairs"),
    ],
)
def test_mistakes_are_told_with_what_was_probably_meant(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiny", override)
    assert says in str(caught.value)


def test_settings_that_nothing_reads_are_told() -> None:
    settings = ["data.packing=packed", "data.overflow=drop", "data.reversed_rows=false"]
    assert load_pretrain_config(None, "tiny", settings).without_effect == [
        "data.overflow = drop has no effect: it needs data.packing = 'segments'",
        "data.reversed_rows = False has no effect: it needs data.packing = 'two-part'",
    ]
    idle = RTDConfig(rarity_exponent=1.0, generator="uniform", generator_size=0.5, tying="none", temperature=2.0).unread()
    assert idle["rarity_exponent"] == "masking = 'rarity'"
    assert idle["two_stage_steps"] == "algorithm = 'two-stage'"
    assert {idle[name] for name in ("generator_size", "tying", "temperature")} == {"generator = 'mlm'"}
    assert "span_max_words" not in RTDConfig(masking="span", span_max_words=3).unread()


@pytest.mark.parametrize("table", ["{ a = 1 }", "[{}]"])
def test_no_setting_takes_a_table(table: str, tmp_path: Path) -> None:
    for preset in ("tiny", "xlnet-small", "modern-cpu"):
        for key in flatten(load(preset)):
            with pytest.raises(ConfigError, match=rf"--set: .*\b{key}\b|unknown (encoder|objective)"):
                load(preset, f"{key}={table}")
    for key in flatten(load_finetune_config([tasks.load("sst2")], ModelConfig(), {}).config):
        (tmp_path / "settings.toml").write_text(f"{key} = {table}\n")
        with pytest.raises(ConfigError, match=rf"settings\.toml.*\b{key}\b"):
            load_finetune_config([tasks.load("sst2")], ModelConfig(), given_settings(tmp_path / "settings.toml", ()))


def test_the_machinery_imports_no_torch() -> None:
    program = "import sys, discern.config.resolve, discern.config.resolve\n"
    program += "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
