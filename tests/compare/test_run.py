"""Comparisons end to end on small text and small tasks: equal cost, going on, refusing, tidying."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import discern.compare.run as module
from discern.compare.dry_run import dry_run
from discern.compare.plan import plan_comparison
from discern.compare.results import check_results, units
from discern.compare.run import COMPARISON_FILE, PAGE_FILE, _claim, compare
from discern.compare.summary import summarize
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.model_files.run import load_run
from discern.pretraining.run import pretrain
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME
from discern.storage.files import alone_in, held
from tests.processes import Program
from tests.report.test_page import assert_stands_alone, structure

WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
LABELS = ("entailment", "not_entailment")
BODY = """
[finetune]
set = { "train.max_steps" = 2, "task.sequence_length" = 16 }
[[run]]
name = "rtd"
[[run]]
name = "mlm"
set = { "objective.name" = "mlm" }
"""


LONG = BODY.replace('name = "mlm"', 'name = "mlm"\nbudget = 0.1')
STEPS = ("train.max_steps=80", "train.checkpoint_every_steps=10")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set and two task folders."""
    folder, rng = tmp_path_factory.mktemp("world"), random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=9)) + ("\n" if number % 5 == 4 else "") for number in range(600)]
    (folder / "text.txt").write_text("\n".join(lines))
    choice = TokenizerChoice(train="wordpiece", vocab_size=120, lowercase=True)
    prepare(
        [str(folder / "text.txt")],
        out=folder / "data",
        tokenizer=choice,
        options=PrepareOptions(heldout=0.2, workers=1),
        progress=Silent(),
    )
    for split, count in (("train", 24), ("dev", 8)):
        pairs = [f"{n}\t{' '.join(rng.choices(WORDS, k=4))}\t{'cat' if n % 2 else 'dog'}\t{LABELS[n % 2]}" for n in range(count)]
        path = folder / "tasks" / "glue" / "RTE" / f"{split}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *pairs]) + "\n")
    for split, count in (("train", 12), ("test", 6)):
        path = folder / "tasks" / "CoNLL-2000" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [
            [f"{word} X {'B-NP' if word in ('cat', 'dog') else 'O'}" for word in rng.choices(WORDS, k=5)] for _ in range(count)
        ]
        path.write_text("\n\n".join("\n".join(sentence) for sentence in sentences) + "\n")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A comparison that nothing stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run(request(world, folder, 'seeds = 1\ntasks = ["rte"]\n', LONG, overrides=STEPS))


@dataclass(frozen=True)
class Options:
    """The arguments of a comparison."""

    config: Path
    data: Path
    out: Path
    task_data: Path
    preset: str
    overrides: tuple[str, ...]


def request(world: Path, folder: Path, head: str, body: str = BODY, **more: Any) -> Options:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compare.toml"
    path.write_text(head + body)
    made = Options(path, world / "data", folder / "out", world / "tasks", "tiny", ("train.max_steps=16",))
    return replace(made, **more)


def run(asked: Options) -> dict[str, Any]:
    return compare(**vars(asked), progress=Silent())


class Listener(Silent):
    """Keeps what was announced."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stages: list[tuple[str, float | None]] = []

    def start(self, description: str, total: float | None, unit: str) -> None:
        self.stages.append((description, total))

    def note(self, message: str) -> None:
        self.notes.append(message)


def change(path: Path, **values: Any) -> None:
    """Change a result file; a value of None takes its key out."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def read_again(asked: Options) -> dict[str, Any]:
    """What the result files come to, refused where they are of something else; does and writes nothing."""
    plan = plan_comparison(**vars(asked))
    check_results(plan, units(plan))
    return summarize(plan, units(plan))


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


XLNETS = """
[finetune]
set = { "train.max_steps" = 4, "task.sequence_length" = 16 }
[[run]]
name = "permutation"
set.objective = { name = "permutation-lm", memory_length = 24 }
set.model = { encoder = "xlnet", embedding_size = 32 }
set.data = { packing = "two-part", sequence_length = 32 }
[[run]]
name = "mlm"
set.objective.name = "mlm"
set.model = { encoder = "xlnet", embedding_size = 32 }
[[run]]
name = "rtd"
"""


@pytest.mark.slow
def test_an_xlnet_a_masked_language_model_on_its_encoder_and_an_electra(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\nbaseline = true\n', XLNETS, overrides=("train.max_steps=40",))
    planned = {row["name"]: row for row in dry_run(**vars(asked))["runs"]}
    assert planned["permutation"]["network"] == planned["mlm"]["network"] == "encoder"
    found = run(asked)
    assert found["complete"]
    rows = {row["name"]: row for row in found["runs"]}
    assert list(rows) == ["permutation", "mlm", "rtd", "untrained"]
    for row in rows.values():
        assert len(row["scores"]["rte"]["values"]) == 1
        assert (row["steps"], row["flops"]) == (planned[row["name"]]["steps"], planned[row["name"]]["flops"])
    assert rows["mlm"]["flops"] == pytest.approx(rows["permutation"]["flops"], rel=0.03)
    assert {"heldout_permutation_lm_loss", "permutation_lm_accuracy"} <= set(rows["permutation"]["held_out"])
    html = (asked.out / PAGE_FILE).read_text(encoding="utf-8")
    structure(html)
    assert "permutation" in html


def test_equal_flops_two_seeds_two_tasks_and_a_baseline(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, 'seeds = 2\ntasks = ["rte", "chunk"]\nbaseline = true\n')
    found = run(asked)
    assert found["complete"]
    assert found == json.loads((asked.out / COMPARISON_FILE).read_text())
    rtd, mlm, untrained = found["runs"]
    assert (rtd["name"], mlm["name"], untrained["name"]) == ("rtd", "mlm", "untrained")
    assert rtd["steps"] == 16
    assert mlm["steps"] > 16
    assert mlm["flops"] == pytest.approx(rtd["flops"], rel=0.03)
    assert untrained["flops"] == untrained["steps"] == 0
    for row in found["runs"]:
        each = row["scores"]
        assert len(each["rte"]["values"]) == 2
        assert each["mean"]["values"][0] == pytest.approx((each["rte"]["values"][0] + each["chunk"]["values"][0]) / 2)
        assert each["rte"]["lowest"] <= each["rte"]["median"] <= each["rte"]["highest"]
    assert {"heldout_generator_loss", "discriminator_auc"} <= set(rtd["held_out"])
    assert "heldout_mlm_loss" in mlm["held_out"]
    assert untrained["held_out"] == {}
    assert mlm["settings"]["objective.name"] == "mlm"
    assert mlm["settings"]["optimizer.warmup_steps"] == round(0.2 * mlm["steps"])
    entry = next(entry for entry in found["significance"] if (entry["run"], entry["task"]) == ("mlm", "mean"))
    assert entry["smallest_p"] == pytest.approx(1 / 3)
    html = (asked.out / PAGE_FILE).read_text(encoding="utf-8")
    assert_stands_alone(html)
    structure(html)
    for shown in ("<svg", "smallest p", "0.333", "Score against seconds of pre-training", "Generator loss", "torch"):
        assert shown in html, shown
    assert str(tmp_path) not in html
    # The encoder stays, checkpoints and fine-tuned weights don't.
    work = asked.out / "work" / "rtd" / "seed-1"
    assert (work / "encoder" / "model.safetensors").is_file()
    assert not (work / "pretraining").exists()
    assert list(work.glob("tasks/*/seed-*/model.safetensors")) == []
    # The seeds start from different weights, and the baseline from those of the reference.
    weights = {path.parent.parent: path.read_bytes() for path in (asked.out / "work").glob("*/*/encoder/model.safetensors")}
    assert len(set(weights.values())) == 6

    before = times(asked.out / "results")
    assert run(asked) == found
    assert times(asked.out / "results") == before


@pytest.mark.usefixtures("unverified")
def test_results_alone_count_as_done_and_a_changed_setting_is_refused(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\nkeep = "results"\n')
    found = run(asked)
    assert list((asked.out / "work").glob("*/seed-*")) == []
    copy = replace(asked, out=tmp_path / "copy")
    shutil.copytree(asked.out / "results", copy.out / "results")
    assert run(copy) == found
    assert not (copy.out / "work").exists()
    with pytest.raises(ConfigError, match=r"rtd, seed 0: optimizer.learning_rate was 0.001, is 0.002") as caught:
        run(replace(copy, overrides=(*copy.overrides, "optimizer.learning_rate=2e-3")))
    assert "another name" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=r"train\.max_steps was 16, is 20"):
        run(replace(copy, overrides=("train.max_steps=20",)))
    with pytest.raises(ConfigError, match="fine-tuned on rte with other set"):
        run(request(world, tmp_path / "other", 'seeds = 1\ntasks = ["rte"]\n', BODY.replace('" = 2', '" = 3'), out=copy.out))
    with pytest.raises(DataError, match=r"rtd, seed 0 is pre-trained, but its encoder is gone .* and chunk needs it"):
        run(request(world, tmp_path / "more", 'seeds = 1\ntasks = ["rte", "chunk"]\n', out=copy.out))
    changed = world / "changed"
    if not changed.exists():
        shutil.copytree(world / "tasks", changed)
        with (changed / "glue" / "RTE" / "dev.tsv").open("a") as stream:
            stream.write("8\tthe cat\tdog\tentailment\n")
    with pytest.raises(ConfigError, match="with other files"):
        run(replace(copy, task_data=changed))
    with pytest.raises(ConfigError, match=r"rtd, seed 0: train\.evaluate_sequences was 2000, is 8"):
        run(replace(copy, overrides=(*copy.overrides, "train.evaluate_sequences=8")))
    # What only decides how often something is written may change.
    assert run(replace(copy, overrides=(*copy.overrides, "train.log_every_steps=3")))["complete"]


@pytest.mark.usefixtures("unverified")
def test_more_seeds_more_tasks_and_more_runs_go_on(world: Path, tmp_path: Path) -> None:
    first = run(request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\n'))
    pretrained = times(tmp_path / "out" / "results" / "rtd" / "seed-0")
    body = BODY.replace("[finetune]", "[finetune]\nseeds = 2") + '[[run]]\nname = "half"\nbudget = 0.5\n'
    more = run(request(world, tmp_path, 'seeds = 2\ntasks = ["rte", "chunk"]\n', body))
    again = times(tmp_path / "out" / "results" / "rtd" / "seed-0")
    unchanged = [path for path in pretrained if path.endswith("pretraining.json")]
    assert unchanged
    assert all(again[path] == pretrained[path] for path in unchanged)
    assert more["complete"]
    assert more["runs"][0]["curves"][0] == first["runs"][0]["curves"][0]
    assert more["runs"][2]["steps"] == 8
    kept = tmp_path / "out" / "results" / "mlm"
    scores = json.loads((kept / "seed-1" / "chunk.json").read_text())["scores"]
    assert len(scores) == 2
    # Asked for fewer fine-tunings, every row has the first of them.
    change(kept / "seed-1" / "chunk.json", scores=[0.25, 0.75], median=0.5)
    fewer = request(world, tmp_path, 'seeds = 2\ntasks = ["chunk"]\n')
    assert read_again(fewer)["runs"][1]["scores"]["chunk"]["values"][1] == 0.25
    # What a seed that diverged was given is no measure of the row.
    change(kept / "seed-1" / "pretraining.json", failure="not finite", seconds=1e6, held_out={"heldout_mlm_loss": 9.9})
    found = read_again(fewer)["runs"][1]
    assert found["finished_seeds"] == 1
    assert found["failures"] == {"1": "not finite"}
    assert found["seconds"] == json.loads((kept / "seed-0" / "pretraining.json").read_text())["seconds"]
    assert found["held_out"]["heldout_mlm_loss"]["highest"] < 9.9


@pytest.mark.parametrize(("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9)])
def test_stopped_it_goes_on_to_the_same_result(
    world: Path, uninterrupted: dict[str, Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    asked = request(world, tmp_path / "cut", 'seeds = 1\ntasks = ["rte"]\n', LONG, overrides=STEPS)
    line = ["-m", "discern", "compare", asked.config, "--preset", asked.preset, "--data", asked.data, "--json"]
    process = Program(*line, "--out", asked.out, "--task-data", asked.task_data, *(f"--set={setting}" for setting in STEPS))
    checkpoint = asked.out / "work" / "rtd" / "seed-0" / "pretraining" / "checkpoints" / "step-00000010"
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == code, messages
    assert not (asked.out / "results" / "rtd" / "seed-0" / "rte.json").exists()
    if number == signal.SIGINT:
        assert json.loads((asked.out / COMPARISON_FILE).read_text())["complete"] is False
    done = run(asked)
    for cut, uncut in zip(done["runs"], uninterrupted["runs"], strict=True):
        assert cut["scores"] == uncut["scores"]
        assert cut["held_out"] == uncut["held_out"]
        assert cut["steps"] == uncut["steps"]


def test_what_another_process_works_on_is_left_to_it(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, "seeds = 1\n")
    with held(asked.out / "work" / "rtd" / ".seed-0.lock") as mine:
        assert mine
        found = run(asked)
    assert not found["complete"]
    assert not (asked.out / "results" / "rtd").exists()
    assert (asked.out / "results" / "mlm" / "seed-0" / "pretraining.json").is_file()
    assert run(asked)["complete"]


def test_processes_publish_one_after_another(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, "seeds = 1\n")
    asked.out.mkdir()
    plan = plan_comparison(**vars(asked))
    publishing = Thread(target=module.publish, args=(plan, units(plan)))
    with alone_in(asked.out):
        publishing.start()
        publishing.join(0.5)
        assert publishing.is_alive()
        assert not (asked.out / COMPARISON_FILE).exists()
    publishing.join(60)
    assert (asked.out / COMPARISON_FILE).is_file()


def test_equal_tokens(world: Path, tmp_path: Path) -> None:
    body = BODY + '[[run]]\nname = "wide"\nset = { "train.sequences_per_step" = 16 }\n'
    plan = plan_comparison(**vars(request(world, tmp_path, 'equal = "tokens"\nseeds = 1\n', body)))
    assert [run.steps for run in plan.runs] == [16, 16, 8]
    assert {run.tokens for run in plan.runs} == {16 * 8 * 32}


@pytest.mark.usefixtures("unverified")
def test_equal_seconds(world: Path, tmp_path: Path) -> None:
    asked = request(
        world, tmp_path, 'equal = "seconds"\nseeds = 1\n', overrides=("train.max_steps=24", "train.log_every_steps=1")
    )
    found = run(asked)
    rtd, mlm = found["runs"]
    assert rtd["steps"] == 24
    step = rtd["seconds"] / 24
    assert rtd["seconds"] <= mlm["seconds"] < rtd["seconds"] + 20 * step + 0.5
    assert run(asked) == found
    head, half = 'equal = "seconds"\nseeds = 1\n', BODY + "budget = 0.5\n"
    with pytest.raises(ConfigError, match=r"mlm, seed 0: budget was 1.0, is 0.5"):
        run(request(world, tmp_path / "half", head, half, out=asked.out, overrides=asked.overrides))
    limited = BODY.replace('name = "rtd"', 'name = "rtd"\nset.train.max_hours = 1.0')
    with pytest.raises(ConfigError, match=r"rtd, seed 0: train\.max_hours was None, is 1.0"):
        run(request(world, tmp_path / "limited", head, limited, out=asked.out, overrides=asked.overrides))
    result = asked.out / "results" / "mlm" / "seed-0" / "pretraining.json"
    # One that was stopped has begun with the time that it then had.
    begun = asked.out / "work" / "mlm" / "seed-0" / "pretraining" / "config.toml"
    before, config = result.read_bytes(), begun.read_text()
    result.unlink()
    begun.write_text(re.sub("max_hours = .*", "max_hours = 9.0", config))
    (begun.parent / CHECKSUMS_NAME).unlink()
    with pytest.raises(ConfigError, match=r"mlm, seed 0: its time limit was 9.0 hours"):
        run(asked)
    begun.write_text(config)
    result.write_bytes(before)


def test_equal_seconds_waits_for_a_reference_that_another_process_makes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(world, tmp_path, 'equal = "seconds"\nseeds = 1\nbaseline = true\n')
    listener = Listener()
    with ExitStack() as other:
        other.enter_context(held(asked.out / "work" / "rtd" / ".seed-0.lock"))
        monkeypatch.setattr(module.time, "sleep", lambda _: other.close())
        assert compare(**vars(asked), progress=listener)["complete"]
    told = [note for note in listener.notes if not note.startswith("step")]
    assert told[:3] == [
        "1 of 3: rtd, seed 0: in progress in another process",
        "2 of 3: mlm, seed 0: waiting for rtd, seed 0, which another process is running",
        "3 of 3: untrained, seed 0",
    ]
    assert "rtd, seed 0" in told[3:]  # the other process has gone without a result
    by_steps, by_time = (stage for stage in listener.stages if stage[0].startswith("pre-training"))
    assert by_steps == ("pre-training", 16)
    assert by_time == ("pre-training", 1.0)  # of the time budget


def test_equal_seconds_goes_on_where_the_reference_diverges(world: Path, tmp_path: Path) -> None:
    wild = 'name = "rtd"\nset = { "optimizer.learning_rate" = 1e30, "optimizer.clip_norm" = 0.0 }'
    body = BODY.replace('name = "rtd"', wild)
    asked = request(world, tmp_path, 'equal = "seconds"\nseeds = 1\nbaseline = true\n', body)
    listener = Listener()
    found = compare(**vars(asked), progress=listener)
    reason = "mlm, seed 0 is left out: the reference diverged with seed 0, so the time limit is unknown"
    assert reason in found["notes"]
    assert reason in listener.notes
    assert found["complete"]
    assert [row["finished_seeds"] for row in found["runs"]] == [0, 0, 1]
    assert not (asked.out / "results" / "mlm").exists()
    assert [row["seeds_left"] for row in dry_run(**vars(asked))["runs"]] == [0, 0, 0]
    folders = [str(asked.out / part / "rtd" / "seed-0") for part in ("results", "work")]
    assert [note for note in listener.notes if f"remove {folders[0]} and {folders[1]} to try it again" in note]
    for folder in folders:
        shutil.rmtree(folder)
    assert [row["seeds_left"] for row in dry_run(**vars(asked))["runs"]] == [1, 1, 0]


def test_the_page_is_written_whatever_ends_the_work(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise DataError("no such row")

    monkeypatch.setattr(module, "finetune", fails)
    asked = request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\n')
    with pytest.raises(DataError, match="no such row"):
        run(asked)
    assert json.loads((asked.out / COMPARISON_FILE).read_text())["runs"][0]["steps"] == 16


def test_the_baseline_begins_with_the_generator_that_the_reference_began_with(world: Path, tmp_path: Path) -> None:
    pretrain(data=world / "data", out=tmp_path / "earlier", preset="tiny", overrides=("train.max_steps=2",), progress=Silent())
    overrides = ("train.max_steps=1", f"objective.generator_checkpoint={tmp_path / 'earlier'}")
    body = '[[run]]\nname = "rtd"\n'
    asked = request(world, tmp_path, 'seeds = 1\nbaseline = true\nkeep = "all"\n', body, overrides=overrides)
    run(asked)
    folders = (tmp_path / "earlier", asked.out / "work" / "untrained" / "seed-0" / "pretraining")
    generators = [load_run(folder, warn=pytest.fail).objective.networks()["generator"].encoder for folder in folders]
    then, now = (list(generator.parameters()) for generator in generators)
    assert all(torch.equal(a, b) for a, b in zip(then, now, strict=True))


def test_settings_that_name_steps_are_stretched_unless_a_run_sets_them(world: Path, tmp_path: Path) -> None:
    body = """
[[run]]
name = "whole"
[[run]]
name = "half"
budget = 0.5
[[run]]
name = "own"
budget = 0.5
set = { optimizer.warmup_steps = 7 }
"""
    shared = (
        "train.max_steps=40",
        "objective.tying=none",
        "objective.freeze_generator_at=30",
    )
    plan = plan_comparison(**vars(request(world, tmp_path, "seeds = 1\n", body, overrides=shared)))
    whole, half, own = plan.runs
    assert whole.steps == 40
    assert half.flops is not None
    assert half.flops.executed == pytest.approx((plan.budget or 0) / 2, rel=0.03)
    factor = (half.steps or 0) / 40
    settings = vars(half.config.objective)
    assert settings["freeze_generator_at"] == round(30 * factor)
    assert half.config.optimizer.warmup_steps == round(0.2 * (half.steps or 0))
    assert own.config.optimizer.warmup_steps == 7


def test_the_sizes_are_those_of_the_network_that_is_evaluated(world: Path, tmp_path: Path) -> None:
    body = '[[run]]\nname = "whole"\nnetwork = "generator"\n[[run]]\nname = "other"\n'
    plan = plan_comparison(**vars(request(world, tmp_path, "seeds = 1\n", body, overrides=("objective.generator_size=0.5",))))
    generator, discriminator = (run.encoder.hidden_size for run in plan.runs if run.trained)
    assert generator == discriminator // 2


def test_segments_that_rounding_would_join_stay_apart(world: Path, tmp_path: Path) -> None:
    body = '[[run]]\nname = "whole"\n[[run]]\nname = "quarter"\nbudget = 0.25\n'
    shared = ("train.max_steps=40", "train.batch_schedule=[[0, 256], [38, 512], [39, 1024]]")
    quarter = plan_comparison(**vars(request(world, tmp_path, "seeds = 1\n", body, overrides=shared))).runs[1]
    last = round(39 * (quarter.steps or 0) / 40)
    assert [step for step, _ in quarter.config.train.batch_schedule] == [0, last - 1, last]


def test_a_file_of_a_run_is_taken_as_its_settings_are(world: Path, tmp_path: Path) -> None:
    body = '[[run]]\nname = "whole"\n[[run]]\nname = "half"\nbudget = 0.5\nconfig = "own.toml"\n'
    asked = request(world, tmp_path, "seeds = 1\n", body)
    (tmp_path / "own.toml").write_text("[optimizer]\nwarmup_steps = 7\n")
    assert plan_comparison(**vars(asked)).runs[1].config.optimizer.warmup_steps == 7
    # What all runs are given goes over the file, and is stretched.
    shared = replace(asked, overrides=(*asked.overrides, "optimizer.warmup_steps=6"))
    assert plan_comparison(**vars(shared)).runs[1].config.optimizer.warmup_steps == 3
    (tmp_path / "own.toml").write_text("[train]\nmax_steps = 5\n")
    with pytest.raises(ConfigError, match=r"run 'half': .*own.toml, line 2 sets train.max_steps.* budget of 'whole'") as caught:
        plan_comparison(**vars(asked))
    assert "budget = 0.5" in (caught.value.hint or "")


def test_dry_run_says_what_would_be_done_and_writes_nothing(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, 'seeds = 3\ntasks = ["rte"]\nbaseline = true\n')
    found = dry_run(**vars(asked))
    assert [row["seeds_left"] for row in found["runs"]] == [3, 3, 3]
    assert found["finetunings_left"] == 9
    assert found["runs"][0]["steps"] == 16
    assert found["estimated_hours_left"] > 0
    assert found["runs"][1]["flops"] == pytest.approx(found["budget"], rel=0.03)
    assert Path(found["tasks"]["rte"]).name == "RTE"
    assert not asked.out.exists()


def test_a_run_that_diverges_is_a_row_and_the_rest_goes_on(world: Path, tmp_path: Path) -> None:
    body = BODY + '[[run]]\nname = "wild"\nset = { "optimizer.learning_rate" = 1e30, "optimizer.clip_norm" = 0.0 }\n'
    found = run(request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\n', body))
    wild = found["runs"][2]
    assert "not finite" in wild["failures"]["0"]
    assert wild["scores"]["rte"]["median"] is None
    assert found["complete"]
    assert found["runs"][1]["scores"]["rte"]["median"] is not None
    assert "Failures" in (tmp_path / "out" / PAGE_FILE).read_text()


def test_a_foreign_folder_is_refused(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, "seeds = 1\n")
    asked.out.mkdir()
    (asked.out / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match="holds no comparison"):
        run(asked)
    assert [path.name for path in asked.out.iterdir()] == ["letter.txt"]
    (asked.out / "results").mkdir()
    _claim(asked.out)  # a comparison that has begun goes on, whatever else is beside it


def test_the_clock_cannot_end_what_goes_by_steps(world: Path, tmp_path: Path) -> None:
    body = '[[run]]\nname = "a"\n[[run]]\nname = "b"\nset.objective = { algorithm = "two-stage", generator_size = 1.0 }\n'
    with pytest.raises(ConfigError, match="run 'b' has several phases"):
        plan_comparison(**vars(request(world, tmp_path, 'equal = "seconds"\n', body)))
    with pytest.raises(ConfigError, match=r"run 'a' has train.max_hours = 1"):
        plan_comparison(**vars(request(world, tmp_path, "", body, overrides=("train.max_hours=1",))))


def test_equal_seconds_leave_no_run_more_evaluations_than_the_reference(world: Path, tmp_path: Path) -> None:
    head = 'equal = "seconds"\nseeds = 1\n'
    limited = BODY.replace('name = "rtd"', 'name = "rtd"\nset.train.max_hours = 0.1')
    for body, pinned in ((BODY, True), (limited, False)):
        _, other = plan_comparison(**vars(request(world, tmp_path, head, body))).runs
        names = {setting.partition("=")[0] for setting in other.overrides_of(0, 0.1)}
        assert ("train.evaluate_every_steps" in names) == pinned
    decay = BODY.replace('"mlm" }', '"mlm", "optimizer.schedule" = "wsd", "optimizer.decay_steps" = 5 }')
    with pytest.raises(ConfigError, match=r"run 'mlm': .*optimizer.decay_steps is set, but the number of steps .* not known"):
        plan_comparison(**vars(request(world, tmp_path, head, decay)))


def test_a_wrong_setting_of_fine_tuning_shows_before_any_training(world: Path, tmp_path: Path) -> None:
    asked = request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\n', BODY.replace("train.max_steps", "train.max_stepss"))
    with pytest.raises(ConfigError, match=r"fine-tuning on 'rte': .*max_stepss"):
        run(asked)
    assert not asked.out.exists()
