"""The machinery on the real configuration, and every preset that is shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from discern.config.layers import preset_names, preset_path, preset_summary
from discern.config.schema import diff, flatten, to_toml
from discern.errors import ConfigError
from discern.finetuning.settings import given_settings, load_finetune_config
from discern.models.config import ModelConfig
from discern.objectives.rtd import RTDConfig
from discern.storage.checksums import write_recorded
from discern.tasks import tasks
from discern.training.pretrain_config import PretrainConfig, differences, load_pretrain_config, read_written_config
from discern.training.schedule import learning_rate

ELECTRAS = [
    "cpu-small",
    "demo",
    "electra-base",
    "electra-base-google",
    "electra-base-plusplus",
    "electra-large",
    "electra-large-1.75m",
    "electra-small",
    "electra-small-google",
    "electra-small-plusplus",
    "electric-base",
    "electric-small",
    "mlm-base",
    "mlm-large",
    "mlm-small",
    "tiny",
]
XLNETS = ["xlnet-base", "xlnet-cpu", "xlnet-large", "xlnet-small"]
DEBERTAS = ["deberta-cpu", "deberta-v3-base", "deberta-v3-large", "deberta-v3-small", "deberta-v3-xsmall"]
MODERN = ["gpu-minutes", "modern-base", "modern-cpu", "modern-small"]
PRESETS = sorted([*DEBERTAS, *ELECTRAS, *MODERN, *XLNETS])
SOURCES = ["Clark et al. 2020", "google-research/electra", "He et al. 2021", "Warner et al. 2024", "Yang et al. 2019"]


def load(preset: str, *overrides: str) -> PretrainConfig:
    return load_pretrain_config(None, preset, overrides).config


def test_the_presets_are_these():
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_whole_and_survives_its_own_toml(name: str, tmp_path: Path):
    resolved = load_pretrain_config(None, name)
    assert resolved.dropped == []
    assert not resolved.user_set
    assert not any("at most" in origin for origin in resolved.origins.values())
    (tmp_path / "config.toml").write_text(to_toml(resolved.config))
    assert diff(load_pretrain_config(tmp_path, None).config, resolved.config) == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_is_and_where_its_values_come_from(name: str):
    assert 20 < len(preset_summary(name)) <= 130
    text = preset_path(name).read_text()
    assert name in ("tiny", "demo") or any(source in text for source in SOURCES)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("objective", ["rtd", "mlm", "replace-mlm", "all-tokens-mlm"])
def test_a_preset_takes_any_objective(name: str, objective: str):
    resolved = load_pretrain_config(None, name, [f"objective.name={objective}"])
    assert resolved.config.objective.name == objective
    if objective == "mlm":
        assert all(item.key.startswith("objective.") for item in resolved.dropped)


# ELECTRA, table 6 and the released code's comments: spec, section 1.3.
SIZES = ("num_layers", "hidden_size", "feedforward_size", "num_heads", "embedding_size")
RECIPES = {
    "electra-small": ((12, 256, 1024, 4, 128), (0.25, 0.15, 5e-4, 128, 128, 1_000_000)),
    "electra-base": ((12, 768, 3072, 12, 768), (0.33333, 0.15, 2e-4, 256, 512, 766_000)),
    "electra-large": ((24, 1024, 4096, 16, 1024), (0.25, 0.25, 2e-4, 2048, 512, 400_000)),
    "electra-small-plusplus": ((12, 256, 1024, 4, 128), (1.0, 0.15, 5e-4, 128, 512, 4_000_000)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_that_of_the_paper(name: str):
    config = load(name)
    sizes, (generator, mask, learning_rate, batch, length, steps) = RECIPES[name]
    assert tuple(getattr(config.model, size) for size in SIZES) == sizes
    objective = config.objective.model_dump()
    assert (objective["generator_size"], objective["generator_depth"]) == (generator, 1.0)
    assert (objective["mask_probability"], objective["mask_token_probability"]) == (mask, 1.0)
    assert (objective["generator_weight"], objective["discriminator_weight"]) == (1.0, 50.0)
    assert (config.train.sequences_per_step, config.data.sequence_length, config.train.max_steps) == (batch, length, steps)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.weight_decay) == (learning_rate, 10_000, 0.01)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.clip_norm) == (0.9, 0.999, 1e-6, 1.0)
    assert (optimizer.bias_correction, optimizer.schedule, config.data.overflow) == (True, "linear", "carry")
    assert (config.model.hidden_dropout, config.model.attention_dropout, config.model.max_positions) == (0.1, 0.1, 512)


# XLNet, table 7 (large) and released code; base is BERT's recipe on that architecture. Spec, section 1.
XLNET_RECIPES = {
    "xlnet-base": ((12, 768, 3072, 12, 768), (512, 384, 256), (1e-4, 10_000, 256, 1_000_000)),
    "xlnet-large": ((24, 1024, 4096, 16, 1024), (512, 384, 256), (4e-4, 40_000, 8192, 500_000)),
    "xlnet-small": ((12, 256, 1024, 4, 256), (128, 96, 64), (5e-4, 10_000, 128, 1_000_000)),
}


@pytest.mark.parametrize("name", XLNET_RECIPES)
def test_an_xlnet_is_that_of_the_paper(name: str):
    config = load(name)
    sizes, (length, memory, permutation), (learning_rate, warmup, batch, steps) = XLNET_RECIPES[name]
    assert tuple(getattr(config.model, size) for size in SIZES) == sizes
    assert (config.model.encoder, config.data.packing, config.data.reversed_rows) == ("xlnet", "two-part", True)
    objective = config.objective.model_dump()
    assert (config.data.sequence_length, objective["memory_length"], objective["permutation_size"]) == (
        length,
        memory,
        permutation,
    )
    assert (objective["prediction_ratio"], objective["span_targets"], objective["legacy_spans"]) == (6, True, False)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (learning_rate, warmup)
    assert (optimizer.weight_decay, optimizer.epsilon, optimizer.clip_norm) == (0.01, 1e-6, 1.0)
    assert (config.train.sequences_per_step, config.train.max_steps) == (batch, steps)
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.1)


def test_the_small_xlnet_has_the_batch_and_steps_of_the_small_electra():
    same = {"train.max_steps", "train.sequences_per_step", "optimizer.learning_rate", "data.sequence_length", "model.hidden_size"}
    assert not same & {key for key, _, _ in differences("electra-small", "xlnet-small")}


def test_the_generators_have_the_released_sizes():
    shrunk = {
        name: load(name).model.shrunk(RECIPES[name][1][0], 1.0) for name in ("electra-small", "electra-base", "electra-large")
    }
    sizes = {name: (m.hidden_size, m.num_heads, m.feedforward_size, m.num_layers) for name, m in shrunk.items()}
    assert sizes == {"electra-small": (64, 1, 256, 12), "electra-base": (256, 4, 1024, 12), "electra-large": (256, 4, 1024, 24)}


def test_the_control_differs_from_electra_small_in_objective_and_steps_only():
    keys = {key for key, _, _ in differences("electra-small", "mlm-small")}
    assert {key for key in keys if not key.startswith("objective.")} == {"train.max_steps"}
    config = load("mlm-small")
    assert config.train.max_steps == 1_450_000
    assert config.objective.model_dump()["mask_token_probability"] == 0.8


def test_a_misspelt_weight_names_the_right_one():
    with pytest.raises(ConfigError) as caught:
        load("tiny", "objective.discrimnator_weight=25")
    assert "'discrimnator_weight' in [objective]" in caught.value.message
    assert caught.value.hint == "did you mean 'discriminator_weight'?"


def test_a_key_of_another_section_is_found_there():
    with pytest.raises(ConfigError) as caught:
        load("tiny", "train.learning_rate=1e-3")
    assert caught.value.hint == "did you mean 'optimizer.learning_rate'?"


def test_a_length_beyond_the_position_table():
    with pytest.raises(ConfigError, match=r"data\.sequence_length is 100000, beyond model\.max_positions, which is 128"):
        load("tiny", "data.sequence_length=100000")
    clamped = load_pretrain_config(None, "electra-base", ["model.max_positions=128"])
    assert clamped.config.data.sequence_length == 128
    assert clamped.origins["data.sequence_length"] == "preset electra-base, at most model.max_positions"


def test_a_micro_batch_larger_than_the_batch_is_lowered() -> None:
    lowered = load_pretrain_config(None, "electra-base", ["train.sequences_per_step=8"])
    assert lowered.config.train.micro_batch_size == 8
    assert lowered.origins["train.micro_batch_size"] == "preset electra-base, at most train.sequences_per_step"
    assert load("tiny", "train.sequences_per_step=1").train.micro_batch_size is None


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
    assert load_pretrain_config(tmp_path, None, ["train.max_steps=41"]).config.optimizer.warmup_steps == 40


def test_another_objective_drops_the_keys_of_the_first():
    resolved = load_pretrain_config(None, "electra-small", ["objective.name=mlm"])
    assert {item.key for item in resolved.dropped} >= {"objective.generator_size", "objective.discriminator_weight"}
    assert resolved.config.objective.model_dump()["mask_token_probability"] == 0.8
    with pytest.raises(ConfigError, match="unknown key 'generator_size'"):
        load("electra-small", "objective.name=mlm", "objective.generator_size=0.5")


def test_values_that_another_objective_does_not_accept_are_dropped_if_nobody_gave_them():
    resolved = load_pretrain_config(None, "modern-cpu", ["objective.name=replace-mlm"])
    (dropped,) = (item for item in resolved.dropped if item.key == "objective.tying")
    assert (dropped.value, dropped.reason.endswith("does not accept it")) == ("gradient-disentangled", True)
    assert getattr(resolved.config.objective, "tying", None) == "embeddings"
    with pytest.raises(ConfigError, match=r"objective\.tying is 'gradient-disentangled'"):
        load("modern-cpu", "objective.name=replace-mlm", "objective.tying=gradient-disentangled")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.max_seq_length=64", "did you mean 'data.sequence_length'?"),
        ("train.batch_size=64", "did you mean 'train.sequences_per_step'?"),
        ("optimizer.lr=1", "did you mean 'optimizer.learning_rate'?"),
        ("train.batch_schedule=[0,1]", "expected a list of pairs"),
    ],
)
def test_names_of_other_programs_and_malformed_schedules(override: str, says: str):
    with pytest.raises(ConfigError) as caught:
        load("tiny", override)
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert "missing" not in caught.value.message


def test_settings_of_another_packing_have_no_effect():
    settings = ["data.packing=packed", "data.overflow=drop", "data.reversed_rows=false"]
    assert load_pretrain_config(None, "tiny", settings).without_effect == [
        "data.overflow = drop has no effect: it needs data.packing = 'segments'",
        "data.reversed_rows = False has no effect: it needs data.packing = 'two-part'",
    ]
    assert load_pretrain_config(None, "tiny", ["data.packing=segments", "data.overflow=drop"]).without_effect == []


def test_an_unknown_objective_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown objective 'rtdd'") as caught:
        load("tiny", "objective.name=rtdd")
    assert caught.value.hint == "did you mean 'rtd'?"


def test_the_machinery_imports_no_torch():
    modules = ["layers", "resolve", "schema"]
    program = "import sys\n" + "".join(f"import discern.config.{name}\n" for name in modules)
    program += "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("size", ["small", "base"])
def test_the_released_code_differs_from_the_paper_in_these_keys_only(size: str):
    assert {key for key, *_ in differences(f"electra-{size}", f"electra-{size}-google")} == {
        "data.overflow",
        "objective.masking",
        "objective.mask_token_probability",
        "optimizer.bias_correction",
        "optimizer.schedule",
        "train.precision",
    }


def test_settings_that_nothing_reads_are_told() -> None:
    idle = RTDConfig(two_stage_steps=7, rarity_exponent=1.0, generator="two-tower", mask_token_probability=0.5)
    for name, needed in {
        "rarity_exponent": "masking = 'rarity'",
        "two_stage_steps": "algorithm = 'two-stage'",
        "mask_token_probability": "generator = 'mlm'",
    }.items():
        assert idle.unread()[name] == needed
    weightless = RTDConfig(generator="uniform", generator_size=0.5, tying="none", temperature=2.0).unread()
    assert {weightless[name] for name in ("generator_size", "tying", "temperature")} == {"generator = 'mlm'"}
    assert "span_max_words" not in RTDConfig(masking="span", span_max_words=3).unread()


PRETRAINING = [(preset, key) for preset in ("tiny", "xlnet-small", "modern-cpu") for key in flatten(load(preset))]
FINE_TUNING = flatten(load_finetune_config([tasks.load("sst2")], ModelConfig(), {}).config)


@pytest.mark.parametrize("table", ["{}", "{ a = 1 }", "[{}]"])
def test_no_setting_takes_a_table(table: str, tmp_path: Path):
    (tmp_path / "empty.toml").write_text("[optimizer]\n")
    assert load_pretrain_config(tmp_path / "empty.toml", "tiny").config == load("tiny")
    for preset, key in [*PRETRAINING, ("tiny", "optimizer"), ("tiny", "nothing")]:
        with pytest.raises(ConfigError, match=rf"--set: .*\b{key}\b"):
            load(preset, f"{key}={table}")
    for key in FINE_TUNING:
        (tmp_path / "settings.toml").write_text(f"{key} = {table}\n")
        with pytest.raises(ConfigError, match=rf"settings\.toml.*\b{key}\b"):
            load_finetune_config([tasks.load("sst2")], ModelConfig(), given_settings(tmp_path / "settings.toml", ()))
