"""FedCAC: "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously Aggressive
Collaboration" (Wu, Liu, Niu, Zhu, Tang; ICCV 2023).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo


def pack_bits(mask: Tensor) -> Tensor:
    """bool [n] → uint8 [ceil(n / 8)], the first in the lowest bit."""
    padded = torch.zeros(-(-len(mask) // 8) * 8, dtype=torch.int32, device=mask.device)
    padded[: len(mask)] = mask
    return (padded.view(-1, 8) << torch.arange(8, device=mask.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The inverse, for rows: uint8 [m, ceil(n / 8)] → bool [m, n]."""
    bits = packed[..., None].to(torch.int32) >> torch.arange(8, device=packed.device) & 1
    return bits.flatten(1)[:, :n].bool()


@register
@dataclass(kw_only=True)
class FedCAC(Strategy):
    """FedCAC ("Bold but Cautious", Algorithm 1): parameters that matter to a client's own data are shared with few.

    Sensitivity of a parameter after local training: Ω = |(θ^{t} − θ^{t−1}) θ^{t}|, θ^{t−1} the download (eq. 5). The
    `tau` most sensitive of each tensor are critical, mask M_i (eq. 6). Overlap of two clients:
    O_ij = 1 − ‖M_i − M_j‖₁ / (2n), n critical parameters each. Client i collaborates with
    C_i = {j : O_ij ≥ O_avg + t/β (O_max − O_avg)}, average and maximum over all pairs i ≠ j, so that C_i shrinks as the
    round t nears β. Critical parameters become the plain average over C_i ∪ {i}, all others the average over everybody.

    tau: the fraction that is critical. beta: β in rounds; after it nobody collaborates on critical parameters. The text
    speaks of layers, which are taken as tensors here; ⌊tau · n⌋ are marked, ties by the lower index. The average over
    everybody is by n_k.

    Up: the model and M_i, a bit for each parameter. Down: one model, which the server puts together, for it knows M_i.
    Batch-norm (not mentioned): the learned part is treated as all parameters, statistics are averaged over everybody.
    A client that missed the last round gets the average over everybody.
    """

    tau: float = 0.5
    beta: int = 100

    name: ClassVar[str] = "fedcac"
    paper: ClassVar[str] = "Wu et al., ICCV 2023"
    newcomers_upload: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        self._require("tau", 0 <= self.tau <= 1, "must be between 0 and 1")
        self._require("beta", self.beta >= 1, "must be at least 1")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._numels = {name: info.numel for name, info in infos.items() if self.shares(info) and not info.buffer}

    def extra(self, state: State) -> State:
        first = next(iter(state.values()))
        return {
            f"critical/{name}": torch.zeros(len(first), -(-n // 8), dtype=torch.uint8, device=first.device)
            for name, n in self._numels.items()
        }

    def key(self, state: State, encoder: Any) -> State:
        return {f"critical/{name}": state[f"critical/{name}"] for name in self._numels}

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs), Phase(0, update=self._mark)]

    def _mark(self, net: Any, x: Tensor, y: Tensor) -> State:
        marks = {}
        for name, n in self._numels.items():
            now = net.params[name]
            sensitivity = ((now - net.start[name]) * now).abs().flatten()
            mask = torch.zeros(n, dtype=torch.bool, device=now.device)
            mask[sensitivity.sort(descending=True, stable=True).indices[: int(self.tau * n)]] = True
            marks[f"critical/{name}"] = pack_bits(mask)
        return marks

    def _partners(self, masks: Tensor, round: int) -> Tensor:
        """masks bool [m, n] → bool [m, m]: i averages its critical parameters with j."""
        m = len(masks)
        own = torch.eye(m, dtype=torch.bool)
        count = int(masks[0].sum())
        if m < 2 or count == 0 or round > self.beta:
            return own
        bits = masks.to(torch.float32)
        # ‖M_i − M_j‖₁ = 2 (count − common), so that the overlap is the common share.
        overlap = ((bits @ bits.T).double() / count).cpu()
        pairs = overlap[~own]
        threshold = pairs.mean() + round / self.beta * (pairs.max() - pairs.mean())
        return own | (overlap >= threshold)

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        everybody = super().mix(uploads, names, guests)
        if guests is not None:
            return everybody
        here = slice(uploads.here.start, uploads.here.stop)
        masks = {name: unpack_bits(uploads.state[f"critical/{name}"], n) for name, n in self._numels.items()}
        if not masks:
            return everybody
        partners = self._partners(torch.cat(list(masks.values()), dim=1), uploads.round).double()
        matrix = partners / partners.sum(1, keepdim=True)
        critical = uploads.mix(matrix[here], list(masks))
        return everybody | {
            name: torch.where(mask[here].view(everybody[name].shape), critical[name], everybody[name])
            for name, mask in masks.items()
        }
