"""The reference of the Python API: the public names of `discern`, documented by Sphinx from their docstrings."""

from __future__ import annotations

import inspect

from docs._sphinx.pages import block

import discern

# Added by scikit-learn; their docstrings link to pages of scikit-learn.
_OF_SKLEARN = "set_fit_request, set_score_request, set_predict_request, get_metadata_routing"
_ESTIMATORS = {"TextClassifier", "TextRegressor", "TokenClassifier"}
_WITH_MEMBERS = _ESTIMATORS | {"Model", "Detection", "FilledToken", "Score", "Objective"}


def parts() -> dict[str, str]:
    """Directives for the functions and the classes; the errors have a page of their own."""
    public = [name for name in discern.__all__ if not name.startswith("_")]
    objects = {name: getattr(discern, name) for name in public}
    errors = {name for name, value in objects.items() if inspect.isclass(value) and issubclass(value, Exception)}
    functions = [name for name, value in objects.items() if not inspect.isclass(value)]
    classes = [name for name in public if name not in errors and inspect.isclass(objects[name])]
    return {
        "python-functions": _directives("autofunction", functions),
        "python-classes": _directives("autoclass", classes),
    }


def _directives(kind: str, names: list[str]) -> str:
    lines = []
    for name in names:
        lines.append(f".. {kind}:: discern.{name}")
        lines += ["   :members:", f"   :exclude-members: {_OF_SKLEARN}"] if name in _WITH_MEMBERS else []
        # Those of the shared base, but not those of scikit-learn.
        lines += ["   :inherited-members: BaseEstimator, ClassifierMixin, RegressorMixin"] if name in _ESTIMATORS else []
        lines.append("")
    return block("\n".join(lines), "{eval-rst}")
