"""Settings of the optimizer and of the loop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from discern.config.resolve import Resolution
from discern.config.schedule import RunPoint, SizeSchedule, check_schedule
from discern.config.schema import OTHER_NAME, Section
from discern.training.metrics_log import TrackerName

NO_STEP_LIMIT = 1_000_000_000
"""`train.max_steps` of a run that is limited by its time budget only."""


class OptimizerConfig(Section):
    """Optimizer with decoupled weight decay, gradient clipping and a schedule. Defaults: ELECTRA, table 6."""

    name: Literal["adamw", "muon", "stable-adamw"] = Field(
        "adamw",
        description="'adamw': Adam with decoupled weight decay. 'muon': Muon for the hidden matrices, AdamW for embeddings, "
        "output layers, biases and norms, with the same learning rate and weight decay. 'stable-adamw': AdamW that reduces the "
        "learning rate of a tensor whose gradient is unusually large; clip_norm = 0 is then usual.",
    )
    learning_rate: float = Field(
        5e-4,
        gt=0,
        description="Peak learning rate. ELECTRA, table 6: 5e-4 small, 2e-4 base and large.",
        json_schema_extra={OTHER_NAME: "lr"},
    )
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay, not applied to biases and LayerNorm. ELECTRA: 0.01."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment. Muon's momentum is always 0.95.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-6, gt=0, description="Epsilon of AdamW, added outside the square root. ELECTRA: 1e-6.")
    bias_correction: bool = Field(True, description="Correct the bias of Adam's moments. The released code does not.")
    clip_norm: float = Field(
        1.0, ge=0, description="Gradients are clipped to this norm, over all networks together; 0: no clipping."
    )
    schedule: Literal["linear", "released", "constant", "wsd"] = Field(
        "linear",
        description="'linear': warm-up, then linear decay to zero at the end. 'released': decay from step 0 times warm-up, "
        "as the released code does. 'constant': warm-up, then constant. 'wsd' (warm-up, stable, decay): warm-up, then constant, "
        "then decay to zero as 1 - sqrt(progress) over the last decay_fraction of the run.",
    )
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="Fraction of the run over which 'wsd' decays. Haegele et al. 2024: 0.1 to 0.2."
    )
    decay_steps: RunPoint | None = Field(
        None, gt=0, description="Steps over which 'wsd' decays, instead of decay_fraction; not under train.max_hours."
    )
    warmup_steps: RunPoint = Field(
        0.01,  # type: ignore[assignment]
        ge=0,
        description="Steps over which the learning rate rises, or the fraction of the run below 1; under train.max_hours, a "
        "tenth of the time at most. ELECTRA: 10,000 of 1,000,000.",
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="Factor of the learning rate per layer, from the top layer down; 1: no decay."
    )
    layer_decay_gap: bool = Field(
        False, description="Count a layer between the heads and the top layer, although there is none, as in the released code."
    )

    def unread(self) -> dict[str, str]:
        return {} if self.schedule == "wsd" else dict.fromkeys(("decay_steps", "decay_fraction"), "schedule = 'wsd'")


class TrainConfig(Section):
    """The loop: length of the run, size of a step, and intervals of checkpoints, evaluations and records."""

    seed: int = Field(0, ge=0, description="Seed of all random numbers: weights, order, masks, samples, dropout.")
    max_steps: int = Field(1_000_000, ge=1, le=NO_STEP_LIMIT, description="Optimizer updates of the whole run.")
    max_hours: float | None = Field(
        None,
        gt=0,
        description="Time budget in hours, without start and compilation; the schedule ends with it. max_steps remains an upper "
        "limit.",
    )
    sequences_per_step: int = Field(
        128,
        ge=1,
        le=1 << 20,
        description="Sequences per update, over all ranks and micro-batches.",
        json_schema_extra={OTHER_NAME: "batch_size"},
    )
    batch_schedule: SizeSchedule = Field(
        (),
        description="Tokens per update, in segments that begin at a step or a fraction of the run: [[0, 16384], [0.5, 65536]]. "
        "Empty: sequences_per_step throughout; otherwise that is the size of the last segment. Padding counts as tokens.",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Sequences per rank and forward pass, at most (default: all sequences of the rank at once). With "
        "data.length_schedule, this is the number of rows of the last length; a forward pass has more of the shorter rows.",
    )
    # Under train.max_hours all three also become due by the clock, unless the user has set them: see training/metrics.py.
    checkpoint_every_steps: int = Field(1000, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=2, description="Number of newest checkpoints to keep.")
    weight_average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, such as 0.999; 0: none. It spans about "
        "1 / (1 - decay) updates, which should be a small part of the run. Evaluations, and all commands that read the run, use "
        "the average.",
    )
    evaluate_every_steps: int = Field(5000, ge=0, description="Steps between evaluations on held-out text; 0: only at the end.")
    evaluate_sequences: int = Field(2000, ge=0, description="Held-out rows of each data set in a periodic evaluation; 0: all.")
    log_every_steps: int = Field(50, ge=1, description="Steps between records in metrics.jsonl.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the forward pass: bfloat16 is autocast, weights stay float32. "
        "auto: bfloat16 if it is faster; on a CPU both are timed when the run begins, and run.json keeps the choice.",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="How several processes share the work. Each computes with its part of the rows. 'ddp': each has the whole "
        "model. 'fsdp': weights, gradients and moments are divided among them (FSDP2). Without dropout, the results are those of "
        "one process, up to rounding.",
    )
    compile: bool | Literal["auto"] = Field(
        False,
        description="Compile the networks with torch.compile. auto: on a GPU, unless the run has fewer than 1,000 steps. If the "
        "compiler fails, the run continues without it.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, which saves memory and costs time."
    )
    tensorboard: bool = Field(False, description="Also write TensorBoard events (extra 'track').")
    tracker: TrackerName = Field(
        "none",
        description="Also send the records to an experiment tracker, whose package must be installed: 'wandb' or 'trackio'.",
    )

    def divides_weights(self, processes: int) -> bool:
        """Whether no single process has the whole model while it is trained."""
        return self.parallel == "fsdp" and processes > 1

    @model_validator(mode="after")
    def _batch_grows(self) -> TrainConfig:
        check_schedule("batch_schedule", self.batch_schedule)
        return self


def limit_micro_batch(work: Resolution) -> None:
    """Lower `train.micro_batch_size` to the sequences of a step."""
    micro, rows = work.value("train.micro_batch_size"), work.value("train.sequences_per_step")
    if micro is not None and micro > rows:
        work.set_value("train.micro_batch_size", rows, "at most train.sequences_per_step")
