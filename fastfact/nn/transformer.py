"""Encoders of transformers, for which PyTorch has fused operators in evaluation: they take plain weights alone.

Where PyTorch's encoder takes these, the ones here compute the same by their layers, each on the path that it takes:
activations and residuals where they stand, and nothing but the attention itself of the padding. Without masks PyTorch's
operator serves where it is faster, with weights that are made once (`nn.operators`).
"""

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from fastfact.nn.attention import LINEAR, FactorizedMultiheadAttention, Tokens, plus
from fastfact.nn.layer import as_leaf
from fastfact.nn.layers import FactorizedLinear
from fastfact.nn.operators import Operated, Part, are_plain

_ATTENTION = (nn.MultiheadAttention, FactorizedMultiheadAttention)


class FactorizedTransformerEncoderLayer(Operated, nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` with factorized layers in it or in its encoder, made by `ff.factorize`."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As `nn.TransformerEncoderLayer.forward`."""
        if type(src) is Proxy:
            return as_leaf(self, src, src_mask, src_key_padding_mask, is_causal)
        masked = src_mask is not None or src_key_padding_mask is not None or is_causal
        how = self._activation(), self.norm_first
        if not masked and (found := self._served(how, src)) is not None:
            return found
        if self._is_dense() or not self.is_fused(src):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        if src.is_nested and src_mask is None and src_key_padding_mask is None:
            x, tokens = Tokens.of_nested(src)
            return tokens.nested(self.of_tokens(x, tokens))

        def attend(x: Tensor) -> Tensor:
            how = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
            return self.self_attn(x, x, x, need_weights=False, **how)[0]

        parts = None if masked or how[0] is None else self._parts(src)
        if parts is None:
            return self._computed(src, attend)
        kind = f"encoder of {self.self_attn.num_heads} heads, {how[0]}, norms {'first' if how[1] else 'last'}"
        return self._serve(how, kind, src, parts, lambda x: self._computed(x, attend))

    def _parts(self, x: Tensor) -> list[Part] | None:
        """The layers, where PyTorch has an operator for all of them by their weights."""
        attention, norms = self.self_attn, (self.norm1, self.norm2)
        if type(attention) is not FactorizedMultiheadAttention:
            return None
        of_attention = attention.parts(x)
        if of_attention is None or any(type(norm) is not nn.LayerNorm for norm in norms):
            return None
        biases = self.linear1.bias, self.linear2.bias, *(norm.bias for norm in norms)
        if self.norm1.eps != self.norm2.eps or any(bias is None or bias.dtype != x.dtype for bias in biases):
            return None
        linear = self.linear1, self.linear2
        return of_attention + [one if type(one) is FactorizedLinear else one.weight for one in linear]

    def _activation(self) -> str | None:
        """The activation, where PyTorch's operator has it."""
        activation = self.activation
        if activation is F.relu or type(activation) is nn.ReLU:
            return "relu"
        is_gelu = type(activation) is nn.GELU and activation.approximate == "none"
        return "gelu" if activation is F.gelu or is_gelu else None

    def _by_operator(self, how: Hashable, x: Tensor, *weights: Tensor) -> Tensor:
        attention, norm1, norm2 = self.self_attn, self.norm1, self.norm2
        in_proj, out_proj, first, second = weights
        return torch._transformer_encoder_layer_fwd(
            *(x, attention.embed_dim, attention.num_heads),
            *(in_proj, attention.in_proj_bias, out_proj, attention.out_proj.bias),
            *(how[0] == "gelu", how[1], norm1.eps),
            *(norm1.weight, norm1.bias, norm2.weight, norm2.bias),
            *(first, self.linear1.bias, second, self.linear2.bias),
        )

    def of_tokens(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The layer, where it `is_fused`, of the tokens [tokens, e] of sequences alone."""

        def attend(x: Tensor) -> Tensor:
            if type(self.self_attn) is FactorizedMultiheadAttention:
                return self.self_attn.of_tokens(x, tokens)[0]
            padded = tokens.padded(x)
            how = {"key_padding_mask": tokens.mask(x.dtype), "need_weights": False}
            return tokens.of(self.self_attn(padded, padded, padded, **how)[0])

        return self._computed(x, attend)

    def _is_dense(self) -> bool:
        """Whether the layer is as PyTorch's, which then takes its fused operator."""
        parts = self.self_attn, self.linear1, self.linear2, getattr(self.self_attn, "out_proj", None)
        return not any(isinstance(part, FactorizedMultiheadAttention | FactorizedLinear) for part in parts)

    def is_fused(self, x: Tensor) -> bool:
        """Whether nobody sees what the layer computes of x on the way, or differentiates it, and nothing is dropped."""
        attention = self.self_attn
        if not are_plain(x, (self, *self._modules.values(), *attention._modules.values())):
            return False
        if type(attention) not in _ATTENTION:
            return False
        if any(type(one) not in LINEAR for one in (self.linear1, self.linear2, attention.out_proj)):
            return False
        return not torch.is_grad_enabled() or not any(p.requires_grad for p in (x, *self.parameters()))

    def _computed(self, x: Tensor, attend) -> Tensor:
        """The layer of x, whose attention is `attend`."""
        first = self.norm_first
        y = attend(self.norm1(x) if first else x)
        x = plus(y, x, self.self_attn)
        x = x if first else self.norm1(x)
        y = self.linear1(self.norm2(x) if first else x)
        y = self.linear2(F.relu_(y) if self._activation() == "relu" else self.activation(y))
        x = plus(y, x, self.linear2)
        return x if first else self.norm2(x)


class FactorizedTransformerEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` with factorized layers in it, made by `ff.factorize`.

    Where PyTorch's makes a nested tensor of padded sequences (see `enable_nested_tensor`), the tokens alone go through
    the layers; padding is 0 in the output then, as there.
    """

    @property
    def use_nested_tensor(self) -> bool:
        """False: nested tensors are not what this encoder leaves padding out by."""
        return False

    @use_nested_tensor.setter
    def use_nested_tensor(self, use: bool) -> None:
        self.__dict__["use_nested_tensor"] = use

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As `nn.TransformerEncoder.forward`."""
        if type(src) is Proxy:
            return as_leaf(self, src, mask, src_key_padding_mask, is_causal)
        valid = None if mask is not None or src_key_padding_mask is None else self._valid(src, src_key_padding_mask)
        if valid is None:
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        tokens = Tokens.where(valid)
        x = tokens.of(src)
        for layer in self.layers:
            x = layer.of_tokens(x, tokens)
        y = tokens.padded(x)
        return y if self.norm is None else self.norm(y)

    def _valid(self, src: Tensor, padding: Tensor) -> Tensor | None:
        """Which tokens [n, length] are no padding; None where they are not computed alone."""
        if not self.__dict__.get("use_nested_tensor") or src.dim() != 3 or src.is_nested or not src.numel():
            return None
        if padding.shape != src.shape[:2]:
            return None
        if not all(type(one) is FactorizedTransformerEncoderLayer and one.is_fused(src) for one in self.layers):
            return None
        given = F._canonical_mask(padding, "src_key_padding_mask", None, "mask", src.dtype)
        valid = given.logical_not()
        checked = getattr(self, "mask_check", True)
        return valid if not checked or torch._nested_tensor_from_mask_left_aligned(src, valid) else None


FUSED = {
    nn.TransformerEncoder: FactorizedTransformerEncoder,
    nn.TransformerEncoderLayer: FactorizedTransformerEncoderLayer,
}
"""PyTorch's class → the one that an encoder with factorized layers has."""
