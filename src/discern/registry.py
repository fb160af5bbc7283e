"""Registries: names that are resolved to classes when they are first needed, so that naming an objective imports no torch."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from discern.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to `"module:attribute"`; other packages add theirs through an entry point group.

    The attribute is the registered object, or a dictionary that holds it under its name.

    Args:
        kind: what is registered, for error messages ("objective").
        entry_point_group: the entry point group in which other packages register ("discern.objectives").
    """

    def __init__(self, kind: str, entry_point_group: str | None = None) -> None:
        self.kind = kind
        self._group = entry_point_group
        self._targets: dict[str, str] = {}
        self._entry_points_read = False

    def register(self, name: str, target: str) -> None:
        """Register a name.

        Raises:
            ConfigError: the name is taken by another target, or the target is not `module:attribute`.
        """
        if target.count(":") != 1:
            raise ConfigError(f"{self.kind} '{name}': target '{target}' is not of the form 'module:attribute'")
        if self._targets.get(name, target) != target:
            raise ConfigError(
                f"{self.kind} '{name}' is registered twice: {self._targets[name]} and {target}",
                hint="give one of them another name",
            )
        self._targets[name] = target

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        self._read_entry_points()
        return sorted(self._targets)

    def load(self, name: str) -> T:
        """Import and return the object that is registered under a name.

        Raises:
            ConfigError: the name is not registered; the hint suggests the nearest one.
        """
        self._read_entry_points()
        if name not in self._targets:
            raise ConfigError(f"unknown {self.kind} '{name}'", hint=did_you_mean(name, self._targets))
        module, attribute = self._targets[name].split(":")
        loaded: Any = getattr(import_module(module), attribute)
        return loaded[name] if isinstance(loaded, dict) else loaded  # type: ignore[no-any-return]

    def _read_entry_points(self) -> None:
        if self._entry_points_read or self._group is None:
            return
        self._entry_points_read = True
        for entry in entry_points(group=self._group):
            self.register(entry.name, entry.value)
