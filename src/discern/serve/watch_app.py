"""The application of `discern watch`: a page of runs in progress, and the data that it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from discern import __version__
from discern.report.page import package_text, render_template
from discern.serve.access import Access, Gate
from discern.serve.app import application, fixed, guarded, page_response
from discern.serve.limits import Limits
from discern.serve.runs import RunsWatcher, snapshot


def watch_application(watcher: RunsWatcher, access: Access, limits: Limits, warn: Callable[[str], None]) -> Gate:
    """The application of `discern watch`."""
    script = package_text("page.js", "discern.serve") + package_text("watch.js", "discern.serve")
    html = render_template("watch.html", package="discern.serve", page={"title": "Runs"}, script=script)
    reading = asyncio.Lock()

    async def data(request: Request) -> Response:
        known = request.query_params.get("known", "")[:1000].split(",")
        async with reading:  # one reader at a time, however many pages are open
            found = await asyncio.to_thread(snapshot, watcher, known)
        return JSONResponse(found)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "discern": __version__})

    routes = [
        Route("/", fixed(page_response(html, script))),
        Route("/data", guarded(data, warn)),
        Route("/health", guarded(health, warn)),
    ]
    return application(routes, access, limits)
