"""What the commands that measure, compare and explain print."""

from __future__ import annotations

from discern.cli.console import Console, columns
from discern.cli.train import Result, baseline_lines, interval_text, shell_path, suggested
from discern.cli.use import serve_results as watch_results  # noqa: F401 (the address of a server)
from discern.errors import counted


def evaluate(console: Console, result: Result, options: Result) -> None:
    model = shell_path(options["model"])
    if options["suite"] is not None:
        _show_suite(console, result)
        return
    if "score" in result:
        examples = f"{counted(result['examples'], 'example')}{interval_text(result)}"
        others = {name: value for name, value in result["metrics"].items() if name != result["metric"]} | {"loss": result["loss"]}
        lines = [f"{result['task']}: {result['metric']} {result['score']:.4f} on {result['file']} ({examples})"]
        lines += [*(f"  {name:<26} {value:.4f}" for name, value in others.items()), *baseline_lines(result)]
        console.result(result, text="\n".join([*lines, suggested(f"report {model}")]))
        return
    from discern.model_files.run import is_run
    from discern.training.metrics import headlines

    lines = [
        f"{options['model']} at step {result['step']:,}, {counted(result['rows'], 'held-out row')}",
        *(f"  {name:<26} {value:.4f}" for name, value in headlines(result).items()),
        *(f"  {f'loss of {name}':<26} {each['heldout_loss']:.4f}" for name, each in result.get("heldout_by_source", {}).items()),
        "--json prints the other metrics, also by frequency and position of the tokens",
    ]
    if is_run(options["model"]):
        lines.append(suggested(f"doctor {model}", f"report {model}"))
    console.result(result, text="\n".join(lines))


def _show_suite(console: Console, result: Result) -> None:
    """Accuracies on minimal pairs, one column per scorer: overall and by phenomenon."""
    by_scorer = result["by_scorer"]
    lines = [
        f"{name}: {each['accuracy']:.4f} of {each['pairs']:,} pairs ranked correctly; ties, counted as one half: {each['ties']:,}"
        for name, each in by_scorer.items()
    ]
    groups = result["by_phenomenon"]
    rows = [(group, *(_cell(each["by_phenomenon"].get(group)) for each in by_scorer.values())) for group in groups]
    console.result(result, text="\n".join([*lines, columns(("phenomenon", *by_scorer), rows)]))


def _cell(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def compare(console: Console, result: Result, options: Result) -> None:
    if options["dry_run"]:
        rows = [
            (
                row["name"],
                row["objective"],
                len(result["seeds"]),
                row["seeds_left"],
                *(_large(row[key]) for key in ("steps", "flops", "flops_paper_convention", "tokens")),
                _cell(row["estimated_hours"], ".2f"),
            )
            for row in result["runs"]
        ]
        heading = ("run", "objective", "seeds", "left", "steps", "FLOPs", "FLOPs, paper", "positions", "hours each")
        left = f"about {result['estimated_hours_left']:.2f} hours of pre-training (an estimate)"
        lines = [columns(heading, rows), *result["notes"]]
        lines.append(f"still to do: {left} and {counted(result['finetunings_left'], 'fine-tuning run')}; nothing was trained")
        console.result(result, text="\n".join(lines))
        return
    from discern.report.comparison import p_text, score_columns, significance_notes, with_spread

    names = score_columns(result)
    rows = [
        (
            row["name"],
            *(_large(row["steps"]), _large(row["flops"]), _cell(row["seconds"], ",.1f")),
            *(with_spread(row["scores"][name]) for name in names),
        )
        for row in result["runs"]
    ]
    lines = [columns(("run", "steps", "FLOPs", "seconds", *names), rows)]
    for entry in result["significance"]:
        difference = f"{entry['difference_of_medians']:+.4f}, p {p_text(entry)}; {entry['verdict']}"
        lines.append(f"{entry['run']} against {entry['against']}, {entry['task']}: {difference}")
    lines += [*significance_notes(result), f"{result['page']} opens in any browser; comparison.json beside it has the same data"]
    console.result(result, text="\n".join(lines))
    for row in result["runs"]:
        for seed, reason in row["failures"].items():
            folder = f"{row['name']}/seed-{seed}"
            folders = f"{folder} from results and from work in {result['page'].parent}"
            console.warn(f"{folder} failed: {reason}; to try it again, remove {folders}")


def _large(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value < 1e7 else f"{value:.3e}"


def report(console: Console, result: Result, options: Result) -> None:
    console.result(result, text=f"{result['out']}: {result['bytes'] / 1000:,.0f} kB, opens in any browser")


def bench(console: Console, result: Result, options: Result) -> None:
    rows = result["sequences_per_step"]
    name = f"{result['preset'] or result['objective']} ({result['parameters']:,} parameters) in {result['precision']}"
    work = f"{rows} sequences of {result['sequence_length']} per step, {min(rows, result['micro_batch_size'])} per forward pass"
    if "flops_per_step" in result:
        cost = f"{result['flops_per_step']:.4g} FLOPs in its matrix products and holds at most "
        cost += f"{result['peak_memory_bytes'] / 2**30:,.2f} GiB of tensors. Nothing was computed."
        console.result(result, text=f"{name}: {work}.\nA training step on one GPU takes {cost}")
        return
    table = [
        (title, *(form.format(result[f"{key}{part}"] / unit) for part in ("", "_forward")))
        for title, form, key, unit in (
            ("tokens per second", "{:,.0f}", "tokens_per_second", 1),
            ("limit of its matrix products", "{:,.0f}", "gemm_limit_tokens_per_second", 1),
            ("share of that limit", "{:.0%}", "gemm_share", 1),
            ("peak memory", "{:,.2f} GiB", "peak_memory_bytes", 2**30),
        )
    ]
    spread = f"({result['step_milliseconds_min']:,.1f} to {result['step_milliseconds_max']:,.1f})"
    table += [
        ("milliseconds per step", f"{result['step_milliseconds']:,.1f} {spread}", ""),
        ("model FLOPs utilization", f"{result['model_flops_utilization']:.0%}", ""),
    ]
    place = f"{result['device_name']}, {counted(result['threads'], 'thread')}"
    place += f" in each of {result['processes']} processes" * (result["processes"] > 1)
    sentence = f"{name} on {place}: {work}, medians of {result['steps']} steps."
    # Two processes of one thread had 1.4 to 1.7 times the speed of one, so two threads should have as much.
    for key, least, option in (
        ("speedup_over_float32", 0.95, "--set train.precision=float32"),
        ("speedup_over_bfloat16", 0.95, "--set train.precision=bfloat16"),
        ("speedup_over_one_thread", 0.7 * result["threads"], "--nproc 2, unless other programs use the cores"),
    ):
        if ratio := result.get(key):
            table.append((key.replace("_", " "), f"{ratio:.2f}", ""))
            sentence += f"\nThis may be faster: {option}" * (ratio < least)
    console.result(result, text="\n".join([columns(("", "training step", "forward only"), table, right=(1, 2)), sentence]))


def doctor(console: Console, result: Result, options: Result) -> None:
    folder = options["folder"]
    if options["accept"]:
        changes = [f"{each['name']}: {_digests(each)}" for each in result["accepted"]]
        verdict = f"accepted {counted(len(changes), 'file')}" if changes else "no file has changed"
        console.result(result, text="\n".join([*changes, f"{folder}: {verdict}"]))
    elif options["files"]:
        _show_files(console, result)
    else:
        facts = [
            f"  {name:<12} {value}"
            for name, value in result.items()
            if isinstance(value, str | int) and name not in ("run", "subject", "verdict")
        ]
        facts += [f"  {'devices':<12} {', '.join(result['devices']) or 'no GPU'}"] if "devices" in result else []
        lines = [line for finding in result["findings"] for line in _finding_lines(finding)]
        console.result(result, text="\n".join([f"{result['subject']}: {result['verdict']}", *facts, "", *lines]))


def _digests(change: Result) -> str:
    before, after = change["before"], change["after"]
    if after is None:
        return "removed"
    return f"{after[:12]}..., new" if before is None else f"{before[:12]}... -> {after[:12]}..."


def _show_files(console: Console, result: Result) -> None:
    marks = {"ok": "ok", "differs": "DIFFERS", "missing": "MISSING", "damaged": "DAMAGED", "unknown": "-"}
    files, folder = result["files"], result["folder"]
    lines = [f"  {marks[each['state']]:<8} {each['name']}" + (f": {each['reason']}" if each["reason"] else "") for each in files]
    verdict = f"{result['problems']} of {len(files)} checks failed" if result["problems"] else "all files are intact"
    if not result["problems"] and any(each["state"] == "unknown" for each in files):
        verdict = "no problem found; `discern doctor --accept FOLDER` adds the missing checksums"
    console.result(result, text="\n".join([f"{result['kind']} {folder}: {verdict}", *lines]))
    if result["problems"]:
        console.warn(f"copy these files again; to accept files that were edited on purpose: discern doctor --accept {folder}")
        console.fail()


def _finding_lines(finding: Result) -> list[str]:
    """One metric: its value, usual range, likely cause and the setting to change."""
    mark = {"fine": "ok  ", "low": "LOW ", "high": "HIGH", "unknown": "-   "}[finding["verdict"]]
    value = "-" if finding["value"] is None else _number(finding["value"])
    usual = "" if finding["usual"] is None else f"   usually {_range(*finding['usual'])}"
    lines = [f"{mark} {finding['name']:<26} {value}{usual}", f"       {finding['cause']}"]
    return lines + ([f"       try: {finding['knob']}"] if finding["verdict"] in ("low", "high") and finding["knob"] else [])


def _range(low: float, high: float | None) -> str:
    if high is None:
        return f"{_number(low)} or more"
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    if value >= 2**20:
        return f"{value / 2**30:,.1f} GiB"
    return f"{value:,.0f}" if value == round(value) else f"{value:.4f}"
