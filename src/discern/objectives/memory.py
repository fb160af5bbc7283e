"""What a recurrent encoder remembers of each slot, from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

_NAME = "memory.slot"


class SlotMemory:
    """The states that each slot of the global batch left behind. One slot's never reach another.

    A slot that has none begins with zeros, which are attended to: the released code does so, and a memory that comes and goes
    would be another model.

    Args:
        shape: of one slot's memory: layers, positions, width.

    Reference: Dai et al. 2019 (Transformer-XL), section 3.2; zihangdai/xlnet, train.py, `initialize_mems`.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = shape
        self._states: dict[int, Tensor] = {}
        self._loaded: dict[int, Tensor] = {}

    def read(self, slots: Int[Tensor, "B"], like: Tensor) -> Float[Tensor, "N B M D"]:
        """The memories of some slots, on the device of `like`."""
        empty = torch.zeros(self._shape)
        found = [self._states.get(slot, self._loaded.get(slot, empty)) for slot in slots.tolist()]
        return torch.stack([state.to(like.device) for state in found], 1)

    def write(self, slots: Int[Tensor, "B"], memory: Float[Tensor, "N B M D"]) -> None:
        """Replace what is remembered of some slots."""
        numbers = slots.tolist()
        if any(number in self._states for number in numbers):
            # The second step since they were loaded: what no slot of this rank has taken by now is other ranks'.
            self._loaded = {}
        for number in numbers:
            self._loaded.pop(number, None)
        self._states.update(zip(numbers, memory.detach().unbind(1), strict=True))

    def state(self) -> dict[str, Tensor]:
        """The memories of this rank's slots by name, on the CPU; before its first step, those it was given."""
        states = self._states or self._loaded
        return {f"{_NAME}{slot}": state.cpu().contiguous() for slot, state in sorted(states.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave, on all ranks that of all slots: which are whose may have changed.

        Raises:
            ValueError: a name or a shape is not that of a slot's memory.
        """
        for name, tensor in state.items():
            if not name.startswith(_NAME) or tuple(tensor.shape) != self._shape:
                raise ValueError(f"'{name}' of shape {tuple(tensor.shape)} is no memory of a slot, whose shape is {self._shape}")
        self._states = {}
        self._loaded = {int(name.removeprefix(_NAME)): tensor for name, tensor in state.items()}
