from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import discern
from discern.cli import main as entry
from discern.cli.main import VERBS, main


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of `discern ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["discern", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_an_evaluation_by_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert call(monkeypatch, "evaluate", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "an evaluation runs in one process" in said
    assert "unset RANK WORLD_SIZE" in said


def on_terminal(*arguments: str, **environment: str) -> str:
    """What `discern ARGUMENTS` shows on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "discern", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"} | environment,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the other side is closed: how a terminal ends
        pass
    process.wait()
    os.close(ours)
    return shown.decode()


def computed() -> float:
    """Seconds that ended child processes computed for: what the clock shows depends on who else is at work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_imports_nothing_heavy():
    heavy = "('torch', 'tokenizers', 'numpy', 'transformers', 'matplotlib', 'discern.pretrain', 'discern.model_files')"
    program = (
        "import sys\nfrom discern.cli.main import main\nsys.argv = ['discern', '--help']\n"
        f"try:\n    main()\nfinally:\n    print([name for name in {heavy} if name in sys.modules])"
    )
    times = []
    for _ in range(5):
        before = computed()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        times.append(computed() - before)
        assert done.stdout.endswith("[]\n")
        if times[-1] < 1.0:  # 0.3 on a quiet machine, twice that on a busy one; importing torch alone takes longer than 1
            return
    raise AssertionError(f"help takes {min(times):.2f} s")


def test_help_lists_the_verbs_that_exist_and_no_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert call(monkeypatch, "--help") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.partition("Commands:")[2].splitlines() if line.strip()]
    assert [verb for verb in VERBS if verb in listed] == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert call(monkeypatch, verb, "--help") == 0
    assert f"Usage: discern {verb}" in capsys.readouterr().out


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"discern {discern.__version__}\n"


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "discern", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"discern {discern.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["confg"], ["'confg'", "'config'"], "discern --help"),
        (["zzz"], ["No such command 'zzz'"], "discern --help"),
        (["--jsn"], ["No such option: --jsn"], "discern --help"),
        (["config"], ["Missing command"], "discern config --help"),
        (["config", "shw"], ["'shw'", "'show'"], "discern config --help"),
        (["config", "show", "--presett", "x"], ["--presett", "--preset,"], "discern config show --help"),
        (["config", "diff", "tiny"], ["Missing argument 'B'"], "discern config diff --help"),
        (
            ["prepare", "x", "--out", "d", "--engine", "spark"],
            ["'--engine': 'spark' is not one of 'local', 'ray'"],
            "discern prepare --help",
        ),
        (["config", "diff", "tiny", "--json"], ["Missing argument 'B'"], "discern config diff --help"),
    ],
)
def test_a_mistyped_command_is_explained_on_stderr(
    arguments: list[str],
    says: list[str],
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert call(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.startswith("error: ")
    assert all(word in first for word in says)
    assert second == f"  hint: {hint}"


def test_ctrl_c_before_a_verb_has_begun(monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "application", interrupted)
    assert call(monkeypatch, "config") == 130


def test_a_terminal_gets_color_unless_it_says_no():
    assert "\x1b[1;31merror: " in on_terminal("confg")
    assert "\x1b[31m" not in on_terminal("confg", NO_COLOR="1")
    assert "╭" not in on_terminal("--help")


def test_importing_the_package_and_its_command_line_is_cheap():
    program = "import sys, discern, discern.cli; print([name for name in ('torch', 'typer', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
@pytest.mark.parametrize(
    ("own_setting", "kept"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False),
    ],
)
def test_freed_memory_stays_with_the_process_unless_the_user_says_otherwise(own_setting: dict[str, str], kept: bool):
    program = """
import numpy
from discern.cli.main import _keep_the_heap
_keep_the_heap()
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
numpy.ones(2**23); before = resident()
block = numpy.ones(2**23); full = resident(); del block
print((resident() - before) > 2**25, (full - resident()) > 2**25)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment | own_setting)
    assert done.returncode == 0, done.stderr
    given_back = done.stdout.split()[1] == "True"
    assert given_back != kept


@pytest.mark.parametrize(("most", "calls"), [(2**40, 2), (2**25, 3), (0, 2)])
def test_an_older_glibc_gets_what_it_takes_or_nothing(most: int, calls: int, monkeypatch: pytest.MonkeyPatch):
    """Where the first setting is refused, the second alone would cost more than it gives."""
    made: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, name: int, value: int) -> int:
            made.append((name, value))
            return int(name != entry._M_MMAP_THRESHOLD or value <= most)

    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda _: Library())
    entry._keep_the_heap()
    assert len(made) == calls
    assert any(name == entry._M_TRIM_THRESHOLD for name, _ in made) == (most > 0)


def test_closed_streams_are_no_place_for_files(tmp_path: Path) -> None:
    """With stdout closed, the first file that a program opens would get its number, and be printed into."""
    script = f"""
import sys
from discern.cli import main
main._open_standard_streams()
with open({str(tmp_path / "file")!r}, "w") as file:
    print("result")
    print("error", file=sys.stderr, flush=True)
    sys.stdout.flush()
    file.write(repr((file.fileno() > 2, sys.stdin.read())))
"""
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script], check=True)
    assert (tmp_path / "file").read_text() == "(True, '')"


def test_texts_from_the_command_line_are_utf8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("detect", "model", "--text", "caf\udce9"), ("fill", "model", "caf\udce9")):
        assert call(monkeypatch, *arguments) == 2
        said = capsys.readouterr().err
        assert "is not UTF-8: byte 0xe9 at character 4" in said
        assert "iconv" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "run", "--out", "{long}"),
        ("detect", "{long}", "--text", "a"),
        ("detect", "model", "--text", "a", "--out", "{long}"),
        ("prepare", "{long}", "--check"),
        ("predict", "model", "rows.csv", "--out", "{long}"),
        ("config", "show", "{long}"),
        ("export", "run", "--out", "{long}"),
    ],
)
def test_a_name_too_long_for_any_disk_is_said_to_be(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *(each.format(long="x" * 300) for each in arguments)) in (1, 2)
    said = capsys.readouterr().err
    assert "did not expect" not in said
    assert "xxx" in said
    assert "too long" in said
