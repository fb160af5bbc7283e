"""The API says what the commands say, refuses what it cannot read, and says what a model lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import discern
from discern.errors import ConfigError
from discern.inference.detection import detect, detection_values
from discern.inference.filling import fill
from discern.inference.model import load
from discern.progress import Silent
from discern.serve.app import REQUESTS, serve_application
from discern.serve.model import ServedModel, load_served
from discern.serve.server import Access, Limits
from tests.small.finetuned import SINGLE, make_finetuned

TEXTS = ["the chef ate the meal", "he", "a chef and the chef"]


@contextmanager
def client_of(models: list[ServedModel], access: Access = Access()) -> Iterator[TestClient]:
    app, batcher = serve_application(models, access, Limits(), pytest.fail)
    yield TestClient(app, base_url="http://127.0.0.1")
    batcher.close(5)


@pytest.fixture(scope="module")
def client(served: ServedModel, tuned: ServedModel) -> Iterator[TestClient]:
    with client_of([served, tuned]) as client:
        yield client


def test_the_page_fetches_nothing_from_elsewhere_and_describes_the_api(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.url.path == "/"
    assert not [part for part in ('src="', "<link", "@import", "url(") if part in page.text]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert [path for path in REQUESTS if f"<code>{path}</code>" not in page.text] == []


def test_detect_says_what_the_command_says(client: TestClient, run_folder: Path) -> None:
    answer = client.post("/detect", json={"texts": TEXTS}).json()
    assert answer["threshold"] == 0.5
    for found, detection in zip(answer["texts"], detect(run_folder, TEXTS, Silent(), pytest.fail), strict=True):
        wanted = detection_values(detection, 0.5)
        assert found.keys() == wanted.keys()
        assert found["tokens"] == wanted["tokens"]
        assert found["replaced_probability"] == pytest.approx(wanted["replaced_probability"], abs=1e-4)
    assert client.post("/detect", json={"text": TEXTS[0]}).json()["tokens"] == answer["texts"][0]["tokens"]


def test_fill_says_what_the_command_says(client: TestClient, run_folder: Path) -> None:
    (wanted,) = fill(run_folder, "The [MASK] ate.", 3, pytest.fail)
    found = client.post("/fill", json={"text": "The [MASK] ate.", "top": 3}).json()["predictions"]
    assert [(each["token"], each["text"], each["shown"]) for each in found] == [
        (each.token, each.text, each.shown) for each in wanted
    ]
    assert found[0]["probability"] == pytest.approx(wanted[0].probability, abs=1e-4)
    several = client.post("/fill", json={"text": "[MASK] [MASK]", "top": 2}).json()["predictions"]
    assert [len(each) for each in several] == [2, 2]


def test_score_embed_and_predict_say_what_the_commands_say(client: TestClient, run_folder: Path, tuned_folder: Path) -> None:
    model = load(run_folder, device="cpu")
    scored = client.post("/score", json={"texts": TEXTS, "tokens": True}).json()
    assert scored["scores"] == pytest.approx(model.score(TEXTS).tolist(), abs=1e-4)
    assert len(scored["tokens"]) == 3
    embedded = client.post("/embed", json={"texts": TEXTS}).json()
    assert np.array(embedded["vectors"]) == pytest.approx(model.encode(TEXTS), abs=1e-4)
    assert embedded["pooling"] == "mean", "what 'auto' chose"
    wanted = load(tuned_folder, device="cpu").predict(TEXTS)
    for model_of_request in (None, 1, "tuned"):  # without one, of two models the one that can
        answer = client.post("/predict", json={"texts": TEXTS, "model": model_of_request}).json()
        assert answer["rows"] == 3
        assert [(each["row"], each["label"]) for each in answer["predictions"]] == [(n, wanted[n]["label"]) for n in range(3)]


def test_what_a_model_lacks_is_said(client: TestClient) -> None:
    first, second = client.get("/models").json()["models"]
    assert first["can"] == ["detect", "fill", "score", "embed"]
    assert first["lacks"]["predict"].endswith("without a task head")
    assert second["tasks"] == [{"name": "own", "kind": "single", "labels": ["bad", "good", "so-so"], "reads": "text"}]
    refused = client.post("/detect", json={"text": "x", "model": 1})
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == second["lacks"]["detect"]


def test_one_of_several_tasks_is_named(tmp_path: Path) -> None:
    made = make_finetuned(tmp_path / "several", first=SINGLE, second=SINGLE)
    served = load_served(made, device="cpu", warn=pytest.fail)
    for wrong in (None, "frist"):
        with pytest.raises(ConfigError, match=f"the task is {wrong}, expected one of: first, second"):
            served.predict(TEXTS, wrong)
    assert len(served.predict(TEXTS, "second")) == len(TEXTS)


def test_an_exported_classifier_is_served(tmp_path: Path, tuned_folder: Path) -> None:
    discern.export(tuned_folder, out=tmp_path / "exported")
    exported = load_served(tmp_path / "exported", device="cpu", warn=pytest.fail)
    assert exported.described()["can"] == ["embed", "predict"]
    assert exported.reader.task_model().objective.encoder is exported.reader.reader.encoder, "one copy of the weights"
    assert exported.lacks["detect"] == "exported has no pre-training head: it is a bare encoder or a fine-tuned model"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "Invalid JSON"),
        (b"[" * 100_000, 400, "Invalid JSON"),
        (b'{"text": "\\ud800"}', 400, "Invalid JSON"),
        (b'["a"]', 422, "should be an object"),
        (b"{}", 422, "give either 'text' or 'texts'"),
        (b'{"wrong": 1}', 422, "wrong: Extra inputs"),
        (b'{"text": 1}', 422, "text: Input should be a valid string"),
        (b'{"text": "a", "model": 7}', 422, "there is no model 7"),
        (b'{"text": "a", "model": "' + b"x" * 1000 + b'"}', 422, "there is no model 'xxx"),
        (json.dumps({"text": "a " * 150_000}).encode(), 413, "larger than 262,144 bytes"),
    ],
)
def test_what_cannot_be_read_is_refused(client: TestClient, body: bytes, status: int, message: str) -> None:
    refused = client.post("/detect", content=body)
    assert refused.status_code == status
    assert message in refused.json()["error"]["message"]
    assert refused.json()["error"]["hint"]
    assert len(refused.text) < 1000


def test_the_masks_of_a_request_are_limited(client: TestClient) -> None:
    refused = client.post("/fill", json={"texts": ["[MASK] " * 600] * 2})
    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == "1,200 masks, expected at most 1,024"


def test_empty_texts_are_answered(client: TestClient) -> None:
    assert client.post("/detect", json={"text": ""}).json()["tokens"] == []
    assert client.post("/detect", json={"texts": []}).json()["texts"] == []
    assert client.post("/score", json={"text": " "}).json()["error"]["message"] == "text 1 has nothing to score"


def test_other_methods_and_paths_are_refused_as_json(client: TestClient) -> None:
    assert client.get("/detect").status_code == 405
    assert client.get("/nothing").json()["error"]["message"] == "not found"


def test_a_failure_is_told_on_the_terminal(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    app, batcher = serve_application([served], Access(), Limits(), warnings.append)
    monkeypatch.setattr(served, "detect", lambda texts: 1 / 0)
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    assert client.post("/detect", json={"text": "x"}).status_code == 500
    assert warnings == ["/detect: ZeroDivisionError: division by zero"]
    assert client.post("/score", json={"text": "x"}).status_code == 200
    batcher.close(5)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"host": "localhost:8765"}),
        (200, {"host": "[::1]:8765"}),
        (200, {"host": "big-machine"}),
        (200, {"origin": "http://127.0.0.1"}),
        (403, {"host": "evil.example"}),
        (403, {"host": "["}),
        (403, {"origin": "http://evil.example"}),
    ],
)
def test_only_pages_of_this_server_may_ask_and_only_by_its_names(
    served: ServedModel, status: int, headers: dict[str, str]
) -> None:
    with client_of([served], Access(frozenset({"localhost", "Big-Machine"}))) as client:
        assert client.post("/detect", json={"text": "x"}, headers=headers).status_code == status


@pytest.mark.parametrize("token", ["sesame", "a+b&c=d%", "\u5bc6\u7801; x"])
def test_a_token_is_asked_of_everyone(served: ServedModel, token: str) -> None:
    with client_of([served], Access(token=token)) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/?token=wrong").status_code == 401
        assert client.post("/detect", params={"token": token}, json={"text": "x"}).status_code == 401
        bearer = client.get("/models", headers={"authorization": "Bearer sesame"})
        assert bearer.status_code == (200 if token == "sesame" else 401)
        opened = client.get("/", params={"token": token})
        assert opened.status_code == 200
        assert "token" not in str(opened.url)
        assert client.get("/models").status_code == 200
        ((name, value),) = client.cookies.items()
        assert name.endswith("_80"), "the cookies of one port are sent to all others of the machine"
        client.cookies.clear()
        others = f'theme={{"dark":true}}; flag; {name}={value}'  # of other programs at this address
        assert client.get("/models", headers={"cookie": others}).status_code == 200
        assert client.get("/models").status_code == 401


def test_openapi_describes_every_field(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    assert described["paths"].keys() == REQUESTS.keys()
    for path in REQUESTS:
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert all(field["description"] for field in schema["properties"].values())
