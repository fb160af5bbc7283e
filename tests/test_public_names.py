import subprocess
import sys
from importlib import import_module

import pytest

import discern


@pytest.mark.parametrize("name", discern.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(discern, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="pretrian"):
        discern.pretrian  # noqa: B018


def test_importing_discern_imports_no_torch() -> None:
    program = "import sys, discern, discern.config.resolve, discern.registry, discern.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_a_room_does_not_hide_the_function_of_its_name(name: str) -> None:
    room = import_module(f"discern.{name}.run")
    assert room.__name__ == f"discern.{name}.run"
    assert callable(getattr(discern, name)), "importing the room has bound the module over the public function"
