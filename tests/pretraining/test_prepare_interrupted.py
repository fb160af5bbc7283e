"""A preparation that is terminated or killed leaves no process, and nothing that is in the way of the next."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary


@pytest.mark.parametrize(
    ("number", "code", "left"),
    [(signal.SIGTERM, 143, []), (signal.SIGKILL, -9, [".data.HEX.parts", ".data.partial", ".data.partial.lock"])],
)
def test_an_interrupted_preparation_can_be_repeated(number: signal.Signals, code: int, left: list[str], tmp_path: Path) -> None:
    text, vocabulary, out = plain(made_up(1500)), write_vocabulary(tmp_path / "vocab.txt"), tmp_path / "data"
    command = [sys.executable, "-m", "discern", "prepare", "-", "--out", out, "--tokenizer", vocabulary, "--workers", "2"]
    with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(text)
        process.stdin.flush()  # and then it waits for more
        children, workers = Path(f"/proc/{process.pid}/task/{process.pid}/children"), []
        deadline = time.monotonic() + 60
        while not ((tmp_path / ".data.partial").exists() and len(workers) >= 2) and time.monotonic() < deadline:
            workers = children.read_text().split()
            time.sleep(0.01)
        process.send_signal(number)
        messages = process.stderr.read()
        assert process.wait(60) == code
    assert number == signal.SIGKILL or "Traceback" not in messages
    assert messages.count("Run the same command again") == (number == signal.SIGTERM)
    found = [re.sub(r"[0-9a-f]{12}", "HEX", path.name) for path in tmp_path.iterdir()]
    assert sorted(found) == [*left, "vocab.txt"], "a pipe cannot be read again, so a preparation that can tidies up"
    while (alive := [worker for worker in workers if Path(f"/proc/{worker}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers
    assert not alive
    (tmp_path / "text").write_text(text)
    tokenizer, build = TokenizerChoice(vocabulary), PrepareOptions(workers=1)
    prepare([str(tmp_path / "text")], out=out, tokenizer=tokenizer, options=build, progress=Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "text", "vocab.txt"]
