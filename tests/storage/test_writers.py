"""No module writes past `discern.storage`: what writes or removes files by itself is listed here, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import discern

SOURCE = Path(discern.__file__).parent

# What is written into a folder that is not published yet, or belongs to nobody else.
ALLOWED = {
    ("cli/progress.py", "open"): "/dev/null in place of a stream that nobody reads",
    ("data/sources/parquet.py", "SpooledTemporaryFile"): "scratch without a name",
    ("data/dataset/writing.py", "open"): "new files in a staged folder, hashed while they are written",
    ("data/dataset/build.py", "TemporaryFile"): "scratch without a name",
    ("data/dataset/remote.py", "open"): "a file that is fetched into the cache",
    ("data/dataset/remote.py", "rename"): "a file of the cache that is complete and checked",
    ("data/dataset/remote.py", "rmtree"): "the local copy of a data set that was uploaded",
    ("data/dataset/remote.py", "truncate"): "a file that is fetched into the cache",
    ("data/dataset/remote.py", "unlink"): "files of the cache, evicted or unfinished",
    ("data/stages/pieces.py", "open"): "new files in a result that is not published yet",
    ("data/stages/results.py", "rename"): "a result of a stage, made aside in the work folder",
    ("data/stages/results.py", "rmtree"): "results of its own work folder, unfinished or damaged",
    ("data/stages/run.py", "rmtree"): "its own work folder, when it is finished or overwritten",
    ("data/stages/run.py", "unlink"): "its own work folder, when it is finished or overwritten",
    ("data/stages/shards.py", "copyfile"): "a staged folder",
    ("data/stages/shards.py", "link"): "a staged folder",
    ("data/stages/shards.py", "open"): "new files in a result that is not published yet",
    ("data/tokenizer/loading.py", "open"): "/dev/null, for what the tokenizers library prints",
    ("data/processes.py", "fdopen"): "a pipe",
    ("model_files/huggingface.py", "save_file"): "a staged folder",
    ("inference/vector_files.py", "unlink"): "the record of vectors that are being replaced",
    ("model_files/onnx.py", "replace"): "an export that is not published yet",
    ("model_files/onnx.py", "unlink"): "an export that is not published yet",
    ("model_files/serving.py", "write_text"): "an export that is not published yet",
    ("finetuning/results.py", "rmtree"): "a fine-tuning that is overwritten",
    ("finetuning/results.py", "unlink"): "a fine-tuning that is overwritten",
    ("finetuning/run.py", "rmtree"): "checkpoints of the seeds' and trials' own",
    ("finetuning/submission.py", "ZipFile"): "an archive in a file of discern.storage",
    ("training/distributed.py", "unlink"): "a mark that it has made, to see whether a folder is shared",
    ("training/checkpoint.py", "rename"): "a checkpoint's folder, made aside in the run's own",
    ("training/checkpoint.py", "rmtree"): "checkpoints of the run's own",
    ("training/checkpoint.py", "save_file"): "a checkpoint's folder that is not published yet",
    ("training/checkpoint.py", "write_text"): "a checkpoint's folder that is not published yet",
    ("training/metrics_log.py", "open"): "metrics.jsonl is appended to",
    ("pretraining/warm_start.py", "TemporaryDirectory"): "scratch",
    ("compare/run.py", "rmtree"): "its own work folder, when it is finished",
    ("api/estimators.py", "TemporaryDirectory"): "scratch",
    ("api/estimators.py", "write_text"): "scratch",
}

_WRITES = {
    "write_text", "write_bytes", "unlink", "rmtree", "rename", "renames", "rmdir", "removedirs", "symlink_to",
    "hardlink_to", "link", "symlink", "truncate", "tofile", "savez", "save_file", "copyfile", "copy2", "copytree", "move",
    "mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "SpooledTemporaryFile", "savetxt",
}  # fmt: skip


def calls(path: Path) -> Iterator[str]:
    """Names of what a module calls to write, replace or remove files, other than the functions of `discern.storage`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("discern.")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            name, own = node.func.id, node.func.id in ours
        elif isinstance(node.func, ast.Attribute):
            name, own = node.func.attr, isinstance(node.func.value, ast.Name) and node.func.value.id in {"cls", *ours}
        else:
            continue
        # str.replace takes two arguments, Path.replace one, os.replace two of its own.
        replaces = (
            name == "replace" and isinstance(node.func, ast.Attribute) and (_is(node.func.value, "os") or len(node.args) == 1)
        )
        if not own and (name in _WRITES or replaces or (name in {"open", "fdopen", "ZipFile"} and _is_for_writing(node))):
            yield name


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_for_writing(call: ast.Call) -> bool:
    """Whether the mode of an `open` writes; one that is computed counts as such."""
    modes = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts) or _is_os_open(call)


def _is_os_open(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and _is(call.func.value, "os") and "O_WRONLY" in ast.dump(call)


def test_all_writing_goes_through_storage() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        if path.parent.name not in ("storage", "kernels")  # the cache of kernels is a matter of its own
        for name in calls(path)
    }
    around = sorted(found - ALLOWED.keys())
    assert not around, f"{around}: write with discern.storage.files, or give the reason in ALLOWED"


def test_a_writer_that_goes_around_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os, zipfile\nfrom discern.storage.files import write_text\n"
        "path.write_text('x')\nopen(name, 'w')\npath.open('a')\nos.replace(a, b)\naside.replace(path)\nshutil.move(a, b)\n"
        "zipfile.ZipFile(path, 'w')\nos.open(path, os.O_WRONLY)\n"
        "write_text(path, 'x')\n'a'.replace('b', 'c')\nopen(name)\npath.open('rb')\nregistry.open(1)\n"
    )
    assert sorted(calls(path)) == ["ZipFile", "move", "open", "open", "open", "replace", "replace", "write_text"]
