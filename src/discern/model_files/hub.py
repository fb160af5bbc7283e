"""Names of the files of a model; models by their names on the Hugging Face Hub, downloaded once; and pushes to the Hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from discern.data.tokenizer.loading import TOKENIZER_NAMES
from discern.errors import ConfigError, DataError
from discern.storage.checksums import CHECKSUMS_NAME
from discern.training.checkpoint import newest_step
from discern.training.process import rank_environment

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
HEAD_NAME = "discern_head.safetensors"
"""Weights without a place in the classes of transformers: the head of a discriminator with a bilinear term, the gate of a head
that copies, the factors of a word table, or the head of a task."""
CALIBRATION_NAME = "detection.json"
"""File that `discern detect --calibrate` writes beside a discriminator."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./,-]+)?")
_SMALL = (
    *(CONFIG_NAME, "generator_config.json", *TOKENIZER_NAMES, "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt"),  # of teachers
    *("discern.toml", CALIBRATION_NAME, CHECKSUMS_NAME, "README.md"),
    *("modules.json", "*sentence_*.json", "[0-9]_*/config.json", f"[0-9]_*/{CHECKSUMS_NAME}"),  # of sentence-transformers
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model.generator.bin")
_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
# Kinds of files that an export consists of, apart from its card, which every export has
_OF_EXPORTS = (".json", ".onnx", ".safetensors", ".toml")
_CACHED = re.compile(r"/models--([^/]+)/snapshots/[^/]+$")


def local_model(name: str | Path, note: Callable[[str], None]) -> Path:
    """The folder of a model, which is downloaded if it is given by its name on the Hub, USER/NAME or USER/NAME@REVISION.

    An existing file or folder is returned unchanged. Otherwise, if the name has the form of a name on the Hub and its first part
    is not an existing folder (then it is a mistyped path), the model is downloaded to the cache of huggingface_hub, where later
    calls find it without a network connection. Anything else is returned unchanged.

    Args:
        note: called with a message about where a downloaded model is.

    Raises:
        ConfigError: huggingface_hub is not installed.
        DataError: there is no such model, or it cannot be downloaded.
    """
    path = Path(name)
    repository = str(name)
    if path.exists() or path.parent.is_dir() or not _NAME.fullmatch(repository) or ".." in repository:
        return path
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"there is no folder {repository}, and downloading it from the Hugging Face Hub needs huggingface_hub",
            hint=f"pip install 'discern-nlp[hf]'; or {_by_hand(repository)}",
        ) from None
    try:
        folder = _download(repository)
    except huggingface_hub.errors.RepositoryNotFoundError as problem:  # or one whose terms have to be accepted first
        raise DataError(
            f"there is no folder {repository}, and no public model of that name on the Hugging Face Hub",
            hint="check the name, or give the folder of a model; for a private or gated model, accept its terms at "
            f"https://huggingface.co/{repository.partition('@')[0]} and run: hf auth login",
        ) from problem
    except Exception as problem:  # network, proxies, certificates and disk raise errors of many types
        raise DataError(
            f"there is no folder {repository}, and it cannot be downloaded from the Hugging Face Hub: {_reason(problem)}",
            hint=_by_hand(repository),
        ) from problem
    note(f"{repository}: {folder}")
    return folder


def hub_name(folder: Path) -> str | None:
    """The name on the Hub of a folder in the cache of huggingface_hub; None for any other folder."""
    found = _CACHED.search(folder.absolute().as_posix())
    return found and found[1].replace("--", "/")


def _download(repository: str) -> Path:
    """Download config, tokenizer and weights, including those of a generator subfolder; pickles only without safetensors."""
    from huggingface_hub import snapshot_download

    name, revision = _divided(repository)

    def fetched(*patterns: str) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*patterns, *(f"generator/{pattern}" for pattern in patterns)],
                cache_dir=os.environ.get("HF_HUB_CACHE") or None,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
            )
        )

    folder = fetched(*_SMALL, HEAD_NAME, *_WEIGHTS)
    return folder if any(folder.glob("*.safetensors")) else fetched(*_SMALL, *_PICKLES)


def _divided(repository: str) -> list[str]:
    """The name of a repository and the revision that is meant."""
    return f"{repository}@main".split("@")[:2]


def _by_hand(repository: str) -> str:
    name, _ = _divided(repository)
    return (
        f"on a machine with a network, run: hf download {repository.replace('@', ' --revision ')} --local-dir {name}; then copy "
        f"the folder here, so that {name}/{CONFIG_NAME} exists"
    )


def _reason(problem: Exception) -> str:
    cause = problem.__cause__ or problem  # where huggingface_hub reports problems of the network
    message = getattr(problem, "server_message", None) or getattr(cause, "server_message", None) or str(cause)
    return message.strip().partition("\n")[0] or type(cause).__name__


def create_repository(target: str) -> None:
    """Make sure, before any work, that `push` can write to `target`. A repository that does not exist is created, private.

    Args:
        target: USER/NAME or USER/NAME@REVISION.

    Raises:
        ConfigError: this is not such a name, huggingface_hub is missing, or nobody is logged in who may write there.
        DataError: the Hub does not respond.
    """
    if not _NAME.fullmatch(target) or ".." in target:
        raise ConfigError(f"'{target}' is not a name on the Hugging Face Hub", hint="use USER/NAME or USER/NAME@REVISION")
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(f"pushing to {target} needs huggingface_hub", hint="pip install 'discern-nlp[hf]'") from None
    if huggingface_hub.get_token() is None:
        raise ConfigError(f"pushing to {target} needs a login to the Hugging Face Hub", hint="hf auth login; or set HF_TOKEN")
    _write_to(target, "nothing was written", lambda api: api.create_repo(_divided(target)[0], private=True, exist_ok=True))


def push(folder: Path, target: str, message: str) -> str:
    """Upload an export to a repository that `create_repository` has prepared. Return its address.

    REVISION may be several, separated by commas. One that is missing becomes a branch. Files of an earlier export that this one
    lacks are removed; those of other kinds, such as a license or pictures, are kept.

    Raises:
        ConfigError, DataError: the upload was refused, or failed several times.
    """
    name, revisions = _divided(target)

    def upload(api: Any) -> str:
        for revision in revisions.split(","):
            if revision != "main":
                api.create_branch(name, branch=revision, exist_ok=True)
            there = [file.rfilename for file in api.model_info(name, revision=revision).siblings or ()]
            stale = [file for file in there if file.endswith(_OF_EXPORTS) and not (folder / file).is_file()]
            about = {"revision": revision, "commit_message": message, "delete_patterns": stale or None}
            api.upload_folder(repo_id=name, folder_path=folder, **about)
        return f"{api.endpoint}/{name}/tree/{revision}"

    address: str = _write_to(target, f"{folder} is complete", upload)
    return address


def _write_to(target: str, state: str, action: Callable[[Any], Any], pauses: Sequence[int] = (1, 4)) -> Any:
    """The result of an action on the API of the Hub.

    Args:
        state: what has been done so far, for the hint.
        pauses: seconds to wait before each repetition, if the Hub is busy.
    """
    from huggingface_hub import HfApi

    try:
        return action(HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None))
    except Exception as problem:  # network, proxies, certificates and disk raise errors of many types
        status = getattr(getattr(problem, "response", None), "status_code", 0)
        if status < 429 or not pauses:
            raise (ConfigError if status in (401, 403, 404) else DataError)(
                f"{target} cannot be written on the Hugging Face Hub: {_reason(problem)}",
                hint=f"{state}; run the same command again, after `hf auth login` if your token may not write there",
            ) from problem
    time.sleep(pauses[0])
    return _write_to(target, state, action, pauses[1:])


@contextmanager
def pushed_checkpoints(run: Path, repository: str, note: Callable[[str], None]) -> Iterator[None]:
    """Push the checkpoints of a run to the Hub while it trains, one at a time, and its last state when it is complete.

    A thread waits for checkpoints, and a process of the lowest priority exports and pushes the newest one. A push that fails is
    a warning, and has no other consequence. If training is interrupted, a push in progress is stopped.

    Args:
        run: folder of the run.
        repository: USER/NAME. Each checkpoint becomes the revision `step-N`, and the last one also `main`.
        note: receives the warnings, and a line before the last push.

    Raises:
        ConfigError: as `create_repository`, before training starts.
    """
    if rank_environment().rank:
        yield
        return
    if "@" in repository:
        raise ConfigError(f"each checkpoint is a revision of its own, but '{repository}' names one", hint="give USER/NAME")
    try:
        create_repository(repository)
    except DataError as problem:  # the Hub may respond again before the first checkpoint
        note(f"warning: {problem.message}")
    ended, complete, processes = threading.Event(), False, list[subprocess.Popen[str]]()
    # Not a rank of the run, nor a user of its GPU or of more than one core
    alone = {"WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def push_newest(revisions: str) -> None:
        try:
            with TemporaryDirectory() as folder:
                out = Path(folder, repository.partition("/")[2])
                command = ["-m", "discern", "export", str(run), "--out", str(out), "--push", f"{repository}@{revisions}"]
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env=os.environ | alone,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                processes.append(process)
                os.setpriority(os.PRIO_PROCESS, process.pid, 19)
                stderr = process.communicate()[1]
                if process.returncode:
                    raise OSError(stderr.partition("error: ")[2].partition("\n")[0] or f"exit code {process.returncode}")
        except OSError as problem:
            again = f"discern export {run} --out DIR --push {repository}"
            note(f"warning: a checkpoint was not pushed to {repository}: {problem}; to push the newest one: {again}")

    def watch() -> None:
        pushed = newest_step(run / "checkpoints")
        while not ended.wait(1):
            if (step := newest_step(run / "checkpoints")) not in (0, pushed):  # 0: an earlier run was moved aside
                pushed = step
                push_newest("step-{step}")
        if complete:
            note(f"pushing the last checkpoint to {repository}")
            push_newest("step-{step},main")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
        complete = True
        ended.set()
        watcher.join()
    finally:
        ended.set()
        while watcher.is_alive():
            for process in processes:
                process.kill()
            watcher.join(0.1)
