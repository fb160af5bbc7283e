"""Generated tables of the reference: metrics, versions of file formats, error classes."""

from __future__ import annotations

from docs._sphinx.metrics import METRICS
from docs._sphinx.pages import code, prose, table

from discern import errors
from discern.compare import results as comparison
from discern.data.dataset import manifest
from discern.inference import detection
from discern.model_files import finetuned
from discern.model_files import run as run_record
from discern.tasks import tasks
from discern.training import checkpoint

_CONTENTS = (
    ("data set", "`DATA/manifest.json`", "format_version", manifest.FORMAT_VERSION),
    ("run", "`RUN/run.json`", "format", run_record.FORMAT),
    ("checkpoint", "`RUN/checkpoints/step-N/state.json`", "format", checkpoint.FORMAT),
    ("fine-tuned model", "`OUT/finetuned.json`", "format", finetuned.FORMAT),
    ("export of a fine-tuned model", "`config.json`, under `discern`", "format", finetuned.FORMAT),
    ("calibrated threshold", "`detection.json`", "format", detection.CALIBRATION_FORMAT),
    ("comparison", "`OUT/comparison.json` and its results", "format", comparison.FORMAT),
)


def parts() -> dict[str, str]:
    """Every table by name."""
    made = {f"metrics-{where}": _metrics(where) for where in ("log", "evaluation", "task")}
    return made | {"formats": _formats(), "errors": _errors(), "tasks": _tasks()}


def _metrics(where: str) -> str:
    chosen = [each for each in METRICS if each.where == where]
    rows = [(code(each.name), prose(each.meaning), each.unit, each.range, prose(each.usual)) for each in chosen]
    return table(("metric", "what it is", "unit", "range", "usual"), rows)


def _formats() -> str:
    rows = [(what, place, code(key), str(version)) for what, place, key, version in _CONTENTS]
    return table(("what", "file", "key", "version"), rows)


def _errors() -> str:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.DiscernError)]
    said = [(each, (each.__doc__ or "").split("\n")[0]) for each in kinds]
    rows = [(code(f"discern.errors.{each.__name__}"), prose(meaning), str(each.exit_code)) for each, meaning in said]
    return table(("class", "meaning", "exit code"), rows)


def _tasks() -> str:
    rows = []
    for name in tasks.names():
        found = tasks.load(name)
        rows.append((code(name), found.family.family, ", ".join(map(code, found.metrics))))
    return table(("task", "family", "metrics, the headline first"), rows)
