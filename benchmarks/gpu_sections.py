"""The sections of gpu.py, each in a process of its own: `python gpu_sections.py NAME`, which waits for its seconds on stdin."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch
    from gpu import KEPT

    from discern.data.batching.synthetic import SPECIAL, SyntheticRows
    from discern.model_files.run import build_objective
    from discern.models import attention as span_attention
    from discern.models.config import build_config
    from discern.objectives import objectives
    from discern.objectives.base import BuildSettings, Objective, Vocabulary
    from discern.pretraining.bench import synthetic_context, time_training
    from discern.progress import Silent
    from discern.training.config import OptimizerConfig, TrainConfig, load_pretrain_config
    from discern.training.distributed import Ranks
    from discern.training.execution import autocast
    from discern.training.flops import fastest_product, step_flops
    from discern.training.loop import forward_backward, reduce_step_counts, setup_phase, train, update
    from discern.training.metrics import MetricsLog, NonFiniteGuard, StepCounters, StepMeter, read_metrics
    from discern.training.optimizer import clip_gradients
    from discern.training.prefetch import Feed, read_local_batch
    from discern.training.process import StopRequest
    from discern.training.state import State, TrainContext
    from discern.types import TokenBatch, with_spans
except ModuleNotFoundError as problem:
    raise SystemExit(
        f"error: this python ({sys.executable}) has no module '{problem.name}'\n"
        "  hint: PYTHONPATH must name discern's src, and a folder with the unpacked wheels of what is missing; see gpu.sh"
    ) from None

CUDA = torch.cuda.is_available()
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0) if CUDA else torch.device("cpu")
VOCAB = 30_522
TINY = {"num_layers": 3, "hidden_size": 64, "embedding_size": 64, "num_heads": 2, "feedforward_size": 128}
# The largest differences that rounding explains, as fractions of what is compared.
CLOSE = {"float32": 1e-3, "bfloat16": 3e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("--small", action="store_true")
    request = parser.parse_args()
    seconds = float(sys.stdin.readline())
    if request.name == os.environ.get("GPU_FAIL"):
        raise RuntimeError(f"GPU_FAIL asks the section {request.name} to fail")
    warnings.simplefilter("ignore")
    if request.name == "correctness":
        name = torch.cuda.get_device_name(0) if CUDA else "cpu"
        tell(machine={"device": name, "torch": torch.__version__, "CUDA": torch.version.cuda, "Python": sys.version.split()[0]})
    SECTIONS[request.name](request.small or not CUDA, Clock(seconds))


class Clock:
    """The time of a section."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def tell(**results: Any) -> None:
    """Tell the parent a result: one line."""
    print(json.dumps(results), flush=True)


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Turn an error in the block into a result, and continue with the section."""
    try:
        yield
    except Exception:  # any error: the other results must still be reported
        lines = traceback.format_exc().splitlines()
        tell(what=what, failed="\n".join(lines if len(lines) <= 2 * KEPT else [*lines[:KEPT], "...", *lines[-KEPT:]]))
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


# ---- correctness ----


def correctness(small: bool, clock: Clock) -> None:
    """Logits, runs and their resumption on the device against those on the CPU, and steps in which the host may not wait."""
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        resumed = pool.submit(killed_and_resumed, Path(folder))  # in processes of their own
        with attempt("parity"):
            parity()
        for name, options in RUNS.items() if CUDA else list(RUNS.items())[-2:]:  # without a GPU, there is little to compare
            with attempt(f"run of {name}"):
                golden(name, options)
            if CUDA:
                with attempt(f"waits of {name}"):
                    never_waits(name, options)
        with attempt("kill and resume"):
            told(
                compared="a run that was killed and resumed, with one that was not",
                where="losses of 30 steps",
                **resumed.result(),
            )


def told(compared: str, where: str, precision: str, difference: float) -> None:
    tell(compared=compared, where=where, precision=precision, difference=difference, equal=difference < CLOSE[precision])


@torch.no_grad()
def parity() -> None:
    """Logits of the same weights on the device and on the CPU, padded and without padding; and of transformers."""
    for encoder in ("bert", "modernbert"):
        objective = build("rtd", {"model": {"encoder": encoder, "attention_dropout": 0.0}}, 1000).eval()
        rng = torch.Generator().manual_seed(1)
        for parameter in objective.parameters():  # far from the start, where every logit is about zero
            parameter += 0.05 * torch.randn(parameter.shape, generator=rng)
        batch = SyntheticRows(1000, 64, 0.7, 4, 0).batch(np.arange(4), np.arange(4))
        name, network = next(iter(objective.networks().items()))
        expected = logits(network, batch, "float32")
        objective.to(DEVICE)
        forms = [("float32", batch), ("bfloat16", batch)] + ([("bfloat16", with_spans(batch))] if CUDA else [])
        for precision, given in forms:
            form = "padded rows" if given is batch else "tokens alone"
            got = logits(network, given.to(DEVICE), precision).cpu()
            told(f"{encoder} with the CPU", f"logits of the {name}, {form}", precision, relative(got, expected, batch))
        if encoder == "bert":
            theirs = transformers_logits(name, network, batch)
            got = logits(network, batch.to(DEVICE), "float32").cpu()
            told(f"{encoder} with transformers", f"logits of the {name}", "float32", relative(got, theirs, batch))


def logits(network: Any, batch: TokenBatch, precision: str) -> torch.Tensor:
    with autocast(precision, batch.input_ids.device):
        found: torch.Tensor = network.token_logits(batch.input_ids, *batch.context).float()
    return found


def relative(ours: torch.Tensor, theirs: torch.Tensor, batch: TokenBatch) -> float:
    """Norm of the difference at the real tokens, as a fraction of the norm."""
    ours, theirs = ours[batch.attention_mask].double(), theirs[batch.attention_mask].double()
    return float((ours - theirs).norm() / theirs.norm())


def transformers_logits(name: str, network: Any, batch: TokenBatch) -> torch.Tensor:
    from transformers import ElectraForMaskedLM, ElectraForPreTraining

    from discern.model_files.huggingface import network_to_huggingface

    with tempfile.TemporaryDirectory() as folder:
        network_to_huggingface(network, SPECIAL).write(Path(folder))
        kind = ElectraForPreTraining if name == "discriminator" else ElectraForMaskedLM
        model = kind.from_pretrained(folder).eval().to(DEVICE)
    here = batch.to(DEVICE)
    given = {"attention_mask": here.attention_mask.long(), "token_type_ids": here.token_type_ids}
    found: torch.Tensor = model(input_ids=here.input_ids, **given).logits.float().cpu()
    return found


MODERN = {"encoder": "modernbert", "attention_bias": True, "initialization": "local", "local_window": 16}
RUNS: dict[str, dict[str, Any]] = {name: {} for name in objectives.names()} | {
    "permutation-lm": {"model": {"encoder": "xlnet"}, "objective": {"memory_length": 32}},
    "rtd, as preset gpu-minutes": {
        "model": MODERN,
        "objective": {"tying": "gradient-disentangled", "discriminator_head": "bilinear", "generator_depth": 0.5},
        "optimizer": {"name": "muon"},
    },
}
"""By name, which begins with the objective's: what is set of model, objective and optimizer."""


def golden(name: str, options: dict[str, Any]) -> None:
    """The losses of a short run on the device against the same run on the CPU in float32."""
    expected = losses(name, options, CPU, "float32")
    for precision in ("float32", "bfloat16"):
        got = losses(name, options, DEVICE, precision)
        difference = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
        told(f"{name} with the CPU", "losses of 10 steps", precision, difference)


def losses(name: str, options: dict[str, Any], device: torch.device, precision: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLog(Path(folder), 0)
        train(context(name, options, device, precision, folder=Path(folder), metrics_log=log), State())
        return [line["loss"] for line in read_metrics(Path(folder))]


def build(name: str, options: dict[str, Any], vocab: int) -> Objective:
    """A newly initialized small objective on the CPU, without dropout, which devices draw differently."""
    name = name.partition(",")[0]
    factory = objectives.load(name)
    model = build_config(**(TINY | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | options.get("model", {})))
    vocabulary = Vocabulary(vocab, SPECIAL, torch.arange(1, vocab + 1))
    objective: Objective = factory(factory.Config(name=name, **options.get("objective", {})), BuildSettings(model, vocabulary))
    objective.initialize(0)
    return objective


def context(name: str, options: dict[str, Any], device: torch.device, precision: str, **others: Any) -> TrainContext:
    """Ten steps of the loop."""
    two_part = name.startswith("permutation")
    found = TrainContext(
        objective=build(name, options, 1000).to(device),
        source=SyntheticRows(1000, 64, 1.0 if two_part else 0.8, 64, 0, two_parts=two_part),
        heldout=None,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5, **options.get("optimizer", {})),
        train=TrainConfig(max_steps=10, sequences_per_step=8, log_every_steps=1),
        ranks=Ranks(0, 1, device),
        precision=precision,
        folder=Path(),
        metrics_log=None,
        progress=Silent(),
        stop=StopRequest(),
    )
    return dataclasses.replace(found, **others)


def never_waits(name: str, options: dict[str, Any]) -> None:
    """Steps of the loop, the last of which fails if the host waits for the device."""
    run = context(name, options, DEVICE, "bfloat16")
    run.objective.train()
    (phase,) = run.objective.phases(run.train.max_steps)
    replica, guard = setup_phase(run, phase), NonFiniteGuard(run.ranks, diverged)
    with ThreadPoolExecutor(1) as reader:
        feed = Feed(run, reader, 0)
        batches = [feed.take(step) for step in range(3)]
        feed.take(3)  # nothing is copied any more
    for step, local in enumerate(batches):  # the first steps create what lasts
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            totals = reduce_step_counts(run, local, StepMeter(0.0))
            means = forward_backward(run, replica, local, totals.counts, step)
            norm = clip_gradients(replica.objective.parameters(), run.optimizer.clip_norm)
            update(replica.optimizer, 1e-4, guard.allow(StepCounters(step, 0, step, 0), norm, means))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    guard.check()
    tell(step_of=name, host_waits="nowhere")


def diverged(before: StepCounters, means: Any) -> None:
    raise FloatingPointError(f"the gradient of step {before.step} is not finite")


def killed_and_resumed(folder: Path) -> dict[str, Any]:
    """Two runs of the command, one of them killed and resumed: the largest difference of their losses."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeiounrst", k=4)) for _ in range(200)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=60)) + "." for _ in range(1500)))
    command("prepare", "text.txt", "--out", "data", "--train-tokenizer", "wordpiece", "--vocab-size", "400", at=folder).wait()
    settings = "max_steps=30 checkpoint_every_steps=5 log_every_steps=1 evaluate_every_steps=0 sequences_per_step=16"
    sets = [part for each in settings.split() for part in ("--set", f"train.{each}")]
    args = ("--preset", "tiny", "--data", "data", "--device", DEVICE.type, "--set", "train.precision=float32", *sets)
    whole, killed = (command("pretrain", *args, "--out", out, at=folder) for out in ("whole", "killed"))
    while killed.poll() is None and not (folder / "killed" / "checkpoints" / "step-00000010").exists() and seen(folder) < 12:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = seen(folder)
    command("pretrain", *args, "--out", "killed", at=folder).wait()
    whole.wait()
    one, other = ([line["loss"] for line in read_metrics(folder / out)] for out in ("whole", "killed"))
    if len(one) != 30 or len(other) != 30 or not before < 30:
        errors = "".join((folder / f"{out}.log").read_text()[-2000:] for out in ("whole", "killed"))
        raise RuntimeError(f"{len(one)} and {len(other)} steps of 30, {before} before the kill\n{errors}")
    return {"precision": "float32", "difference": max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))}


def seen(folder: Path) -> int:
    """Records of the run that is killed."""
    log = folder / "killed" / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def command(*args: str, at: Path) -> subprocess.Popen[bytes]:
    log = at / f"{args[args.index('--out') + 1]}.log"
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "discern", *args], cwd=at, stdout=file, stderr=file)


# ---- speed ----


SHRUNK = ("num_layers=2", "hidden_size=64", "embedding_size=64", "num_heads=2", "feedforward_size=128")


def speed(small: bool, clock: Clock) -> None:
    """Training steps of presets, eager and compiled."""
    tell(fastest_product={each: f"{fastest_product(DEVICE, each) / 1e12:.3g} TFLOP/s" for each in ("float32", "bfloat16")})
    plans = [("gpu-minutes", 128, 256), ("electra-small", 128, 512), ("electra-base", 128, 256), ("modern-base", 512, 64)]
    for preset, length, rows in plans[:1] if small else plans:
        for compiled in (False, True):
            if clock.left() > 8:
                measure(preset, length, 8 if small else rows, compiled, small)


def measure(
    preset: str, length: int, rows: int, compiled: bool, small: bool, *sets: str, label: str = "", around: Any = None
) -> None:
    """Time training steps of a preset at its own settings, apart from length and rows."""
    what = label or ("compiled" if compiled else "eager")
    with attempt(f"{preset}, {rows} rows, {what}"), around or nullcontext():
        chosen = [*(f"model.{each}" for each in SHRUNK if small), *sets]
        sizes = [f"data.sequence_length={length}", f"train.sequences_per_step={rows}", "train.micro_batch_size=none"]
        config = load_pretrain_config(None, preset, [*sizes, *chosen]).config
        vocab = 1000 if small else VOCAB
        objective = build_objective(config, Vocabulary(vocab, SPECIAL, torch.ones(vocab, dtype=torch.int64)))
        objective.initialize(0)
        run = synthetic_context(config, objective.to(DEVICE), Ranks(0, 1, DEVICE), vocab, 1.0, Silent(), 4 * rows)
        run = dataclasses.replace(run, source=WithDocuments(run.source), precision="bfloat16", compiled=compiled)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        read_local_batch(run, 0)
        reading = time.perf_counter() - begin
        begin = time.perf_counter()
        (phase,) = objective.phases(config.train.max_steps)
        timing = time_training(run, phase, seconds=0.5 if small else 2.0)
        flops = step_flops(objective, phase, length, 1).executed / length * timing.tokens_per_second
        tell(
            preset=preset,
            length=length,
            rows=rows,
            mode=what,
            tokens_per_second=round(timing.tokens_per_second),
            step_ms=1000 * statistics.median(timing.seconds),
            reading_ms=1000 * reading,
            memory_GiB=timing.peak_bytes / 2**30,
            tflops=flops / 1e12,
            seconds_with_warm_up=time.perf_counter() - begin,
        )


class WithDocuments:
    """Full rows as rows of several documents, each about a quarter of a row."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def batch(self, indices: Any, slots: Any) -> TokenBatch:
        batch: TokenBatch = self._source.batch(indices, slots)
        count, length = batch.input_ids.shape
        cuts = np.random.default_rng(int(indices[0])).random((count, length)) < 4 / length
        cuts[:, 0] = False
        begins = np.maximum.accumulate(np.where(cuts, np.arange(length), 0), axis=1)
        return dataclasses.replace(
            batch,
            document_ids=torch.from_numpy(np.cumsum(cuts, axis=1)),
            position_ids=torch.from_numpy(np.arange(length) - begins),
        )


# ---- peers ----


def peers(small: bool, clock: Clock) -> None:
    """The steps of peers.py and ours at equal sizes and rows, in one run; first eager, then compiled on a GPU."""
    from peers import PEERS, random_ids, time_step

    vocab, seconds = (1000, 0.5) if small else (VOCAB, 2.0)
    plans = [("electra", "electra-small", "rtd", 512, 128), ("modernbert", "modern-base", "mlm", 32, 512)]
    for compiled in (False, True) if CUDA else (False,):
        for peer, preset, name, rows, length in plans:
            rows, length = (8, 64) if small else (rows, length)
            if clock.left() < (30 if compiled else 6):
                continue
            shrunk = [f"model.{each}" for each in SHRUNK if small]
            model = load_pretrain_config(None, preset, [f"data.sequence_length={length}", *shrunk]).config.model
            theirs = None
            with attempt(f"peer {peer}"):
                torch.manual_seed(0)
                keys = ("num_layers", "hidden_size", "embedding_size", "num_heads", "feedforward_size")
                step = PEERS[peer]({key: getattr(model, key) for key in keys}, vocab, length, DEVICE, compiled=compiled)
                theirs = time_step(step, random_ids(rows, length, vocab, DEVICE), seconds)["tokens_per_second"]
                del step
            with attempt(f"ours beside {peer}"):
                factory = objectives.load(name)
                objective = factory(factory.Config(name=name), BuildSettings(model, Vocabulary(vocab, SPECIAL)))
                objective.initialize(0)
                run = dataclasses.replace(
                    context(name, {}, DEVICE, "bfloat16"),
                    objective=objective.to(DEVICE),
                    source=SyntheticRows(vocab, length, 1.0, 2 * rows, 0),
                    train=TrainConfig(sequences_per_step=rows, max_steps=10**6),
                    compiled=compiled,
                )
                (phase,) = objective.phases(run.train.max_steps)
                ours = time_training(run, phase, seconds=seconds).tokens_per_second
                compared = {} if theirs is None else {"peer_tokens_per_second": round(theirs), "ratio": ours / theirs}
                labels = {"peer": peer, "rows": rows, "length": length, "compiled": compiled}
                tell(**labels, tokens_per_second=round(ours), **compared)


# ---- techniques ----


def techniques(small: bool, clock: Clock) -> None:
    """Steps of one preset with techniques off in turn, and at other numbers of rows, while time is left."""

    def at(rows: int, *sets: str, compiled: bool = False, **more: Any) -> None:
        measure("gpu-minutes", 128, rows, compiled, small, *sets, **more)

    rows = 8 if small else 256
    variants: list[Callable[[], None]] = [
        lambda: at(rows, label="everything on"),
        lambda: at(rows, label="padded rows with a mask", around=kernels.switched_off(span_attention.SPANS_OFF)),
        lambda: at(rows, "optimizer.name=adamw", label="AdamW instead of Muon"),
    ]
    if CUDA:
        variants += [
            lambda: at(4 * rows, label="eager"),
            lambda: at(rows // 4, label="eager"),
            lambda: at(rows, label="not copied ahead", around=without_copying_ahead()),
            lambda: at(4 * rows, compiled=True),
        ]
    for variant in variants:
        if clock.left() > (4 if small else 6):
            variant()


def without_copying_ahead() -> Any:
    """A context in which rows are copied when the step that needs them begins."""
    return unittest.mock.patch.object(Feed, "_copy", lambda feed, step, launched: (read_local_batch(feed._context, step), None))


SECTIONS = {"correctness": correctness, "speed": speed, "peers": peers, "techniques": techniques}

if __name__ == "__main__":
    main()
