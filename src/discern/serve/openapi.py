"""The description of the API, as OpenAPI 3.1 and for people."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from discern.serve.requests import AlternativesRequest, EmbedRequest, FillRequest, PredictRequest, ScoreRequest, TextsRequest


@dataclass(frozen=True)
class Operation:
    """One path of the API.

    Attributes:
        summary: what it does, in a sentence.
        answer: fields of its answer, with their meaning.
        example: body of a request.
    """

    path: str
    method: str
    summary: str
    answer: dict[str, str]
    request: type[BaseModel] | None = None
    example: dict[str, Any] | None = None

    def curl(self, server: str) -> str:
        """A command that sends the example.

        Args:
            server: address of the server.
        """
        if self.example is None:
            return f"curl {server}{self.path}"
        body = json.dumps(self.example, ensure_ascii=False)
        return f"curl {server}{self.path} -H 'Content-Type: application/json' -d '{body}'"

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The fields of the request, with their descriptions."""
        if self.request is None:
            return []
        return [(name, field.description or "") for name, field in self.request.model_fields.items()]


_DETECTED = {
    "tokens": "tokens as in the vocabulary",
    "offsets": "start and end of each token in the text, in characters",
    "replaced_probability": "probability that each token was replaced",
    "marked": "whether it reaches the threshold",
    "threshold": "the calibrated threshold of the model, or 0.5",
}
_OPERATIONS = (
    Operation(
        "/detect",
        "post",
        "The probability that each token of a text was replaced.",
        _DETECTED,
        TextsRequest,
        {"text": "The chef ate the purple meal."},
    ),
    Operation(
        "/fill",
        "post",
        "The likeliest tokens at each [MASK] of a text.",
        {
            "text": "the text",
            "predictions": "the likeliest tokens: token as in the vocabulary, text that it adds, probability; a list per mask if "
            "there are several",
        },
        FillRequest,
        {"text": "The [MASK] sat on the mat.", "top": 5},
    ),
    Operation(
        "/score",
        "post",
        "How likely texts are: scores in nats, higher is likelier.",
        {
            "scorer": "name of the scorer, which depends on the model",
            "scores": "score of each text, the sum over its tokens",
            "scores_per_token": "mean over its tokens",
            "scores_per_character": "divided by its length in characters",
            "num_tokens": "tokens of all texts",
        },
        ScoreRequest,
        {"texts": ["He reads a book.", "He reads a brook."]},
    ),
    Operation(
        "/embed",
        "post",
        "Texts as vectors.",
        {"vectors": "one vector per text", "size": "length of a vector", "pooling": "how a text became one vector"},
        EmbedRequest,
        {"texts": ["A fine film.", "A good movie."]},
    ),
    Operation(
        "/predict",
        "post",
        "The answer of a fine-tuned model, with its confidence.",
        {"rows": "number of texts", "predictions": "for each text, a line of `discern predict`"},
        PredictRequest,
        {"text": "A fine film."},
    ),
    Operation(
        "/alternatives",
        "post",
        "The words that the generator would put in place of a word.",
        {"word": "the word in the text", "alternatives": "text and probability of the likeliest words"},
        AlternativesRequest,
        {"text": "The chef ate the purple meal.", "start": 17, "end": 23},
    ),
    Operation(
        "/models",
        "get",
        "The models, and what each can do.",
        {"models": "its name, its verbs, the reason for each verb that it lacks, and its tasks"},
    ),
    Operation("/health", "get", "Whether the server answers; needs no token.", {"status": "ok", "waiting": "waiting requests"}),
)
_ERRORS = {
    "400": "The body is not JSON.",
    "401": "The token is missing or wrong.",
    "413": "There is too much text.",
    "415": "The body is not declared as JSON.",
    "422": "A field is wrong, or the model lacks a network for this.",
    "429": "Too many requests of this client.",
    "503": "Too many requests are waiting.",
}


def reference() -> tuple[Operation, ...]:
    """All paths of the API, in the order of its documentation."""
    return _OPERATIONS


def document(version: str) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        version: version of discern.
    """
    schemas: dict[str, Any] = {
        "Error": {
            "type": "object",
            "properties": {"error": {"type": "object", "properties": {"message": _TEXT, "hint": _TEXT}}},
        }
    }
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        described: dict[str, Any] = {
            "summary": operation.summary,
            "operationId": operation.path.strip("/"),
            "responses": {"200": _answer(operation.answer), **({} if operation.request is None else _refusals())},
        }
        if operation.request is not None:
            schemas[operation.request.__name__] = operation.request.model_json_schema()
            content = {"schema": {"$ref": f"#/components/schemas/{operation.request.__name__}"}, "example": operation.example}
            described["requestBody"] = {"required": True, "content": {"application/json": content}}
        paths[operation.path] = {operation.method: described}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "discern",
            "version": version,
            "description": "Answers have the form that the commands print with --json.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


_TEXT = {"type": "string"}


def _answer(fields: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"description": meaning} for name, meaning in fields.items()}
    schema = {"type": "object", "properties": properties}
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _refusals() -> dict[str, Any]:
    schema = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {code: {"description": why, "content": {"application/json": schema}} for code, why in _ERRORS.items()}
