import json

import pytest

from tests.support import run_python

SMALL = ["--preset", "tiny", "--set", "model.num_layers=1", "--vocab-size", "300", "--steps", "2"]


def test_json_is_one_object_and_nothing_else() -> None:
    done = run_python("-m", "discern", "bench", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["preset"] == "tiny"
    assert figures["tokens_per_second"] > 0
    assert figures["tokens_per_second_forward"] > 0
    assert figures["processes"] == 1


def test_people_get_a_table_and_a_sentence() -> None:
    done = run_python("-m", "discern", "bench", *SMALL)
    assert done.returncode == 0, done.stderr
    head, *rows, sentence = done.stdout.strip().splitlines()
    assert head.split("  ")[-1].strip() == "forward only"
    names = [row.split("  ")[0] for row in rows]
    assert names[:3] == ["tokens per second", "limit of its matrix products", "share of that limit"]
    assert "sequences of 32 per step" in sentence


def test_the_meta_device_counts_without_computing() -> None:
    # XLNet-Large would need dozens of gigabytes.
    few = ["--set", "model.num_layers=3", "--set", "train.sequences_per_step=64"]
    done = run_python("-m", "discern", "bench", "--preset", "xlnet-large", *few, "--device", "meta", "--json")
    figures = json.loads(done.stdout)
    assert figures["flops_per_step"] == figures["flops_per_position"] * 64 * 512 > 0
    assert figures["peak_memory_bytes"] > 16 * figures["parameters"]
    assert (figures["precision"], figures["micro_batch_size"]) == ("bfloat16", 8)
    shown = run_python("-m", "discern", "bench", *SMALL, "--device", "meta").stdout
    assert "GiB of tensors. Nothing was computed." in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no configuration"),
        (["--preset", "tiny", "--fill", "1.5"], "--fill"),
        (["--preset", "tinny"], "tiny"),
        (["--preset", "tiny", "--device", "warp"], "there is no device"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    refused = run_python("-m", "discern", "bench", *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
