"""Diagnosis of a run, or of this machine."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discern import __version__, kernels
from discern.config.schema import flatten
from discern.corruption.randomness import Randomness
from discern.data.executors import available_cores
from discern.diagnosis.health import (
    Expectations,
    Finding,
    diagnosable_from,
    diagnose_drift,
    diagnose_duplicates,
    diagnose_gradients,
    diagnose_metrics,
    diagnose_waiting,
    embedding_norm,
    expectations,
    finding_in_range,
    steps_of_run,
    too_early,
    unusual_findings,
)
from discern.errors import DataError, counted
from discern.model_files.run import build_objective, load_run
from discern.pretraining.evaluate import change_since
from discern.pretraining.run import heldout_stream, training_stream
from discern.progress import Progress
from discern.training.device import gpu_names
from discern.training.distributed import Ranks, choose_device
from discern.training.evaluation import EVALUATION_SEED, evaluate
from discern.training.metrics import read_metrics

CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""Command that installs PyTorch without the libraries of CUDA."""


def examine(run: Path | None, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Diagnose the newest checkpoint of a run on its data set, or this machine if no run is given.

    Args:
        sequences: rows to evaluate on, held-out ones if there are any; gradients are computed on 32 of them.
        warn: called for each damaged checkpoint that was skipped, and if the data set cannot be read or has changed.

    Returns:
        `subject`: the run with its step, or this machine; `verdict`: a sentence; properties by name; `findings`: each metric with
        its usual range (None for an upper end that there is not), its verdict, the cause, and the setting to change.

    Raises:
        DataError: the folder is not a run.
        CheckpointError: the run has no intact checkpoint.
        ConfigError: the machine has no such device.
    """
    subject, facts, findings = _machine() if run is None else _run(run, sequences, device, progress, warn)
    unusual, early = len(unusual_findings(findings)), sum(finding.early for finding in findings)
    verdict = f"{counted(unusual, 'value')} out of the usual range" if unusual else "nothing is out of its usual range"
    if early:
        verdict += f"; for {counted(early, 'metric')} it is too early to tell"
    plain = [
        {**asdict(finding), "usual": finding.usual and [None if bound == inf else bound for bound in finding.usual]}
        for finding in findings
    ]
    return {"subject": subject, "verdict": verdict, **facts, "findings": plain}


_Diagnosis = tuple[str, dict[str, Any], list[Finding]]


def _run(folder: Path, sequences: int, device: str, progress: Progress, warn: Callable[[str], None]) -> _Diagnosis:
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

    # Speed
    findings += diagnose_waiting(next((record for record in reversed(records) if record.get("tokens_per_second")), {}))

    # Held-out metrics
    expected = Expectations()
    try:
        data = run.open_data()
        if data.tokenizer_fingerprint != run.record["tokenizer_fingerprint"]:
            raise DataError(f"{data.folder} has changed: its tokenizer is not that of the run")
    except DataError as problem:
        warn(f"its data set cannot be read, so only the weights were examined: {problem.message}")
    else:
        if (change := change_since(data, run.folder, run.record)) is not None:
            warn(change)
        facts["text"], stream = "held out", heldout_stream(data, config)
        if stream is None:
            facts["text"], stream = "trained on" if change is None else "not held out", training_stream(data, config)
        objective, rows = run.objective.to(ranks.device), min(sequences, stream.num_rows)
        progress.start("examining", rows, "rows")
        facts["figures"] = evaluate(objective, stream, ranks, sequences=rows, progress=progress)
        progress.finish()
        expected = expectations(objective, steps, flatten(config))

        # Gradients of the losses at the word embeddings, without dropout
        numbers = np.arange(min(32, stream.num_rows))
        batch = stream.batch(numbers, numbers)
        randomness = Randomness(EVALUATION_SEED, 0, batch.example_index)
        objective.requires_grad_(True)
        corrupted = objective.corrupt(batch, randomness).to(ranks.device)
        output = objective(corrupted, randomness.to(ranks.device))
        findings = [*diagnose_metrics(facts["figures"], expected), diagnose_gradients(objective, output), *findings]
    settled = diagnosable_from(config.optimizer.warmup_steps, ended_at)
    return subject, facts, [too_early(finding, run.step, settled, expected.discriminator_from) for finding in findings]


def _machine() -> _Diagnosis:
    """The properties of this machine that determine whether a run works, and how fast."""
    cores, loaded = available_cores(), kernels.load_kernels()
    facts: dict[str, Any] = {
        "discern": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "kernels": loaded.reason,
        "devices": gpu_names(),
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
            float(shutil.disk_usage(Path.cwd()).free),
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
    return "this machine", facts, findings
