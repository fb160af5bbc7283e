"""The verbs that serve pages: of models, and of runs in progress."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from discern.api.use import OnResult
from discern.api.verb import Device, Listener, Names, Paths, argument, listed, listening, model_folder, option, verb
from discern.errors import ConfigError

Port = Annotated[int, option("Port to listen on; 0: any free port.", "N", min=0, max=65535)]
Host = Annotated[
    str,
    option("Address to listen on. With 0.0.0.0, other machines can connect, and every request needs a token.", "ADDRESS"),
]
HostName = Annotated[Names | None, option("Host name that browsers may use to reach the server; may be repeated.", "HOST")]


@contextmanager
def server_packages() -> Iterator[None]:
    """Import the packages of the extra `serve`.

    Raises:
        ConfigError: one of them is not installed.
    """
    try:
        yield
    except ImportError as problem:
        if (problem.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio", "h11"):
            raise
        raise ConfigError(
            f"this command needs the package {problem.name}, which is not installed", hint="pip install 'discern-nlp[serve]'"
        ) from problem


@verb("Use")
def serve(
    models: Annotated[Paths, argument("MODEL", "A run, an export, a fine-tuned model, or a model on the Hub; or two of them.")],
    *,
    port: Port = 8765,
    host: Host = "127.0.0.1",
    name: HostName = None,
    device: Device = "auto",
    on_result: OnResult = None,
    progress: Listener = None,
) -> None:
    """Serve a page to play with a model, or with two side by side, and a JSON API.

    The page shades each word by how likely it is to have been replaced, shows what the generator would put there, fills masks,
    scores and embeds sentences, and shows what a fine-tuned model answers. GET /docs describes the API. Stop the server with
    Ctrl-C.

    If other machines can reach the server, every request needs a token: the one in the environment variable DISCERN_TOKEN, or
    else a new one, which is part of the printed address.

    Example: discern serve examples/models/modern-cpu

    Example: discern serve runs/first runs/second --port 8080

    Returns:
        None, when it is stopped. `on_result` is called with the address as soon as it answers.

    Raises:
        ConfigError: more than two models are given, the port is taken, or the extra `serve` is not installed.
    """
    with server_packages():
        from discern.serve.app import serve_application
        from discern.serve.model import load_served
        from discern.serve.server import Limits, short_names

    listener, warn = listening(progress)
    given = listed(models)
    if len(given) > 2:
        raise ConfigError(f"{len(given)} models are given, expected one or two", hint="leave some out")
    names = short_names([Path(each) for each in given])
    address = bound_address(host, port, name)
    loaded = [
        load_served(model_folder(each, listener), name=called, device=device, warn=warn)
        for each, called in zip(given, names, strict=True)
    ]
    app, batcher = serve_application(loaded, address.access, Limits(), warn)
    run_server(app, {"models": names}, address, on_result)
    batcher.close(Limits().stop_seconds)


def bound_address(host: str, port: int, names: Names | None) -> Any:
    """Where a server listens from now on, with the token of the environment."""
    from discern.serve.server import bind

    return bind(host, port, names=tuple(listed(names)), token=os.environ.get("DISCERN_TOKEN") or None)


def run_server(application: Any, served: dict[str, Any], address: Any, on_result: OnResult) -> None:
    """Serve until the process is asked to stop.

    Args:
        served: what `on_result` is told besides the address.
    """
    from discern.serve.server import Limits, run

    def started(_: object) -> None:
        if on_result is not None:
            on_result({"url": address.url, "port": address.port, **served})

    run(application, address, Limits(), started)


@verb("Compare and diagnose")
def watch(
    runs: Annotated[Paths, argument("RUN", "Runs, or folders of runs, finished or in progress.")],
    *,
    port: Port = 8766,
    host: Host = "127.0.0.1",
    name: HostName = None,
    on_result: OnResult = None,
    progress: Listener = None,
) -> None:
    """Serve a page that shows runs in progress: overlaid curves, held-out metrics, findings, examples, remaining time.

    It only reads the folders of the runs, so you can start and stop it at any time, and runs may start, end or disappear while it
    is open. Stop it with Ctrl-C. Requests from other machines need a token, as with `discern serve`.

    Example: discern watch runs/first

    Example: discern watch runs --port 8080

    Returns:
        None, when it is stopped. `on_result` is called with the address as soon as it answers.

    Raises:
        ConfigError: the port is taken, or the extra `serve` is not installed.
    """
    with server_packages():
        from discern.serve.server import short_names
        from discern.serve.watch import RunsWatcher, watch_application

    _, warn = listening(progress)
    address = bound_address(host, port, name)
    watcher = RunsWatcher([Path(each) for each in listed(runs)])
    names = short_names([each.folder for each in watcher.read()])
    run_server(watch_application(watcher, address.access, warn), {"runs": names}, address, on_result)
