"""Run the commands of a tutorial and record what they print.

    python docs/tutorials/run.py laptop

runs every block marked `sh` of `docs/tutorials/laptop.md`, one after another, in an empty folder, and writes the commands,
their output, their time and the kind of machine to `docs/tutorials/recorded/laptop.json`. The site shows each output below
its block. A tutorial without a record shows none, and says that it was not run.

A tutorial that starts from files of the reader gets them by `--with`, under the names that its page gives them:

    python docs/tutorials/run.py two-objectives --with my-texts=wikipedia --with tasks=data
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", flags=re.S | re.M)
_VERSIONS = "import discern, torch; print(discern.__version__, torch.__version__)"


def blocks(page: str) -> list[str]:
    """The blocks of commands of a page, in order."""
    return _BLOCK.findall(page)


def machine() -> str:
    """What kind of machine this is: processor, cores, memory, GPUs."""
    try:
        named = [
            line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        return f"{platform.machine()}, {os.cpu_count()} cores"
    threads = os.environ.get("OMP_NUM_THREADS")
    used = f", {threads} used" if threads else ""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    parts = [f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores{used}, {memory:.0f} GiB of memory"]
    return ", ".join([*parts, *(name for name in gpus if name)] if any(gpus) else [*parts, "no GPU"])


def run(page: str, given: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """Run the blocks of a page in a folder that has only what is given.

    Args:
        given: files and folders that the page expects, by the names it gives them.

    Raises:
        SystemExit: a block failed; its output is printed.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    versions = subprocess.run([sys.executable, "-c", _VERSIONS], capture_output=True, text=True, check=True, env=environment)
    done: list[dict[str, Any]] = []
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in (given or {}).items():
            (Path(folder) / name).symlink_to(source.resolve(strict=True))
        for commands in blocks(page):
            began = time.perf_counter()
            process = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            seconds = time.perf_counter() - began
            # Where the given files lie on this machine is nobody's business.
            output = process.stdout
            for name, source in (given or {}).items():
                output = output.replace(str(source.resolve()), name)
            loads.append(os.getloadavg()[0])
            print(f"{commands}{output}({seconds:.1f} s)\n", flush=True)
            if process.returncode:
                sys.exit(f"exit code {process.returncode}; nothing was recorded")
            done.append({"commands": commands, "output": output, "seconds": round(seconds, 1)})
    discern, torch = versions.stdout.split()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "discern": discern,
        "torch": torch,
        "busy": max(loads, default=0.0) > 2 * (os.cpu_count() or 1),
        "seconds": round(sum(block["seconds"] for block in done), 1),
        "blocks": done,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the tutorial, for example laptop")
    parser.add_argument("--with", dest="given", metavar="NAME=PATH", action="append", default=[], help="what the page expects")
    asked = parser.parse_args()
    name = asked.name
    given = {each.partition("=")[0]: Path(each.partition("=")[2]) for each in asked.given}
    record = run((HERE / f"{name}.md").read_text(encoding="utf-8"), given)
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
