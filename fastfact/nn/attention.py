"""Attention whose packed input projections are made from factors."""

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastfact.nn.layer import FactorizedLayer, as_leaf
from fastfact.nn.layers import FactorizedLinear
from fastfact.nn.operators import OF_PROCESS, Operated, Part, are_plain, is_watched
from fastfact.nn.specs import LowRank
from fastfact.ops import attention
from fastfact.ops.backends import PLAIN
from fastfact.ops.common import autocasts, recording, transforming

LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear, FactorizedLinear)
"""Linear layers that are all that they seem."""
PROJECTIONS = {
    "in_proj_weight": "in_proj",
    "q_proj_weight": "q_proj",
    "k_proj_weight": "k_proj",
    "v_proj_weight": "v_proj",
}
"""The weights of `nn.MultiheadAttention` that belong to no module of their own → the layers that stand for them."""


class Tokens(NamedTuple):
    """Where the tokens of n sequences stand: their places [tokens], in order, among n · length."""

    n: int
    length: int
    places: Tensor

    @classmethod
    def where(cls, valid: Tensor) -> "Tokens":
        """Those that `valid` [n, length] marks."""
        return cls(*valid.shape, valid.flatten().nonzero().squeeze(1))

    @classmethod
    def of_nested(cls, x: Tensor) -> tuple[Tensor, "Tokens"]:
        """The tokens [tokens, e] of a nested tensor, and where they stand."""
        sequences = x.unbind()
        lengths = torch.tensor([len(one) for one in sequences], device=x.device)
        longest = int(lengths.max()) if len(sequences) else 0
        return torch.cat(sequences), cls.where(torch.arange(longest, device=x.device) < lengths[:, None])

    def padded(self, x: Tensor) -> Tensor:
        """x [tokens, channels] with zeros between: [n, length, channels]."""
        if len(self.places) < self.n * self.length:
            x = x.new_zeros(self.n * self.length, x.shape[-1]).index_copy_(0, self.places, x)
        return x.unflatten(0, (self.n, self.length))

    def of(self, x: Tensor) -> Tensor:
        """The tokens [tokens, channels] of x [n, length, channels]."""
        x = x.flatten(0, 1)
        return x if len(self.places) == len(x) else x.index_select(0, self.places)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[n, length]: 0 for a token, −∞ for padding; None where there is none."""
        if len(self.places) == self.n * self.length:
            return None
        out = torch.full((self.n * self.length,), -math.inf, dtype=dtype, device=self.places.device)
        return out.index_fill_(0, self.places, 0.0).view(self.n, self.length)

    def nested(self, x: Tensor) -> Tensor:
        """x [tokens, channels] as a nested tensor of a sequence each."""
        lengths = torch.bincount(self.places // self.length, minlength=self.n).tolist()
        return torch.nested.as_nested_tensor(list(x.split(lengths)))


class FactorizedMultiheadAttention(Operated, nn.MultiheadAttention):
    """`nn.MultiheadAttention` of which some input projections are factorized layers, its submodules: `in_proj` for the
    packed weight [3 e, e] of queries, keys and values, or `q_proj`, `k_proj`, `v_proj` where these have other widths.

    Made by `ff.factorize`; the bias stays the module's own. Attention is computed here, and each projection, the
    output's included, by its layer, whichever path that takes; where queries and keys or values are different tensors,
    from the weight of `in_proj`, unless it is `LowRank` and takes σ and B A apart. In evaluation without masks
    PyTorch's operator serves, with weights that are kept, where that was measured to be faster (`nn.operators`).
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
        own = {k: v for k, v in self.__dict__.items() if k != OF_PROCESS}
        dense.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in own.items()}
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
        if query is key is value and attn_mask is None is key_padding_mask and not (self.training or is_causal):
            how = (
                need_weights,
                average_attn_weights,
                self.embed_dim,
                self.num_heads,
                self.batch_first,
                self.add_zero_attn,
            )
            if (found := self._served(how, query)) is not None:
                return found
            plain = are_plain(query, layers := self._modules.values()) and all(type(one) in LINEAR for one in layers)
            if plain and (parts := self.parts(query)):
                kind = f"attention of {self.num_heads} heads" + (", weights" if need_weights else "")

                def by_layers(x: Tensor) -> tuple[Tensor, Tensor | None]:
                    return self._computed(x, x, x, None, need_weights, None, average_attn_weights, False)

                return self._serve(how, kind, query, parts, by_layers)
        given = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        return self._computed(query, key, value, *given)

    def _computed(self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal):
        """The forward, layer after layer."""
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
        heads = self._heads(self._projected(query, key, value))
        y, weights = self._of_heads(*heads, mask, padding, causal, need_weights)
        y = self.out_proj(y)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if first else y.transpose(0, 1), weights

    def _by_operator(self, how: Hashable, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor | None]:
        (in_proj, out_proj), (need_weights, average, embed_dim, num_heads, *_) = weights, how
        weights = in_proj, self.in_proj_bias, out_proj, self.out_proj.bias
        return torch._native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, None, need_weights, average)

    def parts(self, x: Tensor) -> list[Part] | None:
        """The projections of all inputs and of the output, where PyTorch has an operator for attention of x with itself
        by their weights; it is for the caller to know that nobody sees what they compute."""
        own, out_proj = self._modules, self.out_proj
        in_proj = own["in_proj"] if "in_proj" in own else self._parameters.get("in_proj_weight")
        if in_proj is None or not self.batch_first or self.num_heads % 2 or x.dim() != 3 or not x.numel():
            return None
        in_bias, out_bias = self.in_proj_bias, out_proj.bias
        if in_bias is None or out_bias is None or self.bias_k is not None or self.add_zero_attn:
            return None
        if in_bias.dtype != x.dtype or out_bias.dtype != x.dtype:
            return None
        return [in_proj, out_proj if type(out_proj) is FactorizedLinear else out_proj.weight]

    def of_tokens(self, x: Tensor, tokens: Tokens, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Attention of sequences with themselves, x [tokens, e] → y [tokens, e] and the weights [n, heads, length,
        length] if they are asked for. Nothing but the attention itself is computed of the padding."""
        heads = self._heads(tokens.padded(part) for part in self._projected(x, x, x))
        y, weights = self._of_heads(*heads, None, tokens.mask(x.dtype), False, need_weights)
        return self.out_proj(tokens.of(y)), weights

    def _of_nested(self, x: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of sequences of several lengths with themselves."""
        rows, tokens = Tokens.of_nested(x)
        y, weights = self.of_tokens(rows, tokens, need_weights)
        return tokens.nested(y), weights.mean(1) if average and weights is not None else weights

    def _heads(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """The heads [n, heads, length, d] of queries, keys and values, of which each part [n, length, c e] has c."""
        found = []
        for part in parts:
            n, length, channels = part.shape
            heads = part.view(n, length, channels // self.embed_dim, self.num_heads, self.head_dim)
            found += [one.transpose(1, 2) for one in heads.unbind(2)]
        return found

    def _of_heads(self, q, k, v, mask, padding, causal: bool, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of q, k, v [n, heads, length, d], before the output's projection, [n, length, e], and its weights
        [n, heads, length, keys] if they are asked for. mask: [length, keys], or one of each head [n heads, …]; padding:
        [n, keys]; both are added."""
        n, keys = q.shape[0], k.shape[2]  # not len(q), which a graph for any number of sequences cannot have
        if self.bias_k is not None:
            k, v = (
                torch.cat([t, bias.view(1, self.num_heads, 1, self.head_dim).expand(n, -1, -1, -1)], 2)
                for t, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        more = (0, k.shape[2] - keys)
        if mask is not None:
            mask = F.pad(mask if mask.dim() == 2 else mask.view(n, self.num_heads, *mask.shape[1:]), more)
        if padding is not None:
            padding = F.pad(padding, more)[:, None, None]
            mask = padding if mask is None else mask + padding
        y, weights = self._attended(q, k, v, mask, causal, need_weights)
        return y.transpose(1, 2).flatten(2), weights

    def _attended(self, q, k, v, mask, causal: bool, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of each head, q [n, heads, length, d], and its weights if they are asked for."""
        dropout = self.dropout if self.training else 0.0
        kernel = not dropout and attention.serves(q, k, v, mask) and attention.pays(q, k)
        kernel = kernel and attention.pays_in_a_step(q, k)
        if not need_weights:
            if kernel:
                return attention.attention(q, k, v, mask, causal), None
            if dropout or causal or mask is not None or not attention.by_products(q, k):
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
        mine = not (torch.is_grad_enabled() or transforming() or autocasts(q.device.type))
        # A query that a mask lets see nothing has weights that are not numbers.
        if kernel and mine and mask is None and not recording():
            return attention.with_weights(q, k, v)
        left, right = q.flatten(0, 1), k.flatten(0, 1).mT
        scores = torch.baddbmm(q.new_zeros(1, 1, 1), left, right, beta=0, alpha=1 / math.sqrt(q.shape[-1]))
        scores = scores.view(*q.shape[:2], *scores.shape[1:])
        scores = scores if mask is None else scores + mask
        weights = torch.softmax(scores, -1, out=scores if mine else None)
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights if need_weights else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, those of the same tensor together as one product gives them."""
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
                return layer(x) if own is None else plus(layer(x), own, layer)
            if name not in made:
                made[name] = self._projection(name)
            return F.linear(x, made[name][outputs], own)

        if not self._qkv_same_embed_dim:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            each = zip(names, (query, key, value), strict=True)
            return tuple(part(name, x, 0, e, place * e) for place, (name, x) in enumerate(each))
        if key is value and query is key:
            return (part("in_proj_weight", query, 0, 3 * e),)
        q = part("in_proj_weight", query, 0, e)
        if key is value:
            return q, part("in_proj_weight", key, e, 3 * e)
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


def plus(y: Tensor, other: Tensor, module: nn.Module) -> Tensor:
    """y + other, where y is what a module has computed: in its memory, if that is its own and nobody else sees y."""
    own = isinstance(module, FactorizedLayer | nn.Linear | nn.MultiheadAttention)
    fits = type(y) is Tensor and type(other) in PLAIN and y.dtype == other.dtype
    if not own or not fits or transforming() or is_watched(module):
        return y + other
    return y.add_(other)


def _is_apart(layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer takes σ and B A of its weight apart for inputs such as x."""
    return isinstance(layer, FactorizedLayer) and isinstance(layer.spec, LowRank) and layer.path_for(x) == "factored"
