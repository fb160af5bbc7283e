"""Diagnosis of a run, or of this machine."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discern import __version__, kernels
from discern.config.schema import flatten
from discern.corruption.randomness import Randomness
from discern.data.batching.stream import RowStream
from discern.data.executors import available_cores
from discern.diagnosis.health import (
    Expectations,
    Finding,
    diagnosable_from,
    diagnose_drift,
    diagnose_duplicates,
    diagnose_gradients,
    diagnose_loss_shares,
    diagnose_metrics,
    diagnose_waiting,
    embedding_gradients,
    embedding_norm,
    expectations,
    finding_in_range,
    steps_of_run,
    too_early,
)
from discern.errors import DataError
from discern.model_files.run import RunFolder, build_objective, load_run
from discern.parsing import is_number
from discern.pretraining.evaluate import change_since
from discern.pretraining.run import heldout_stream, training_stream
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
    config, ranks, records = run.config, Ranks(0, 1, choose_device(device)), read_metrics(folder)
    steps, ended_at = config.train.max_steps, steps_of_run(config.train, records[-1] if records else {})
    ended = ", when its time was used" if run.step == ended_at < steps else f" of {steps:,}"
    subject = f"{folder} at step {run.step:,}{ended}"
    facts: dict[str, Any] = {"run": str(folder), "step": run.step, "max_steps": steps, "objective": config.objective.name}

    # Text and initial weights
    statistics = run.record.get("statistics", {})
    findings = diagnose_duplicates(statistics.get("documents", 0), statistics.get("duplicates", 0))
    if "start" in run.record or "start" in run.record.get("decay", {}) or config.objective.generator_source is not None:
        findings.append(Finding("embedding_norm_drift", None, None, "unknown", "not known, as the run started from a model"))
    else:
        start = build_objective(config, run.vocabulary)
        start.initialize(config.train.seed)
        findings.append(diagnose_drift(embedding_norm(run.objective), embedding_norm(start), flatten(config)))

    # Speed, by the last record; on a GPU like the run's own, as a fraction of the speed of large products
    record: Mapping[str, Any] = next((record for record in reversed(records) if "data_share" in record), {})
    numbers = [float(record[key]) for key in ("flops", "tokens", "tokens_per_second") if is_number(record.get(key))]
    arithmetic, peak_share = run.record.get("arithmetic", {}), None
    if ranks.device.type == "cuda" and arithmetic.get("device") == "cuda" and len(numbers) == 3 and 0.0 not in numbers:
        flops, tokens, speed = numbers
        peak = fastest_product(ranks.device, arithmetic.get("precision", "float32")) * arithmetic.get("processes", 1)
        peak_share = flops / tokens * speed / peak
    findings += diagnose_waiting(record, peak_share)

    # Held-out metrics and gradients
    expected = Expectations()
    try:
        stream, facts["text"] = _text(run, warn)
    except DataError as problem:
        warn(f"its data set cannot be read, so only the weights were examined: {problem.message}")
    else:
        objective = run.objective.to(ranks.device)
        rows = min(sequences, stream.num_rows)
        progress.start("examining", rows, "rows")
        try:
            facts["figures"] = evaluate(objective, stream, ranks, sequences=rows, progress=progress)
        finally:
            progress.finish()
        expected = expectations(objective, steps, flatten(config))
        findings = diagnose_metrics(facts["figures"], expected) + _gradients(run, stream, ranks, expected) + findings
    settled = diagnosable_from(config.optimizer.warmup_steps, ended_at)
    judged = [too_early(finding, run.step, settled, expected.discriminator_from) for finding in findings]
    return Diagnosis(subject, facts, judged)


def _text(run: RunFolder, warn: Callable[[str], None]) -> tuple[RowStream, str]:
    data = run.open_data()
    if data.tokenizer_fingerprint != run.record["tokenizer_fingerprint"]:
        raise DataError(f"{data.folder} has changed: its tokenizer is not that of the run")
    change = change_since(data, run.folder, run.record)
    if change is not None:
        warn(change)
    heldout = heldout_stream(data, run.config)
    if heldout is not None:
        return heldout, "held out"
    text = "trained on" if change is None else "not held out"
    return training_stream(data, run.config), text


def _gradients(run: RunFolder, stream: RowStream, ranks: Ranks, expected: Expectations) -> list[Finding]:
    """Findings about the gradients of the losses at the word embeddings, without dropout."""
    count = min(_GRADIENT_ROWS, stream.num_rows)
    numbers = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))
    batch = stream.batch(numbers, numbers)
    randomness = Randomness(EVALUATION_SEED, 0, batch.example_index)
    objective = run.objective.requires_grad_(True)
    corrupted = objective.corrupt(batch, randomness).to(ranks.device)
    output = objective(corrupted, randomness.to(ranks.device))
    # Not every loss has a weight that can be set.
    settings = {f"objective.{name}" for name in type(run.config.objective).model_fields}
    shares = [
        replace(finding, knob="") if finding.verdict == "unknown" and finding.knob not in settings else finding
        for finding in diagnose_loss_shares(output, expected)
    ]
    return shares + diagnose_gradients(embedding_gradients(objective, output))


def examine_machine(folder: Path) -> Diagnosis:
    """Diagnose the properties of this machine that determine whether a run works, and how fast.

    Args:
        folder: folder to which runs would be written.
    """
    cores, loaded = available_cores(), kernels.load_kernels()
    facts: dict[str, Any] = {
        "discern": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "kernels": loaded.reason,
        "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }
    if torch.version.cuda is not None and not facts["devices"]:
        facts["torch_build"] = f"for CUDA {torch.version.cuda}, but there is no GPU; the CPU build saves 5 GB: {CPU_TORCH}"
    threads = f"more threads than the {counted(cores, 'core')} that this process may use, so they wait for each other"
    findings = [
        finding_in_range(
            "threads",
            torch.get_num_threads(),
            (1, cores),
            fine=f"this process may use {counted(cores, 'core')}",
            high=(threads, "set OMP_NUM_THREADS to the number of cores"),
        ),
        finding_in_range(
            "cpu_kernels",
            float(loaded.library is not None),
            (1, 1),
            fine="the fused kernels are in use for networks on the CPU",
            low=(f"the fused kernels are not in use: {loaded.reason}", "install gcc, or set CC to a C compiler; Linux only"),
        ),
        finding_in_range(
            "free_disk_bytes",
            float(shutil.disk_usage(folder).free),
            (2 * 2**30, inf),
            fine="enough space for checkpoints; each takes three times the size of the weights",
            low=("less than 2 GiB is free: a run stops when a checkpoint cannot be written", "write to another disk with --out"),
        ),
    ]
    memory = Path("/proc/meminfo")
    if memory.exists():
        (free,) = (line.split()[1] for line in memory.read_text().splitlines() if line.startswith("MemAvailable:"))
        findings.append(
            finding_in_range(
                "free_memory_bytes",
                float(free) * 1024,
                (2**30, inf),
                fine="`discern pretrain --dry-run` estimates what a configuration needs",
                low=("less than 1 GiB of memory is free", "a smaller train.micro_batch_size, or gradient_checkpointing = true"),
            )
        )
    return Diagnosis("this machine", facts, findings)


def examine(run: Path | None, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> Diagnosis:
    """Diagnose a run, or this machine if no run is given."""
    return examine_machine(Path.cwd()) if run is None else examine_run(run, sequences, device, progress, warn)
