"""Comparisons end to end on small text and small tasks: equal cost, going on, refusing, tidying."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import discern.compare.run as module
from discern.compare.plan import ComparisonPlan, plan_comparison
from discern.compare.run import COMPARISON_FILE, PAGE_FILE, RESULT_FILE, check_results, compare, list_units
from discern.compare.summary import summarize
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from discern.storage.files import held
from tests.processes import Program
from tests.report.test_page import assert_stands_alone, structure

WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
Options = dict[str, Any]
"""The arguments of a comparison."""
FINETUNE = """
[finetune]
set = { "train.max_steps" = 2, "task.sequence_length" = 16 }
"""
RTD = '[[run]]\nname = "rtd"\n'
MLM = '[[run]]\nname = "mlm"\nset = { "objective.name" = "mlm" }\n'
BODY = FINETUNE + RTD + MLM
LONG = f"{BODY}budget = 0.1\n"
STEPS = ("train.max_steps=80", "train.checkpoint_every_steps=10")
WILD = 'set = { "optimizer.learning_rate" = 1e30, "optimizer.clip_norm" = 0.0 }\n'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set and two task folders."""
    folder, rng = tmp_path_factory.mktemp("world"), random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=9)) + ("\n" if number % 5 == 4 else "") for number in range(600)]
    (folder / "text.txt").write_text("\n".join(lines))
    prepare(
        [str(folder / "text.txt")],
        out=folder / "data",
        tokenizer=TokenizerChoice(train="wordpiece", vocab_size=120, lowercase=True),
        options=PrepareOptions(heldout=0.2, workers=1),
        progress=Silent(),
    )
    for task, columns in (("RTE", "sentence1\tsentence2"), ("QNLI", "question\tsentence")):
        (folder / "tasks" / task).mkdir(parents=True)
        for split, count in (("train", 24), ("dev", 8)):
            rows = [f"{n}\t{' '.join(rng.choices(WORDS, k=4))}\tcat\t{'not_' * (n % 2)}entailment" for n in range(count)]
            (folder / "tasks" / task / f"{split}.tsv").write_text("\n".join([f"index\t{columns}\tlabel", *rows]) + "\n")
    return folder


def request(world: Path, folder: Path, head: str, body: str = BODY, **more: Any) -> Options:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.toml").write_text(head + body)
    options = {"config": folder / "compare.toml", "data": world / "data", "out": folder / "out", "task_data": world / "tasks"}
    return {**options, "preset": "tiny", "overrides": ("train.max_steps=16",), **more}


def run(options: Options, **more: Any) -> dict[str, Any]:
    return compare(**options, **{"progress": Silent(), **more})


def plan(options: Options) -> ComparisonPlan:
    return plan_comparison(**options, device="cpu")


class Listener(Silent):
    """Keeps what was announced."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


XLNETS = """
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


def test_an_xlnet_a_masked_language_model_on_its_encoder_and_an_electra(world: Path, tmp_path: Path) -> None:
    planned = plan(request(world, tmp_path, 'tasks = ["rte"]\n', FINETUNE + XLNETS, overrides=("train.max_steps=40",)))
    costs = [run.cost["flops"] for run in planned.runs]
    assert costs == pytest.approx([planned.budget] * 3, rel=0.03)


def test_equal_flops_two_seeds_two_tasks_and_a_baseline(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = request(world, tmp_path, 'seeds = 2\ntasks = ["rte", "qnli"]\nbaseline = true\n')
    out = options["out"]
    summary = run(options)
    assert summary["complete"]
    assert summary == json.loads((out / COMPARISON_FILE).read_text())
    rtd, mlm, untrained = summary["runs"]
    assert mlm["steps"] > rtd["steps"] == 16
    assert mlm["flops"] == pytest.approx(rtd["flops"], rel=0.03)
    assert untrained["flops"] == untrained["steps"] == 0
    for row in summary["runs"]:
        scores = row["scores"]
        assert len(scores["rte"]["values"]) == 2
        assert scores["mean"]["values"][0] == pytest.approx((scores["rte"]["values"][0] + scores["qnli"]["values"][0]) / 2)
        assert scores["rte"]["lowest"] <= scores["rte"]["median"] <= scores["rte"]["highest"]
    assert "heldout_mlm_loss" in mlm["held_out"]
    assert summary["significance"][0]["smallest_p"] == pytest.approx(1 / 3)
    html = (out / PAGE_FILE).read_text(encoding="utf-8")
    assert_stands_alone(html)
    structure(html)
    assert all(shown in html for shown in ("<svg", "0.333", "Score against seconds of pre-training"))
    assert str(tmp_path) not in html
    # The encoder stays, checkpoints and fine-tuned weights don't.
    work = out / "work" / "rtd" / "seed-1"
    assert (work / "encoder" / "model.safetensors").is_file()
    assert not (work / "pretraining").exists()
    assert list(work.glob("tasks/*/seed-*/model.safetensors")) == []
    # The seeds start from different weights, and the baseline from those of the reference.
    weights = {path.read_bytes() for path in (out / "work").glob("*/*/encoder/model.safetensors")}
    assert len(weights) == 6

    for work in ("pretrain", "finetune", "open_run"):
        monkeypatch.setattr(module, work, None)
    assert run(options) == summary, "nothing is done again"


@pytest.mark.usefixtures("unverified")
def test_results_alone_count_as_done_and_a_changed_setting_is_refused(world: Path, tmp_path: Path) -> None:
    options = request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\nkeep = "results"\n')
    summary = run(options)
    assert list((options["out"] / "work").glob("*/seed-*")) == []
    copy = options | {"out": tmp_path / "copy"}
    shutil.copytree(options["out"] / "results", copy["out"] / "results")
    assert run(copy) == summary
    assert not (copy["out"] / "work").exists()
    changed = tmp_path / "changed"
    shutil.copytree(world / "tasks", changed)
    with (changed / "RTE" / "dev.tsv").open("a") as stream:
        stream.write("8\tthe cat\tdog\tentailment\n")
    for asked, message in (
        (copy | {"overrides": ("train.max_steps=20",)}, r": train\.max_steps was 16, is 20"),
        (copy | {"overrides": (*copy["overrides"], "train.evaluate_sequences=8")}, ": train.evaluate_sequences was 2000, is 8"),
        (copy | {"task_data": changed}, ", rte: files was .*, is"),
    ):
        with pytest.raises(ConfigError, match=f"rtd, seed 0{message}") as caught:
            run(asked)
        assert "another name" in (caught.value.hint or "")
    with pytest.raises(DataError, match=r"rtd, seed 0 is pre-trained, but its encoder is gone .* and qnli needs it"):
        run(request(world, tmp_path / "more", 'seeds = 1\ntasks = ["rte", "qnli"]\n', out=copy["out"]))
    # What only decides how often something is written may change.
    assert run(copy | {"overrides": (*copy["overrides"], "train.log_every_steps=3")})["complete"]


@pytest.mark.usefixtures("unverified")
def test_more_seeds_more_tasks_and_more_runs_go_on(world: Path, tmp_path: Path) -> None:
    first = run(request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\n'))
    body = BODY.replace("[finetune]", "[finetune]\nseeds = 2") + '[[run]]\nname = "half"\nbudget = 0.5\n'
    more = run(request(world, tmp_path, 'seeds = 2\ntasks = ["rte", "qnli"]\n', body))
    assert more["complete"]
    assert more["runs"][0]["curves"][0] == first["runs"][0]["curves"][0]
    assert more["runs"][2]["steps"] == 8
    path = tmp_path / "out" / "results" / "mlm" / "seed-1" / RESULT_FILE
    result = json.loads(path.read_text())
    assert len(result["tasks"]["qnli"]["scores"]) == 2

    # With fewer fine-tunings, every row has the first of them; the costs and metrics of a seed that diverged don't count.
    result["tasks"]["qnli"]["scores"] = [0.25, 0.75]
    result["pretraining"] |= {"failure": "not finite", "seconds": 1e6, "held_out": {"heldout_mlm_loss": 9.9}}
    path.write_text(json.dumps(result))
    planned = plan(request(world, tmp_path, 'seeds = 2\ntasks = ["qnli"]\n'))
    units = list_units(planned)
    check_results(planned, units)
    row = summarize(planned, units)["runs"][1]
    assert row["scores"]["qnli"]["values"][1] == 0.25
    assert (row["finished_seeds"], row["failures"]) == (1, {"1": "not finite"})
    assert row["held_out"]["heldout_mlm_loss"]["highest"] < 9.9
    assert row["seconds"] < 1e5


@pytest.mark.parametrize(("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9)])
def test_stopped_it_goes_on_to_the_same_result(world: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    head = 'seeds = 1\ntasks = ["rte"]\n'
    uninterrupted = run(request(world, tmp_path / "whole", head, LONG, overrides=STEPS))
    options = request(world, tmp_path / "cut", head, LONG, overrides=STEPS)
    out = options["out"]
    line = ["-m", "discern", "compare", options["config"], "--preset", "tiny", "--data", options["data"], "--json"]
    process = Program(*line, "--out", out, "--task-data", options["task_data"], *(f"--set={setting}" for setting in STEPS))
    checkpoint = out / "work" / "rtd" / "seed-0" / "pretraining" / "checkpoints" / "step-00000010"
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == code, messages
    assert json.loads((out / "results" / "rtd" / "seed-0" / RESULT_FILE).read_text())["pretraining"] is None
    if number == signal.SIGINT:
        assert json.loads((out / COMPARISON_FILE).read_text())["complete"] is False
    for cut, whole in zip(run(options)["runs"], uninterrupted["runs"], strict=True):
        assert all(cut[key] == whole[key] for key in ("scores", "held_out", "steps"))


def test_what_another_process_works_on_is_left_to_it(world: Path, tmp_path: Path) -> None:
    options = request(world, tmp_path, "seeds = 1\n")
    with held(options["out"] / "work" / "rtd" / ".seed-0.lock") as mine:
        assert mine
        assert not run(options)["complete"]
    assert run(options)["complete"]


def test_equal_tokens(world: Path, tmp_path: Path) -> None:
    body = BODY + '[[run]]\nname = "wide"\nset = { "train.sequences_per_step" = 16 }\n'
    planned = plan(request(world, tmp_path, 'equal = "tokens"\nseeds = 1\n', body))
    assert [run.cost["steps"] for run in planned.runs] == [16, 16, 8]
    assert {run.cost["tokens"] for run in planned.runs} == {16 * 8 * 32}


@pytest.mark.usefixtures("unverified")
def test_equal_seconds(world: Path, tmp_path: Path) -> None:
    head, overrides = 'equal = "seconds"\nseeds = 1\n', ("train.max_steps=24", "train.log_every_steps=1")
    options = request(world, tmp_path, head, overrides=overrides)
    summary = run(options)
    rtd, mlm = summary["runs"]
    assert rtd["steps"] == 24
    assert rtd["seconds"] <= mlm["seconds"] < rtd["seconds"] + 20 * rtd["seconds"] / 24 + 0.5
    assert run(options) == summary
    with pytest.raises(ConfigError, match=r"mlm, seed 0: budget was 1.0, is 0.5"):
        run(request(world, tmp_path / "other", head, BODY + "budget = 0.5\n", out=options["out"], overrides=overrides))
    # A run that was stopped has begun with the time that it then had.
    path = options["out"] / "results" / "mlm" / "seed-0" / RESULT_FILE
    result = json.loads(path.read_text())
    result["specification"]["train.max_hours"] = 9.0
    path.write_text(json.dumps({**result, "pretraining": None}))
    with pytest.raises(ConfigError, match=r"mlm, seed 0: train\.max_hours was 9.0"):
        run(options)


def test_equal_seconds_waits_for_a_reference_that_another_process_makes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = request(world, tmp_path, 'equal = "seconds"\nseeds = 1\nbaseline = true\n')
    listener = Listener()
    with ExitStack() as other:
        other.enter_context(held(options["out"] / "work" / "rtd" / ".seed-0.lock"))
        monkeypatch.setattr(module.time, "sleep", lambda _: other.close())
        assert run(options, progress=listener)["complete"]
    told = [note for note in listener.notes if not note.startswith("step")]
    assert told[:3] == [
        "1 of 3: rtd, seed 0: in progress in another process",
        "2 of 3: mlm, seed 0: waiting for its reference in another process",
        "3 of 3: untrained, seed 0",
    ]
    assert "rtd, seed 0" in told[3:]  # the other process has gone without a result


def test_equal_seconds_goes_on_where_the_reference_diverges(world: Path, tmp_path: Path) -> None:
    options = request(world, tmp_path, 'equal = "seconds"\nseeds = 1\nbaseline = true\n', FINETUNE + RTD + WILD + MLM)
    listener = Listener()
    summary = run(options, progress=listener)
    reason = "mlm, seed 0 is left out: the reference diverged with seed 0, so the time limit is unknown"
    assert summary["notes"] == [reason]
    assert summary["complete"]
    assert [row["finished_seeds"] for row in summary["runs"]] == [0, 0, 1]
    assert "not finite" in summary["runs"][0]["failures"]["0"]
    assert "Failures" in (options["out"] / PAGE_FILE).read_text()
    assert [row["seeds_left"] for row in run(options, dry_run=True)["runs"]] == [0, 0, 0]
    folders = [options["out"] / part / "rtd" / "seed-0" for part in ("results", "work")]
    assert any(note.endswith(f"remove {folders[0]} and {folders[1]} to try it again") for note in listener.notes)
    for folder in folders:
        shutil.rmtree(folder)
    assert [row["seeds_left"] for row in run(options, dry_run=True)["runs"]] == [1, 1, 0]


def test_the_page_is_written_whatever_ends_the_work(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise DataError("no such row")

    monkeypatch.setattr(module, "finetune", fails)
    options = request(world, tmp_path, 'seeds = 1\ntasks = ["rte"]\n')
    with pytest.raises(DataError, match="no such row"):
        run(options)
    assert json.loads((options["out"] / COMPARISON_FILE).read_text())["runs"][0]["steps"] == 16


def test_settings_that_name_steps_are_rescaled_unless_a_run_sets_them(world: Path, tmp_path: Path) -> None:
    body = """
[[run]]
name = "whole"
[[run]]
name = "half"
budget = 0.5
[[run]]
name = "file"
budget = 0.5
config = "own.toml"
"""
    (tmp_path / "own.toml").write_text("[optimizer]\nwarmup_steps = 7\n")
    shared = ("train.max_steps=40", "objective.tying=none", "objective.freeze_generator_at=30")
    planned = plan(request(world, tmp_path, "seeds = 1\n", body, overrides=shared))
    whole, half, file = planned.runs
    assert (whole.cost["steps"], file.config.optimizer.warmup_steps) == (40, 7)
    assert half.cost["flops"] == pytest.approx((planned.budget or 0) / 2, rel=0.03)
    steps = half.config.train.max_steps
    assert vars(half.config.objective)["freeze_generator_at"] == round(30 * steps / 40)
    # The settings of all runs override a file, and are rescaled; segments without steps are left out.
    shared = (*shared, "optimizer.warmup_steps=6", "train.batch_schedule=[[0, 256], [30, 512], [31, 1024]]")
    *_, file = plan(request(world, tmp_path, "seeds = 1\n", body.replace("0.5", "0.25"), overrides=shared)).runs
    factor = file.config.train.max_steps / 40
    assert file.config.optimizer.warmup_steps == round(6 * factor)
    assert file.config.train.batch_schedule == ((0, 256), (round(31 * factor), 1024))


def test_the_sizes_are_those_of_the_network_that_is_evaluated(world: Path, tmp_path: Path) -> None:
    body = '[[run]]\nname = "whole"\nnetwork = "generator"\n[[run]]\nname = "other"\n'
    planned = plan(request(world, tmp_path, "seeds = 1\n", body, overrides=("objective.generator_size=0.5",)))
    generator, discriminator = (run.encoder.hidden_size for run in planned.runs)
    assert generator == discriminator // 2


def test_dry_run_says_what_would_be_done_and_writes_nothing(world: Path, tmp_path: Path) -> None:
    options = request(world, tmp_path, 'seeds = 3\ntasks = ["rte"]\nbaseline = true\n')
    planned = run(options, dry_run=True)
    assert [row["seeds_left"] for row in planned["runs"]] == [3, 3, 3]
    assert planned["finetunings_left"] == 9
    assert planned["estimated_hours_left"] > 0
    assert Path(planned["tasks"]["rte"]).name == "RTE"
    assert not options["out"].exists()


def test_a_foreign_folder_is_refused(world: Path, tmp_path: Path) -> None:
    options = request(world, tmp_path, "seeds = 1\n")
    options["out"].mkdir()
    (options["out"] / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match="holds no comparison"):
        run(options)


def test_equal_seconds_leave_no_run_more_evaluations_than_the_reference(world: Path, tmp_path: Path) -> None:
    limited = BODY.replace('name = "rtd"', 'name = "rtd"\nset.train.max_hours = 0.1')
    for body, pinned in ((BODY, True), (limited, False)):
        _, other = plan(request(world, tmp_path, 'equal = "seconds"\nseeds = 1\n', body)).runs
        names = {setting.partition("=")[0] for setting in other.overrides}
        assert ("train.evaluate_every_steps" in names) == pinned


TWO_STAGE = '[[run]]\nname = "b"\nset.objective = { algorithm = "two-stage", generator_size = 1.0 }\n'
DECAY = BODY.replace('"mlm" }', '"mlm", "optimizer.schedule" = "wsd", "optimizer.decay_steps" = 5 }')


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        ("", RTD + '[[run]]\nname = "b"\nset = { train.max_steps = 5 }', "run 'b' sets train.max_steps, .* those of 'rtd'"),
        ("", RTD + '[[run]]\nname = "b"\nconfig = "seed.toml"', "run 'b' sets train.seed, .* those of 'rtd'"),
        ("", RTD + "set.train.max_hours = 1", "run 'rtd' has train.max_hours = 1"),
        ('equal = "seconds"\n', RTD + TWO_STAGE, "run 'b': .*two_stage_steps has a fraction"),
        ('equal = "seconds"\n', DECAY, r"run 'mlm': .*optimizer.decay_steps is set, but the number of steps .* not known"),
        ('tasks = ["rte"]\n', BODY.replace("train.max_steps", "train.max_stepss"), r"fine-tuning on 'rte': .*max_stepss"),
        ("", RTD + 'network = "decoder"', "run 'rtd' has no network 'decoder'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(
    world: Path, tmp_path: Path, head: str, body: str, message: str
) -> None:
    options = request(world, tmp_path, head, body)
    (tmp_path / "seed.toml").write_text("[train]\nseed = 5\n")
    with pytest.raises(ConfigError, match=message):
        run(options)
    assert not options["out"].exists()
