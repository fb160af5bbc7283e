"""A server on this machine that speaks as the Hugging Face Hub does: repositories with revisions, uploads and downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

Files = Mapping[str, bytes]


class Hub:
    """What the server holds, and what it was asked.

    Attributes:
        repositories: the files of each revision, by the name of the repository.
        asked: method and path of every request.
        created: content of the requests to create a repository.
        failing: requests to refuse: a part of their path, and the statuses to answer with, one at a time.
        stores_large: weights are uploaded on their own, as to a large file store.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Files]] = {}
        self.asked: list[str] = []
        self.created: list[dict[str, str]] = []
        self.failing: dict[str, list[int]] = {}
        self.stores_large = False
        self.address = ""
        self.large: dict[str, bytes] = {}
        self.commits: dict[str, Files] = {}

    def commit_of(self, files: Files) -> str:
        """The identifier of a state of a repository."""
        identifier = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[identifier] = files
        return identifier

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """Status, and JSON or bytes."""
        self.asked.append(f"{method} {path}")
        for part, statuses in self.failing.items():
            if part in path and statuses:
                return statuses.pop(0), {"error": "not now"}
        if path.startswith("/large/"):
            self.large[path.removeprefix("/large/")] = body
            return 200, {}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            name = "{organization}/{name}".format(**self.created[-1])
            status = 409 if name in self.repositories else 200
            self.repositories.setdefault(name, {"main": {".gitattributes": b""}})
            return status, {"url": f"{self.address}/{name}", "name": name, "id": name}
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git/info/(lfs)/objects/batch|/(\w+)/([^/]+)(?:/(.*))?)?", path)
        name, lfs, action, revision, file = found.groups() if found else ("", None, None, None, None)
        revisions = self.repositories.get(name)
        if revisions is None:
            return (200, {}) if path.startswith("/api/") and method == "POST" else (404, {"error": "RepoNotFound"})
        action, revision = lfs or action, unquote(revision or "main")
        if action == "branch":
            status = 409 if revision in revisions else 200
            revisions.setdefault(revision, revisions["main"])
            return status, {}
        if action == "lfs":
            objects = json.loads(body)["objects"]
            lacks = [each for each in objects if each["oid"] not in self.large]
            for each in lacks:
                each["actions"] = {"upload": {"href": f"{self.address}/large/{each['oid']}"}}
            return 200, {"objects": objects}
        files = revisions.get(revision, self.commits.get(revision))
        if files is None:
            return 404, {"error": "RevisionNotFound"}
        if action == "preupload":
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if self.stores_large and path.endswith(".safetensors") else "regular" for path in paths}
            return 200, {"files": [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]}
        if action == "commit":
            revisions[revision] = self.changed(files, body)
            return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1"}
        if action == "resolve":
            return (200, files[unquote(file)]) if unquote(file) in files else (404, {"error": "EntryNotFound"})
        if action == "tree":
            return 200, [{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files.items()]
        return 200, {"id": name, "sha": self.commit_of(files), "siblings": [{"rfilename": path} for path in files]}

    def changed(self, files: Files, commit: bytes) -> Files:
        """The files after a commit."""
        changed = dict(files)
        for line in commit.splitlines():
            kind, value = json.loads(line).values()
            if kind == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                changed[value["path"]] = self.large[value["oid"]]
            elif kind == "deletedFile":
                del changed[value["path"]]
        return changed


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    """Serve a hub at its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            status, content = hub.answer(self.command, self.path.partition("?")[0], self.rfile.read(length))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("X-Repo-Commit", self.path.split("/resolve/")[-1].partition("/")[0])
            if status == 404 and isinstance(content, dict):
                self.send_header("X-Error-Code", content["error"])
            self.send_header("ETag", hashlib.sha1(data).hexdigest())
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.do_GET()

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
