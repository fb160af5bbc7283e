"""Kill processes of a training run at random moments, and check that nothing is lost.

    python benchmarks/kills.py --out FOLDER [--kills 50] [--seed 0] [--launchers torchrun nproc] [--parallel ddp]

A tiny network is trained twice by two processes, once undisturbed. Of the other run, a random rank, or under torchrun sometimes a
whole node (an agent with its rank), is killed by SIGKILL at random moments between two starts of the processes: while they
start, train, evaluate and write checkpoints. Under torchrun there are two agents on this machine, and they start the ranks again
by themselves (`--max-restarts`); this script only replaces an agent that it has killed. Under `--nproc` it repeats the command.

After each kill it checks that the others end within 60 seconds, that the newest checkpoint is whole, and that a message named
the rank, if the others had met it; at the end, that the final weights equal those of the undisturbed run bit for bit. Writes
FOLDER/kills.jsonl, a line per kill, and prints a summary as JSON. Exit code 1 if something was lost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from discern.errors import DiscernError
from discern.training.checkpoint import check_files, found

LONGEST = 60.0  # seconds until the others have to have ended
STARTED = re.compile(r"^pre-training: [\d,]+ steps$", re.MULTILINE)  # rank 0 says so when all have met
SETTINGS: dict[str, object] = {
    "train.sequences_per_step": 4,
    "train.checkpoint_every_steps": 5,
    "train.evaluate_every_steps": 40,
    "train.evaluate_sequences": 8,
    "model.num_layers": 1,
}


@dataclass(frozen=True)
class Kill:
    """One kill and what became of it.

    Attributes:
        what: 'rank 1', or 'node 1' for an agent with its rank.
        after: seconds after the ranks were started.
        step: step of the newest checkpoint at that moment; 0 if there was none.
        ended: seconds until the other rank had ended.
        named: whether a message named the process; None if the kill came before the ranks had met.
        resumed: step at which the run continued; 0: from the beginning.
    """

    launcher: str
    what: str
    after: float
    step: int
    ended: float
    named: bool | None
    resumed: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50, help="kills per launcher")
    parser.add_argument("--steps", type=int, default=0, help="steps of the run (default: 60 per kill)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launchers", nargs="+", choices=["torchrun", "nproc"], default=["torchrun", "nproc"])
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    options = parser.parse_args()
    SETTINGS["train.parallel"] = options.parallel
    summary = run(options.out, options.kills, options.seed, options.launchers, options.steps or 60 * options.kills)
    print(json.dumps(summary))
    return 0 if all(each["nothing_lost"] for each in summary.values()) else 1


def run(out: Path, kills: int, seed: int, launchers: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Kill and compare under each launcher. Return the summaries."""
    out.mkdir(parents=True, exist_ok=True)
    data = make_data(out)
    own = pretrain(data, out / "undisturbed", steps)
    with (out / "undisturbed.log").open("w") as log:
        subprocess.run([*own, "--nproc", "2"], check=True, env=environment(), stdout=log, stderr=log)
    expected = digest(out / "undisturbed", steps)
    summary = {}
    for launcher in launchers:
        target = out / launcher
        shutil.rmtree(target, ignore_errors=True)
        rng = random.Random(f"{seed} {launcher}")
        disturbed = (Torchrun if launcher == "torchrun" else Nproc)(pretrain(data, target, steps), out)
        done = [kill_once(disturbed, target, rng, out / "kills.jsonl") for _ in range(kills)]
        code = disturbed.finish()
        whole = code == 0 and digest(target, steps) == expected
        inside = [each for each in done if each.named is not None]
        summary[launcher] = {
            "kills": len(done),
            "kills_while_connected": len(inside),
            "named": sum(each.named is True for each in inside),
            "seconds_to_end_median": sorted(each.ended for each in done)[len(done) // 2],
            "seconds_to_end_max": max(each.ended for each in done),
            "final_weights_equal": whole,
            "nothing_lost": whole and max(each.ended for each in done) < LONGEST and all(each.named for each in inside),
        }
    return summary


class Torchrun:
    """Two agents of torchrun on this machine, each with one rank."""

    name = "torchrun"

    def __init__(self, command: list[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._port = free_port()
        self._agents: list[subprocess.Popen[bytes]] = []
        for node in range(2):
            self._agents.append(self._start(node))

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        endpoint = f"127.0.0.1:{self._port}"
        agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1000", "--rdzv-id=kills"]
        # The first agent keeps the store in which the agents meet, also after the second was replaced.
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={int(node == 0)}"]
        with self.log(node).open("ab") as log:
            line = [sys.executable, *agent, *meeting, *self._command[1:]]
            return subprocess.Popen(line, env=environment(), stdout=log, stderr=log, start_new_session=True)

    def log(self, node: int) -> Path:
        """Output of an agent and its ranks."""
        return self._folder / f"torchrun-{node}.log"

    def said(self) -> str:
        """All output so far."""
        return "".join(self.log(node).read_text(errors="replace") for node in range(2) if self.log(node).exists())

    def ranks(self) -> list[int]:
        """Process ids of the ranks, by node."""
        return [pid for agent in self._agents for pid in children(agent.pid)]

    def kill(self, rng: random.Random, ranks: list[int]) -> tuple[str, list[int]]:
        """Kill a rank or the second node. Return what was killed, and the process ids of the ranks that have to end."""
        victim = rng.randrange(2)
        whole = victim == 1 and rng.random() < 0.3
        if whole:
            self._agents[1].kill()
        os.kill(ranks[victim], signal.SIGKILL)
        if whole:
            self._agents[1].wait()
            self._agents[1] = self._start(1)
        return f"{'node' if whole else 'rank'} {victim}", [ranks[1 - victim]]

    def is_over(self) -> bool:
        """Whether the agents have ended."""
        return all(agent.poll() is not None for agent in self._agents)

    def go_on(self) -> None:
        """The agents start the ranks again by themselves."""

    def finish(self) -> int:
        """Wait for the end of the run, and return its exit code."""
        return max(agent.wait(1200) for agent in self._agents)


class Nproc:
    """The launcher of `--nproc 2`, which ends with its processes and is started again."""

    name = "nproc"

    def __init__(self, command: list[str], folder: Path) -> None:
        self._command, self._log = command, folder / "nproc.log"
        self.go_on()

    def go_on(self) -> None:
        """Start the same command again."""
        with self._log.open("ab") as log:
            line = [*self._command, "--nproc", "2"]
            self._process = subprocess.Popen(line, env=environment(), stdout=log, stderr=log, start_new_session=True)

    def said(self) -> str:
        """All output so far."""
        return self._log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        return children(self._process.pid)

    def kill(self, rng: random.Random, ranks: list[int]) -> tuple[str, list[int]]:
        """Kill a rank. Return what was killed, and the process ids of the processes that have to end."""
        victim = rng.randrange(2)
        os.kill(ranks[victim], signal.SIGKILL)
        return f"rank {victim}", [ranks[1 - victim], self._process.pid]

    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    def finish(self) -> int:
        """Wait for the end of the run, and return its exit code."""
        return self._process.wait(1200)


def kill_once(run: Torchrun | Nproc, target: Path, rng: random.Random, log: Path) -> Kill:
    """Wait for the ranks, kill at a random moment, and wait until the others have ended and new ranks have started."""
    ranks = wait_for(lambda: len(run.ranks()) == 2 and run.ranks(), "two ranks", run)
    begin, starts = time.monotonic(), starts_of(run)
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0, 8))
    else:
        wait_for(lambda: starts_of(run) > starts or run.ranks() != ranks, "training to begin", run)
        time.sleep(rng.uniform(0, 4))
    if run.ranks() != ranks:  # after an agent was replaced, the other one may start its rank twice
        return kill_once(run, target, rng, log)
    after, step = time.monotonic() - begin, newest(target)
    met = starts_of(run) > starts
    what, others = run.kill(rng, ranks)
    begin = time.monotonic()
    wait_for(lambda: not any(is_running(pid) for pid in others), "the others to end", run)
    ended = time.monotonic() - begin
    check_newest(target)
    if run.is_over():
        run.go_on()
    wait_for(lambda: len(run.ranks()) == 2 and not {*run.ranks()} & {*ranks}, "new ranks", run)
    killed = ranks[int(what[-1])]
    named = bool(re.search(rf"(rank|process) {what[-1]}\b.*\(pid {killed}\b", run.said())) if met else None
    kill = Kill(run.name, what, round(after, 2), step, round(ended, 1), named, newest(target))
    with log.open("a") as file:
        file.write(json.dumps(asdict(kill)) + "\n")
    return kill


def starts_of(run: Torchrun | Nproc) -> int:
    """How often training has begun."""
    return len(STARTED.findall(run.said()))


def check_newest(target: Path) -> None:
    """Check that the newest checkpoint is whole.

    Raises:
        SystemExit: it is not.
    """
    for path in found(target / "checkpoints")[:1]:
        try:
            check_files(path)
        except DiscernError as problem:
            raise SystemExit(f"lost: {problem}") from problem


def newest(target: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in found(target / "checkpoints")), default=0)


def wait_for(condition: Callable[[], Any], what: str, run: Torchrun | Nproc) -> Any:
    """Wait until a condition holds, and return its value.

    Raises:
        SystemExit: it did not hold within two minutes.
    """
    begin = time.monotonic()
    while not (value := condition()):
        if time.monotonic() - begin > 2 * LONGEST:
            raise SystemExit(f"waited {2 * LONGEST:.0f} s for {what}; the run has said:\n{run.said()[-3000:]}")
        time.sleep(0.05)
    return value


def children(pid: int) -> list[int]:
    """Running child processes, oldest first."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(each) for each in found if is_running(int(each))]


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def digest(target: Path, steps: int) -> str:
    """Checksum of the final weights and moments."""
    total = hashlib.sha256()
    for path in sorted((target / "checkpoints" / f"step-{steps:08d}").glob("*.safetensors")):
        # The files of divided checkpoints hold equal tensors in any order.
        for name, tensor in sorted(load_file(path).items()):
            total.update(f"{path.name} {name} {tensor.shape}".encode() + tensor.tobytes())
    return total.hexdigest()


def environment() -> dict[str, str]:
    """One thread per process, with which sums are the same in all runs; and a torchrun that can replace nodes."""
    # By default torchrun 2.13 keeps the address of its first store, and a new agent waits for it in vain.
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def pretrain(data: Path, out: Path, steps: int) -> list[str]:
    """The command, without a launcher."""
    settings = [part for key, value in {**SETTINGS, "train.max_steps": steps}.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "discern", "pretrain", "--preset", "tiny", "--data", str(data), "--out", str(out), *settings]


def make_data(out: Path) -> Path:
    """A data set of random words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(300)]
    documents = ("\n".join(" ".join(rng.choices(words, k=12)) for _ in range(6)) for _ in range(600))
    (out / "text.txt").write_text("\n\n".join(documents))
    tokenizer = ["--train-tokenizer", "wordpiece", "--vocab-size", "300", "--heldout", "0.05", "--json"]
    line = [sys.executable, "-m", "discern", "prepare", str(out / "text.txt"), "--out", str(out / "data"), *tokenizer]
    subprocess.run(line, check=True, env=environment(), capture_output=True)
    return out / "data"


if __name__ == "__main__":
    sys.exit(main())
