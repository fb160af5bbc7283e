"""Names of the folders that a page shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def short_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, after as many parents as are needed to tell it from the others: "small/rtd", "large/rtd"."""
    found = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = []
    for own in found:
        length = 1
        while length < len(own) and any(other[-length:] == own[-length:] for other in found if other != own):
            length += 1
        names.append(Path(*own[-length:]).as_posix())
    return names
