"""What the API reads: the fields of each request, and how a body becomes one."""

from __future__ import annotations

import abc
import asyncio
import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from discern.errors import DiscernError
from discern.parsing import json_value
from discern.serve.limits import Limits


class RefusedError(DiscernError):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


_MODEL = "Number of the model, from 0 as in GET /models, or its name there; by default the first that can answer."


class ApiRequest(BaseModel, abc.ABC):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @property
    @abc.abstractmethod
    def items(self) -> list[Any]:
        """What the model computes, one result for each."""


class TextsRequest(ApiRequest):
    """One text, or several."""

    text: str | None = Field(None, description="One text.")
    texts: list[str] | None = Field(None, description="Several texts, instead of `text`.")
    model: int | str | None = Field(None, description=_MODEL)

    @model_validator(mode="after")
    def _one_of_them(self) -> TextsRequest:
        if (self.text is None) == (self.texts is None):
            raise ValueError("give either 'text' or 'texts'")
        return self

    @property
    def items(self) -> list[Any]:
        """The texts."""
        return [self.text] if self.texts is None else list(self.texts)


class FillRequest(TextsRequest):
    """Texts with [MASK]."""

    top: int = Field(5, ge=1, le=100, description="Number of predictions per mask.")


class ScoreRequest(TextsRequest):
    """Texts to score."""

    tokens: bool = Field(False, description="Also return the score of each token.")


Pooling = Literal["auto", "mean", "mean-all", "cls"]


class EmbedRequest(TextsRequest):
    """Texts to embed."""

    pooling: Pooling = Field(
        "auto",
        description="'mean': mean of the token states without [CLS] and [SEP]; 'mean-all': with them; 'cls': the state of [CLS]; "
        "'auto': as the model was trained, 'mean' if it was not trained for vectors.",
    )


Readable = str | list[str] | dict[str, str]


class PredictRequest(TextsRequest):
    """Texts for a fine-tuned model."""

    text: Readable | None = Field(  # type: ignore[assignment]
        None, description="A text; a pair of texts; a list of words to tag; or {'question': ..., 'context': ...}."
    )
    texts: list[Readable] | None = Field(None, description="Several inputs, instead of `text`.")  # type: ignore[assignment]
    task: str | None = Field(None, description="Task to apply, if the model was fine-tuned on several.")


class AlternativesRequest(ApiRequest):
    """A word of a text."""

    text: str = Field(description="The text.")
    start: int = Field(ge=0, description="Where the word starts, in characters (code points).")
    end: int = Field(ge=1, description="Where it ends.")
    top: int = Field(8, ge=1, le=100, description="Number of alternatives.")
    model: int | str | None = Field(None, description=_MODEL)

    @model_validator(mode="after")
    def _inside(self) -> AlternativesRequest:
        if not self.start < self.end <= len(self.text):
            raise ValueError(f"start {self.start} and end {self.end} do not mark a word in a text of {len(self.text)} characters")
        return self

    @property
    def items(self) -> list[Any]:
        """The place, as `ServedModel.alternatives` takes it."""
        return [(self.text, self.start, self.end)]


AnyRequest = TypeVar("AnyRequest", bound=ApiRequest)


class BodyReader:
    """Reads bodies of requests within the limits of a server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0

    async def read(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """The fields of a request.

        Raises:
            RefusedError: the body is not JSON, is too large, or its fields are wrong.
        """
        limits = self._limits
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body must be JSON", hint="send the header 'Content-Type: application/json'")
        too_large = RefusedError(
            413,
            f"the request is larger than {limits.max_body_bytes:,} bytes",
            hint="send less text at a time; the commands read files of any size",
        )
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limits.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._held += len(chunk)
                if len(body) > limits.max_body_bytes:
                    raise too_large
                if self._held > limits.max_held_bytes:
                    raise RefusedError(503, "the server is receiving too much at once", hint="try again in a moment")
        except ClientDisconnect as problem:
            raise RefusedError(400, "the request was cut off") from problem
        finally:
            self._held -= len(body)
        # Large bodies take a while to parse, during which others should be served.
        parsed: AnyRequest
        if len(body) > 1 << 16:
            parsed = await asyncio.to_thread(lambda: _parsed(bytes(body), kind))
        else:
            parsed = _parsed(bytes(body), kind)
        self._check(parsed)
        return parsed

    def _check(self, parsed: ApiRequest) -> None:
        items = parsed.items
        if len(items) > self._limits.max_texts:
            raise RefusedError(
                413, f"{len(items):,} texts, expected at most {self._limits.max_texts:,}", hint="send fewer at a time"
            )
        characters = sum(map(characters_of, items))
        if characters > self._limits.max_characters:
            raise RefusedError(
                413,
                f"{characters:,} characters, expected at most {self._limits.max_characters:,}",
                hint="send less text at a time; the commands read files of any size",
            )


def characters_of(item: Any) -> int:
    """The number of characters of a text, a list of texts, or a mapping to texts."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, dict):
        return sum(map(characters_of, item.values()))
    return sum(map(characters_of, item)) if isinstance(item, list | tuple) else 0


def _parsed(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    example = 'like {"text": "The chef ate the meal."}'
    try:
        # Half a surrogate pair has no place in a text.
        value = json_value(body.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as problem:
        raise RefusedError(400, "the body is not JSON in UTF-8", hint=example) from problem
    if not isinstance(value, dict):
        raise RefusedError(400, f"the body is a JSON {type(value).__name__}, expected an object", hint=example)
    try:
        return kind.model_validate(value)
    except ValidationError as problem:
        raise RefusedError(422, _first(problem), hint=f"its fields: {', '.join(kind.model_fields)}") from problem


def _first(problem: ValidationError) -> str:
    """The first error of a request, in words."""
    error = problem.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, error["loc"]))[:80]
    what = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"unknown field {where!r}"
    return f"{where}: {what}" if where else what
