"""Cost of a run, estimated before it starts: parameters, memory, FLOPs and time."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from discern.config.schema import flatten, toml_value
from discern.data.batching.mixture import MixedData
from discern.model_files.run import CHECKPOINTS, check_words, vocabulary_of
from discern.pretraining.bench import meta_steps, slot_memory
from discern.pretraining.resume import meta_objective
from discern.pretraining.run import Plan, check_shares, precision_of, training_stream
from discern.progress import duration_in_words
from discern.training import checkpoint
from discern.training.config import NO_STEP_LIMIT, step_sizes
from discern.training.distributed import Ranks, choose_device
from discern.training.flops import fastest_product, run_flops
from discern.training.optimizer import counts_by_rule, counts_text
from discern.training.state import average_warning

# Fraction of the speed of plain matrix products that a whole training step reached in measurements on CPUs.
_SHARE_OF_PRODUCTS = 0.6


class Estimate(NamedTuple):
    """Estimates of a run: values for programs, text for people."""

    values: dict[str, Any]
    text: str


def estimate(planned: Plan, *, device: str = "auto", processes: int = 1) -> Estimate:
    """Estimate parameters, memory, FLOPs and time of the rest of a run, without starting it.

    Memory is that of a step on a GPU, from the shapes of its tensors. Time is estimated from the speed of matrix products on this
    machine.

    Args:
        processes: number of processes that train, each on a GPU of its own or all on this machine's CPU.

    Raises:
        ConfigError, DataError: the options do not fit together.
    """
    chosen = choose_device(device)
    check_shares(planned.config, Ranks(0, processes, chosen))
    config, data = planned.config, planned.data
    precision = precision_of(planned, Ranks(0, 1, chosen)).name
    check_words(config, data)
    vocabulary = vocabulary_of(data)
    objective = meta_objective(config, vocabulary)
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    sizes = step_sizes(config.train, config.data)
    whole = run_flops(objective, config.train.max_steps, sizes)
    speed = fastest_product(chosen, precision) * _SHARE_OF_PRODUCTS * (processes if chosen.type == "cuda" else 1)
    steps = config.train.max_steps
    if config.train.max_hours is not None:
        steps = max(1, min(steps, whole.steps_within(config.train.max_hours * 3600 * speed)))
    done = checkpoint.newest_step(planned.out / CHECKPOINTS) if planned.has_progress else 0
    begin = min(steps, max(done, 0 if planned.decay is None else planned.decay.step))
    # Weights that are divided take less than this.
    rows, at_once = config.train.sequences_per_step // processes, config.train.micro_batch_size
    share = {"sequences_per_step": rows, "micro_batch_size": None if at_once is None else min(at_once, rows)}
    own = config.model_copy(update={"train": config.train.model_copy(update=share)})
    flops = whole.after(steps) - whole.after(begin)
    epochs = training_stream(data, config).epochs(sizes.examples_before(steps))
    mixture = []
    if isinstance(data, MixedData):
        columns = zip(data.weights.items(), data.tokens, epochs, strict=True)
        mixture = [{"source": name, "tokens": n, "weight": weight, "epochs": read} for (name, weight), n, read in columns]
    warnings = list(filter(None, [average_warning(config.train, steps)]))
    if max(epochs) > 100:
        warnings.append(f"a data set would be read {max(epochs):,.0f} times; use more text or fewer steps")
    values = {
        "steps": steps - begin,
        "first_step": begin,
        "parameters": parameters,
        "parameters_by_network": {
            name: sum(parameter.numel() for parameter in nn.ModuleList(network.parts()).parameters())
            for name, network in objective.networks().items()
        },
        "parameters_by_optimizer": counts_by_rule(objective, config.optimizer),
        "flops": flops.executed,
        "flops_paper_convention": flops.paper,
        "memory_bytes": meta_steps(own, objective, precision, vocabulary.size).peak_memory_bytes,
        "slot_memory_bytes": slot_memory(config, objective),
        "estimated_seconds": (seconds := flops.executed / speed),
        "estimated_cost": None if config.train.price_per_hour is None else config.train.price_per_hour * seconds / 3600,
        "epochs": max(epochs),
        "mixture": mixture,
        "precision": precision,
        "device": str(chosen),
        "warnings": warnings,
    }
    return Estimate(values, _text(planned, values, processes))


def _text(planned: Plan, values: dict[str, Any], processes: int) -> str:
    """The estimates, and the settings that the user has set: all of them are shown by `discern config show`."""
    config, time_text = planned.config, duration_in_words(values["estimated_seconds"])
    sizes = ", ".join(f"{name} {size:,}" for name, size in values["parameters_by_network"].items())
    steps, first = values["steps"], values["first_step"]
    steps_text = f"{steps:,}" + (f", from step {first:,} on" if first else "")
    if config.train.max_hours is not None and first + steps < config.train.max_steps:
        bound = "" if config.train.max_steps >= NO_STEP_LIMIT else f"; train.max_steps allows {config.train.max_steps:,}"
        steps_text = f"about {steps:,} fit into {config.train.max_hours:g} hours (estimate){bound}"
    remembered = values["slot_memory_bytes"] / 2**30
    each = "" if processes == 1 else " for each process"
    slots = f", of which {remembered:,.1f} GiB for the memory of the slots, shared by all processes" if remembered >= 0.05 else ""
    lines = [
        *(
            f"setting       {key} = {toml_value(value)} ({planned.settings.origins[key]})"
            for key, value in flatten(config).items()
            if key in planned.user_set
        ),
        f"parameters    {values['parameters']:,} ({sizes})",
        f"optimizer     {counts_text(values['parameters_by_optimizer'])}",
        f"arithmetic    {values['flops']:.4e} FLOPs executed; {values['flops_paper_convention']:.4e} by the paper's convention",
        f"memory        about {values['memory_bytes'] / 2**30:.1f} GiB{each} (estimate){slots}",
        f"time          about {time_text} on this machine's {values['device']} in {values['precision']} (estimate)",
        *([] if (cost := values["estimated_cost"]) is None else [f"cost          about {cost:,.2f} (estimate)"]),
        f"steps         {steps_text}",
        f"epochs        {values['epochs']:,.2f}",
        *(
            f"mixture       {one['source']}: {one['tokens']:,} tokens, weight {one['weight']:.4g}, epochs {one['epochs']:.2f}"
            for one in values["mixture"]
        ),
        *(f"warning       {warning}" for warning in values["warnings"]),
        "nothing was trained or written: this was a dry run",
    ]
    return "\n".join(lines)
