"""Rules of the layout that the import linter cannot express."""

import ast
import tomllib
from pathlib import Path

import discern

SOURCE = Path(discern.__file__).parent


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_model_and_corruption_know_nothing_of_ranks_and_files() -> None:
    for room in ("models", "corruption"):
        for path in (SOURCE / room).rglob("*.py"):
            # How a model is stored names paths, in messages.
            allowed = {"pathlib", "pathlib.Path"} if path.name in ("architecture.py", "huggingface.py") else set()
            found = {name for name in imports(path) if name.startswith(("torch.distributed", "pathlib", "io", "os"))}
            assert found <= allowed, path


def test_transformers_and_datasets_are_imported_where_they_read() -> None:
    for path in SOURCE.rglob("*.py"):
        packages = {name.split(".")[0] for name in imports(path)}
        assert "transformers" not in packages or path.match("model_files/teacher.py"), path
        assert "datasets" not in packages or path.parent.parts[-2:] == ("data", "sources"), path


def test_nothing_prints_but_the_console() -> None:
    for path in SOURCE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], path


def test_only_the_module_of_devices_names_a_kind_of_gpu() -> None:
    for path in SOURCE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        named = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)} | imports(path)
        assert path.match("training/device.py") or not named & {"torch.cuda", "torch.mps"}, path


def test_shape_types_are_checked_while_tests_run() -> None:
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    checked = tuple(settings["addopts"].split("--jaxtyping-packages=")[1].split()[0].split(",")[:-1])
    for path in SOURCE.rglob("*.py"):
        if any(name.startswith("jaxtyping") for name in imports(path)):
            module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            assert any(f"{module}.".startswith(f"{package}.") for package in checked), f"{module}: add it to --jaxtyping-packages"
