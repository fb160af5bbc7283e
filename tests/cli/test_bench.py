import json
import subprocess
import sys

import pytest

from discern.cli.main import main

SMALL = ["--preset", "tiny", "--set", "model.num_layers=1", "--vocab-size", "300", "--steps", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "discern", "bench", *arguments], capture_output=True, text=True, timeout=180)


def test_json_is_one_object_and_nothing_else() -> None:
    done = run(*SMALL, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["preset"] == "tiny"
    assert figures["tokens_per_second"] > 0
    assert figures["tokens_per_second_forward"] > 0
    assert figures["processes"] == 1


def test_people_get_a_table_and_a_sentence() -> None:
    done = run(*SMALL)
    assert done.returncode == 0, done.stderr
    head, *rows, sentence = done.stdout.strip().splitlines()
    assert head.split("  ")[-1].strip() == "forward only"
    names = [row.split("  ")[0] for row in rows]
    assert names[:3] == ["tokens per second", "limit of its matrix products", "share of that limit"]
    assert "sequences of 32 per step" in sentence


def test_two_processes_share_the_step() -> None:
    done = run(*SMALL, "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["processes"] == 2
    assert figures["micro_batch_size"] == 4


def test_the_meta_device_counts_without_computing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # XLNet-Large would need dozens of gigabytes.
    few = ["--set", "model.num_layers=3", "--set", "train.sequences_per_step=64"]
    monkeypatch.setattr(sys, "argv", ["discern", "bench", "--preset", "xlnet-large", *few, "--device", "meta", "--json"])
    with pytest.raises(SystemExit):
        main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["flops_per_step"] == figures["flops_per_position"] * 64 * 512 > 0
    assert figures["peak_memory_bytes"] > 16 * figures["parameters"]
    assert (figures["precision"], figures["micro_batch_size"]) == ("bfloat16", 8)
    monkeypatch.setattr(sys, "argv", ["discern", "bench", *SMALL, "--device", "meta"])
    with pytest.raises(SystemExit):
        main()
    assert "GiB of tensors. Nothing was computed." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no configuration"),
        (["--preset", "tiny", "--fill", "1.5"], "--fill"),
        (["--preset", "tinny"], "tiny"),
        (["--preset", "tiny", "--device", "warp"], "there is no device"),
    ],
)
def test_what_is_asked_wrongly(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["discern", "bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert says in captured.err
    assert captured.out == ""
