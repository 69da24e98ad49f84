"""Launching a kernel in the first of several tiles that the device has room for."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from triton.runtime.errors import OutOfResources, PTXASError

_too_large: set[tuple] = set()


class Tile(NamedTuple):
    """A program's part of a product: rows × columns of the result, `depth` at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 3

    @property
    def settings(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}

    def and_smaller(self) -> list["Tile"]:
        """This tile and smaller ones: first with two stages in flight, last the least one that `tl.dot` takes."""
        tile, tiles = self, [self]
        while tile := tile._half():
            tiles.append(tile)
        return tiles

    def _half(self) -> "Tile | None":
        if self.stages > 2:
            return self._replace(stages=2)
        if max(self.rows, self.columns) > 64:
            rows, columns = min(self.rows, 64), min(self.columns, 64)
            return self._replace(rows=rows, columns=columns, warps=4)
        if self.depth > 32:
            return self._replace(depth=32)
        if self.stages > 1:
            return self._replace(stages=1)
        if max(self.rows, self.columns, self.depth) > 16:
            return Tile(16, 16, 16, self.warps, 1) if max(self.rows, self.columns) <= 32 else Tile(32, 32, 16, 4, 1)
        return None


def first_that_fits(tiles: Iterable[Tile], device: torch.device, key: tuple, launch: Callable[[Tile], None]) -> bool:
    """Call `launch` with the first of `tiles` whose compiled kernel fits the device; False where none does.

    What a kernel needs is known when it is compiled. key: what decides it but the tile (kernel, constants, types); one
    that was too large with the same key is not tried again.
    """
    for tile in tiles:
        which = (device, key, tile)
        if which in _too_large:
            continue
        try:
            launch(tile)
        except (OutOfResources, PTXASError):
            _too_large.add(which)
        else:
            return True
    return False
