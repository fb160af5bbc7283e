"""The application of `discern serve`: the page, the JSON API, and its documentation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from discern import __version__
from discern.errors import DiscernError
from discern.report.page import embedded, package_text, render_template, script_hash
from discern.serve.access import Access, Gate, problem
from discern.serve.batching import Batcher, BusyError
from discern.serve.limits import Limits
from discern.serve.model import ServedModel, Verb, predicted
from discern.serve.openapi import document, reference
from discern.serve.requests import (
    AlternativesRequest,
    BodyReader,
    EmbedRequest,
    FillRequest,
    PredictRequest,
    RefusedError,
    ScoreRequest,
    TextsRequest,
    characters_of,
)

Warn = Callable[[str], None]
Endpoint = Callable[[Request], Awaitable[Response]]


class Api:
    """The answers to requests, computed by one thread.

    Args:
        models: one model or two.
        warn: called about errors that are not a client's fault.
    """

    def __init__(self, models: Sequence[ServedModel], limits: Limits, warn: Warn) -> None:
        self.models, self.limits, self.warn = models, limits, warn
        self.batcher = Batcher(limits.max_waiting, limits.max_waiting_characters)
        self._bodies = BodyReader(limits)

    async def detect(self, request: Request) -> Response:
        """POST /detect."""
        asked = await self._bodies.read(request, TextsRequest)
        model = self._model(asked.model, "detect")
        found = await self._computed(request, model, "detect", (), model.detect, asked.items)
        if asked.texts is None:
            return JSONResponse(found[0])
        threshold = None if model.threshold is None else model.threshold.value
        return JSONResponse({"texts": found, "threshold": threshold})

    async def fill(self, request: Request) -> Response:
        """POST /fill."""
        asked = await self._bodies.read(request, FillRequest)
        model = self._model(asked.model, "fill")
        self._limit_masks(model, asked.items)
        found = await self._computed(request, model, "fill", (asked.top,), partial(model.fill, top=asked.top), asked.items)
        return JSONResponse(found[0] if asked.texts is None else {"texts": found})

    async def alternatives(self, request: Request) -> Response:
        """POST /alternatives."""
        asked = await self._bodies.read(request, AlternativesRequest)
        model = self._model(asked.model, "fill")
        self._limit_masks(model, [text for text, _, _ in asked.items])
        work = partial(model.alternatives, top=asked.top)
        return JSONResponse((await self._computed(request, model, "alternatives", (asked.top,), work, asked.items))[0])

    def _limit_masks(self, model: ServedModel, texts: Sequence[str]) -> None:
        masks = 0 if model.filler is None else sum(map(model.filler.masks_in, texts))
        if masks > self.limits.max_masks:
            raise RefusedError(413, f"{masks:,} masks, expected at most {self.limits.max_masks:,}", hint="send fewer at a time")

    async def score(self, request: Request) -> Response:
        """POST /score."""
        asked = await self._bodies.read(request, ScoreRequest)
        model = self._model(asked.model, "score")
        found = await self._computed(request, model, "score", (), model.score, asked.items)
        return JSONResponse(model.scores(found, tokens=asked.tokens))

    async def embed(self, request: Request) -> Response:
        """POST /embed."""
        asked = await self._bodies.read(request, EmbedRequest)
        model = self._model(asked.model, "embed")
        work = partial(model.embed, pooling=asked.pooling)
        found = await self._computed(request, model, "embed", (asked.pooling,), work, asked.items)
        size = 0 if model.reader is None else model.reader.hidden_size
        return JSONResponse({"vectors": found, "size": size, "pooling": model.pooling(asked.pooling)})

    async def predict(self, request: Request) -> Response:
        """POST /predict."""
        started = time.perf_counter()
        asked = await self._bodies.read(request, PredictRequest)
        model = self._model(asked.model, "predict")
        found = await self._computed(
            request, model, "predict", (asked.task,), partial(model.predict, task=asked.task), asked.items
        )
        own = [{"row": number, **each} for number, each in enumerate(found)]
        return JSONResponse(predicted(own, started))

    async def health(self, _: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok", "discern": __version__, "waiting": self.batcher.waiting})

    async def described(self, _: Request) -> Response:
        """GET /models."""
        return JSONResponse({"models": [model.described() for model in self.models]})

    def _model(self, asked: int | str | None, verb: Verb) -> ServedModel:
        if asked is None:
            return next((model for model in self.models if verb not in model.lacks), self.models[0])
        found = [model for number, model in enumerate(self.models) if asked in (number, model.name)]
        if not found:
            names = ", ".join(f"{number} ({model.name})" for number, model in enumerate(self.models))
            raise RefusedError(422, f"there is no model {asked!r:.60}", hint=f"one of: {names}")
        return found[0]

    async def _computed(
        self,
        request: Request,
        model: ServedModel,
        verb: str,
        options: tuple[Any, ...],
        work: Callable[[Sequence[Any]], list[Any]],
        items: list[Any],
    ) -> list[Any]:
        """The results of the items; work that a client no longer waits for is not begun."""
        if not items:
            return []
        key = (id(model), verb, *options)
        running = asyncio.ensure_future(self.batcher.run(key, work, items, sum(map(characters_of, items))))
        left = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({running, left}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise RefusedError(400, "the client has gone")
            return running.result()
        finally:
            running.cancel()
            left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def guarded(endpoint: Endpoint, warn: Warn) -> Endpoint:
    """The endpoint, with its errors as JSON: 4xx if the request is wrong, 503 if the server is busy, otherwise 500."""

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RefusedError as refused:
            return problem(refused.status, refused.message, refused.hint or "")
        except BusyError:
            return problem(503, "too many requests are waiting", "try again in a moment", {"retry-after": "1"})
        except DiscernError as error:
            return problem(422, error.message, error.hint or "")
        except Exception as error:  # no request may stop the server
            warn(f"{request.url.path}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return problem(500, "the server failed on this request", "the terminal of the server shows why")

    return answered


def page_response(html: str, *scripts: str) -> Response:
    """A page that may run only these scripts, and may ask only this server."""
    allowed = " ".join(f"'sha256-{script_hash(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(html, headers={"content-security-policy": policy})


def fixed(response: Response) -> Endpoint:
    """An endpoint that always gives the same answer."""

    async def answer(_: Request) -> Response:
        return response

    return answer


def application(routes: Sequence[Route], access: Access, limits: Limits) -> Gate:
    """An application with these routes, guarded, whose errors are JSON."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail).lower(), "GET /docs describes the API", error.headers)

    empty = Route("/favicon.ico", fixed(Response(status_code=204)))
    return Gate(Starlette(routes=[*routes, empty], exception_handlers={HTTPException: refused}), access, limits)


def serve_application(models: Sequence[ServedModel], access: Access, limits: Limits, warn: Warn) -> tuple[Gate, Batcher]:
    """The application of `discern serve`, and the thread that computes its answers, to be closed at the end."""
    api = Api(models, limits, warn)
    script = package_text("page.js", "discern.serve") + package_text("serve.js", "discern.serve")
    names = " and ".join(model.name for model in models)
    data = {"models": [model.described() for model in models], "characters": limits.max_characters, "texts": limits.max_texts}
    html = render_template(
        "serve.html", package="discern.serve", page={"title": names}, models=models, data=embedded(data), script=script
    )

    async def documented(request: Request) -> Response:
        server = str(request.base_url).rstrip("/")  # as the reader wrote it
        values = {"page": {"title": "API"}, "reference": reference(), "limits": limits, "server": server}
        return page_response(render_template("api.html", package="discern.serve", **values))

    posts: dict[str, Endpoint] = {
        "/detect": api.detect,
        "/fill": api.fill,
        "/alternatives": api.alternatives,
        "/score": api.score,
        "/embed": api.embed,
        "/predict": api.predict,
    }
    routes = [
        Route("/", fixed(page_response(html, script))),
        Route("/docs", documented),
        Route("/openapi.json", fixed(JSONResponse(document(__version__)))),
        Route("/health", guarded(api.health, warn)),
        Route("/models", guarded(api.described, warn)),
        *(Route(path, guarded(endpoint, warn), methods=["POST"]) for path, endpoint in posts.items()),
    ]
    return application(routes, access, limits), api.batcher
