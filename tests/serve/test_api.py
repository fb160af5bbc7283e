"""The API says what the commands say, refuses what it cannot read, and says what a model lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from discern.errors import ConfigError
from discern.inference.detection import detect, detection_values
from discern.inference.fill import fill
from discern.inference.model import load
from discern.inference.scoring import load_scorer
from discern.progress import Silent
from discern.serve.access import Access
from discern.serve.app import serve_application
from discern.serve.limits import Limits
from discern.serve.model import ServedModel, load_served
from tests.small.finetuned import SINGLE, make_finetuned

TEXTS = ["the chef ate the meal", "he", "a chef and the chef"]
HOSTILE = "<script>alert(1)</script>\x1b[31m \u202e"


def client_of(models: list[ServedModel], access: Access | None = None, limits: Limits | None = None) -> Iterator[TestClient]:
    app, batcher = serve_application(models, access or Access(), limits or Limits(), pytest.fail)
    yield TestClient(app, base_url="http://127.0.0.1")  # type: ignore[arg-type]
    batcher.close(5)


@pytest.fixture(scope="module")
def client(served: ServedModel, tuned: ServedModel) -> Iterator[TestClient]:
    yield from client_of([served, tuned])


def test_the_page_and_the_documentation_fetch_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/docs"):
        page = client.get(path)
        assert page.status_code == 200
        assert "<html" in page.text
        assert not [part for part in ('src="', "<link", "@import", "url(") if part in page.text]
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"


def test_detect_says_what_the_command_says(client: TestClient, run_folder: Path) -> None:
    expected = [detection_values(each, 0.5) for each in detect(run_folder, TEXTS, Silent(), pytest.fail)]
    one = client.post("/detect", json={"text": TEXTS[0]}).json()
    assert one["tokens"] == expected[0]["tokens"]
    assert one["replaced_probability"] == pytest.approx(expected[0]["replaced_probability"], abs=1e-4)
    many = client.post("/detect", json={"texts": TEXTS}).json()
    assert many["threshold"] == 0.5
    for found, wanted in zip(many["texts"], expected, strict=True):
        assert found["replaced_probability"] == pytest.approx(wanted["replaced_probability"], abs=1e-4)
        assert found["offsets"] == [list(offset) for offset in wanted["offsets"]]


def test_fill_score_and_embed_say_what_the_commands_say(client: TestClient, run_folder: Path) -> None:
    (wanted,) = fill(run_folder, "The [MASK] ate.", 3, pytest.fail)
    found = client.post("/fill", json={"text": "The [MASK] ate.", "top": 3}).json()
    assert [each["token"] for each in found["predictions"]] == [each.token for each in wanted]
    assert [each["probability"] for each in found["predictions"]] == pytest.approx(
        [each.probability for each in wanted], abs=1e-4
    )
    two = client.post("/fill", json={"text": "[MASK] [MASK]", "top": 2}).json()["predictions"]
    assert [len(each) for each in two] == [2, 2]
    scorer = load_scorer(run_folder, None, "cpu", warn=pytest.fail)
    scored = client.post("/score", json={"texts": TEXTS, "tokens": True}).json()
    assert scored["scorer"] == scorer.name
    assert scored["scores"] == pytest.approx([each.total for each in scorer.score(TEXTS)], abs=1e-4)
    assert len(scored["tokens"]) == 3
    embedded = client.post("/embed", json={"texts": TEXTS}).json()
    for vector, row in zip(embedded["vectors"], load(run_folder, device="cpu").encode(TEXTS), strict=True):
        assert vector == pytest.approx(row.tolist(), abs=1e-4)
    assert embedded["pooling"] == "mean", "what 'auto' chose"


def test_predict_says_what_the_command_says(client: TestClient, tuned_folder: Path) -> None:
    wanted = load(tuned_folder, device="cpu").predict(TEXTS)
    found = client.post("/predict", json={"texts": TEXTS}).json()  # of two models, the one that can
    assert [each["row"] for each in found["predictions"]] == [0, 1, 2]
    assert found["rows"] == 3
    for one, other in zip(found["predictions"], wanted, strict=True):
        assert one["label"] == other["label"]
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)
    assert (
        client.post("/predict", json={"text": TEXTS[0], "model": "tuned"}).json()["predictions"][0]["label"] == wanted[0]["label"]
    )


def test_alternatives_are_words_for_the_place(client: TestClient) -> None:
    text = "😀 the chef ate"
    found = client.post("/alternatives", json={"text": text, "start": 6, "end": 10, "top": 4}).json()
    assert found["word"] == "chef"
    assert 0 < len(found["alternatives"]) <= 4
    assert not [each for each in found["alternatives"] if each["text"].startswith("##")]
    assert client.post("/alternatives", json={"text": text, "start": 3, "end": 99}).status_code == 422


def test_what_a_model_lacks_is_said(client: TestClient) -> None:
    first, second = client.get("/models").json()["models"]
    assert first["can"] == ["detect", "fill", "score", "embed"]
    assert "has not been fine-tuned" in first["lacks"]["predict"] or first["lacks"]["predict"]
    assert second["tasks"] == [{"name": "own", "kind": "single", "labels": ["bad", "good", "so-so"], "reads": "text"}]
    refused = client.post("/detect", json={"text": "x", "model": 1})
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == second["lacks"]["detect"]


def test_one_of_several_tasks_is_named(tmp_path: Path) -> None:
    made = make_finetuned(tmp_path / "several", first=SINGLE, second=SINGLE)
    served = load_served(made, name="ours", device="cpu", warn=pytest.fail)
    with pytest.raises(ConfigError, match=r"^ours was fine-tuned on several tasks: first, second") as caught:
        served.predict(TEXTS, None)
    assert caught.value.hint == 'name one of them: "task": "first"'
    with pytest.raises(ConfigError, match=r"^ours was not fine-tuned on 'frist'") as caught:
        served.predict(TEXTS, "frist")
    assert "first" in str(caught.value.hint)
    assert len(served.predict(TEXTS, "second")) == len(TEXTS)


def test_an_exported_classifier_is_served(tmp_path: Path, tuned: ServedModel, tuned_folder: Path) -> None:
    from discern.api.verbs import export

    export(tuned_folder, out=tmp_path / "exported")
    exported = load_served(tmp_path / "exported", device="cpu", warn=pytest.fail)
    assert exported.described()["can"] == ["embed", "predict"]
    assert exported.tuned is not None
    assert exported.reader is not None
    assert exported.tuned.objective.encoder is exported.reader.reader.encoder, "one copy of the weights"
    assert exported.lacks["detect"] == "exported has no pre-training head: it is a bare encoder or a fine-tuned model"
    for one, other in zip(exported.predict(TEXTS, None), tuned.predict(TEXTS, None), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)


def test_a_model_without_a_generator_says_so(tmp_path: Path, run_folder: Path) -> None:
    from discern.model_files.export import export

    export(run_folder, out=tmp_path / "alone", progress=Silent(), warn=pytest.fail)
    model = load_served(tmp_path / "alone", device="cpu", warn=lambda message: None)
    assert "detect" in model.described()["can"]
    assert model.detector is not None
    assert model.reader is not None
    assert model.detector.network.encoder is model.reader.reader.encoder, "one copy of the weights"
    assert "no head over the vocabulary" in model.described()["lacks"]["fill"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b"1" * 5000, 400),
        (b'{"text": "\\ud800"}', 400),
        (b'["a"]', 400),
        (b"{}", 422),
        (b'{"wrong": 1}', 422),
        (b'{"text": 1}', 422),
        (b'{"text": "a", "texts": ["b"]}', 422),
        (b'{"text": "a", "model": 7}', 422),
        (b'{"text": "a", "model": "' + b"x" * 1000 + b'"}', 422),
        (json.dumps({"text": "a " * 500_000}).encode(), 413),
        (json.dumps({"text": "a " * 60_000}).encode(), 413),
        (json.dumps({"texts": ["a"] * 600}).encode(), 413),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_next_request_is_answered(client: TestClient, body: bytes, status: int) -> None:
    refused = client.post("/detect", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == status
    error = refused.json()["error"]
    assert error["message"]
    assert len(refused.text) < 1000
    assert client.post("/detect", json={"text": "x"}).status_code == 200


def test_the_documentation_has_the_address_of_its_reader(client: TestClient) -> None:
    page = client.get("/docs", headers={"host": "localhost:8799"}).text
    assert "curl http://localhost:8799/detect -H " in page
    assert "instead of <code>text</code>." in page
    assert "`" not in page


def test_the_masks_of_a_request_are_limited(client: TestClient) -> None:
    refused = client.post("/fill", json={"texts": ["[MASK] " * 600] * 2})
    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == "1,200 masks, expected at most 1,024"
    assert len(client.post("/fill", json={"text": "a [MASK] " * 3}).json()["predictions"]) == 3
    refused = client.post("/alternatives", json={"text": "[MASK] " * 1025, "start": 0, "end": 6})
    assert refused.json()["error"]["message"] == "1,025 masks, expected at most 1,024"


def test_hostile_texts_are_answered_as_texts(client: TestClient) -> None:
    found = client.post("/detect", json={"text": HOSTILE})
    assert found.status_code == 200
    assert found.headers["content-type"] == "application/json"
    assert client.post("/detect", json={"text": ""}).json()["tokens"] == []
    assert client.post("/score", json={"text": " "}).status_code == 422
    assert client.post("/detect", json={"texts": []}).json()["texts"] == []


def test_other_methods_paths_and_types_are_refused_as_json(client: TestClient) -> None:
    assert client.get("/detect").status_code == 405
    assert client.get("/nothing").json()["error"]["message"] == "not found"
    assert client.post("/detect", content="text=a", headers={"content-type": "text/plain"}).status_code == 415


def test_only_pages_of_this_server_may_ask_and_only_by_its_names(client: TestClient) -> None:
    def status(**headers: str) -> int:
        return client.post("/detect", json={"text": "x"}, headers=headers).status_code

    assert status(host="evil.example") == 403
    assert status(host="localhost:8765") == 200
    assert status(host="[::1]:8765") == 200
    assert status(host="localhost.evil.example") == 403
    assert status(host="") == 403
    assert status(origin="http://evil.example") == 403
    assert status(origin="http://[") == 403
    assert status(origin="null") == 403
    assert status(origin="http://127.0.0.1") == 200


def test_a_token_is_asked_of_everyone(served: ServedModel) -> None:
    for client in client_of([served], Access(token="sesame")):
        assert client.get("/health").status_code == 200
        assert client.get("/").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        assert client.post("/detect?token=sesame", json={"text": "x"}).status_code == 401
        assert client.post("/detect", json={"text": "x"}, headers={"authorization": "Bearer sesame"}).status_code == 200
        opened = client.get("/?token=sesame")
        assert opened.status_code == 200
        assert "token" not in str(opened.url)
        assert client.post("/detect", json={"text": "x"}).status_code == 200  # the cookie
        assert "sesame" not in opened.text


def test_a_name_is_known_however_it_is_written(served: ServedModel) -> None:
    for client in client_of([served], Access(frozenset({"Big-Machine"}))):
        assert client.get("/health", headers={"host": "Big-Machine:8765"}).status_code == 200
        assert client.get("/health", headers={"host": "big-machine"}).status_code == 200
        assert client.get("/health", headers={"host": "small-machine"}).status_code == 403


@pytest.mark.parametrize("token", ["a+b&c=d%", "\u5bc6\u7801; x"])
def test_any_token_is_kept_as_a_cookie_of_its_port(served: ServedModel, token: str) -> None:
    for client in client_of([served], Access(token=token)):
        assert client.get("/", params={"token": token}).status_code == 200
        assert client.get("/models").status_code == 200
        ((name, value),) = client.cookies.items()
        assert name.endswith("_80")
        client.cookies.clear()
        assert client.get("/models").status_code == 401
        others = f'theme={{"dark":true}}; flag; {name}={value}'  # of other programs at this address
        assert client.get("/models", headers={"cookie": others}).status_code == 200


def test_an_unknown_device_is_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no device 'gpu'"):
        load_served(run_folder, device="gpu", warn=pytest.fail)


def test_a_client_may_not_ask_too_often(served: ServedModel) -> None:
    for client in client_of([served], limits=Limits(burst=3, requests_per_second=0.01)):
        codes = [client.get("/health").status_code for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        assert int(client.get("/health").headers["retry-after"]) > 1


def test_openapi_describes_every_path(client: TestClient) -> None:
    described: dict[str, Any] = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if method == "get":
                assert client.get(path).status_code == 200
            else:
                example = operation["requestBody"]["content"]["application/json"]["example"]
                model = 1 if path == "/predict" else 0
                assert client.post(path, json=example | {"model": model}).status_code == 200, path
    names = {schema["$ref"].rpartition("/")[2] for schema in _references(described)}
    assert names <= described["components"]["schemas"].keys()


def _references(value: Any) -> Iterator[dict[str, str]]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)
