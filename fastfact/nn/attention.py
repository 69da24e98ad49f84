"""Attention whose packed input projections are made from factors."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from fastfact.nn.layer import FactorizedLayer, as_leaf
from fastfact.nn.layers import FactorizedLinear
from fastfact.nn.specs import LowRank
from fastfact.ops import attention

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

    Made by `ff.factorize`; the bias stays the module's own. Attention is computed here, and each projection, the
    output's included, by its layer, whichever path that takes; where queries and keys or values are different tensors,
    from the weight of `in_proj`, unless it is `LowRank` and takes σ and B A apart. Nested tensors are for PyTorch.
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
        # In the order of `nn.MultiheadAttention`, which the states of optimizers go by.
        order = [name for name in (*PROJECTIONS, "in_proj_bias", "bias_k", "bias_v") if name in dense._parameters]
        dense._parameters = {name: dense._parameters[name] for name in dict.fromkeys([*order, *dense._parameters])}
        return dense

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        if type(query) is Proxy:
            given = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return as_leaf(self, query, key, value, *given)
        if query.is_nested:
            if not (query is key is value) or self.training or key_padding_mask is not None or attn_mask is not None:
                return super().forward(
                    query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
                )
            return self._of_nested(query, need_weights, average_attn_weights)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs attn_mask: it only says that this mask is the causal one")
        batched, first = query.dim() == 3, self.batch_first
        same_key, same_value = query is key, key is value

        def by_batch(x: Tensor) -> Tensor:
            return x.unsqueeze(0) if not batched else x if first else x.transpose(0, 1)

        query = by_batch(query)
        key = query if same_key else by_batch(key)
        value = key if same_value else by_batch(value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        causal = is_causal and key_padding_mask is None and not need_weights
        padding = F._canonical_mask(
            mask=key_padding_mask,
            mask_name="key_padding_mask",
            other_type=F._none_or_dtype(attn_mask),
            other_name="attn_mask",
            target_type=query.dtype,
        )
        mask = F._canonical_mask(
            mask=None if causal else attn_mask,
            mask_name="attn_mask",
            other_type=None,
            other_name="",
            target_type=query.dtype,
            check_other=False,
        )
        if mask is not None:
            shape = [query.shape[1], key.shape[1]]
            if mask.dim() == 3:
                shape.insert(0, query.shape[0] * self.num_heads)
            if list(mask.shape) != shape:
                raise RuntimeError(f"attn_mask has shape {list(mask.shape)}, must be {shape}")
        q, k, v = self._projected(query, key, value)
        n, keys = q.shape[0], k.shape[1]  # not len(q), which a graph for any number of sequences cannot have
        if self.bias_k is not None:
            k, v = (torch.cat([t, bias.expand(n, -1, -1)], 1) for t, bias in ((k, self.bias_k), (v, self.bias_v)))
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        more = (0, k.shape[2] - keys)
        if mask is not None:
            mask = F.pad(mask if mask.dim() == 2 else mask.view(n, self.num_heads, *mask.shape[1:]), more)
        if padding is not None:
            padding = F.pad(padding, more)[:, None, None]
            mask = padding if mask is None else mask + padding
        y, weights = self._attended(q, k, v, mask, causal, need_weights)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if first else y.transpose(0, 1), weights

    def _of_nested(self, x: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of sequences of several lengths with themselves, padded to the longest."""
        lengths, padded = [len(one) for one in x.unbind()], x.to_padded_tensor(0.0)
        missing = torch.arange(padded.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        y, weights = self(padded, padded, padded, missing, need_weights, average_attn_weights=average)
        return torch.nested.as_nested_tensor([one[:n] for one, n in zip(y, lengths, strict=True)]), weights

    def _attended(self, q, k, v, mask, causal: bool, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of each head, q [n, heads, length, d], and its weights if they are asked for."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            if not dropout and attention.serves(q, k, v, mask) and attention.pays(q, k):
                return attention.attention(q, k, v, mask, causal), None
            if dropout or causal or mask is not None or not attention.by_products(q, k):
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights if need_weights else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; what is the same tensor is projected in one product."""
        e, bias = self.embed_dim, self.in_proj_bias
        made: dict[str, Tensor | None] = {}

        def part(name: str, x: Tensor, begin: int, end: int, at: int = 0) -> Tensor:
            """x by rows begin … end of a weight, whose first has the place `at` in the bias."""
            own, outputs = None if bias is None else bias[at + begin : at + end], slice(begin, end)
            layer = self._modules.get(PROJECTIONS[name])
            whole = layer is not None and (begin, end) == (0, layer.out_features)
            if layer is not None and _is_apart(layer, x):
                return layer._apart(x, layer._tensors(), own, None if whole else outputs)
            if whole:
                return layer(x) if own is None else layer(x) + own
            if name not in made:
                made[name] = self._projection(name)
            return F.linear(x, made[name][outputs], own)

        if not self._qkv_same_embed_dim:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            each = zip(names, (query, key, value), strict=True)
            return tuple(part(name, x, 0, e, place * e) for place, (name, x) in enumerate(each))
        if key is value and query is key:
            return part("in_proj_weight", query, 0, 3 * e).chunk(3, -1)
        q = part("in_proj_weight", query, 0, e)
        if key is value:
            return q, *part("in_proj_weight", key, e, 3 * e).chunk(2, -1)
        return q, part("in_proj_weight", key, e, 2 * e), part("in_proj_weight", value, 2 * e, 3 * e)

    def _projection(self, name: str) -> Tensor | None:
        layer = self._modules.get(PROJECTIONS[name])
        return self._parameters.get(name) if layer is None else layer._weight_for(False)

    def _shown(self, name: str) -> Tensor | None:
        layer = self._modules.get(PROJECTIONS[name])
        return self._projection(name) if layer is None else layer.weight

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The weight of queries, keys and values together, as in `nn.MultiheadAttention`; None if they are apart.
        No place to write to, as `FactorizedLayer.weight`."""
        return self._shown("in_proj_weight")

    @property
    def q_proj_weight(self) -> Tensor | None:
        """The weight of the queries where they are apart, else None."""
        return self._shown("q_proj_weight")

    @property
    def k_proj_weight(self) -> Tensor | None:
        """The weight of the keys where they are apart, else None."""
        return self._shown("k_proj_weight")

    @property
    def v_proj_weight(self) -> Tensor | None:
        """The weight of the values where they are apart, else None."""
        return self._shown("v_proj_weight")


def _is_apart(layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer takes σ and B A of its weight apart for inputs such as x."""
    return isinstance(layer, FactorizedLayer) and isinstance(layer.spec, LowRank) and layer.path_for(x) == "factored"
