"""Attention whose packed input projections are made from factors."""

from torch import Tensor, nn

from fastfact.nn.layers import FactorizedLinear

PROJECTIONS = {
    "in_proj_weight": "in_proj",
    "q_proj_weight": "q_proj",
    "k_proj_weight": "k_proj",
    "v_proj_weight": "v_proj",
}
"""The weights of `nn.MultiheadAttention` that belong to no module of their own → the layers that stand for them."""


class FactorizedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of which some input projections are factorized layers, its submodules: `in_proj` for the
    packed weight [3 e, e] of queries, keys and values, or `q_proj`, `k_proj`, `v_proj` where these have other widths.

    Made by `ff.factorize`; the bias stays the module's own.
    """

    @classmethod
    def from_dense(cls, attention: nn.MultiheadAttention, layers: dict[str, FactorizedLinear]):
        """`attention` with the weights named in `layers` replaced; everything else is shared with it."""
        new = cls.__new__(cls)
        new.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in attention.__dict__.items()}
        for name, layer in layers.items():
            del new._parameters[name]
            setattr(new, PROJECTIONS[name], layer)
        return new

    def to_dense(self) -> nn.MultiheadAttention:
        """The `nn.MultiheadAttention` of the same function."""
        dense = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        dense.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in self.__dict__.items()}
        for name, projection in PROJECTIONS.items():
            if projection in dense._modules:
                layer = dense._modules.pop(projection)
                dense.register_parameter(name, layer.to_dense().weight)
        return dense

    def _projection(self, name: str) -> Tensor | None:
        layer = self._modules.get(PROJECTIONS[name])
        return self._parameters.get(name) if layer is None else layer._weight_for(False)

    @property
    def in_proj_weight(self) -> Tensor | None:
        return self._projection("in_proj_weight")

    @property
    def q_proj_weight(self) -> Tensor | None:
        return self._projection("q_proj_weight")

    @property
    def k_proj_weight(self) -> Tensor | None:
        return self._projection("k_proj_weight")

    @property
    def v_proj_weight(self) -> Tensor | None:
        return self._projection("v_proj_weight")
