"""The application of `discern serve`: the page, and a JSON API whose requests are computed together by one thread."""

from __future__ import annotations

import abc
import asyncio
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from discern import __version__
from discern.data.tokenizer.loading import naming_panics
from discern.errors import DiscernError
from discern.report.page import package_text, render_template, script_hash
from discern.serve.model import ServedModel, Verb
from discern.serve.server import Access, AuthMiddleware, Limits, error_response

Input = str | list[str] | dict[str, str]
Warn = Callable[[str], None]
_BATCH_REQUESTS = 32  # the first of a batch waits for the last


class RequestError(DiscernError):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


# Batches


@dataclass(eq=False)
class _Job:
    """The items of one request. Jobs with the same work and options can share a batch."""

    work: Callable[..., list[Any]]
    options: tuple[Any, ...]
    items: Sequence[Any]
    results: Future[list[Any]] = field(default_factory=Future)


class Batcher:
    """Computes requests in the order of their arrival, on one thread; requests of the same kind that wait share a batch."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="discern-model", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., list[Any]], items: Sequence[Any], *options: Any) -> list[Any]:
        """The results of `work(items, *options)`, one for each item. If the caller is cancelled in time, nothing is computed."""
        job = _Job(work, options, items)
        self._jobs.put(job)
        return await asyncio.wrap_future(job.results)

    def close(self, seconds: float) -> None:
        """Stop the thread, and wait for at most so long for what it computes."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        waiting: list[_Job] = []
        while True:
            while not waiting or not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    return
                waiting.append(job)
            kind = (waiting[0].work, waiting[0].options)
            batch = [job for job in waiting if (job.work, job.options) == kind][:_BATCH_REQUESTS]
            waiting = [job for job in waiting if job not in batch]
            _compute([job for job in batch if job.results.set_running_or_notify_cancel()])


def _compute(batch: list[_Job]) -> None:
    """Set the results of each job, or its error. If a batch fails, its jobs are computed one by one: only the wrong one fails."""
    if not batch:
        return
    try:
        with naming_panics("the model's tokenizer"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about texts that are read in windows
            results = iter(batch[0].work([item for job in batch for item in job.items], *batch[0].options))
    except Exception as error:
        if len(batch) == 1:
            batch[0].results.set_exception(error)
        else:
            for job in batch:
                _compute([job])
    else:
        for job in batch:
            job.results.set_result([next(results) for _ in job.items])


# Requests: the first line of a docstring is the summary in the description of the API


class ApiRequest(BaseModel, abc.ABC):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)
    needs: ClassVar[Verb]

    text: str | None = Field(None, description="One text.")
    texts: list[str] | None = Field(None, description="Several texts, instead of 'text'.")
    model: int | str | None = Field(
        None,
        description="Number of the model, from 0 as in GET /models, or its name there; by default the first that can answer.",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> ApiRequest:
        if (self.text is None) == (self.texts is None):
            raise ValueError("give either 'text' or 'texts'")
        return self

    @property
    def items(self) -> Sequence[Any]:
        """The texts."""
        return [self.text] if self.texts is None else self.texts

    @abc.abstractmethod
    async def answer(self, model: ServedModel, batcher: Batcher) -> Any:
        """The answer of a model, as JSON."""


class DetectRequest(ApiRequest):
    """The probability that each token of a text was replaced."""

    needs = "detect"

    async def answer(self, model: ServedModel, batcher: Batcher) -> Any:
        found = await batcher.run(model.detect, self.items)
        return found[0] if self.texts is None else {"texts": found, "threshold": model.threshold}


class FillRequest(ApiRequest):
    """The likeliest tokens at each [MASK] of a text."""

    needs = "fill"
    top: int = Field(5, ge=1, le=100, description="Number of predictions per mask.")

    async def answer(self, model: ServedModel, batcher: Batcher) -> Any:
        found = await batcher.run(model.fill, self.items, self.top)
        return found[0] if self.texts is None else {"texts": found}


class ScoreRequest(ApiRequest):
    """How likely texts are: scores in nats, higher is likelier."""

    needs = "score"
    tokens: bool = Field(False, description="Also return the score of each token.")

    async def answer(self, model: ServedModel, batcher: Batcher) -> Any:
        return model.score_values(await batcher.run(model.scorer.score, self.items), tokens=self.tokens)


class EmbedRequest(ApiRequest):
    """Texts as vectors."""

    needs = "embed"
    pooling: Literal["auto", "mean", "mean-all", "cls"] = Field(
        "auto",
        description="'mean': mean of the token states without [CLS] and [SEP]; 'mean-all': with them; 'cls': the state of [CLS]; "
        "'auto': as the model was trained, 'mean' if it was not trained for vectors.",
    )

    async def answer(self, model: ServedModel, batcher: Batcher) -> Any:
        vectors = await batcher.run(model.embed, self.items, self.pooling)
        pooling = model.reader.vectors.pooling if self.pooling == "auto" else self.pooling
        return {"vectors": vectors, "size": model.reader.hidden_size, "pooling": pooling}


class PredictRequest(ApiRequest):
    """The answer of a fine-tuned model, with its confidence."""

    needs = "predict"
    text: Input | None = Field(  # type: ignore[assignment]
        None, description="A text; a pair of texts; a list of words to tag; or {'question': ..., 'context': ...}."
    )
    texts: list[Input] | None = Field(None, description="Several inputs, instead of 'text'.")  # type: ignore[assignment]
    task: str | None = Field(None, description="Task to apply, if the model was fine-tuned on several.")

    async def answer(self, model: ServedModel, batcher: Batcher) -> Any:
        started = time.perf_counter()
        found = await batcher.run(model.predict, self.items, self.task)
        seconds = time.perf_counter() - started
        predictions = [{"row": row, **prediction} for row, prediction in enumerate(found)]
        return {"rows": len(found), "seconds": seconds, "rows_per_second": len(found) / seconds, "predictions": predictions}


REQUESTS: dict[str, type[ApiRequest]] = {
    "/detect": DetectRequest,
    "/fill": FillRequest,
    "/score": ScoreRequest,
    "/embed": EmbedRequest,
    "/predict": PredictRequest,
}


async def read_request(request: Request, kind: type[ApiRequest], limits: Limits) -> ApiRequest:
    """The fields of a request.

    Raises:
        RequestError: the body is too large or not JSON, or its fields are wrong.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.max_body_bytes:
            hint = "send less text at a time; the commands read files of any size"
            raise RequestError(413, f"the request is larger than {limits.max_body_bytes:,} bytes", hint=hint)
    try:
        return kind.model_validate_json(body)
    except ValidationError as problem:
        error = problem.errors(include_url=False, include_input=False)[0]
        message = ": ".join(filter(None, [".".join(map(str, error["loc"]))[:80], error["msg"].removeprefix("Value error, ")]))
        status = 400 if error["type"] == "json_invalid" else 422
        raise RequestError(status, message, hint=f"send JSON with these fields: {', '.join(kind.model_fields)}") from None


def openapi() -> dict[str, Any]:
    """The description of the API as OpenAPI 3.1, from the fields of its requests."""
    responses = {"200": {"description": "As the command with --json."}, "default": {"description": "An error, with a hint."}}
    paths = {}
    for path, kind in REQUESTS.items():
        body = {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}
        paths[path] = {"post": {"summary": kind.__doc__, "requestBody": body, "responses": responses}}
    return {"openapi": "3.1.0", "info": {"title": "discern", "version": __version__}, "paths": paths}


# Applications


def page_response(html: str, script: str) -> Response:
    """A page that may run only this script, and may ask only this server."""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash(script)}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(html, headers={"content-security-policy": policy})


def application(routes: Sequence[Route], access: Access, warn: Warn) -> Starlette:
    """An application with these routes for those who have access. Its errors are JSON.

    Args:
        warn: called about errors that are not a client's fault.
    """

    async def unknown(_: Request, error: Any) -> Response:
        return error_response(error.status_code, error.detail.lower(), "GET /openapi.json describes the API")

    async def refused(_: Request, error: Any) -> Response:
        return error_response(getattr(error, "status", 422), error.message, error.hint)

    async def vanished(*_: Any) -> Response:
        return Response(status_code=400)  # which nobody reads

    async def failed(request: Request, error: Exception) -> Response:
        warn(f"{request.url.path}: {type(error).__name__}: {error}")
        return error_response(500, "the server failed on this request", "the terminal of the server shows why")

    return Starlette(
        routes=[*routes, Route("/favicon.ico", Response(status_code=204))],
        middleware=[Middleware(AuthMiddleware, access)],
        exception_handlers={HTTPException: unknown, DiscernError: refused, ClientDisconnect: vanished, Exception: failed},
    )


def serve_application(models: Sequence[ServedModel], access: Access, limits: Limits, warn: Warn) -> tuple[Starlette, Batcher]:
    """The application of `discern serve`, and the thread that computes its answers, to be closed at the end.

    Args:
        models: one model or two.
    """
    batcher = Batcher()

    async def answer(kind: type[ApiRequest], request: Request) -> Response:
        parsed = await read_request(request, kind, limits)
        named = [model for number, model in enumerate(models) if parsed.model in (None, number, model.name)]
        if not named:
            names = ", ".join(f"{number} ({model.name})" for number, model in enumerate(models))
            raise RequestError(422, f"there is no model {parsed.model!r:.60}", hint=f"one of: {names}")
        model = next((model for model in named if kind.needs not in model.lacks), named[0])
        if kind.needs in model.lacks:
            raise RequestError(422, model.lacks[kind.needs], hint="GET /models lists what each model can do")
        if kind.needs == "fill" and (masks := sum(map(model.filler.masks_in, parsed.items))) > limits.max_masks:
            raise RequestError(413, f"{masks:,} masks, expected at most {limits.max_masks:,}", hint="send fewer at a time")
        return JSONResponse(await parsed.answer(model, batcher))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "discern": __version__})

    script = package_text("serve.js", "discern.serve")
    described = {"models": [model.described() for model in models]}
    html = render_template(
        "serve.html",
        package="discern.serve",
        page={"title": " and ".join(model.name for model in models)},
        models=models,
        requests=REQUESTS,
        limits=limits,
        data=described,
        script=script,
    )
    routes = [
        Route("/", page_response(html, script)),
        Route("/docs", RedirectResponse("/#api")),
        Route("/openapi.json", JSONResponse(openapi())),
        Route("/health", health),
        Route("/models", JSONResponse(described)),
        *(Route(path, partial(answer, kind), methods=["POST"]) for path, kind in REQUESTS.items()),
    ]
    return application(routes, access, warn), batcher
