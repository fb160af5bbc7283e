"""What ails a run, or this machine."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discern import __version__, kernels
from discern.config.tree import flatten
from discern.corruption.randomness import Randomness
from discern.data.shards import TokenData
from discern.data.source import RowStream, training_rows
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.training.diagnosis import (
    Expectations,
    Finding,
    compare_lengths,
    embedding_gradients,
    embedding_norm,
    expectations,
    judge,
    judge_cosine,
    judge_drift,
    judge_duplicates,
    judge_held_out,
    judge_loss_shares,
)
from discern.training.evaluation import EVALUATION_SEED, evaluate
from discern.training.parallel import Ranks, choose_device
from discern.training.watchman import settled_from, too_early
from discern.workflows.pretrain import heldout_stream
from discern.workflows.runs import LoadedRun, build_objective, load_run

_GRADIENT_ROWS = 32

CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""Installs PyTorch without the libraries of CUDA."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        subject: what was looked at, with its step where it is a run.
        facts: what was read rather than judged, by name.
    """

    subject: str
    facts: dict[str, Any]
    findings: list[Finding]


def examine_run(folder: Path, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> Diagnosis:
    """Look at the newest checkpoint of a run with text of its data set: the held-out part, or what it was trained on.

    Args:
        sequences: rows for the figures; the gradients are those of the first 32.
        warn: told of damaged checkpoints that were passed over, and of a data set that is gone.

    Raises:
        DataError: the folder holds no run.
        CheckpointError: it holds no sound checkpoint.
        ConfigError: there is no such device.
    """
    run = load_run(folder, warn=warn)
    statistics = run.record.get("statistics", {})
    findings = judge_duplicates(statistics.get("documents", 0), statistics.get("duplicates", 0))
    findings.append(_drift(run))
    steps = run.config.train.max_steps
    subject = f"{folder} at step {run.step:,} of {steps:,}"
    facts: dict[str, Any] = {"run": str(folder), "step": run.step, "max_steps": steps, "objective": run.config.objective.name}
    try:
        stream, facts["text"] = _text(run)
    except DataError as problem:
        warn(f"its data set cannot be read, so only the weights were looked at: {problem.message}")
        return Diagnosis(subject, facts, [_as_far_as_it_is(each, run, Expectations()) for each in findings])
    ranks = Ranks(0, 1, choose_device(device))
    objective = run.objective.to(ranks.device)
    rows = min(sequences, stream.num_rows)
    progress.start("examining", rows, "rows")
    try:
        figures = evaluate(objective, stream, ranks, sequences=rows, progress=progress)
    finally:
        progress.finish()
    facts["figures"] = figures
    expected = expectations(objective, steps, flatten(run.config))
    found = judge_held_out(figures, expected) + _gradients(run, stream, ranks, expected) + findings
    return Diagnosis(subject, facts, [_as_far_as_it_is(each, run, expected) for each in found])


def _as_far_as_it_is(finding: Finding, run: LoadedRun, expected: Expectations) -> Finding:
    """The finding, without a verdict where the run is not far enough for one."""
    begins = expected.discriminator_from if finding.name.startswith("discriminator") else 0
    return too_early(finding, run.step, begins + settled_from(run.config.optimizer.warmup_steps, run.config.train.max_steps))


def _text(run: LoadedRun) -> tuple[RowStream, str]:
    data = TokenData.open(Path(run.record["data"]))
    if data.tokenizer_fingerprint != run.record["tokenizer_fingerprint"]:
        raise DataError(f"{data.folder} is another data set by now: its tokenizer is not the run's")
    heldout = heldout_stream(data, run.config)
    if heldout is not None:
        return heldout, "held out"
    return training_rows(data.split("train"), data.special_tokens, run.config.data, run.config.train.seed), "trained on"


def _gradients(run: LoadedRun, stream: RowStream, ranks: Ranks, expected: Expectations) -> list[Finding]:
    """What the terms of the loss send to the word embeddings, dropout off."""
    count = min(_GRADIENT_ROWS, stream.num_rows)
    numbers = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))
    batch = stream.batch(numbers, numbers)
    randomness = Randomness(EVALUATION_SEED, 0, batch.example_index)
    objective = run.objective.requires_grad_(True)
    corrupted = objective.corrupt(batch, randomness).to(ranks.device)
    output = objective(corrupted, randomness.to(ranks.device))
    gradients = embedding_gradients(objective, output)
    shares = [_with_knob_of(run, finding) for finding in judge_loss_shares(output, expected)]
    return [*shares, judge_cosine(gradients), *compare_lengths(gradients)]


def _with_knob_of(run: LoadedRun, finding: Finding) -> Finding:
    """The finding, without a knob that the run's objective has not: not every term of a loss has a weight to set."""
    settings = {f"objective.{name}" for name in type(run.config.objective).model_fields}
    is_absent = finding.verdict == "unknown" and finding.knob not in settings
    return replace(finding, knob="") if is_absent else finding


def _drift(run: LoadedRun) -> Finding:
    """Against the weights that the run's seed gives, which are where it began unless it was initialised from a model."""
    start = build_objective(run.config, run.vocabulary)
    start.initialise(run.config.train.seed)
    return judge_drift(embedding_norm(run.objective), embedding_norm(start), flatten(run.config))


def examine_machine(folder: Path) -> Diagnosis:
    """What of this machine decides how fast, or whether, a run goes.

    Args:
        folder: where runs would be written.
    """
    cores = _cores()
    loaded = kernels.load_kernels()
    facts: dict[str, Any] = {
        "discern": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "kernels": loaded.reason,
        "devices": _gpus(),
    }
    if torch.version.cuda is not None and not facts["devices"]:
        facts["torch_build"] = f"for CUDA {torch.version.cuda}, but there is no GPU; the CPU build saves 5 GB: {CPU_TORCH}"
    findings = [
        judge(
            "threads",
            torch.get_num_threads(),
            (1, cores),
            fine=f"this process may use {cores} cores",
            high=(f"more threads than the {cores} cores that this process may use: they wait for each other", "OMP_NUM_THREADS"),
        ),
        judge(
            "cpu_kernels",
            float(loaded.library is not None),
            (1, 1),
            fine="the fused kernels are in use where a network is computed on the processor",
            low=(
                f"the fused kernels are not in use: {loaded.reason}",
                "install a C compiler (gcc or clang), or set CC; Linux only",
            ),
        ),
        judge(
            "free_disk_bytes",
            float(shutil.disk_usage(folder).free),
            (2 * 2**30, float("inf")),
            fine="room for checkpoints, which are three times the weights each",
            low=(
                "less than 2 GiB are free where you are: a run stops when a checkpoint cannot be written",
                "--out on another disk",
            ),
        ),
    ]
    free = _free_memory()
    if free is not None:
        findings.append(
            judge(
                "free_memory_bytes",
                float(free),
                (2**30, float("inf")),
                fine="`discern pretrain --dry-run` tells what a configuration needs",
                low=("less than 1 GiB of memory is free", "train.micro_batch_size, train.gradient_checkpointing = true"),
            )
        )
    return Diagnosis("this machine", facts, findings)


def _cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def examine(run: Path | None, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> Diagnosis:
    """A run, or without one this machine.

    Raises:
        ConfigError: no rows to look at.
    """
    if sequences < 1:
        raise ConfigError(f"--sequences is {sequences}; at least one row is needed", hint="leave it out")
    return examine_machine(Path.cwd()) if run is None else examine_run(run, sequences, device, progress, warn)
