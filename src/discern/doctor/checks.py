"""Diagnosis of a run, or of this machine."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discern import __version__, kernels
from discern.artifacts.run import RunFolder, build_objective, load_run
from discern.config.schema import flatten
from discern.corruption.randomness import Randomness
from discern.data.batching.rows import RowStream, training_rows
from discern.data.dataset.shards import TokenData
from discern.data.processes import available_cores
from discern.diagnosis.expectations import Expectations, expectations
from discern.diagnosis.health import (
    Finding,
    diagnosable_from,
    diagnose_drift,
    diagnose_duplicates,
    diagnose_gradient_cosine,
    diagnose_gradient_ratio,
    diagnose_loss_shares,
    diagnose_metrics,
    diagnose_waiting,
    embedding_gradients,
    embedding_norm,
    finding_in_range,
    first_judged,
    steps_of_run,
    too_early,
)
from discern.errors import ConfigError, DataError
from discern.parsing import is_number
from discern.pretraining.evaluate import change_since
from discern.pretraining.rows import heldout_stream
from discern.progress import Progress
from discern.training.distributed import Ranks, choose_device
from discern.training.evaluation import EVALUATION_SEED, evaluate
from discern.training.flops import fastest_product
from discern.training.metrics_log import read_metrics
from discern.wording import counted

_GRADIENT_ROWS = 32

CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""Command that installs PyTorch without the libraries of CUDA."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis.

    Attributes:
        subject: the run with its step, or this machine.
        facts: properties without a verdict, by name.
    """

    subject: str
    facts: dict[str, Any]
    findings: list[Finding]


def examine_run(folder: Path, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> Diagnosis:
    """Diagnose the newest checkpoint of a run on its data set: on the held-out split, or else on the training text.

    Args:
        sequences: rows to evaluate on; gradients are computed on 32 of them.
        warn: called for each damaged checkpoint that was skipped, and if the data set cannot be read or has changed.

    Raises:
        DataError: the folder is not a run.
        CheckpointError: the run has no intact checkpoint.
        ConfigError: the machine has no such device.
    """
    run = load_run(folder, warn=warn)
    statistics = run.record.get("statistics", {})
    findings = diagnose_duplicates(statistics.get("documents", 0), statistics.get("duplicates", 0))
    findings.append(_drift(run))
    ranks = Ranks(0, 1, choose_device(device))
    records = read_metrics(folder)
    findings += _waiting(records, run, ranks.device)
    steps = run.config.train.max_steps
    ended_at = steps_of_run(run.config.train, records[-1] if records else {})
    ended = ", when its time was used" if run.step == ended_at < steps else f" of {steps:,}"
    subject = f"{folder} at step {run.step:,}{ended}"
    facts: dict[str, Any] = {"run": str(folder), "step": run.step, "max_steps": steps, "objective": run.config.objective.name}
    settled = diagnosable_from(run.config.optimizer.warmup_steps, ended_at)

    def judged(finding: Finding, expected: Expectations) -> Finding:
        """The finding, without its verdict if it is too early in the run to tell."""
        return too_early(finding, run.step, first_judged(finding, expected, settled))

    try:
        stream, facts["text"] = _text(run, warn)
    except DataError as problem:
        warn(f"its data set cannot be read, so only the weights were examined: {problem.message}")
        return Diagnosis(subject, facts, [judged(each, Expectations()) for each in findings])
    objective = run.objective.to(ranks.device)
    rows = min(sequences, stream.num_rows)
    progress.start("examining", rows, "rows")
    try:
        metrics = evaluate(objective, stream, ranks, sequences=rows, progress=progress)
    finally:
        progress.finish()
    facts["figures"] = metrics
    expected = expectations(objective, steps, flatten(run.config))
    found = diagnose_metrics(metrics, expected) + _gradients(run, stream, ranks, expected) + findings
    return Diagnosis(subject, facts, [judged(each, expected) for each in found])


def _waiting(records: Sequence[Mapping[str, Any]], run: RunFolder, device: torch.device) -> list[Finding]:
    """What the run was waiting for when it last wrote a record and, on a GPU like its own, how fast it was."""
    record: Mapping[str, Any] = next((each for each in reversed(records) if "data_share" in each), {})
    computed = run.record.get("arithmetic", {})
    numbers = [float(record[key]) for key in ("flops", "tokens", "tokens_per_second") if is_number(record.get(key))]
    if device.type != "cuda" or computed.get("device") != "cuda" or len(numbers) < 3 or 0.0 in numbers:
        return diagnose_waiting(record)
    flops, tokens, speed = numbers
    peak = fastest_product(device, computed.get("precision", "float32")) * computed.get("processes", 1)
    return diagnose_waiting(record, flops / tokens * speed / peak)


def _text(run: RunFolder, warn: Callable[[str], None]) -> tuple[RowStream, str]:
    data = TokenData.open(run.record["data"])
    if data.tokenizer_fingerprint != run.record["tokenizer_fingerprint"]:
        raise DataError(f"{data.folder} has changed: its tokenizer is not that of the run")
    change = change_since(data, run.folder, run.record)
    if change is not None:
        warn(change)
    heldout = heldout_stream(data, run.config)
    if heldout is not None:
        return heldout, "held out"
    text = "trained on" if change is None else "not held out"
    return training_rows(data.split("train"), data.special_tokens, run.config.data, run.config.train.seed), text


def _gradients(run: RunFolder, stream: RowStream, ranks: Ranks, expected: Expectations) -> list[Finding]:
    """Findings about the gradients of the losses at the word embeddings, without dropout."""
    count = min(_GRADIENT_ROWS, stream.num_rows)
    numbers = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))
    batch = stream.batch(numbers, numbers)
    randomness = Randomness(EVALUATION_SEED, 0, batch.example_index)
    objective = run.objective.requires_grad_(True)
    corrupted = objective.corrupt(batch, randomness).to(ranks.device)
    output = objective(corrupted, randomness.to(ranks.device))
    gradients = embedding_gradients(objective, output)
    shares = [_with_knob_of(run, finding) for finding in diagnose_loss_shares(output, expected)]
    return [*shares, diagnose_gradient_cosine(gradients), *diagnose_gradient_ratio(gradients)]


def _with_knob_of(run: RunFolder, finding: Finding) -> Finding:
    """The finding, without settings that the objective of the run does not have: not every loss has a weight."""
    settings = {f"objective.{name}" for name in type(run.config.objective).model_fields}
    is_absent = finding.verdict == "unknown" and finding.knob not in settings
    return replace(finding, knob="") if is_absent else finding


def _drift(run: RunFolder) -> Finding:
    """Compare the embeddings with the initial ones, which follow from the seed unless the run started from a model."""
    if "start" in run.record or "start" in run.record.get("decay", {}) or run.config.objective.generator_source is not None:
        return Finding("embedding_norm_drift", None, None, "unknown", "not known, as the run started from a model")
    start = build_objective(run.config, run.vocabulary)
    start.initialize(run.config.train.seed)
    return diagnose_drift(embedding_norm(run.objective), embedding_norm(start), flatten(run.config))


def examine_machine(folder: Path) -> Diagnosis:
    """Diagnose the properties of this machine that determine whether a run works, and how fast.

    Args:
        folder: folder to which runs would be written.
    """
    cores = available_cores()
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
        finding_in_range(
            "threads",
            torch.get_num_threads(),
            (1, cores),
            fine=f"this process may use {counted(cores, 'core')}",
            high=(
                f"more threads than the {counted(cores, 'core')} that this process may use, so they wait for each other",
                "set OMP_NUM_THREADS to the number of cores",
            ),
        ),
        finding_in_range(
            "cpu_kernels",
            float(loaded.library is not None),
            (1, 1),
            fine="the fused kernels are in use for networks on the CPU",
            low=(
                f"the fused kernels are not in use: {loaded.reason}",
                "install gcc, or set CC to a C compiler; Linux only",
            ),
        ),
        finding_in_range(
            "free_disk_bytes",
            float(shutil.disk_usage(folder).free),
            (2 * 2**30, float("inf")),
            fine="enough space for checkpoints; each takes three times the size of the weights",
            low=(
                "less than 2 GiB is free here: a run stops when a checkpoint cannot be written",
                "write to another disk with --out",
            ),
        ),
    ]
    free = _free_memory()
    if free is not None:
        findings.append(
            finding_in_range(
                "free_memory_bytes",
                float(free),
                (2**30, float("inf")),
                fine="`discern pretrain --dry-run` estimates what a configuration needs",
                low=(
                    "less than 1 GiB of memory is free",
                    "a smaller train.micro_batch_size, or train.gradient_checkpointing = true",
                ),
            )
        )
    return Diagnosis("this machine", facts, findings)


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _free_memory() -> int | None:
    """Bytes available without swapping; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def examine(run: Path | None, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> Diagnosis:
    """Diagnose a run, or this machine if no run is given.

    Raises:
        ConfigError: the number of rows is not above 0.
    """
    if sequences < 1:
        raise ConfigError(f"--sequences is {sequences}; at least one row is needed", hint="leave it out")
    return examine_machine(Path.cwd()) if run is None else examine_run(run, sequences, device, progress, warn)
