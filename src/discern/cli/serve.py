"""`discern serve`: models in a browser, and as a JSON API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from discern.cli.console import JsonOption, command
from discern.cli.options import DeviceOption, HostOption, NameOption, PortOption, server_extra
from discern.errors import ConfigError


def serve(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL", help="A run, an export, a fine-tuned model, or a model on the Hub; or two of them."),
    ],
    *,
    port: PortOption = 8765,
    host: HostOption = "127.0.0.1",
    name: NameOption = None,
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Serve a page to play with a model, or with two side by side, and a JSON API.

    The page shades each word by how likely it is to have been replaced, shows what the generator would put there, fills masks,
    scores and embeds sentences, and shows what a fine-tuned model answers. GET /docs describes the API. Stop the server with
    Ctrl-C.

    If other machines can reach the server, every request needs a token: the one in the environment variable DISCERN_TOKEN, or
    else a new one, which is part of the printed address.

    Examples: discern serve examples/models/modern-cpu

    discern serve runs/first runs/second --port 8080
    """
    with command(json_output=json_output) as console:
        if len(models) > 2:
            raise ConfigError(f"{len(models)} models are given, expected one or two", hint="leave some out")
        with server_extra("serve"):
            from discern.serve.app import serve_application
            from discern.serve.limits import Limits
            from discern.serve.model import load_served
            from discern.serve.names import short_names
            from discern.serve.server import bind, run

        address = bind(host, port, names=tuple(name or ()), token=os.environ.get("DISCERN_TOKEN") or None)
        limits = Limits()
        loaded = [
            load_served(each, name=called, device=device, warn=console.warn)
            for each, called in zip(models, short_names(models), strict=True)
        ]
        app, batcher = serve_application(loaded, address.access, limits, console.warn)

        def started(_: object) -> None:
            said = {"url": address.url, "port": address.port, "models": [each.name for each in loaded]}
            console.result(said, text=f"{' and '.join(each.name for each in loaded)}: {address.url} (Ctrl-C stops)")
            console.flush()

        run(app, address, limits, started)
        batcher.close(limits.stop_seconds)
