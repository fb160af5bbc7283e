"""`discern watch`: the page of runs in progress, read from their folders without involving the process that trains.

A run may be deleted, torn or restarted while it is read. Whatever cannot be read now is shown as it was read last.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from discern.errors import DataError, DiscernError
from discern.model_files.run import CHECKPOINTS, RECORD_FILE
from discern.progress import duration, duration_in_words
from discern.report.charts import COLORS
from discern.report.metrics import AXES, held_out_table, last_held_out, metric_charts
from discern.report.page import Page, Texts, package_text, render_page
from discern.report.run_page import LoggedRun, example_texts, read_logged_run, steps_done, verdict_of_run
from discern.serve.app import application, page_response
from discern.serve.server import Access, short_names
from discern.training.checkpoint import newest_step
from discern.training.metrics import METRICS_FILE

_SILENT_SECONDS = 120.0  # without a record, after which a run is no longer called training
_SCRIPT = package_text("watch.js", "discern.serve")


class WatchedRun:
    """A run's folder, as it was read last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: LoggedRun | None = None
        self.verdict: list[str] = []
        self.examples: list[Texts] = []
        self._changed = 0.0

    def read(self) -> None:
        """Read the folder again if its metrics log has changed."""
        with suppress(DiscernError, OSError, KeyError, TypeError, ValueError):
            changed = (self.folder / METRICS_FILE).stat().st_mtime
            if changed != self._changed:
                run = read_logged_run(self.folder)
                self.verdict, self.examples, self.run = verdict_of_run(run), example_texts(self.folder), run
                self._changed = changed

    def card(self) -> dict[str, Any]:
        """The condition of the run, the fraction that is done, and facts about its progress."""
        if self.run is None or "tokens_per_second" not in self.run.metrics_log[-1]:
            return {"condition": "no records yet" if self.folder.is_dir() else "gone", "fraction": 0, "facts": {}}
        train, last = self.run.config.train, self.run.metrics_log[-1]
        used = 0 if train.max_hours is None else last["seconds"] / (3600 * train.max_hours)
        fraction, silent = max(last["step"] / train.max_steps, used), time.time() - self._changed
        if not self.folder.is_dir():
            condition = "gone"
        elif fraction >= 1:
            condition = "finished"
        else:
            condition = "training" if silent < _SILENT_SECONDS else f"no record for {duration_in_words(silent)}"
        checkpoint = newest_step(self.folder / CHECKPOINTS)
        facts = {
            "Steps": steps_done(self.run),
            "Remaining": duration(last["seconds"] * max(1 / fraction - 1, 0)),
            "Speed": f"{last['tokens_per_second']:,.0f} tokens/s",
            "Newest checkpoint": f"step {checkpoint:,}" if checkpoint else "none yet",
        }
        return {"condition": condition, "fraction": fraction, "facts": facts}


class RunsWatcher:
    """The runs that were named, and those in folders that were named, in the order in which they were found.

    Args:
        paths: runs, or folders of runs.

    Raises:
        DataError: there is no run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._runs: dict[Path, WatchedRun] = {}
        self.left_out = 0
        if not self.read():
            raise DataError(
                f"there is no run in {' or '.join(map(str, paths))}: no {RECORD_FILE}",
                hint="give the folder that `discern pretrain --out RUN` writes to, once it has begun",
            )

    def read(self) -> list[WatchedRun]:
        """Read what is new in all runs. Runs that have vanished stay, with what was read of them."""
        folders = [
            folder for path in self._paths for folder in (path, *sorted(path.glob("*"))) if (folder / RECORD_FILE).is_file()
        ]
        for folder in folders:
            if folder not in self._runs and len(self._runs) < COLORS:
                self._runs[folder] = WatchedRun(folder)
        self.left_out = len({*folders} - self._runs.keys())
        for run in self._runs.values():
            run.read()
        return list(self._runs.values())


def watch_page(watcher: RunsWatcher, axis: str = "step") -> str:
    """The page of runs in progress: the parts of `discern report`, with the curves of all runs in common charts.

    Args:
        axis: horizontal axis of the curves, one of `AXES`.
    """
    watched = watcher.read()
    runs = dict(zip(short_names([run.folder for run in watched]), watched, strict=True))
    logs = {name: run.run.metrics_log for name, run in runs.items() if run.run is not None}
    held_out = {f"{name}, step {step:,}": metrics for name, log in logs.items() for step, metrics in [last_held_out(log)] if step}
    examples = [replace(texts, title=f"{name}: {texts.title}") for name, run in runs.items() for texts in run.examples]
    page = Page(
        title="Runs",
        charts=metric_charts({name: [log] for name, log in logs.items()}, axis),
        sections=[held_out_table("Held-out metrics", held_out), *examples],
    )
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
    return render_page(
        page,
        "watch.html",
        package="discern.serve",
        cards=[{"name": name, "verdict": run.verdict, **run.card()} for name, run in runs.items()],
        left_out=watcher.left_out,
        axes=AXES,
        axis=axis,
        load=load,
        script=_SCRIPT,
    )


def watch_application(watcher: RunsWatcher, access: Access, warn: Callable[[str], None]) -> Starlette:
    """The application of `discern watch`."""
    drawing = asyncio.Lock()

    async def answer(request: Request) -> Response:
        axis = request.query_params.get("over", "step")
        async with drawing:  # one at a time, however many pages are open
            html = await asyncio.to_thread(watch_page, watcher, axis if axis in AXES else "step")
        return page_response(html, _SCRIPT)

    return application([Route("/", answer)], access, warn)
