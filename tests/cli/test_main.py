"""The command itself: help, mistyped commands, several processes, and the process around a verb."""

from __future__ import annotations

import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

import discern
from discern.api.verb import VERBS
from discern.cli import main as entry
from tests.support import run_discern

BASIC_OPTIONS = 12
NOTHING_ADVANCED = {name for name in VERBS if name.startswith("config ")} | {"demo", "report", "watch"}


@pytest.mark.parametrize("name", ["", "config", *VERBS])
def test_help_is_whole_at_every_width_and_explains_the_verb(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    for width in (60, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        done = run_discern(*name.split(), "--help")
        assert done.returncode == 0
        texts[width] = done.stdout
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= width
    # A word that is broken is broken elsewhere at another width.
    words = set(texts[120].split())
    assert set(texts[60].split()) == words
    assert not any(word.endswith("-") for word in words - {"-"})
    assert texts[60].startswith(f"Usage: discern {name}".rstrip())
    assert not re.search(r"<(str|int|float|bool|path|text|integer)>|list\[|Optional", texts[60], re.IGNORECASE)
    if name in VERBS:
        assert f"Example: discern {name} " in f"{' '.join(texts[60].split())} "
        basic, heading, _ = texts[60].partition("\nOptions:\n")[2].partition("\nAdvanced:\n")
        assert 1 <= len(re.findall(r"^  --", basic, re.MULTILINE)) <= BASIC_OPTIONS
        assert bool(heading) == (name not in NOTHING_ADVANCED)


def test_help_lists_the_commands_in_groups_with_whole_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_discern("--help").stdout == run_discern().stdout
    shown = run_discern("--help").stdout + run_discern("config", "--help").stdout
    for name, verb in VERBS.items():
        listed = shown.partition(f"\n{'Commands' if ' ' in name else verb.group}:\n")[2].partition("\n\n")[0]
        assert re.search(rf"^  {name.rpartition(' ')[2]} +[A-Z][^.]*\.$", listed, re.MULTILINE), name


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    heavy = "('torch', 'tokenizers', 'numpy', 'transformers', 'matplotlib', 'discern.pretrain', 'discern.model_files')"
    program = (
        "import sys\nfrom discern.cli.main import main\nsys.argv = ['discern', '--help']\n"
        f"try:\n    main()\nfinally:\n    print([name for name in {heavy} if name in sys.modules])"
    )
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.endswith("[]\n")
        if times[-1] < 1.0:  # 0.4 on a quiet machine, twice that on a busy one; importing torch alone takes longer than 1
            return
    raise AssertionError(f"help takes {min(times):.2f} s")


def test_the_version() -> None:
    assert run_discern("--version").stdout == f"discern {discern.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        ("confg", ["'confg'", "'config'"], "discern --help"),
        ("zzz", ["No such command 'zzz'"], "discern --help"),
        ("--jsn", ["No such option: --jsn"], "discern --help"),
        ("config", ["Missing command"], "discern config --help"),
        ("config shw", ["'shw'", "'show'"], "discern config --help"),
        ("config show --presett x", ["--presett", "--preset,"], "discern config show --help"),
        ("config diff tiny --json", ["Missing argument 'B'"], "discern config diff --help"),
        ("prepare x --engine spark", ["'--engine': 'spark' is not one of 'local', 'ray'"], "discern prepare --help"),
        ("finetune m --out o --nproc 0", ["'--nproc'"], "discern finetune --help"),
        ("finetune m --out o --trian a.csv", ["--trian", "--train"], "discern finetune --help"),
        ("bench --fill 1.5", ["'--fill'"], "discern bench --help"),
    ],
)
def test_a_mistyped_command_is_explained_on_stderr(arguments: str, says: list[str], hint: str) -> None:
    done = run_discern(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert all(word in first for word in says)
    assert second == f"  hint: {hint}"


def test_ctrl_c_before_a_verb_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "application", interrupted)
    assert run_discern("config").returncode == 130


def test_a_terminal_gets_color() -> None:
    leader, follower = pty.openpty()
    streams = {"stdin": subprocess.DEVNULL, "stdout": follower, "stderr": follower}
    environment = os.environ | {"TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, "-m", "discern", "confg"], **streams, env=environment):
        os.close(follower)
        shown = os.read(leader, 65536)
    os.close(leader)
    assert b"\x1b[1;31merror: " in shown


NPROC = ("finetune", "m", "--train", "a.csv", "--out", "o")


def test_nproc_starts_processes_unless_this_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[list[str], int]] = []

    def launch(config: LaunchConfig, program: str, arguments: list[str]) -> None:
        launched.append((arguments, config.nproc_per_node))

    monkeypatch.setattr("torch.distributed.launcher.api.launch_agent", launch)
    monkeypatch.setattr("logging.disable", lambda: None)
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")
    assert run_discern(*NPROC, "--nproc", 2).returncode == 0
    # What is wrong is reported once, before any process is started, and a preview starts none.
    for command in ("bench --preset tinny", "pretrain --preset tiny --data none --out o --dry-run"):
        assert run_discern(*command.split(), "--nproc", 2).stderr.count("error: ") == 1
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)  # one of those processes
    assert "there is no folder m" in run_discern(*NPROC, "--nproc", 2).stderr
    assert launched == [(["-m", "discern", *NPROC, "--nproc", "2"], 2)]
    assert "an evaluation runs in one process" in run_discern("evaluate", "m").stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
@pytest.mark.parametrize(("own_setting", "kept"), [({}, True), ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False)])
def test_freed_memory_stays_with_the_process_unless_the_user_sets_a_threshold(own_setting: dict[str, str], kept: bool) -> None:
    program = """
import numpy
from discern.cli.main import _keep_the_heap
_keep_the_heap()
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
block = numpy.ones(2**23); full = resident(); del block
print((full - resident()) < 2**25)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment | own_setting)
    assert done.stdout == f"{kept}\n", done.stderr


def test_a_file_does_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    script = f"""
import sys
from discern.cli import main
main._open_standard_streams()
with open({str(tmp_path / "file")!r}, "w") as file:
    print("result", flush=True)
    print("error", file=sys.stderr, flush=True)
    file.write(repr((file.fileno() > 2, sys.stdin.read())))
"""
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script], check=True)
    assert (tmp_path / "file").read_text() == "(True, '')"


@pytest.mark.parametrize("arguments", [("detect", "model", "--text"), ("score", "model", "--text"), ("fill", "model")])
def test_texts_on_the_command_line_are_utf8(arguments: tuple[str, ...]) -> None:
    done = run_discern(*arguments, "caf\udce9")
    assert done.returncode == 2
    assert "is not UTF-8: byte 0xe9 at character 4" in done.stderr
    assert "iconv" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "report run --out LONG",
        "detect LONG --text a",
        "detect model --text a --out LONG",
        "prepare LONG --check",
        "predict model rows.csv --out LONG",
        "config show LONG",
        "export run --out LONG",
    ],
)
def test_a_name_that_is_too_long_for_any_disk_is_an_ordinary_error(arguments: str, tmp_path: Path) -> None:
    done = run_discern(*arguments.replace("LONG", "x" * 300).split(), cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "xxx" in done.stderr
    assert "too long" in done.stderr
    assert "unexpected" not in done.stderr
