"""FedRoD: "On Bridging Generic and Personalized Federated Learning for Image Classification" (Chen, Chao; ICLR
2022).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo, classifier_of


class TwoHeads(nn.Linear):
    """A generic classifier (weight, bias) and beside it a personal one (personal_weight, personal_bias), from zero.

    In eval mode the sum of both logits [n, c]. In training generic and summed logits [n, 2c]; the second half lets no
    gradient into the features or the generic head.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        self.load_state_dict(linear.state_dict())
        self.personal_weight = nn.Parameter(torch.zeros_like(self.weight))
        self.register_parameter(
            "personal_bias", None if linear.bias is None else nn.Parameter(torch.zeros_like(linear.bias))
        )

    def forward(self, x: Tensor) -> Tensor:
        generic = super().forward(x)
        if not self.training:
            return generic + F.linear(x, self.personal_weight, self.personal_bias)
        personal = F.linear(x.detach(), self.personal_weight, self.personal_bias)
        return torch.cat([generic, generic.detach() + personal], dim=-1)


@register
@dataclass(kw_only=True)
class FedRoD(Strategy):
    """FedRoD (§4, linear personalized head): features and a generic head learn a class-balanced risk and are averaged
    as in FedAvg; a personal head on the same features learns the client's own empirical risk and stays.

    Balanced risk: the balanced softmax, cross-entropy of z_c + log n_c with the client's class counts n_c. Personal
    risk: cross-entropy of generic plus personal logits, whose gradient goes into the personal head only. Both are
    minimised together. The personal model, which is evaluated, is the sum. The personal head starts from zero, the text
    leaves it open; the form with a hypernetwork is not here.

    The classifier must be an `nn.Linear`; one that is tied to an embedding has a weight of its own from then on. The
    personal head is never shared; with `share_classifier=False` the generic one stays too, and only the features are
    averaged. Batch-norm (not mentioned) is shared as in FedAvg.
    """

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    classifies: ClassVar[bool] = True
    trains_head: ClassVar[bool] = False

    def prepare(self, model: nn.Module) -> nn.Module:
        path = classifier_of(model, self.classifier)
        head = None if path is None else model.get_submodule(path)
        if path is None or head is None or type(head) is not nn.Linear:
            raise ValueError(f"{self.name}: the classifier ({path}) is {type(head).__name__}, must be an nn.Linear")
        if not any(param.requires_grad for param in head.parameters()):
            raise ValueError(f"{self.name}: the classifier ({path}) is frozen, must train")
        if head is model:
            return TwoHeads(head)
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, TwoHeads(head))
        return model

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._classes = next(info.shape[0] for info in infos.values() if info.role == "personal_weight")

    def shares(self, info: TensorInfo) -> bool:
        return info.role not in ("personal_weight", "personal_bias") and self.allowed(info)

    def extra(self, state: State) -> State:
        first = next(tensor for tensor in state.values() if tensor.is_floating_point())
        return {"counts": first.new_ones(len(first), self._classes)}

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, update=self._count, loss=self._loss)]

    def _count(self, net: Any, x: Tensor, y: Tensor) -> State:
        return {"counts": torch.bincount(y, minlength=self._classes).to(net.start["counts"])}

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        generic, summed = net(x).chunk(2, dim=-1)
        return F.cross_entropy(generic + net.start["counts"].log(), y) + F.cross_entropy(summed, y)
