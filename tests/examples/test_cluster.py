"""The scripts for clusters, run with stand-ins for the schedulers: their commands are ones that discern and torchrun accept."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from discern.cli.main import application
from discern.training.config import load_pretrain_config

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted([*CLUSTER.rglob("*.sh"), *CLUSTER.rglob("*.sbatch")])
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[1-8]",
    "SLURM_NNODES": "8",
    "SLURM_JOB_NUM_NODES": "8",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "8",
}
OPTIONS = {"job-name", "cpus-per-task", "mem", "mem-per-cpu", "time", "open-mode", "output", "signal", "requeue"}
COUNTS = {"nodes", "ntasks-per-node", "gpus-per-node"}
RECORD = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> "$LOG"; printf "\\n" >> "$LOG"\n'
STAND_INS = {
    "scontrol": '[ "$1" = show ] && echo node1',
    "srun": '[ "$1" = --kill-on-bad-exit=1 ] && shift; exec "$@"',
    "torchrun": "",
    "discern": "",
    "ray": "",
}


@pytest.fixture
def called(tmp_path: Path) -> Any:
    """Runs a command line with stand-ins for other programs, and returns how they were called."""
    stands = tmp_path / "bin"
    stands.mkdir()
    for name, then in STAND_INS.items():
        (stands / name).write_text(f"{RECORD}{then}\n")
        (stands / name).chmod(0o755)
    log = tmp_path / "log"
    environment = os.environ | SLURM | {"PATH": f"{stands}:{os.environ['PATH']}", "LOG": str(log)}

    def run(*line: str | Path, **variables: str) -> list[list[str]]:
        done = subprocess.run(line, env=environment | variables, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return calls(log)

    run.environment, run.log, run.stands = environment, log, stands  # type: ignore[attr-defined]
    return run


def calls(log: Path) -> list[list[str]]:
    return [line.split("\0")[:-1] for line in log.read_text().split("\n")[:-1]]


def check_discern(arguments: list[str]) -> dict[str, Any]:
    """Parse a command of discern, and load the configuration that it asks for. Return its parameters."""
    command = typer.main.get_command(application()).commands[arguments[0]]  # type: ignore[attr-defined]
    parameters: dict[str, Any] = command.make_context(arguments[0], list(arguments[1:])).params
    if arguments[0] == "pretrain":
        settings = [value for option, value in pairwise(arguments) if option == "--set"]
        load_pretrain_config(None, parameters["preset"], settings)
    return parameters


def check_torchrun(arguments: list[str]) -> argparse.Namespace:
    """Parse a command of torchrun, and the one of discern in it."""
    parsed: argparse.Namespace = get_args_parser().parse_args(arguments)
    assert parsed.module
    assert parsed.training_script == "discern"
    assert parsed.rdzv_backend == "c10d", "the static rendezvous starts no processes again"
    assert parsed.max_restarts > 0
    parameters = check_discern(parsed.training_script_args)
    assert parameters["nproc"] == 1, "torchrun starts the processes"
    return parsed


def options_of(script: Path) -> dict[str, str]:
    """The options of sbatch in a script."""
    lines = script.read_text().splitlines()
    given = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    # sbatch reads them before the first command only.
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert given[-1] < commands[0]
    found = dict(re.fullmatch(r"#SBATCH --([a-z-]+)=?(\S*)", lines[number]).groups() for number in given)  # type: ignore[misc,union-attr]
    assert found.keys() <= OPTIONS | COUNTS
    assert all(found[name].isdigit() for name in COUNTS & found.keys())
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_stop_at_the_first_error(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", sorted(CLUSTER.rglob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_jobs_are_queued_again(script: Path) -> None:
    options = options_of(script)
    assert options["requeue"] == ""
    assert options["open-mode"] == "append", "a job that is queued again would overwrite its log"
    assert re.fullmatch(r"(\d+-)?\d\d:\d\d:\d\d", options["time"])
    if script.name == "pretrain.sbatch":
        assert re.fullmatch(r"B:USR1@\d+", options["signal"])
        assert options["ntasks-per-node"] == "1", "one agent of torchrun per node"


def test_slurm_preparation(called: Any) -> None:
    _, _, (program, *line) = called("bash", CLUSTER / "slurm" / "prepare.sbatch", "text/", "DATA", "vocab.txt")
    assert (program, line[0]) == ("ray", "symmetric-run")
    split = line.index("--")
    assert line[split + 1] == "discern"
    assert check_discern(line[split + 2 :])["engine"] == "ray"
    command = pytest.importorskip("ray.scripts.symmetric_run").symmetric_run
    options = command.make_context("symmetric-run", line[1:split]).params
    assert (options["address"], options["min_nodes"]) == ("node1:6379", 8)
    assert options["ray_args_and_entrypoint"] == ("--num-cpus", "8")
    assert options_of(CLUSTER / "slurm" / "prepare.sbatch")["ntasks-per-node"] == "1", "one Ray node per machine"


def test_slurm_training(called: Any) -> None:
    _, _, (_, *torchrun) = called("bash", CLUSTER / "slurm" / "pretrain.sbatch", "DATA", "RUN")
    parsed = check_torchrun(torchrun)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint, parsed.rdzv_id) == ("8", "8", "node1:30211", "4711")
    assert "SLURM_JOB_ID % 1000" in (CLUSTER / "slurm" / "pretrain.sbatch").read_text()


@pytest.mark.parametrize(("number", "code", "again"), [(signal.SIGUSR1, 1, True), (signal.SIGTERM, 1, True), (None, 1, False)])
def test_slurm_training_is_queued_again_when_its_time_ends(called: Any, number: int | None, code: int, again: bool) -> None:
    # The stand-in saves a checkpoint when it is asked to stop, as torchrun's processes do, and ends with an error code.
    wait = "sleep 60 &\nwait $!" if number is not None else f"exit {code}"
    (called.stands / "torchrun").write_text(f"{RECORD}trap 'sleep 0.5; exit {code}' TERM\n{wait}\n")
    job = subprocess.Popen(["bash", CLUSTER / "slurm" / "pretrain.sbatch", "DATA", "RUN"], env=called.environment)
    deadline = time.monotonic() + 20
    while not (called.log.exists() and calls(called.log)[-1][0] == "torchrun") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    if number is not None:
        job.send_signal(number)
    assert job.wait(20) == code
    assert (calls(called.log)[-1] == ["scontrol", "requeue", "4711"]) is again


def test_kubernetes_job(called: Any) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes" / "pretrain.yaml").read_text())
    assert (service["apiVersion"], service["kind"], service["spec"]["clusterIP"]) == ("v1", "Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}, "Jobs label their pods so"
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    values = {each["name"]: each["value"] for each in container["env"]}
    ((_, *torchrun),) = called(*container["command"], *container["args"], JOB_COMPLETION_INDEX="0", **values)
    parsed = check_torchrun(torchrun)
    assert int(parsed.nnodes) == spec["completions"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.rdzv_endpoint == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500", "the name of the pod with index 0"
    assert parsed.rdzv_conf == "is_host=1"
    assert parsed.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    for page in (CLUSTER / "kubernetes" / "pretrain.yaml", ROOT / "docs" / "howto" / "cluster.md"):
        assert f"docker build --target cuda --tag {container['image']} ." in page.read_text(encoding="utf-8")


def test_dockerfile() -> None:
    """What needs no daemon: its targets, what it copies, and who runs it."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    stages: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            _, base, _, name = line.split()
            stages[name] = list(stages.get(base, ()))
        elif stages and line and not line.startswith("#"):
            stages[name].append(line)
    for target in ("cpu", "cuda"):
        assert stages[target][-1] == "USER 1000", "Kubernetes' runAsNonRoot needs a number"
        assert 'ENTRYPOINT ["discern"]' in stages[target]
    sources = {path for line in stages["wheel"] if line.startswith("COPY") for path in line.split()[1:-1]}
    sources |= set(re.findall(r"--mount=type=bind,source=(\S+?),", "\n".join(lines)))
    assert all((ROOT / path).exists() for path in sources)
    assert sources == set(re.findall(r"^!(.+)", (ROOT / ".dockerignore").read_text(), flags=re.M)), "only these reach the build"


def test_skypilot_task(called: Any) -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((CLUSTER / "skypilot" / "pretrain.yaml").read_text())
    assert task.keys() <= {"name", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    assert isinstance(task["num_nodes"], int)
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    ((_, *torchrun),) = called("bash", "-c", task["run"], SKYPILOT_NODE_RANK="1", **variables, **task["envs"])
    parsed = check_torchrun(torchrun)
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "8")
    assert (parsed.rdzv_endpoint, parsed.rdzv_conf) == ("10.0.0.1:29500", "is_host=0")


@pytest.mark.parametrize(("name", "arguments"), [("prepare", ["text/", "DATA", "vocab.txt"]), ("pretrain", ["DATA", "RUN"])])
def test_ray_jobs(called: Any, name: str, arguments: list[str]) -> None:
    ((program, *line),) = called("bash", CLUSTER / "ray" / f"{name}.sh", "http://head:8265", *arguments)
    assert (program, line[:2]) == ("ray", ["job", "submit"])
    split = line.index("--")
    submit = pytest.importorskip("ray.dashboard.modules.job.cli").submit
    options = submit.make_context("submit", line[2:]).params
    assert list(options["entrypoint"]) == line[split + 1 :]
    parameters = check_discern(line[split + 2 :])
    if name == "prepare":
        assert parameters["engine"] == "ray"
    else:
        assert parameters["nproc"] == options["entrypoint_num_gpus"] == 8
        json.loads(options["runtime_env_json"])
