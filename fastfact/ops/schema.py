"""The op schemas with their reference and fake implementations, registered with PyTorch.

The registered ops always take the client axis (but see `backends.takes_one`). Compiled libraries add their own
implementations (see `backends`).
"""

import torch
from torch import Tensor

from fastfact import formats
from fastfact.formats import VALUE_TYPES
from fastfact.ops import reference
from fastfact.ops.backends import load

SCHEMAS = {
    "rank1_weight": "(Tensor? mu, Tensor u, Tensor v, int layout, bool channels_last) -> Tensor",
    "rank1_weight_backward": "(Tensor grad, Tensor u, Tensor v, int layout, int needs) -> (Tensor, Tensor)",
    "compact_weight": "(Tensor u, Tensor v, Tensor values, Tensor index, int layout, bool channels_last) -> Tensor",
    "compact_weight_backward": "(Tensor grad, Tensor u, Tensor v, Tensor values, Tensor index, int layout, int needs)"
    " -> (Tensor, Tensor, Tensor)",
    "lowrank_weight": "(Tensor? sigma, Tensor a, Tensor b, int layout, int[] size, float scaling, bool channels_last)"
    " -> Tensor",
    "lowrank_weight_backward": "(Tensor grad, Tensor a, Tensor b, int layout, int[] size, float scaling, int needs)"
    " -> (Tensor, Tensor)",
    "hadamard_weight": "(Tensor x1, Tensor y1, Tensor x2, Tensor y2, int[] size, bool personalized,"
    " bool channels_last) -> Tensor",
    "hadamard_weight_backward": "(Tensor grad, Tensor x1, Tensor y1, Tensor x2, Tensor y2, int[] size,"
    " bool personalized, int needs) -> (Tensor, Tensor, Tensor, Tensor)",
    "prox_sgd_step": "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, float[] l1, float lr,"
    " float momentum, float weight_decay, bool proximal) -> ()",
    "pack_bitmap": "(Tensor x, int value_type) -> (Tensor, Tensor, Tensor)",
    "unpack_bitmap": "(Tensor bits, Tensor values, Tensor scale, int n) -> Tensor",
    "similarity_sums": "(Tensor keys, Tensor[] uploads, Tensor? valid, int first, int rows, float epsilon, float tau,"
    " bool count) -> (Tensor[], Tensor)",
    "srht": "(Tensor x, Tensor signs, Tensor rows, bool quantize) -> (Tensor, Tensor)",
    "gather_rows": "(Tensor[] samples, Tensor index) -> Tensor",
    "rows_linear": "(Tensor[] samples, Tensor index, Tensor weight) -> Tensor",
    "rows_linear_backward": "(Tensor[] samples, Tensor index, Tensor grad) -> Tensor",
    "softmax_loss": "(Tensor logits, Tensor labels) -> (Tensor, Tensor)",
    "rows_softmax_loss": "(Tensor[] samples, Tensor index, Tensor weight, Tensor? bias, Tensor labels)"
    " -> (Tensor, Tensor, Tensor)",
    "factored_conv2d": "(Tensor x, Tensor? u, Tensor? v, Tensor? values, Tensor? index, Tensor? bias, int[] size,"
    " int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    "ordered_factored_conv2d": "(Tensor x, Tensor? u, Tensor? v, Tensor? values, Tensor? index, Tensor? bias,"
    " Tensor? order, int[] size, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    "factored_conv2d_order": "(Tensor x, Tensor? u, Tensor? v, Tensor values, Tensor index, int[] size, int[] stride,"
    " int[] padding, int[] dilation, int groups) -> Tensor",
    "factored_conv2d_backward": "(Tensor grad, Tensor x, Tensor? u, Tensor? v, Tensor? values, Tensor? index,"
    " int[] size, int[] stride, int[] padding, int[] dilation, int groups, int needs)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "fused_conv2d": "(Tensor x, Tensor? u, Tensor? v, Tensor? mu, Tensor? index, Tensor? bias, int layout, int[] size,"
    " bool channels_last, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    "fused_conv2d_dx": "(Tensor grad, Tensor? u, Tensor? v, Tensor? mu, Tensor? index, int[] image,"
    " bool image_channels_last, int layout, int[] size, bool channels_last, int[] stride, int[] padding,"
    " int[] dilation, int groups) -> Tensor",
    "fused_conv2d_dw": "(Tensor grad, Tensor x, Tensor? u, Tensor? v, Tensor? index, int layout, int[] size,"
    " bool channels_last, int[] stride, int[] padding, int[] dilation, int groups, int needs)"
    " -> (Tensor, Tensor, Tensor)",
}

_library = torch.library.Library("fastfact", "DEF")


def _empty_weight(like: Tensor, size, channels_last: bool) -> Tensor:
    k = like.shape[0]
    if channels_last and len(size) == 4:
        o, i, kh, kw = size
        return like.new_empty(k, o, kh, kw, i).permute(0, 1, 4, 2, 3)
    return like.new_empty(k, *size)


def _fake_rank1_weight(mu, u, v, layout, channels_last):
    if layout == formats.LINEAR:
        size = (v.shape[2], u.shape[2])
    elif layout == formats.KERNEL:
        size = (v.shape[2], u.shape[2], u.shape[3], v.shape[3])
    else:
        size = (*v.shape[2:], *u.shape[2:])
    return _empty_weight(u, size, channels_last)


def _fake_pack_bitmap(x, value_type):
    k, rows, n = x.shape
    nonzeros = torch.library.get_ctx().new_dynamic_size()
    dtype = next(t for t, code in VALUE_TYPES.items() if code == value_type)
    scales = (k, rows) if dtype == torch.int8 else (0,)
    return (
        x.new_empty(k, rows, (n + 7) // 8, dtype=torch.uint8),
        x.new_empty(nonzeros, dtype=dtype),
        x.new_empty(scales, dtype=torch.float32),
    )


def _fake_where_needed(tensors, needs):
    return tuple(t.new_empty(t.shape if needs >> bit & 1 else (0,)) for bit, t in enumerate(tensors))


def _fake_factored_conv2d(x, u, v, values, index, bias, size, stride, padding, dilation, groups):
    h, w = ((x.shape[3 + d] + 2 * padding[d] - dilation[d] * (size[2 + d] - 1) - 1) // stride[d] + 1 for d in range(2))
    return _empty_weight(x, (x.shape[1], size[0], h, w), formats.is_channels_last(x))


def _fake_factored_conv2d_backward(grad, x, u, v, values, index, *settings_and_needs):
    *_, needs = settings_and_needs
    dx = _empty_weight(x, x.shape[1:], formats.is_channels_last(x)) if needs & 1 else x.new_empty(0)
    present = [t if t is not None else x.new_empty(0) for t in (u, v, values)]
    return dx, *_fake_where_needed(present, needs >> 1)


def _fake_fused_conv2d_dw(grad, x, u, v, index, layout, size, channels_last, *settings_and_needs):
    *_, needs = settings_and_needs
    present = [t if t is not None else x.new_empty(0) for t in (u, v)]
    dmu = x.new_empty(index.shape) if index is not None else _empty_weight(x, size, channels_last)
    return *_fake_where_needed(present, needs), dmu if needs >> 2 & 1 else x.new_empty(0)


def _fake_similarity_sums(keys, uploads, valid, first, rows, epsilon, tau, count):
    counts = keys.new_empty(rows if count else 0, dtype=torch.int64)
    return [x.new_empty(rows, x.shape[1]) for x in uploads], counts


def _fake_srht(x, signs, rows, quantize):
    dtype = torch.int8 if quantize else torch.promote_types(x.dtype, torch.float32)
    scale = x.new_empty(len(x) if quantize else 0, dtype=torch.float32)
    return x.new_empty(len(x), len(rows), dtype=dtype), scale


_FAKES = {
    "rank1_weight": _fake_rank1_weight,
    "rank1_weight_backward": lambda grad, u, v, layout, needs: _fake_where_needed((u, v), needs),
    "compact_weight": lambda u, v, values, index, layout, channels_last: _fake_rank1_weight(
        values, u, v, layout, channels_last
    ),
    "compact_weight_backward": lambda grad, u, v, values, index, layout, needs: _fake_where_needed(
        (u, v, values), needs
    ),
    "lowrank_weight": lambda sigma, a, b, layout, size, scaling, channels_last: _empty_weight(a, size, channels_last),
    "lowrank_weight_backward": lambda grad, a, b, layout, size, scaling, needs: _fake_where_needed((a, b), needs),
    "hadamard_weight": lambda x1, y1, x2, y2, size, personalized, channels_last: _empty_weight(x1, size, channels_last),
    "hadamard_weight_backward": lambda grad, x1, y1, x2, y2, size, personalized, needs: _fake_where_needed(
        (x1, y1, x2, y2), needs
    ),
    "prox_sgd_step": lambda params, grads, momenta, l1, lr, momentum, weight_decay, proximal: None,
    "pack_bitmap": _fake_pack_bitmap,
    "unpack_bitmap": lambda bits, values, scale, n: bits.new_empty(*bits.shape[:2], n, dtype=torch.float32),
    "similarity_sums": _fake_similarity_sums,
    "srht": _fake_srht,
    "gather_rows": lambda samples, index: samples[0].new_empty(*index.shape, *samples[0].shape[1:]),
    "rows_linear": lambda samples, index, weight: weight.new_empty(*index.shape, weight.shape[1]),
    "rows_linear_backward": lambda samples, index, grad: grad.new_empty(
        len(index), grad.shape[2], samples[0].shape[1:].numel()
    ),
    "softmax_loss": lambda logits, labels: (logits.new_empty(len(logits)), torch.empty_like(logits)),
    "rows_softmax_loss": lambda samples, index, weight, bias, labels: (
        weight.new_empty(len(weight)),
        weight.new_empty(*index.shape, weight.shape[1]),
        weight.new_empty(weight.shape),
    ),
    "factored_conv2d": _fake_factored_conv2d,
    "ordered_factored_conv2d": lambda x, u, v, values, index, bias, order, *settings: _fake_factored_conv2d(
        x, u, v, values, index, bias, *settings
    ),
    "factored_conv2d_order": lambda x, u, v, values, index, *settings: index.new_empty(
        len(index), torch.library.get_ctx().new_dynamic_size()
    ),
    "factored_conv2d_backward": _fake_factored_conv2d_backward,
    "fused_conv2d": lambda x, u, v, mu, index, bias, layout, size, channels_last, *settings: _fake_factored_conv2d(
        x, u, v, mu, index, bias, size, *settings
    ),
    "fused_conv2d_dx": lambda grad, u, v, mu, index, image, channels_last, *settings: _empty_weight(
        grad, tuple(image), channels_last
    ),
    "fused_conv2d_dw": _fake_fused_conv2d_dw,
}

for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fastfact::{_name}", _FAKES[_name], lib=_library)

load()
