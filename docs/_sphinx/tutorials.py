"""The recorded output of a tutorial, pasted below its commands."""

from __future__ import annotations

import json
import re
from typing import Any

from docs.tutorials.run import RECORDED

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", flags=re.S | re.M)
_FIRST, _LAST = 24, 12
NOT_RUN = "**Not run yet.** The commands are checked, but no machine of this kind has run them, so this page shows no figures.\n"
NOT_RUN_CHINESE = "**尚未实际运行。** 命令都经过检查，但还没有完整运行过，因此本页不给出任何数字。\n"


def recorded(name: str) -> dict[str, Any] | None:
    """The record of a tutorial; None if it was not run."""
    path = RECORDED / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def with_output(page: str, name: str) -> str:
    """A page with the output of each block of commands below it, or a notice that it was not run."""
    record = recorded(name)
    title, _, body = page.partition("\n")
    if record is None:
        notice = NOT_RUN_CHINESE if re.search(r"[\u4e00-\u9fff]", title) else NOT_RUN
        return f"{title}\n\n```{{note}}\n{notice}```\n{body}"
    blocks = iter(record["blocks"])

    def pasted(found: re.Match[str]) -> str:
        block = next(blocks, None)
        if block is None or block["commands"] != found[1]:
            raise ValueError(f"{name}: the page and its record differ; run: python docs/tutorials/run.py {name}")
        shown = _shown(block["output"])
        output = f"\n\n```{{code-block}} text\n:class: output\n{shown}\n```\n" if shown else "\n"
        return f"{found[0]}{output}\n*{_took(block['seconds'])}*\n"

    # Times of a machine with other work are no measurement of discern.
    busy = " Many other programs were running on these cores, so the times are upper limits." if record["busy"] else ""
    said = (
        f"*Run on {record['date']} in {_took(record['seconds'])}: {record['machine']}; discern {record['discern']}, "
        f"PyTorch {record['torch']}, Python {record['python']}.{busy}*\n"
    )
    return f"{title}\n\n{said}\n{_BLOCK.sub(pasted, body)}"


def _took(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def _shown(output: str) -> str:
    """The output, with the middle left out if it is long."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    if len(lines) > _FIRST + _LAST:
        lines = [*lines[:_FIRST], f"... ({len(lines) - _FIRST - _LAST} lines)", *lines[-_LAST:]]
    return "\n".join(lines)
