"""`discern watch`: runs in progress in a browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import HostOption, NameOption, PortOption, server_extra


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs, or folders of runs, finished or in progress.")],
    *,
    port: PortOption = 8766,
    host: HostOption = "127.0.0.1",
    name: NameOption = None,
    json_output: JsonOption = False,
) -> None:
    """Serve a page that shows runs in progress: overlaid curves, held-out metrics, findings, examples, remaining time.

    It only reads the folders of the runs, so you can start and stop it at any time, and runs may start, end or disappear while it
    is open. Stop it with Ctrl-C. Requests from other machines need a token, as with `discern serve`.

    Examples: discern watch runs/first

    discern watch runs --port 8080
    """
    with command(json_output=json_output) as console:
        with server_extra("watch"):
            from discern.serve.limits import Limits
            from discern.serve.names import short_names
            from discern.serve.runs import RunsWatcher
            from discern.serve.server import bind, run
            from discern.serve.watch_app import watch_application

        address = bind(host, port, names=tuple(name or ()), token=os.environ.get("DISCERN_TOKEN") or None)
        limits = Limits()
        watcher = RunsWatcher(runs)

        def started(_: object) -> None:
            names = short_names([each.folder for each in watcher.read()])
            said = {"url": address.url, "port": address.port, "runs": names}
            console.result(said, text=f"{', '.join(names)}: {address.url} (Ctrl-C stops)")
            console.flush()

        run(watch_application(watcher, address.access, limits, console.warn), address, limits, started)
