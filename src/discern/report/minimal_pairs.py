"""What `discern evaluate --suite blimp` found, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from discern.report.page import Table

_GROUPS = {"by_phenomenon": "phenomenon", "by_paradigm": "paradigm"}
_NEEDED = {"accuracy", "pairs", "ties", "step", *_GROUPS}


def blimp_tables(found: Mapping[str, Any]) -> list[Table]:
    """Accuracies overall and by phenomenon, then by paradigm, a column a scorer.

    Args:
        found: figures by the name of the scorer; what is none of them is left out.
    """
    by_scorer = {name: each for name, each in found.items() if isinstance(each, Mapping) and each.keys() >= _NEEDED}
    if not by_scorer:
        return []
    note = " ".join(_origin(name, each) for name, each in by_scorer.items())
    tables = []
    for key, what in _GROUPS.items():
        groups = sorted({group for each in by_scorer.values() for group in each[key]})
        rows: list[list[str | float]] = [
            [group.replace("_", " "), *(each[key].get(group, "") for each in by_scorer.values())] for group in groups
        ]
        if key == "by_phenomenon":
            rows.insert(0, ["overall", *(each["accuracy"] for each in by_scorer.values())])
        tables.append(Table(f"BLiMP by {what}: share of pairs preferred rightly", [what, *by_scorer], rows, note))
    return tables


def _origin(scorer: str, found: Mapping[str, Any]) -> str:
    limit = found.get("limit")
    which = f"the first {limit:,} of each paradigm" if isinstance(limit, int) else "all"
    step = "" if found["step"] is None else f" at step {found['step']:,}"
    return f"{scorer}{step}: {found['pairs']:,} pairs ({which}); ties, counted as one half: {found['ties']:,}."
