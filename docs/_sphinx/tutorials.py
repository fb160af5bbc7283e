"""The recorded output of a tutorial, pasted below its commands."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Language:
    """What the build says on a page in a language."""

    not_run: str
    run: str
    busy: str
    seconds: str
    minutes: str
    left_out: str

    def took(self, seconds: float) -> str:
        return self.seconds.format(seconds) if seconds < 120 else self.minutes.format(seconds / 60)


_ENGLISH = _Language(
    not_run=NOT_RUN,
    run="Run on {date} in {took}: {machine}; discern {discern}, PyTorch {torch}, Python {python}.",
    busy=" Many other programs were running on these cores, so the times are upper limits.",
    seconds="{:.0f} s",
    minutes="{:.1f} minutes",
    left_out="... ({} lines)",
)
_CHINESE = _Language(
    not_run=NOT_RUN_CHINESE,
    run="{date} 实际运行，共用时 {took}：{machine}；discern {discern}，PyTorch {torch}，Python {python}。",
    busy="运行时这些核心上还有许多其他程序，所以这里的时间只是上限。",
    seconds="{:.0f} 秒",
    minutes="{:.1f} 分钟",
    left_out="……（省略 {} 行）",
)


def with_output(page: str, name: str) -> str:
    """A page with the output of each block of commands below it, or a notice that it was not run."""
    record = recorded(name)
    title, _, body = page.partition("\n")
    said = _CHINESE if re.search(r"[\u4e00-\u9fff]", title) else _ENGLISH
    if record is None:
        return f"{title}\n\n```{{note}}\n{said.not_run}```\n{body}"
    blocks = iter(record["blocks"])

    def pasted(found: re.Match[str]) -> str:
        block = next(blocks, None)
        if block is None or block["commands"] != found[1]:
            raise ValueError(f"{name}: the page and its record differ; run: python docs/tutorials/run.py {name}")
        shown = _shown(block["output"], said)
        output = f"\n\n```{{code-block}} text\n:class: output\n{shown}\n```\n" if shown else "\n"
        return f"{found[0]}{output}\n*{said.took(block['seconds'])}*\n"

    # Times of a machine with other work are no measurement of discern.
    run = said.run.format(**record | {"took": said.took(record["seconds"])}) + (said.busy if record["busy"] else "")
    return f"{title}\n\n*{run}*\n\n{_BLOCK.sub(pasted, body)}"


def _shown(output: str, said: _Language) -> str:
    """The output, with the middle left out if it is long."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    if len(lines) > _FIRST + _LAST:
        lines = [*lines[:_FIRST], said.left_out.format(len(lines) - _FIRST - _LAST), *lines[-_LAST:]]
    return "\n".join(lines)
