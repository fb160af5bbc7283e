"""What the commands that train print, and which commands they suggest next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.text import Text

from discern.cli.console import Console, columns
from discern.config.schema import NONE, leaves, toml_value
from discern.errors import ConfigError, DataError, counted
from discern.progress import duration

Result = dict[str, Any]


def suggested(*commands: str) -> str:
    """Commands to run next, one per line, so that each can be copied."""
    return "\n".join(["next:", *(f"  discern {command}" for command in commands)])


def shell_path(path: Path | str) -> str:
    """A path as the command line takes it, also with spaces, or with a dash in the beginning."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def has_gpu() -> bool:
    """Whether this machine has a GPU that the process may use; does not import torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def after_pretrain(run: Path, metrics: Mapping[str, Any], *, is_evaluated: bool) -> str:
    """Evaluate the run if text was held out, try out what its networks do, export it, and fine-tune it."""
    quoted = shell_path(run)
    tried = [f"evaluate {quoted}"] if is_evaluated else []
    if "discriminator_loss" in metrics and "energy" not in metrics:
        tried.append(f"detect {quoted} --text 'Some text.'")
    elif "mlm_loss" in metrics:
        tried.append(f"fill {quoted} 'The [MASK] sat on the mat.'")
    else:
        tried.append(f"score {quoted} sentences.txt")
    return suggested(*tried, f"export {quoted} --out MODEL", f"finetune {quoted} --train FILE.csv --out TUNED")


def demo(console: Console, result: Result, options: Result) -> None:
    text, words, task, seconds = (result[key] for key in ("text", "wrong_words", "labeled_task", "seconds_by_stage"))
    lines = [
        f"Read {text['characters']:,} characters of documentation from {text['modules']:,} modules of {text['packages']} "
        f"packages.",
        f"Trained {result['step']:,} steps. On held-out text, the generator predicts {result['generator_accuracy']:.1%} of the "
        f"masked tokens; the discriminator has AUC {result['discriminator_auc']:.3f} (0.5 is guessing).",
    ]
    scores = f"{median(task['pretrained']):.3f} pre-trained, {median(task['untrained']):.3f} untrained"
    baseline = f"{result['baseline']['metrics']['accuracy']:.3f} for {result['baseline']['title']}"
    lines += [
        f"A random word is the most suspicious one in {words['most_suspicious']} of {words['sentences']} held-out sentences.",
        f"A labeled task with {task['examples']:,} examples: accuracy {scores}, {baseline}; {task['verdict']}.",
    ]
    lines += [result["note"]] if result["note"] else []
    stages = ", ".join(f"{stage} {spent:.0f}" for stage, spent in seconds.items())
    lines += [f"{sum(seconds.values()):.0f} seconds: {stages}.", f"Report: {result['report']}"]
    run = shell_path(Path(options["out"]) / "run")
    tried = suggested(f"detect {run} --text 'Your own sentence.'", "prepare YOUR-TEXT --out DATA --train-tokenizer wordpiece")
    console.result(result, text="\n".join([*lines, tried]))


def prepare(console: Console, result: Result, options: Result) -> None:
    if options["check"]:
        _show_check(console, result)
        return
    state = "repaired" if result["repaired"] else "made"
    state = "already existed with identical content" if result["unchanged"] else state
    lengths, near = result["document_lengths"], result["near_duplicates"]
    lines = [
        f"{options['out']}: {state} in {result['seconds']:.1f} s, {result['tokens_per_second']:,.0f} tokens/s",
        f"  documents   {result['documents']:,}: {result['train_documents']:,} to train on, {result['heldout_documents']:,} "
        f"held out; {counted(result['duplicates'], 'exact duplicate')}",
        *(f"  left out    {counted(count, 'document')}, {reason}" for reason, count in (result["filtered"] or {}).items()),
        *([] if near is None else [f"  removed     {counted(near, 'near-duplicate')}"]),
        f"  tokens      {result['tokens']:,}: {result['train_tokens']:,} to train on, {result['heldout_tokens']:,} held out",
        f"  vocabulary  {result['vocab_size']:,} ({result['tokenizer']['kind']}), {result['unknown_fraction']:.3%} of the tokens "
        f"unknown, {result['tokens_per_word']:.2f} tokens per word",
        f"  lengths     median document {lengths['0.5']:,} tokens, longest {lengths['1']:,}",
        *(f"  {line}" for line in _overlap_lines(result["overlap"])),
    ]
    data, tokenizer = shell_path(options["out"]), options["tokenizer"]
    if tokenizer is not None and (not Path(tokenizer).exists() or (Path(tokenizer) / "config.json").is_file()):
        lines.append(suggested(f"adapt {shell_path(tokenizer)} --data {data} --out RUN"))
    else:
        recipe = "gpu-minutes" if has_gpu() else "modern-cpu"
        masking = "" if result["segmenter"] == "none" else " --set objective.masking=whole-word"
        lines.append(suggested(f"pretrain --preset {recipe} --data {data} --out RUN{masking}"))
    console.result(result, text="\n".join(lines))


def _overlap_lines(overlap: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The overlap with each evaluation file, and its first examples."""
    from discern.data.curation.contamination import FileOverlap

    lines = [] if overlap is None else ["overlap with evaluation files: examples that share 13 words in a row with the text"]
    for file in (FileOverlap.model_validate(values) for values in overlap or ()):
        lines.append(f"  {file}")
        lines += [
            f"    line {each.line:,}: '{each.words}' in {each.input}, document {each.document:,} ({each.begins!r})"
            for each in file.found
        ]
    return lines


def _show_check(console: Console, result: Result) -> None:
    """Print the result of a check. Fails if `prepare` would."""
    filtered, statistics = result["filtered"] or {}, result["statistics"]
    summary = ", ".join(counted(result[f"{unit}s"], unit) for unit in ("document", "sentence", "character"))
    if statistics is not None:
        summary += f", {counted(statistics['tokens'], 'token')} ({statistics['unknown_fraction']:.3%} unknown)"
    languages = ", ".join(f"{code} {share:.0%}" for code, share in list(result["languages"].items())[:5])
    is_empty = result["documents"] == sum(filtered.values())
    remarks = [*(f"error: {error}" for error in result["errors"]), *result["remarks"], *result["advice"]]
    lines = [
        *([summary] if result["documents"] else []),
        *([f"languages: {languages}"] if languages else []),
        *(f"left out {counted(count, 'document')}, {reason}" for reason, count in filtered.items()),
        *(remarks or ["no problems found"] * (not is_empty)),
        *_overlap_lines(result["overlap"]),
    ]
    console.result(result, text="\n".join(lines))
    reason, hint = "the input contains no text", "give files with text"
    if result["errors"]:
        reason, hint = f"{len(result['errors'])} of the inputs cannot be read", "mend them, or leave them out"
    elif result["documents"]:
        reason, hint = "the filters leave out every document", "leave out a --filter"
    if result["errors"] or is_empty:
        raise DataError(f"`discern prepare` would stop: {reason}", hint=hint)


def pretrain(console: Console, result: Result, options: Result) -> None:
    if options["dry_run"]:
        console.result(result, text=result["summary"])
        return
    from discern.training.metrics import headlines

    lines = [f"{options['out']}: {counted(result['step'], 'step')}"]
    if "tokens_per_second" in result:
        amount = f", {result['tokens']:,} tokens in {duration(result['seconds'])}, {result['tokens_per_second']:,.0f} tokens/s"
        lines[0] += amount
    losses = {f"heldout_loss of {name}": each["heldout_loss"] for name, each in result.get("heldout_by_source", {}).items()}
    lines += [f"  {name:<26} {_number(value)}" for name, value in (headlines(result) | losses).items()]
    next_steps = after_pretrain(Path(options["out"]), result, is_evaluated="heldout_loss" in result)
    console.result(result, text="\n".join([*lines, next_steps]))


def _number(value: Any) -> str:
    """A number with four digits, or all digits before the decimal point if there are more."""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


# Shown first, in this order; other metrics of the objective follow.
_FIRST = ("loss", "generator_loss", "discriminator_loss", "mlm_loss", "permutation_lm_loss", "perplexity", "discriminator_auc")


def adapt(console: Console, result: Result, options: Result) -> None:
    parts = [f"{options['out']}: {result['start']}, trained for {counted(result['step'], 'more step')}"]
    for name, before in result["before"].items():
        after = result["after"][name]
        names = sorted(before, key=lambda each: _FIRST.index(each) if each in _FIRST else len(_FIRST))
        rows = [(each, _number(before[each]), _number(after[each]), f"{after[each] - before[each]:+,.4f}") for each in names]
        parts.append(columns((f"{name} text, held out", "before", "after", "change"), rows, right=(1, 2, 3)))
    metrics = next(iter(result["after"].values()))
    console.result(result, text="\n\n".join([*parts, after_pretrain(Path(options["out"]), metrics, is_evaluated=True)]))


_ADVICE = (
    "More labeled examples, a model pre-trained for longer, or one adapted to such text (discern adapt) may help; "
    "`discern finetune --sweep-rates` looks for a better learning rate."
)


def finetune(console: Console, result: Result, options: Result) -> None:
    out, lines = Path(options["out"]), []
    if options["sweep"]:
        rows = []
        for row in result["sweep"]:
            spread = "" if row["standard_deviation"] is None else f" +- {row['standard_deviation']:.4f}"
            failed = f"({len(row['failed_seeds'])} failed)" if row["failed_seeds"] else ""
            rows.append((row["folder"], "-" if row["median"] is None else f"{row['median']:.4f}{spread}", failed))
        lines += [columns(("setting", f"median {result['metric']}", ""), rows), f"best: {result['best_folder']}"]
        if result["chosen_on"]:
            lines.append(f"  selected by its scores on {result['chosen_on']}, so these are slightly optimistic")
        out = out / result["best_folder"]
    for entry in result.get("tasks", {result["task"]: result}).values():
        lines += _task_lines(entry, len(result["seeds"]))
    if result.get("kept_step"):
        lines.append(
            f"{result['passes']:.1f} passes over the training rows, weights of step {result['kept_step']:,}; "
            f"padding: {result['padding_fraction']:.1%} of the positions in the batches"
        )
    if result["median"] is None:
        lines.append("every seed failed: try a lower learning rate (--set optimizer.learning_rate=...) and another --out")
    else:
        quoted, tasks = shell_path(out), list(result.get("tasks", {}))
        of = f" --task {tasks[0]}" if len(tasks) > 1 else ""
        embeds = result["settings"].get("files.task") == "pairs"
        used = f"embed {quoted} FILE --out vectors.npy" if embeds else f"predict {quoted} FILE{of}"
        evaluated = f"evaluate {quoted} --data FILE{of}"
        lines.append(suggested(used, evaluated, f"report {quoted}", f"export {quoted} --out MODEL{of}"))
    console.result(result, text="\n".join(lines))
    if result["median"] is None:
        console.fail()


def baseline_lines(entry: Mapping[str, Any]) -> list[str]:
    """One line per baseline, and their comparison with the score."""
    from discern.tasks.baselines import comparison_sentence

    metric, baselines = entry["metric"], entry.get("baselines") or {}
    lines = [f"  baseline {each['metrics'][metric]:.4f}, {each['title']}" for each in baselines.values()]
    sentence = comparison_sentence(entry)
    if sentence and not entry["beats_baselines"]:
        sentence += f" {_ADVICE}"
    return [*lines, *([f"  {sentence}"] if sentence else [])]


def interval_text(entry: Mapping[str, Any]) -> str:
    """The 95 % interval of a score, in words; empty without one."""
    return "" if entry.get("interval") is None else "; 95 % interval {:.4f} to {:.4f}".format(*entry["interval"])


def _task_lines(entry: Result, seeds: int) -> list[str]:
    examples = f"{counted(entry['examples'], 'example')}{interval_text(entry)}"
    if entry["median"] is None:
        lines = [f"{entry['task']}: no seed has a score"]
    elif seeds == 1:
        lines = [f"{entry['task']}: {entry['metric']} {entry['median']:.4f} on {entry['split']} ({examples})"]
    else:
        deviation = entry["standard_deviation"]  # None if all seeds but one have failed
        spread = "" if deviation is None else f", standard deviation {deviation:.4f}"
        lines = [
            f"{entry['task']}: median {entry['metric']} {entry['median']:.4f} of {seeds} seeds on {entry['split']} "
            f"({examples}); mean {entry['mean']:.4f}{spread}, best {entry['best']:.4f}"
        ]
    lines += [f"  {name:<26} {value:.4f}" for name, value in entry["metrics"].items() if name != entry["metric"]]
    if teacher := entry.get("teacher"):
        further = f", which labeled {counted(teacher['unlabeled_examples'], 'further text')}"
        lines.append(f"  teacher {teacher['model']}: {teacher['score']:.4f}{further if teacher['unlabeled_examples'] else ''}")
    lines += baseline_lines(entry)
    if entry.get("selected_on") == entry["split"]:
        lines.append(f"  the weights of each seed were selected on {entry['split']}, so its scores are slightly optimistic")
    for seed, reasons in (entry.get("retried_seeds") or {}).items():
        times = "once" if len(reasons) == 1 else f"{len(reasons)} times"
        lines.append(f"  seed {seed}: retried {times} ({reasons[-1]})")
    return [*lines, *(f"  seed {seed} failed: {reason}" for seed, reason in entry["failed_seeds"].items())]


def config_show(console: Console, result: Result, options: Result) -> None:
    """The configuration as TOML, with the origin of each value as a comment."""
    flat = dict(leaves({key: entry for key, entry in result.items() if key != "dropped"}))
    names = [key.removesuffix(".origin") for key in flat if key.endswith(".origin")]
    # In TOML, values without a section come first.
    lines = {key: _assignment(key, flat[f"{key}.value"]) for key in sorted(names, key=lambda key: "." in key)}
    width = min(44, max(map(len, lines.values())))
    text, section = Text(), ""
    for key, line in lines.items():
        if section != (section := key.rpartition(".")[0]):
            text.append(f"{chr(10) if text else ''}[{section}]\n", style="bold")
        origin = flat[f"{key}.origin"]
        style = "green" if flat[f"{key}.set_by_user"] else "dim" if origin == "default" else "cyan"
        text.append(line.ljust(width), style="dim" if line.startswith("#") else "")
        text.append(f"  # {origin}\n", style=style)
    for item in result["dropped"]:
        text.append(f"\n# dropped: {item.key} = {toml_value(item.value)}, from {item.origin}; {item.reason}", style="yellow")
    text.rstrip()
    console.result(result, text=text)


def _assignment(key: str, value: object) -> str:
    """One line of TOML; a comment if the value is None, which TOML cannot express."""
    name = key.rpartition(".")[2]
    return f"# {name} is {NONE}" if value is None else f"{name} = {toml_value(value)}"


def config_check(console: Console, result: Result, options: Result) -> None:
    origins = result.get("origins", {})
    counts = ", ".join(f"{count} {origin}" for origin, count in origins.items())
    if result["valid"] or console.json_output:
        console.result(result, text=f"valid: {sum(origins.values())} values ({counts})")
    if not result["valid"]:
        raise ConfigError(result["message"], hint=result["hint"])


def config_diff(console: Console, result: Result, options: Result) -> None:
    sides = ("left", "right")
    rows = [
        (row["key"], *("-" if side not in row else NONE if row[side] is None else toml_value(row[side]) for side in sides))
        for row in result["differences"]
    ]
    table = columns(("key", result["left"], result["right"]), rows)
    console.result(result, text=table if rows else f"{result['left']} and {result['right']} are the same")


def config_schema(console: Console, result: Result, options: Result) -> None:
    console.records([result])  # JSON in any case


FIRST_PRESETS = ("modern-cpu", "gpu-minutes", "electra-small")


def config_presets(console: Console, result: Result, options: Result) -> None:
    presets = result["presets"]
    width = max(map(len, presets))
    rest = [name for name in presets if name not in FIRST_PRESETS]
    lines = ["To start with:", *(f"  {name:<{width}}  {presets[name]}" for name in FIRST_PRESETS)]
    lines += ["", "To repeat papers, and for tests:", *(f"  {name:<{width}}  {presets[name]}" for name in rest)]
    console.result(result, text="\n".join(lines))
