"""Parity, loss curves and speed on a GPU, or with smaller numbers on a CPU: run by gpu.sh, which lists its requirements.

Every section runs in a process of its own with a time limit. If one fails or hangs, the others keep their time, and its results
so far are reported. The text is synthetic, with structure to learn, unless DISCERN_TEST_DATA names a folder with
wikipedia-en/*.tar.xz and vocab/bert-uncased-en.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch

    from discern.data.batching.stream import Rows, to_batch
    from discern.data.batching.synthetic import SPECIAL, SyntheticParts, SyntheticRows
    from discern.models import span_attention
    from discern.models.config import build_config, config_class
    from discern.models.span_attention import attention_path
    from discern.objectives import objectives
    from discern.objectives.base import BuildSettings, Objective, Vocabulary
    from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
    from discern.pretrain.bench import Span, time_training
    from discern.progress import Silent
    from discern.training.clock import StepMeter
    from discern.training.compilation import Mode
    from discern.training.config import OptimizerConfig, TrainConfig
    from discern.training.context import TrainContext
    from discern.training.feed import Feed, read_local_batch, read_rows
    from discern.training.flops import step_flops
    from discern.training.interrupt import StopRequest
    from discern.training.loop import forward_backward, reduce_step_counts, setup_phase, update
    from discern.training.parallel import Ranks
    from discern.training.precision import autocast
    from discern.training.products import fastest_product
    from discern.training.schedule import learning_rate
    from discern.training.step_means import Progressed, UpdateGuard
except ModuleNotFoundError as problem:
    raise SystemExit(
        f"error: this python ({sys.executable}) has no module '{problem.name}'\n"
        "  hint: PYTHONPATH must name discern's src, and a folder with the unpacked wheels of what is missing; see gpu.sh"
    ) from None

VOCAB = 30_522
SMALL = {"num_layers": 12, "hidden_size": 256, "embedding_size": 128, "num_heads": 4, "feedforward_size": 1024}
BASE = {"num_layers": 12, "hidden_size": 768, "embedding_size": 768, "num_heads": 12, "feedforward_size": 3072}
MINI = {"num_layers": 2, "hidden_size": 64, "embedding_size": 32, "num_heads": 1, "feedforward_size": 256}
MIDI = {"num_layers": 2, "hidden_size": 128, "embedding_size": 128, "num_heads": 2, "feedforward_size": 512}
# Seconds, out of 580 in total; time that a section leaves over goes to the next one.
LIMITS = {
    "parity": 40, "waits": 30, "curves": 85, "eager": 65, "techniques": 90, "graphs": 25, "compiled": 60,
    "compiled with graphs": 50, "peers": 135,
}  # fmt: skip
LIMITS_SMALL = {
    "parity": 25, "waits": 15, "curves": 35, "eager": 20, "techniques": 30, "graphs": 10, "compiled": 90,
    "compiled with graphs": 10, "peers": 40,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--small", action="store_true", help="smaller numbers; always so without a GPU")
    parser.add_argument("--sections", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=60.0, help=argparse.SUPPRESS)
    request = parser.parse_args()
    small = request.small or not torch.cuda.is_available()
    if request.section:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SECTIONS[request.section](small, request.limit)
        return
    request.out.mkdir(parents=True, exist_ok=True)
    limits = LIMITS_SMALL if small else LIMITS
    begin = time.monotonic()
    end = begin + sum(limits[name] for name in request.sections)
    record: dict[str, Any] = {"machine": machine(), "small": small, "sections": {}}
    for number, name in enumerate(request.sections):
        later = sum(limits[other] for other in request.sections[number + 1 :])
        record["sections"][name] = run_section(name, small, max(end - later - time.monotonic(), 5.0))
        record["seconds"] = round(time.monotonic() - begin, 1)
        (request.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (request.out / "gpu.md").write_text(markdown(record) + "\n")
    print(markdown(record))


def run_section(name: str, small: bool, limit: float) -> dict[str, Any]:
    """Run one section in a process of its own; return the lines that it printed and its errors."""
    command = [sys.executable, __file__, "--section", name, "--limit", str(limit), *(["--small"] if small else [])]
    print(f"{name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        problem = None
        try:
            if process.wait(limit):
                problem = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            problem = f"ended after {limit:.0f} s"
        out.seek(0)
        errors.seek(0)
        found = [json.loads(line) for line in out.read().splitlines() if line.startswith("{") and line.endswith("}")]
        said = errors.read()[-1500:]
    result: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1), "results": found}
    return result | ({"problem": problem, "stderr": said} if problem else {})


def tell(**results: Any) -> None:
    """Print a result of a section as a line for the parent process."""
    print(json.dumps(results), flush=True)


@contextmanager
def attempt(**labels: Any) -> Iterator[None]:
    """Turn an error in the block into a result, and continue with the section."""
    try:
        yield
    except Exception as problem:  # any error: the other results must still be reported
        frames = traceback.extract_tb(problem.__traceback__)
        ours = next((f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames) if "discern" in f.filename), "")
        said = next(iter(str(problem).strip().splitlines()), "")
        tell(**labels, failed=f"{type(problem).__name__}: {said[:200]}", at=ours)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def build(sizes: dict[str, Any], vocab: int = VOCAB, seed: int = 0, **options: Any) -> ReplacedTokenDetection:
    """Return a newly initialized objective on the CPU."""
    share = 1 / 3 if sizes["hidden_size"] == 768 else 0.25
    sizes = dict(sizes)
    kind = OnHost if sizes.pop("on_host", False) else ReplacedTokenDetection
    model = {key: options.pop(key) for key in list(options) if key in config_class("bert").model_fields}
    config = RTDConfig(**({"generator_size": share} | options))
    objective = kind(config, BuildSettings(build_config(**(sizes | model)), Vocabulary(vocab, SPECIAL)))
    objective.initialize(seed)
    return objective


def parts(objective: Objective, source: Any, precision: str, **train: Any) -> TrainContext:
    """The context of a training loop."""
    rate = train.pop("learning_rate", 5e-4)
    return TrainContext(
        objective=objective.to(device()),
        source=source,
        heldout=None,
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=100),
        train=TrainConfig(**train),
        ranks=Ranks(0, 1, device()),
        precision=precision,
        folder=Path(),
        metrics_log=None,
        progress=Silent(),
        stop=StopRequest(),
    )


# ---- parity ----


@torch.no_grad()
def parity(small: bool, limit: float) -> None:
    """Compare the outputs of the same weights with those on the CPU, and with those of transformers on the same device."""
    sizes = MINI if small else SMALL
    objective = build(sizes).eval()
    rng = torch.Generator().manual_seed(1)
    for parameter in objective.parameters():  # far from the start, where every logit is about zero
        parameter += 0.05 * torch.randn(parameter.shape, generator=rng)
    numbers = np.arange(4)
    batch = SyntheticRows(VOCAB, 64, 0.7, 4, 0).batch(numbers, numbers)
    names = list(objective.networks())
    reference = {name: logits(objective, name, batch, "float32") for name in names}
    objective.to(device())
    real = batch.attention_mask
    for name in names:
        for precision in ("float32", "bfloat16"):
            with attempt(against="the same weights on the CPU in float32", network=name, precision=precision):
                got = logits(objective, name, batch.to(device()), precision).cpu()
                tell(
                    against="the same weights on the CPU in float32",
                    network=name,
                    precision=precision,
                    **distance(got, reference[name], real),
                )
    for name in names:
        with attempt(against="transformers", network=name):
            theirs = transformers_logits(objective, name, batch)
            ours = logits(objective, name, batch.to(device()), "float32").cpu()
            tell(against="transformers on this device", network=name, precision="float32", **distance(ours, theirs, real))


def logits(objective: ReplacedTokenDetection, name: str, batch: Any, precision: str) -> torch.Tensor:
    network = objective.networks()[name]
    context = (batch.visible_mask, batch.token_type_ids, batch.position_ids)
    with autocast(precision, batch.input_ids.device):
        return network.token_logits(batch.input_ids, *context).float()


def distance(ours: torch.Tensor, theirs: torch.Tensor, real: torch.Tensor) -> dict[str, float]:
    """Differences over the real tokens."""
    ours, theirs = ours[real].double(), theirs[real].double()
    return {
        "largest_difference": float((ours - theirs).abs().max()),
        "relative_difference": float((ours - theirs).norm() / theirs.norm()),
        "deviation_of_logits": float(theirs.std()),
    }


def transformers_logits(objective: ReplacedTokenDetection, name: str, batch: Any) -> torch.Tensor:
    from transformers import ElectraForMaskedLM, ElectraForPreTraining

    from discern.interop.huggingface import to_huggingface

    with tempfile.TemporaryDirectory() as folder:
        to_huggingface(objective.networks()[name], Vocabulary(VOCAB, SPECIAL)).write(Path(folder))
        kind = ElectraForPreTraining if name == "discriminator" else ElectraForMaskedLM
        model = kind.from_pretrained(folder).eval().to(device())
    here = batch.to(device())
    given = {"attention_mask": here.attention_mask.long(), "token_type_ids": here.token_type_ids}
    found: torch.Tensor = model(input_ids=here.input_ids, **given).logits.float().cpu()
    return found


# ---- loss curves ----


class Text:
    """Rows of synthetic text, in which each token mostly determines the next; or of real text if available."""

    def __init__(self, vocab: int, length: int, count: int, folder: str | None, seed: int = 5) -> None:
        self.name = "made-up text"
        rng = np.random.default_rng(seed)
        words = vocab - 5
        follows, ids = rng.permutation(words), np.empty((count, length), np.int64)
        frequent = np.cumsum(1 / np.arange(1, words + 1))
        fresh = np.searchsorted(frequent, rng.random((count, length)) * frequent[-1]).clip(max=words - 1)
        ids[:, 0] = fresh[:, 0]
        for place in range(1, length):
            ids[:, place] = np.where(rng.random(count) < 0.7, follows[ids[:, place - 1]], fresh[:, place])
        self.ids, self.vocab = ids + 5, vocab
        if folder:
            self._read(Path(folder), length)
        self.ids[:, 0], self.ids[:, -1] = SPECIAL.cls, SPECIAL.sep

    def _read(self, folder: Path, length: int) -> None:
        import tarfile

        from tokenizers import BertWordPieceTokenizer

        vocabulary = folder / "vocab" / "bert-uncased-en.txt"
        tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
        found: list[int] = []
        with tarfile.open(sorted((folder / "wikipedia-en").glob("*.tar.xz"))[0]) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    lines = file.read().decode().splitlines()
                    found += [i for e in tokenizer.encode_batch(lines, add_special_tokens=False) for i in e.ids]
                if len(found) > 2_000_000:
                    break
        # The special tokens of this vocabulary have other ids; as ordinary words they do no harm.
        rows = len(found) // length
        self.ids = np.array(found[: rows * length], np.int64).reshape(rows, length)
        self.name, self.vocab = "English Wikipedia", max(len(vocabulary.read_text().splitlines()), 6)

    def batch(self, indices: Any, slots: Any) -> Any:
        ids = self.ids[(indices * 7919) % len(self.ids)]
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        special = (places == 0) | (places == ids.shape[1] - 1)
        return to_batch(Rows(ids, np.full(len(ids), ids.shape[1]), special, np.zeros_like(ids), places, None), indices, slots)


def curves(small: bool, limit: float) -> None:
    """Compare the losses of three seeds in float32 with those in bfloat16, on the same text, for as many steps as time permits.

    In bfloat16 with weights in float32, with weights in bfloat16, and with weights in bfloat16 beside float32 copies.
    """
    begin = time.monotonic()
    most, rows, length, vocab = (300, 16, 32, 512) if small else (1500, 64, 128, 8192)
    text = Text(vocab, length, 4096 if small else 16384, os.environ.get("DISCERN_TEST_DATA"))
    local = {"initialization": "local", "tying": "gradient-disentangled", "discriminator_head": "bilinear"}
    options = local | {"initializer_range": 0.05, "generator_size": 0.5}

    def prepared(precision: str, seed: int, steps: int, weights: str = "float32") -> TrainContext:
        objective = build(MIDI if small else SMALL, text.vocab, seed, **options)
        run = parts(objective, text, precision, max_steps=steps, sequences_per_step=rows, seed=seed, learning_rate=1e-3)
        return dataclasses.replace(run, train=run.train.model_copy(update={"weight_precision": weights}))

    each = 0.0
    for precision in ("float32", "bfloat16"):
        run = prepared(precision, 0, most)
        trained(run, 3)
        since = time.monotonic()
        trained(run, 10)
        each = max(each, (time.monotonic() - since) / 10)
    left = limit - (time.monotonic() - begin) - 8
    steps = min(most, max(int(0.8 * left / (6 * each)) // 10 * 10, 10))
    low = [("bfloat16", 0, weights) for weights in ("float32", "bfloat16", "bfloat16-masters")]
    for precision, seed, weights in (("float32", 0, "float32"), *low, ("float32", 1, "float32"), ("float32", 2, "float32")):
        with attempt(precision=precision, seed=seed, weights=weights):
            run = prepared(precision, seed, steps, weights)
            begin = time.monotonic()
            losses = trained(run, steps)
            tell(
                text=text.name,
                precision=precision,
                weights=weights,
                seed=seed,
                seconds=round(time.monotonic() - begin, 1),
                losses=[{"step": (n + 1) * steps // 10, **window} for n, window in enumerate(windows(losses, 10))],
            )


def trained(run: TrainContext, steps: int) -> list[dict[str, float]]:
    """Return the loss of each step, as computed by the training loop."""
    run.objective.train()
    (phase,) = run.objective.phases(steps)
    replica = setup_phase(run, phase)
    meter, found = StepMeter(0.0), []
    guard = UpdateGuard(run.ranks, diverged)
    with torch.random.fork_rng([device()] if device().type == "cuda" else []):
        for step in range(steps):
            local = read_local_batch(run, step)
            totals = reduce_step_counts(run, local, meter)
            means = forward_backward(run, replica, local, totals.counts, step)
            norm = replica.clip(run.optimizer.clip_norm)
            allowed = guard.admit(Progressed(step, 0, step, 0), norm, means)
            update(replica.optimizer, learning_rate(run.optimizer, step, run.train.max_steps), allowed)
            found.append((means, norm))
    guard.check()
    return [means.read(run.ranks) | {"grad_norm": float(norm)} for means, norm in found]


def diverged(before: Progressed, means: Any) -> None:
    raise FloatingPointError(f"the gradient of step {before.step} is not finite")


def windows(losses: list[dict[str, float]], count: int) -> list[dict[str, float]]:
    size = len(losses) // count
    cut = [losses[start : start + size] for start in range(0, size * count, size)]
    return [{name: round(statistics.fmean(each[name] for each in part), 4) for name in part[0]} for part in cut]


# ---- speed ----


def shapes(small: bool) -> dict[str, tuple[dict[str, int], int, list[int]]]:
    """Model, sequence length and rows per step."""
    if small:
        return {"2 x 64": (MINI, 32, [8, 32]), "2 x 128": (MIDI, 64, [8])}
    return {"electra-small": (SMALL, 128, [128, 512, 2048]), "electra-base": (BASE, 512, [16, 64, 128])}


def eager(small: bool, limit: float) -> None:
    peaks = {precision: fastest_product(device(), precision) for precision in ("float32", "bfloat16")}
    tell(peak_flops=peaks)
    for name, (sizes, length, batches) in shapes(small).items():
        for rows in batches:
            measure(name, sizes, length, rows, "bfloat16", "eager", small)
        measure(name, sizes, length, batches[0], "float32", "eager", small)


class WithDocuments:
    """Full rows of a source as rows of several documents, each about a quarter of a row."""

    def __init__(self, source: SyntheticRows) -> None:
        self._source = source

    def batch(self, indices: Any, slots: Any) -> Any:
        batch = self._source.batch(indices, slots)
        count, length = batch.input_ids.shape
        cuts = np.random.default_rng(int(indices[0])).random((count, length)) < 4 / length
        cuts[:, 0] = False
        begins = np.maximum.accumulate(np.where(cuts, np.arange(length), 0), axis=1)
        return dataclasses.replace(
            batch,
            document_ids=torch.from_numpy(np.cumsum(cuts, axis=1)),
            position_ids=torch.from_numpy(np.arange(length) - begins),
        )


class OnHost(ReplacedTokenDetection):
    corrupts_anywhere = False  # type: ignore[assignment]


def without_copying_ahead() -> Any:
    """A context in which rows are copied when the step that needs them begins."""
    return unittest.mock.patch.object(Feed, "_copy", lambda feed, step, launched: (read_local_batch(feed._context, step), None))


def techniques(small: bool, limit: float) -> None:
    """Time a step with everything on, and with each technique switched off in turn, on rows of several documents."""
    name, (sizes, length, batches) = list(shapes(small).items())[0 if small else -1]
    rows, plain = batches[0] if small else batches[1], {"attention_dropout": 0.0}
    modern = {"encoder": "modernbert", **sizes}
    variants: list[tuple[str, dict[str, Any], Any, Mode]] = [
        ("everything on", plain, nullcontext(), "off"),
        ("padded rows with a mask", plain, span_attention.switched_off(), "off"),
        ("attention dropout 0.1", {"attention_dropout": 0.1}, nullcontext(), "off"),
        ("not copied ahead", plain, without_copying_ahead(), "off"),
        ("corrupted on the host", plain | {"on_host": True}, nullcontext(), "off"),
        ("blocks compiled", plain, nullcontext(), "blocks"),
        ("blocks compiled, graphs", plain, nullcontext(), "graphs"),
        ("modernbert: everything on", plain | modern, nullcontext(), "off"),
        ("modernbert: padded rows with a mask", plain | modern, span_attention.switched_off(), "off"),
    ]
    if device().type != "cuda":  # the others concern a GPU only
        variants = [variants[0], variants[2], variants[7]]
    for label, options, around, mode in variants:
        with around:
            source = WithDocuments(SyntheticRows(VOCAB, length, 1.0, 2 * rows, 0))
            prepare = partial(dataclasses.replace, compilation=mode)
            measure(name, sizes | options, length, rows, "bfloat16", label, small, change=prepare, source=source)
    told = attention_path(build(sizes | plain).to(device()), device(), "bfloat16")
    tell(attention=None if told is None else told.note)
    reading(small)


def reading(small: bool) -> None:
    """How many tokens a second one core reads, and corrupts on the host."""
    for name, (sizes, length, batches) in shapes(small).items():
        with attempt(mode="reading", model=name):
            source = WithDocuments(SyntheticRows(VOCAB, length, 1.0, 2 * batches[-1], 0))
            run = parts(build(sizes), source, "bfloat16", sequences_per_step=batches[-1])
            best: dict[str, float] = {}
            for what, read in (
                ("read", lambda step, run=run: list(read_rows(run, step))),
                ("corrupted", partial(read_local_batch, run)),
            ):
                times = []
                for step in range(5):
                    begin = time.perf_counter()
                    read(step)
                    times.append(time.perf_counter() - begin)
                best[what] = batches[-1] * length / min(times)
            tell(reading=best, model=name)


def graphs(small: bool, limit: float) -> None:
    """Time a step with each encoder's forward and backward pass replayed as CUDA graphs."""
    if device().type != "cuda":
        tell(mode="graphs", failed="CUDA graphs need a GPU")
        return
    for name, (sizes, length, batches) in shapes(small).items():
        for rows in batches[:2]:
            measure(name, sizes, length, rows, "bfloat16", "graphs", small, graph_encoders)


def compiled(small: bool, limit: float) -> None:
    for name, (sizes, length, batches) in list(shapes(small).items())[: 1 if small else 2]:
        measure(name, sizes, length, batches[1 if len(batches) > 1 else 0], "bfloat16", "compiled", small, compile_encoders)


def compiled_with_graphs(small: bool, limit: float) -> None:
    if device().type != "cuda":
        tell(mode="compiled with graphs", failed="CUDA graphs need a GPU")
        return
    for name, (sizes, length, batches) in shapes(small).items():
        measure(name, sizes, length, batches[0], "bfloat16", "compiled with graphs", small, compile_with_graphs)


def measure(
    name: str,
    sizes: dict[str, int],
    length: int,
    rows: int,
    precision: str,
    mode: str,
    small: bool,
    prepare: Callable[[TrainContext], None] | None = None,
    *,
    change: Callable[[TrainContext], TrainContext] = lambda run: run,
    source: Any = None,
) -> None:
    """Time steps of the loop, and reading on its own, which a thread does while the device computes."""
    labels = {"model": name, "length": length, "rows": rows, "precision": precision, "mode": mode}
    with attempt(**labels):
        source = source or SyntheticRows(VOCAB, length, 1.0, 2 * rows, 0)
        run = change(parts(build(sizes), source, precision, sequences_per_step=rows, max_steps=10**6))
        begin = time.perf_counter()
        read_local_batch(run, 0)
        reading = time.perf_counter() - begin
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        if prepare is not None:
            run.objective.train()
            prepare(run)
        (phase,) = run.objective.phases(run.train.max_steps)
        timing = time_training(run, phase, Span(None, 1.0 if small else 3.0))
        flops = step_flops(run.objective, phase, length, 1).executed / length
        tell(
            **labels,
            tokens_per_second=timing.tokens_per_second,
            step_milliseconds=1000 * statistics.median(timing.seconds),
            reading_milliseconds=1000 * reading,
            peak_memory_bytes=timing.peak_bytes,
            model_flops_per_second=flops * timing.tokens_per_second,
            seconds_with_warm_up=round(time.perf_counter() - begin, 1),
        )


def compile_encoders(run: TrainContext) -> None:
    for network in run.objective.networks().values():
        network.encoder.compile()


def compile_with_graphs(run: TrainContext) -> None:
    for network in run.objective.networks().values():
        network.encoder.compile(mode="reduce-overhead")


class Tensors(torch.nn.Module):
    """An encoder on full rows, called with tensors only, as capturing a graph requires."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.plain = encoder.forward

    def forward(self, ids: torch.Tensor, types: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.plain(ids, None, types, places, None)
        return found


def graph_encoders(run: TrainContext) -> None:
    batch = read_local_batch(run, 0).micro_batches[0][0].tokens.to(device())
    sample = (batch.input_ids, batch.token_type_ids, batch.position_ids)
    for network in run.objective.networks().values():
        with autocast(run.precision, device()):
            # Without the cache of autocast: casts made before the capture would be replayed with old values.
            torch.set_autocast_cache_enabled(False)
            replayed = torch.cuda.make_graphed_callables(Tensors(network.encoder), sample)
            torch.set_autocast_cache_enabled(True)

        def forward(
            ids: Any, mask: Any = None, types: Any = None, places: Any = None, pieces: Any = None, call: Any = replayed
        ) -> Any:
            assert mask is None
            assert pieces is None
            return call(ids, types, places)

        network.encoder.forward = forward  # type: ignore[method-assign]


def waits(small: bool, limit: float) -> None:
    """Run a step of every objective in which the host may not wait for the device; list the places where it does."""
    if device().type != "cuda":
        tell(waits="asked of a GPU only")
        return
    for name in objectives.names():
        with attempt(waits=name):
            run = any_objective(name)
            steps_of(run, 2)  # the first steps create what lasts
            found: dict[str, int] = {}

            def note(message: Any, category: Any, filename: str, lineno: int, *_: Any, found: dict[str, int] = found) -> None:
                frames = [frame for frame in traceback.extract_stack() if "/discern/" in frame.filename]
                where = (
                    f"{frames[-1].filename.split('/discern/')[-1]}:{frames[-1].lineno} {frames[-1].line}" if frames else filename
                )
                found[where] = found.get(where, 0) + 1

            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = note
                steps_of(run, 1, sync="warn")
            tell(waits=name, places=found)


def any_objective(name: str) -> TrainContext:
    """A small network under an objective, by its name."""
    factory, two_part = objectives.load(name), name == "permutation-lm"
    sizes = dict(MIDI) | ({"encoder": "xlnet"} if two_part else {})
    options = {"memory_length": 32} if two_part else {}
    settings = BuildSettings(build_config(**sizes), Vocabulary(VOCAB, SPECIAL))
    objective = factory(factory.Config(name=name, **options), settings)
    objective.initialize(0)
    rows = SyntheticRows(VOCAB, 64, 1.0 if two_part else 0.8, 32, 0)
    return parts(objective, SyntheticParts(rows) if two_part else rows, "bfloat16", sequences_per_step=16, max_steps=100)


def steps_of(run: TrainContext, steps: int, sync: str = "default") -> None:
    """Steps of the loop, whose rows are read beforehand.

    Args:
        sync: what torch does where the host waits for the device: 'default' for nothing, 'warn' or 'error'.
    """
    run.objective.train()
    (phase,) = run.objective.phases(run.train.max_steps)
    replica = setup_phase(run, phase)
    guard = UpdateGuard(run.ranks, diverged)
    replica.optimizer.begin_moments()
    for step in range(steps):
        local = read_local_batch(run, step)
        torch.cuda.set_sync_debug_mode(sync)
        try:
            totals = reduce_step_counts(run, local, StepMeter(0.0))
            means = forward_backward(run, replica, local, totals.counts, step)
            norm = replica.clip(run.optimizer.clip_norm)
            update(replica.optimizer, 1e-4, guard.admit(Progressed(step, 0, step, 0), norm, means))
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- peers ----


def peers(small: bool, limit: float) -> None:
    """Time the steps of peers.py and ours at equal sizes and rows, in one run; compiled on a GPU, eager on a CPU."""
    from peers import PEERS, random_ids, time_step

    cuda = device().type == "cuda"
    wide = {"embedding_size": (MIDI if small else BASE)["hidden_size"]}
    small_shape, base_shape = (8, 64) if small else (512, 128), (8, 64) if small else (16, 512)
    plans: list[tuple[str, str, dict[str, Any], tuple[int, int]]] = [
        ("electra", "rtd", MIDI if small else SMALL, small_shape),
        ("modernbert", "mlm", {"encoder": "modernbert", **(MIDI if small else BASE), **wide}, base_shape),
    ]
    # The peer computes all logits at once, which takes seconds on a CPU.
    vocab, seconds = (1000, 0.5) if small else (VOCAB, 3.0)
    for peer, name, sizes, (rows, length) in plans:
        labels = {"peer": peer, "rows": rows, "length": length, "compiled": cuda, "precision": "bfloat16"}
        theirs = None
        with attempt(**labels, what="peer"):
            torch.manual_seed(0)
            step = PEERS[peer](sizes, vocab, length, device(), compiled=cuda)
            theirs = time_step(step, random_ids(rows, length, vocab, device()), seconds)["tokens_per_second"]
        with attempt(**labels, what="discern"):
            factory, model = objectives.load(name), build_config(**sizes)
            objective = factory(factory.Config(name=name), BuildSettings(model, Vocabulary(vocab, SPECIAL)))
            objective.initialize(0)
            source = SyntheticRows(vocab, length, 1.0, 2 * rows, 0)
            run = parts(objective, source, "bfloat16", sequences_per_step=rows, max_steps=10**6)
            run = dataclasses.replace(run, compilation="blocks" if cuda else "off")
            (phase,) = objective.phases(run.train.max_steps)
            ours = time_training(run, phase, Span(None, seconds)).tokens_per_second
            compared = {} if theirs is None else {"peer_tokens_per_second": theirs, "ratio": ours / theirs}
            tell(**labels, tokens_per_second=ours, **compared)


SECTIONS: dict[str, Callable[[bool, float], None]] = {
    "parity": parity,
    "waits": waits,
    "curves": curves,
    "eager": eager,
    "techniques": techniques,
    "graphs": graphs,
    "compiled": compiled,
    "compiled with graphs": compiled_with_graphs,
    "peers": peers,
}


# ---- the page ----


def markdown(record: dict[str, Any]) -> str:
    sections, machine = record["sections"], record["machine"]
    small = ", smaller numbers" if record["small"] else ""
    lines = [f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}{small}; {record['seconds']:.0f} s", ""]
    for name, section in sections.items():
        if "problem" in section:
            last = (section["stderr"].strip().splitlines() or [""])[-1]
            lines += [f"**{name}**: {section['problem']}. {last}", ""]
    results = [(name, result) for name, section in sections.items() for result in section["results"]]
    lines += parity_lines([result for name, result in results if name == "parity"])
    lines += curve_lines([result for name, result in results if name == "curves"])
    lines += waits_lines([result for name, result in results if name == "waits"])
    lines += peer_lines([result for name, result in results if name == "peers"])
    lines += speed_lines([result for name, result in results if name not in ("parity", "curves", "waits", "peers")])
    return "\n".join(lines)


def parity_lines(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| logits against | network | precision | largest difference | relative | standard deviation |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        start = f"| {result['against']} | {result['network']} |"
        if "failed" in result:
            lines.append(f"{start} {result.get('precision', '')} | {result['failed']} | | |")
            continue
        values = (result[key] for key in ("largest_difference", "relative_difference", "deviation_of_logits"))
        lines.append(f"{start} {result['precision']} | " + " | ".join(f"{value:.2g}" for value in values) + " |")
    return [*lines, ""] if results else []


def curve_lines(results: list[dict[str, Any]]) -> list[str]:
    if not results:
        return []
    good = [result for result in results if "failed" not in result]
    failed = [f"{run_name(result)}: {result['failed']}" for result in results if "failed" in result]
    if not good:
        return [*failed, ""]
    heads = [run_name(result) for result in good]
    lines = [f"Loss on {good[0]['text']}, generator / discriminator, means of tenths of the run:", ""]
    lines += ["| to step | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in zip(*(result["losses"] for result in good), strict=False):
        cells = [f"{cell['generator_loss']:.3f} / {cell['discriminator_loss']:.4f}" for cell in row]
        lines.append(f"| {row[0]['step']} | " + " | ".join(cells) + " |")
    return [*lines, "", *failed, ""]


def run_name(result: dict[str, Any]) -> str:
    stored = "" if result["weights"] == "float32" else f", weights {result['weights']}"
    return f"{result['precision']}{stored}, seed {result['seed']}"


def waits_lines(results: list[dict[str, Any]]) -> list[str]:
    asked = [result for result in results if "places" in result or "failed" in result]
    if not asked:
        return []
    lines = ["Where the host waits for the device in a step, by objective:", ""]
    for result in asked:
        places = [f"{count} x `{where}`" for where, count in result.get("places", {}).items()]
        lines.append(f"- {result['waits']}: {result.get('failed') or '; '.join(places) or 'nowhere'}")
    return [*lines, ""]


def peer_lines(results: list[dict[str, Any]]) -> list[str]:
    if not results:
        return []
    lines = ["| peer on transformers | rows | length | compiled | its tokens/s | ours | ratio |", "|---|---|---|---|---|---|---|"]
    for result in results:
        start = f"| {result['peer']} | {result['rows']} | {result['length']} | {'yes' if result['compiled'] else 'no'} |"
        if "failed" in result:
            lines.append(f"{start} {result['what']}: {result['failed']} | | |")
            continue
        theirs = f"{result['peer_tokens_per_second']:,.0f}" if "ratio" in result else ""
        ratio = f"{result['ratio']:.2f}" if "ratio" in result else ""
        lines.append(f"{start} {theirs} | {result['tokens_per_second']:,.0f} | {ratio} |")
    return [*lines, ""]


def speed_lines(results: list[dict[str, Any]]) -> list[str]:
    peaks = next((result["peak_flops"] for result in results if "peak_flops" in result), {})
    lines = [
        "| model | length | rows | precision | mode | tokens/s | ms a step | reading, ms | memory | TFLOP/s | utilization |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if "rows" not in result:
            if "failed" in result:
                lines.append(f"| | | | | {result.get('mode', '')} | {result['failed']} | | | | | |")
            continue
        start = "| " + " | ".join(str(result[key]) for key in ("model", "length", "rows", "precision", "mode")) + " |"
        if "failed" in result:
            lines.append(f"{start} {result['failed']} {result['at']} | | | | | |")
            continue
        peak = peaks.get(result["precision"])
        share = f"{result['model_flops_per_second'] / peak:.0%}" if peak else ""
        lines.append(
            f"{start} {result['tokens_per_second']:,.0f} | {result['step_milliseconds']:,.1f} | "
            f"{result['reading_milliseconds']:,.1f} | {result['peak_memory_bytes'] / 2**30:.2f} GiB | "
            f"{result['model_flops_per_second'] / 1e12:,.2f} | {share} |"
        )
    if peaks:
        shown = ", ".join(f"{value / 1e12:,.2f} TFLOP/s in {name}" for name, value in peaks.items())
        lines += [
            "",
            f"Utilization is of a large product measured here: {shown}. Memory is of the device; of the process on a CPU.",
        ]
    for result in results:
        if "reading" in result:
            speeds = ", ".join(f"{what} {speed / 1e6:.2f} M" for what, speed in result["reading"].items())
            lines += ["", f"One core, {result['model']}, tokens a second: {speeds}."]
        if result.get("attention"):
            lines += ["", f"With everything on, {result['attention']}."]
    return [*lines, ""]


if __name__ == "__main__":
    main()
