"""Factorized layers: drop-in for `nn.Conv2d` and `nn.Linear`, with the weight made from factors in each forward."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from fastfact import ops
from fastfact.nn import choice, compiled, weight_cache
from fastfact.nn.derived import Derived
from fastfact.nn.factors import INDEX, is_dense, rank1_parts
from fastfact.nn.layer import PATHS, FactorizedLayer, Form, as_leaf, cast, converted, densified, dtype_of
from fastfact.nn.specs import LowRank, Rank1, Spec
from fastfact.ops import direct
from fastfact.ops.backends import PLAIN
from fastfact.ops.common import (
    address,
    as_rows,
    exporting,
    has_amx,
    is_channels_last,
    is_mapped,
    recording,
    transforming,
)
from fastfact.ops.weights import Convolution, are_rows

NOMINAL_IMAGES, NOMINAL_SIDE = 32, 16
"""The input assumed where sizes may be symbols."""
DEPTHWISE = 4
"""Channels from which on the kernel of depthwise layers serves."""
FEW_PIXELS = 500
"""Of the output, up to which a convolution of dense μ may be done without W, and up to which one with kernels of 1×1
may be faster as a product of rows than as oneDNN does it."""
ONEDNN = torch.backends.mkldnn.is_available()
"""Whether PyTorch has oneDNN here, with which inductor computes convolutions channels_last."""
FEW_ROWS, SMALL = 16, 1 << 16
"""Rows up to which a product with a W of so many numbers is no more than a loop (`multiply_few` in
csrc/bind_cpu_direct.cpp)."""

__all__ = ["FactorizedConv1d", "FactorizedConv2d", "FactorizedLinear"]


class FactorizedConv2d(FactorizedLayer):
    """`nn.Conv2d` whose weight [out, in / groups, kh, kw] is made from the factors of `spec`.

    Arguments as for `nn.Conv2d`, plus `spec` (default `ff.Rank1()`). Input [n, in, h, w] or [in, h, w], output as
    `nn.Conv2d` gives it. Raises ValueError as `nn.Conv2d` does, and for a spec that does not fit.

    `to(memory_format=torch.channels_last)`, or a dense layer whose weight is channels_last, sets `channels_last`: all
    images [n, in, h, w] are then brought into that format, and the output has it, as with such a weight of `nn.Conv2d`.
    """

    _axes_served = 0
    paths = (*PATHS, "fused")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
        *,
        spec: Spec | None = None,
    ):
        conv = self._dense(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device="meta"
        )
        self._setup(conv, Rank1() if spec is None else spec, None, device, dtype)
        self.reset_parameters()

    def _setup(self, conv: nn.Conv2d, spec: Spec, dense: Tensor | None, device=None, dtype=None) -> None:
        super().__init__()
        for name in (*nn.Conv2d.__constants__, "_reversed_padding_repeated_twice"):
            if hasattr(conv, name):
                setattr(self, name, getattr(conv, name))
        size = tuple(self._weight_of(conv).shape)
        self._build(size, spec, conv.out_channels if conv.bias is not None else None, dense, device, dtype)
        if dense is not None:
            self._take_format(dense)
        self._note_kind()

    def _note_kind(self) -> None:
        mode, padding = self.padding_mode, self._padding()
        self.__dict__["_pads"] = padding is None or (mode != "zeros" and any(padding))
        super()._note_kind()

    _dense = nn.Conv2d

    def _take_format(self, like: Tensor) -> None:
        self.channels_last = _is_laid_out_last(like)
        self._note_kind()

    def _describe(self):
        if type(self) is not FactorizedConv2d or self._pads:
            return None
        names = "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"
        own = {name: getattr(self, name) for name in names}
        return compiled.describe("conv2d", self.spec, self.path, self.channels_last, **own, bias=self.bias is not None)

    def _apply(self, fn, *args, **kwargs):
        # The factors may have no tensor of four dimensions, which memory formats are for.
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        self._take_format(fn(torch.empty(1, 2, 2, 2, memory_format=form)))
        return super()._apply(fn, *args, **kwargs)

    @classmethod
    def from_dense(
        cls, layer: nn.Conv2d, spec: Spec, init: str = "random", generator: torch.Generator | None = None
    ) -> "FactorizedConv2d":
        """The factorized form of `layer`: its settings, bias, dtype, device, memory format and mode."""
        return converted(cls.__new__(cls), layer, spec, init, generator)

    def to_dense(self) -> nn.Conv2d:
        """An `nn.Conv2d` of the same function, with W as its weight and this layer's bias."""
        dense = self._dense(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device="meta",
        )
        return densified(dense, self)

    def _takes_dense(self, x, tensors):
        o, i, *kernel = self.size
        if x.dim() != 4 or not self._is_one_op():
            return False
        if i == 1 and o == self.groups:
            return o >= DEPTHWISE
        if self.groups > 1 or not ops.conv.multiplies_tiles(dtype_of(x)):
            return False
        if kernel == [1, 1]:
            return True
        return len(x) * math.prod(self._output(x)) <= FEW_PIXELS

    def _factors_are_weights(self, tensors):
        return "u" in tensors and tensors["u"][0].numel() == 1 and self.size[1] > 1

    def _has_factored_form(self):
        return super()._has_factored_form() and self.spec.layout != "view"

    def _padding(self) -> tuple[int, ...] | None:
        """The padding of each axis, None where "same" means more at the end of an axis."""
        if not isinstance(self.padding, str):
            return self.padding
        same = self.padding == "same"
        reach = [same * gap * (k - 1) for gap, k in zip(self.dilation, self.kernel_size, strict=True)]
        return None if any(r % 2 for r in reach) else tuple(r // 2 for r in reach)

    def _why_not(self, path, tensors):
        if path == "fused":
            return None
        if isinstance(self.spec, LowRank):
            return (
                None if self.spec.layout == "separable" else 'layout "view" has no factored form, "separable" has one'
            )
        if isinstance(self.spec, Rank1) and self.spec.layout == "view":
            return 'layout "view" has no factored form, only "spatial" and "kernel" have one'
        return super()._why_not(path, tensors)

    def _work(self, shape, tensors, channels_last, step, dtype, device):
        if shape is None:
            reach = [gap * (extent - 1) + 1 for gap, extent in zip(self._pair("dilation"), self.size[2:], strict=True)]
            shape = (NOMINAL_IMAGES, self.in_channels, *(max(NOMINAL_SIDE, least) for least in reach))
        rows, image = shape[0] if len(shape) == 4 else 1, shape[-2:]
        how = (*map(self._pair, ("stride", "padding", "dilation")), *_rank_and_nonzeros(tensors))
        kind = self._kind(getattr(self.spec, "layout", ""))
        own = channels_last, step, dtype, device, is_dense(tensors)
        return choice.Work(kind, self.size, self.groups, rows, image, *how, *own)

    def _pair(self, setting: str) -> tuple[int, int]:
        """A setting (stride, padding, dilation) for both axes of an image."""
        if setting == "padding":
            padding = self._padding()
            return padding if padding and self.padding_mode == "zeros" else (0,) * len(self.dilation)
        return getattr(self, setting)

    def _in_two_parts(self) -> bool:
        """Whether the fused path makes no weight: two smaller convolutions cost less.

        Not of a 1×1 kernel, whose dense product waits for memory just the same.
        """
        o, i, kh, kw = self.size
        if not isinstance(self.spec, Rank1) or self.spec.sparse or kh * kw == 1:
            return False
        if self.spec.layout == "kernel":
            return self.groups == 1 and self.spec.rank * (i * kh + o * kw) < o * i * kh * kw
        return self.spec.layout == "spatial" and self.spec.rank < kh * kw

    def _candidates(self, x, tensors):
        paths = super()._candidates(x, tensors)
        # Trained, two smaller convolutions took longer than W on every shape that was measured.
        if x.is_cuda and self._in_two_parts() and not torch.is_grad_enabled():
            paths.append("fused")
        if self._multiplies_pixels(x, tensors) and not self._can_reorder(x, tensors):
            paths.append("product")
        return paths

    def _can_reorder(self, x, tensors):
        """Whether W may be kept in oneDNN's form for x."""
        if self.training or not weight_cache.allowed() or not is_channels_last(x) or not x.numel() or _onednn() is None:
            return False
        if type(self)._conv_forward is not FactorizedConv2d._conv_forward:
            return False
        # What PyTorch's convolution refuses is left to it.
        if x.shape[1] != self.size[1] * self.groups or min(self._pair("stride")) < 1 or min(self._output(x)) < 1:
            return False
        return (
            _onednn_computes(x.dtype)
            and _is_of_one_dtype(x, tensors, self.bias)
            and self._is_plain(x, tensors, self.bias)
        )

    def _output(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the output for x [n, i, h, w], below 1 where x is too small."""
        how = map(self._pair, ("padding", "dilation", "stride"))
        return tuple(
            (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, padding, dilation, stride in zip(x.shape[2:], self.size[2:], *how, strict=True)
        )

    def _forms(self, path, x, tensors, bias):
        multiplies = self._multiplies_pixels(x, tensors)
        rows = x.numel() // max(1, x.shape[1]) if multiplies else 0
        if path == "product" or (multiplies and _is_few(x, rows, self.size)):
            call = functools.partial(self._kept_weight_call, direct.PIXELS, bias=bias)
            return {"reconstruct": Form("columns", lambda w: _by_columns(w.flatten(1)), call)}
        forms = super()._forms(path, x, tensors, bias)
        if self._can_reorder(x, tensors):
            reorder, _ = _onednn()
            how = [list(self._pair(name)) for name in ("padding", "stride", "dilation")]
            # For the first size that comes; another form would serve others better, but would have to be kept too.
            key = "reordered", *map(tuple, how), self.groups
            call = functools.partial(self._kept_weight_call, direct.REORDERED, bias=bias)
            forms = {"reconstruct": Form(key, lambda w: reorder(w, *how, self.groups, list(x.shape)), call)}
            if direct.convolves(direct.settings(direct.CONVOLUTION, 0, True, self.size, self._convolution()), x):
                call = functools.partial(self._kept_weight_call, direct.PANELS, bias=bias)
                forms["panels"] = Form("panels of taps", direct.panels, call)
        # By AMX any number of pixels are multiplied faster than PyTorch does.
        ordered = rows > 0 and (rows <= FEW_PIXELS or (x.dtype == torch.float32 and has_amx()))
        return forms | _orders(self, x, x.shape[1], tensors, bias) if ordered else forms

    def _multiplies_pixels(self, x, tensors):
        """Whether there is a path "product" for x."""
        if self.size[2:] != (1, 1) or self.groups > 1 or self._pair("stride") != (1, 1):
            return False
        if type(self)._conv_forward is not FactorizedConv2d._conv_forward:
            return False
        if self._pair("padding") != (0, 0) or x.dim() != 4 or not self._can_cast(x, tensors, self.bias):
            return False
        return are_rows(x) and (not torch.is_grad_enabled() or self._is_one_node(x, tensors, self.bias))

    def _choose_nominal(self, x, tensors, trained):
        own = next(iter(tensors.values()))
        if own.is_cuda and not (torch.compiler.is_compiling() or recording()):
            mapped = any(t is not None and is_mapped(t) for t in (*tensors.values(), self.bias))
            return "fused" if mapped or self._in_two_parts() else "reconstruct"
        return super()._choose_nominal(x, tensors, trained)

    def _is_one_op(self) -> bool:
        """Whether the factored path of images is one op, `factored_conv2d`."""
        if isinstance(self.spec, Rank1) and self.spec.layout == "spatial":
            return True
        of_pixels = self.size[2:] == (1, 1) and self.size[1] > 1 and self.groups == 1
        if not of_pixels or self._pair("padding") != (0, 0):
            return False
        return isinstance(self.spec, LowRank) or (isinstance(self.spec, Rank1) and self.spec.layout == "kernel")

    def _call(self, path, x, tensors, bias):
        if path != "factored" or not self._is_one_factored(x, tensors, bias):
            return super()._call(path, x, tensors, bias)
        of, repeated = self._plan_of_factors(x, tensors), not self.training and INDEX in tensors
        return direct.with_input(
            ops.conv.call_of_factors(of, *_parts(tensors), bias, repeated), x, self._cast(x), False
        )

    def _plan_of_factors(self, x, tensors):
        return ops.conv.of_factors(self.size, self._convolution(), self._cast(x), self._form_of_factors())

    def _is_one_factored(self, x, tensors, bias):
        return self._is_one_op() and x.dim() == 4 and super()._is_one_factored(x, tensors, bias)

    def _without_weight(self, path, x, tensors, bias):
        if path == "factored" and self._is_one_factored(x, tensors, bias):
            # What does not fit is told by the checked function.
            with contextlib.suppress(RuntimeError, ValueError):
                of = self._plan_of_factors(x, tensors)
                y = ops.conv.apply_factors(of, x, *_parts(tensors), bias, not self.training and INDEX in tensors)
                if y is not None:
                    return y
        if path == "factored" and isinstance(self.spec, LowRank):
            return self._apart(x, tensors, bias)
        y = self._convolve(x if x.dim() == 4 else x.unsqueeze(0), path == "fused", tensors, bias)
        return y if x.dim() == 4 else y.squeeze(0)

    def _dense_forward(self, x, weight, bias):
        return self._conv_forward(x, weight, bias)

    def _dense_call(self, x, weight, bias):
        if type(self)._conv_forward is not FactorizedConv2d._conv_forward or x.dim() != 4:
            return super()._dense_call(x, weight, bias)
        return self._kept_weight_call(direct.CONVOLUTION, weight, bias)

    def _kept_weight_call(self, kind: int, weight: Tensor, bias: Tensor | None) -> direct.Call:
        of = direct.settings(kind, 0, kind == direct.PANELS, self.size, self._convolution())
        return direct.Call(direct.dense, (of, None, weight, bias), 1)

    def _convolution(self):
        return Convolution(self._pair("stride"), self._pair("padding"), self._pair("dilation"), self.groups)

    def _is_one_node(self, x, tensors, bias):
        return x.dim() == 4 and super()._is_one_node(x, tensors, bias)

    def _convolve(self, x: Tensor, fused: bool, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        """The factored or the fused path, on x with its batch axis."""
        how, spec, parts = self._convolution()._asdict(), self.spec, rank1_parts(tensors)
        if not fused:
            if spec.layout == "kernel":
                return ops.separable_conv2d(x, *parts, bias, size=self.size, **how)
            return ops.factored_conv2d(x, *parts, bias, size=self.size, repeated=not self.training, **how)
        if isinstance(spec, Rank1) and spec.layout == "kernel" and not spec.sparse:
            return ops.separable_conv2d(x, *parts, bias, size=self.size, **how)
        if isinstance(spec, Rank1):
            return ops.fused_conv2d(x, *parts, bias, layout=spec.layout, size=self.size, **how)
        if self._shares_sigma(x):
            return self._apart(x, tensors, bias)
        weight = spec.weight(cast(tensors), self.size, is_channels_last(x))
        return ops.fused_conv2d(x, mu=weight, bias=bias, size=self.size, **how)

    def _shares_sigma(self, x: Tensor) -> bool:
        """Whether clients of `vmap` share σ, and σ and BA apart cost less than each client's own W."""
        if not isinstance(self.spec, LowRank) or self.spec.layout != "separable" or self.groups > 1:
            return False
        return is_mapped(self.A) and not is_mapped(self.sigma) and self.spec.is_thin(self.size, self._rows(x))

    def _rows(self, x):
        stride = self._pair("stride")
        images = x.shape[0] if x.dim() == 4 else 1
        return images * x.shape[-2] * x.shape[-1] / (stride[0] * stride[1])

    def _apart(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        """A convolution with σ, and the two of B and A: a kh×1 and a 1×kw one, through r channels."""
        spec, (o, i, kh, kw) = self.spec, self.size
        image = x if x.dim() == 4 else x.unsqueeze(0)
        how = self._convolution()._asdict()
        seen = self._adapter_input(image)
        down = tensors["B"].transpose(0, 1).unflatten(-1, (i, kh))  # ONNX's older exporter knows no .mT
        across = (spec.scaling * tensors["A"]).unflatten(-1, (o, kw))
        adapter = ops.separable_conv2d(image if seen is None else seen, down, across, size=self.size, **how)
        y = F.conv2d(image, tensors["sigma"], bias, **how) + adapter
        return y if x.dim() == 4 else y.squeeze(0)

    def _padded(self, x: Tensor) -> Tensor:
        """x, with its padding where that is not by zeros, alike on both sides of an axis."""
        if not self._pads:
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self._reversed_padding_repeated_twice, mode=mode)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self._convolution())

    def _in_format(self, x):
        if not self.channels_last or x.dim() != 4 or torch._C._are_functorch_transforms_active():
            return x
        last = x.contiguous(memory_format=torch.channels_last)
        if last is x and x.shape[1] == 1 < x.shape[2] * x.shape[3] and not is_channels_last(x):
            last = x.view(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
            return last if is_channels_last(last) else x
        return last

    def _forward(self, x):
        last = self._in_format(x)
        return super()._forward(x) if last is x else self._of_padded(last)

    def _of_padded(self, x):
        if not (torch.compiler.is_compiling() and self._is_turned(x)):
            return super()._of_padded(x)
        # As inductor does with dense convolutions; what is computed between two of them it then computes channels_last.
        return super()._of_padded(x.contiguous(memory_format=torch.channels_last)).contiguous()

    def _is_turned(self, x: Tensor) -> bool:
        """Whether a graph computes the layer channels_last, of contiguous images, and gives contiguous ones."""
        if not ONEDNN or self.channels_last or exporting() or torch._C._are_functorch_transforms_active():
            return False
        return x.is_cpu and x.dim() == 4 and x.is_contiguous() and not is_channels_last(x)

    def extra_repr(self) -> str:
        return f"{nn.Conv2d.extra_repr(self)}, spec={self.spec}"


class FactorizedConv1d(FactorizedConv2d):
    """`nn.Conv1d` whose weight [out, in / groups, k] is made from the factors of `spec`, those of a convolution with
    1×k kernels: `size` is (out, in / groups, 1, k).

    Arguments as for `nn.Conv1d`, plus `spec` (default `ff.Rank1()`). Input [n, in, length] or [in, length].
    """

    _axes_served = 3
    _dense = nn.Conv1d

    def _take_format(self, like):
        """Memory formats are for images."""

    @staticmethod
    def _weight_of(layer: nn.Conv1d) -> Tensor:
        return layer.weight.detach().unsqueeze(2)

    @property
    def weight(self) -> Tensor:
        """W in PyTorch's order [out, in / groups, k], as `FactorizedLayer.weight`."""
        return self._derived_weight().squeeze(2)

    def _pair(self, setting: str) -> tuple[int, int]:
        return (0 if setting == "padding" else 1), *super()._pair(setting)

    def path_for(self, x: Tensor) -> str:
        return super().path_for(x.unsqueeze(-2))

    def times(self, x: Tensor, training: bool) -> tuple[dict[str, float], str]:
        return super().times(x.unsqueeze(-2), training)

    def _dense_side(self, x, trained):
        return super()._dense_side(x.squeeze(-2), trained)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Proxy:
            return as_leaf(self, x)
        if x.dim() == 2:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.dim() == 3 and not (self._pads or torch.compiler.is_compiling()):
            y = direct.serve(self._nodes, x, self.training, self._noted)
            if y is not None:
                return y
        return super().forward(x.unsqueeze(-2)).squeeze(-2)

    def _is_turned(self, x):
        return False

    def _is_served_as_sequences(self, x: Tensor) -> bool:
        """Whether nodes for images x [n, c, 1, l] are of the sequences [n, c, l] that were given."""
        return not (self._pads or is_channels_last(x)) and x.dim() == 4

    def _let_serve(self, x, tensors, bias, watch, call):
        if self._is_served_as_sequences(x) and (of_sequences := direct.of_sequences(call)):
            return super()._let_serve(x.squeeze(-2), tensors, bias, watch, of_sequences)
        return super()._let_serve(x, tensors, bias, watch, call)

    def _serve(self, x):
        y = super()._serve(x.squeeze(-2)) if self._is_served_as_sequences(x) else None
        return super()._serve(x) if y is None else y.unsqueeze(-2)

    def _padded(self, x):
        return super()._padded(x.squeeze(-2)).unsqueeze(-2)


class FactorizedLinear(FactorizedLayer):
    """`nn.Linear` whose weight [out, in] is made from the factors of `spec`.

    Arguments as for `nn.Linear`, plus `spec` (default `ff.Rank1()`). Input […, in], output […, out].
    """

    _axes_served = 0
    is_only_multiplied = False
    """Whether the module that the layer is in takes its weight for nothing but `F.linear`, see `weight`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        spec: Spec | None = None,
    ):
        linear = nn.Linear(in_features, out_features, bias, device="meta")
        self._setup(linear, Rank1() if spec is None else spec, None, device, dtype)
        self.reset_parameters()

    def _setup(self, linear: nn.Linear, spec: Spec, dense: Tensor | None, device=None, dtype=None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        size = (self.out_features, self.in_features)
        self._build(size, spec, self.out_features if linear.bias is not None else None, dense, device, dtype)

    @classmethod
    def from_dense(
        cls, layer: nn.Linear, spec: Spec, init: str = "random", generator: torch.Generator | None = None
    ) -> "FactorizedLinear":
        """The factorized form of `layer`: its settings, bias, dtype, device and mode."""
        return converted(cls.__new__(cls), layer, spec, init, generator)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` of the same function, with W as its weight and this layer's bias."""
        return densified(nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta"), self)

    def _work(self, shape, tensors, channels_last, step, dtype, device):
        rows = NOMINAL_IMAGES if shape is None else torch.Size(shape[:-1]).numel()
        ones = ((1, 1),) * 4  # image, stride, padding, dilation
        own = *_rank_and_nonzeros(tensors), False, step, dtype, device, is_dense(tensors)
        return choice.Work(self._kind("linear"), self.size, 1, rows, *ones, *own)

    def _describe(self):
        if type(self) is not FactorizedLinear:
            return None
        own = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias is not None}
        return compiled.describe("linear", self.spec, self.path, False, **own)

    def _dense_forward(self, x, weight, bias):
        return F.linear(x, weight, bias)

    def _dense_call(self, x, weight, bias):
        return direct.Call(direct.dense, (direct.settings(direct.LINEAR, 0, False, self.size), None, weight, bias), 1)

    def _forms(self, path, x, tensors, bias):
        forms = super()._forms(path, x, tensors, bias)
        rows = x.numel() // max(1, x.shape[-1]) if x.dim() else 0
        if x.is_cpu and _is_few(x, rows, self.size):
            return {"reconstruct": Form("columns", _by_columns, forms["reconstruct"].call)}
        return forms | _orders(self, x, x.shape[-1], tensors, bias) if rows else forms

    def _call(self, path, x, tensors, bias):
        drawn = self._dropout_active()  # what the adapter sees, for each call
        if path != "factored" or x.dim() < 2 or drawn or not self._is_one_factored(x, tensors, bias):
            return super()._call(path, x, tensors, bias)
        of = self._plan_of_factors(x, tensors)
        return direct.with_input(ops.conv.call_of_factors(of, *_parts(tensors), bias), x, self._cast(x), True)

    def _plan_of_factors(self, x, tensors):
        form = self._form_of_factors()
        if form and not tensors["sigma"].requires_grad:
            return ops.lowrank.plan(self.size, form, self._cast(x))
        return ops.conv.of_factors(self.size, cast=self._cast(x), form=form)

    def _without_weight(self, path, x, tensors, bias):
        parts = _parts(tensors)
        if x.dim() and self._is_one_factored(x, tensors, bias):
            # Cast once, not wherever what is drawn is used.
            given = x.to(self._cast(x) or x.dtype) if self._dropout_active() else x
            as_it_is = x.dim() == 2 or (x.dim() > 2 and torch.is_grad_enabled())
            rows = given if as_it_is else as_rows(given)
            if (seen := self._adapter_input(rows)) is not None:
                parts = *parts[:3], seen
            with contextlib.suppress(RuntimeError, ValueError):
                y = ops.conv.apply_factors(self._plan_of_factors(x, tensors), rows, *parts, bias)
                if y is not None:
                    return y if as_it_is else y.view(*x.shape[:-1], self.size[0])
        if isinstance(self.spec, LowRank):
            return self._apart(x, tensors, bias)
        return ops.factored_linear(x, *_parts(tensors), bias, size=self.size)

    @property
    def weight(self) -> Tensor:
        """W in PyTorch's order, as `FactorizedLayer.weight`. Where the layer `is_only_multiplied`, `F.linear(x,
        layer.weight, layer.bias)` is the layer, on the path that it takes."""
        weight = self._derived_weight()
        if self.is_only_multiplied and type(weight) is Derived and isinstance(self.spec, Rank1):
            weight.multiply = functools.partial(_multiply, weakref.ref(self), self._state())
        return weight

    def _state(self) -> tuple | None:
        """What W made now depends on, as far as PyTorch tells; None where it does not."""
        tensors = self._tensors()
        if any(type(t) not in PLAIN or t.is_inference() for t in tensors.values()):
            return None
        factors = ((id(t), t._version, address(t), t.requires_grad) for t in tensors.values())
        return self.training, torch.is_grad_enabled(), *factors

    def _rows(self, x):
        return x.numel() / x.shape[-1]

    def _takes_dense(self, x, tensors):
        return x.dim() > 0 and ops.conv.multiplies_tiles(dtype_of(x))

    def _apart(
        self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, outputs: slice | None = None
    ) -> Tensor:
        """x σᵀ + scaling · (x Aᵀ) Bᵀ + bias, or some of its columns."""
        (a, b), sigma = self.spec.parts(tensors, self.size), tensors["sigma"]
        if outputs is not None:
            sigma, b = sigma[outputs], b[outputs]
        return ops.lowrank.layer(x, sigma, a, b, bias, scaling=self.spec.scaling, seen=self._adapter_input(x))

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, spec={self.spec}"


compiled.kind("conv2d", FactorizedConv2d)
compiled.kind("linear", FactorizedLinear)


def _multiply(
    layer: Callable[[], FactorizedLinear | None], state: tuple | None, x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """The layer for x, where W with this bias is still what it was when it was made."""
    own = layer()
    if own is None or bias is not own.bias or type(x) not in PLAIN or not x.is_cpu or transforming():
        return None
    return None if state is None or own._state() != state else own.forward(x)


def _is_few(x: Tensor, rows: int, size: Sequence[int]) -> bool:
    """Whether rows are so few, and W so small, that W by columns serves, in evaluation."""
    return x.dtype in (torch.float32, torch.float64) and 1 <= rows <= FEW_ROWS and size[0] * size[1] <= SMALL


def _by_columns(weight: Tensor) -> Tensor:
    """W [o, i] with its columns one after the other in memory: products of few rows read it along the outputs."""
    return weight.t().contiguous().t()


def _parts(tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """(u, v, μ, its positions), or (A, B, σ, None)."""
    return (tensors["A"], tensors["B"], tensors["sigma"], None) if "sigma" in tensors else rank1_parts(tensors)


def _is_of_one_dtype(x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> bool:
    """Whether all that is no position has the dtype of x."""
    floating = [t for t in (x, *tensors.values(), bias) if t is not None and t.is_floating_point()]
    return all(t.dtype == x.dtype for t in floating)


@functools.cache
def _onednn_computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this dtype here."""
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, *asked):
        return False
    return dtype == torch.float32 or getattr(torch.ops.mkldnn, asked[dtype])()


def _orders(
    layer: FactorizedLayer, x: Tensor, channels: int, tensors: dict[str, Tensor], bias: Tensor | None
) -> dict[str, Form]:
    """W in orders in which a product of rows of so many channels reads it: "product" as oneDNN brings it there in each
    product of half precision, of linear layers, and "panels" as this package does. None where x does not fit, or
    PyTorch may round float32 in products."""
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return {}
    fits = channels == layer.size[1] and _is_of_one_dtype(x, tensors, layer.bias)
    if not fits or not layer._is_plain(x, tensors, layer.bias):
        return {}

    def form(name: str, kind: int, order: Callable[[Tensor], Tensor]) -> Form:
        settings = direct.settings(kind, 0, len(layer.size) == 4, layer.size)

        def call(weight: Tensor) -> direct.Call:
            return direct.Call(direct.dense, (settings, None, weight, bias), 1)

        return Form(name, lambda weight: order(weight.flatten(1)), call)

    forms = {}
    if len(layer.size) == 2 and (pack := _packing(x.dtype)):
        forms["product"] = form("product", direct.PACKED, pack)
    if _has_panels(x.dtype, layer.size[1] % 2 == 0):
        forms["panels"] = form("panels", direct.PANELS, direct.panels)
    return forms


@functools.cache
def _packing(dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """W [o, i] → W in oneDNN's order, where products of this dtype gain by it."""
    there = dtype != torch.float32 and _onednn_computes(dtype) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return torch.ops.mkldnn._reorder_linear_weight.default if there else None


@functools.cache
def _has_panels(dtype: torch.dtype, even: bool) -> bool:
    """Whether this package multiplies rows of this dtype, and of an even number of channels, with W in panels."""
    return direct.panels(torch.empty(0, 2 if even else 1, dtype=dtype)) is not None


@functools.cache
def _onednn() -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    """PyTorch's (reordering of a convolution's weight, convolution with such a weight), where it has them."""
    names = "_reorder_convolution_weight", "_convolution_pointwise"
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return None
    return torch.ops.mkldnn._reorder_convolution_weight.default, torch.ops.mkldnn._convolution_pointwise.default


def _rank_and_nonzeros(tensors: dict[str, Tensor]) -> tuple[int, int]:
    factor = tensors.get("u", tensors.get("A"))
    return (0 if factor is None else len(factor)), (tensors["mu"].numel() if "mu" in tensors else 0)


def _is_laid_out_last(weight: Tensor) -> bool:
    """Whether PyTorch takes a weight [o, i, kh, kw] for channels_last, by its strides, also where one channel or one
    tap leaves several formats the same in memory."""
    if weight.dim() != 4:
        return False
    expected = 0
    for d in (1, 3, 2, 0):
        if weight.stride(d) < max(expected, 1) or (d == 0 and expected == weight.stride(1)):
            return False
        expected = weight.stride(d) * max(weight.shape[d], 1)
    return True
