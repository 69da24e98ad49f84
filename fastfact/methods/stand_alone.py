"""Stand-Alone: the lower bound of the papers' tables."""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo


@register
@dataclass(kw_only=True)
class StandAlone(Strategy):
    """Every client trains by itself (Factorized-FL §5.1, baseline 7). Nothing is uploaded, mixed or downloaded.

    The momentum starts at zero in each round, as for the other methods, so that the comparison is of what is shared.
    """

    name: ClassVar[str] = "stand-alone"
    paper: ClassVar[str] = "Factorized-FL §5.1"

    def shares(self, info: TensorInfo) -> bool:
        return False
