"""Every public op with arguments that fit, compared with its float64 reference, and with some that do not.

A case draws arguments that fit and, most of the time, spoils one or two. Whatever comes in, an op either returns what
the reference in float64 returns, of the shape and dtype it promises, or raises a ValueError, TypeError or
NotImplementedError that begins with a name of an op, or PyTorch's for want of memory; nothing else, and no crash.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from fastfact import ops, use_backend
from fastfact.base.formats import FLOATING, LAYOUTS, lowrank_shape, rank1_shapes
from fastfact.ops.registry import OPS

NAMES = sorted({*ops.__all__, *OPS} - {"GatheredBatch"})
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}


@dataclass
class Case:
    """A call of `function` with arguments that fit; `tensors` names those that a cast to float64 concerns."""

    function: Callable
    args: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    compare: bool = True

    def call(self):
        return self.function(**self.args)

    def as_float64(self) -> "Case":
        return Case(self.function, {name: as_float64(value) for name, value in self.args.items()})


small = st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.float32, *FLOATING])


def tensor(draw, shape, dtype=torch.float32) -> Tensor:
    """Numbers near 1, laid out in one of the ways in which a tensor can lie in memory."""
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    how = draw(st.sampled_from(["plain", "plain", "gaps", "transposed", "last", "offset"]))
    shape = tuple(shape)
    if how == "gaps":
        t = torch.randn(*shape, 2, generator=generator)[..., 0]
    elif how == "transposed" and len(shape) > 1:
        t = torch.randn(*shape[::-1], generator=generator).permute(*range(len(shape))[::-1])
    elif how == "last" and len(shape) >= 4:
        t = torch.randn(*shape[:-3], *shape[-2:], shape[-3], generator=generator).movedim(-1, -3)
    elif how == "offset" and shape:
        t = torch.randn(shape[0] + 1, *shape[1:], generator=generator)[1:]
    else:
        t = torch.randn(shape, generator=generator)
    return t.to(dtype)


def clients_of(draw, k, shape, dtype) -> Tensor:
    """With the client axis, or without it, or shared by a stride of 0."""
    how = draw(st.sampled_from(["own", "own", "shared", "none"])) if k is not None else "none"
    if how == "none":
        return tensor(draw, shape, dtype)
    if how == "shared":
        return tensor(draw, (1, *shape), dtype).expand(k, *shape)
    return tensor(draw, (k, *shape), dtype)


def positions(draw, numel, k=None) -> Tensor:
    """A support of one client, or of each, all of one length."""
    count = draw(st.integers(0, min(numel, 40)))
    rows = [
        torch.randperm(numel, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))[:count].sort().values
        for _ in range(k or 1)
    ]
    index = torch.stack(rows) if k else rows[0]
    return index.to(draw(st.sampled_from([torch.int32, torch.int64])))


def some_clients(draw, least=0):
    return draw(st.sampled_from([None, None, 1, 2, 3, least]))


@st.composite
def rank1_weight(draw):
    layout, dtype, k = draw(st.sampled_from(["linear", "spatial", "kernel", "view"])), draw(dtypes), some_clients(draw)
    size = [draw(small) for _ in range(2 if layout == "linear" else 4)]
    u, v = rank1_shapes(LAYOUTS[layout], size)
    rank = draw(st.integers(1, 3))
    args = {"u": clients_of(draw, k, (rank, *u), dtype), "v": clients_of(draw, k, (rank, *v), dtype), "layout": layout}
    mu = draw(st.sampled_from(["none", "dense", "compact"]))
    if mu == "dense":
        args["mu"] = clients_of(draw, k, size, dtype)
    elif mu == "compact":
        args["index"] = positions(draw, torch.Size(size).numel(), k)
        args["mu"] = tensor(draw, args["index"].shape, dtype)
    args["channels_last"] = draw(st.sampled_from([None, True, False]))
    return Case(ops.rank1_weight, args, dtype)


@st.composite
def lowrank_weight(draw):
    layout, dtype, k = draw(st.sampled_from(["separable", "view"])), draw(dtypes), some_clients(draw)
    size = tuple(draw(st.integers(0, 5)) for _ in range(draw(st.sampled_from([2, 4]))))
    rows, columns = lowrank_shape(LAYOUTS[layout], size)
    rank = draw(st.integers(0, 3))
    args = {"a": clients_of(draw, k, (rank, columns), dtype), "b": clients_of(draw, k, (rows, rank), dtype)}
    args |= {"size": size, "layout": layout, "scaling": draw(st.floats(-3, 3)), "sigma": None}
    if draw(st.booleans()):
        args["sigma"] = clients_of(draw, k, size, dtype)
    return Case(ops.lowrank_weight, args | {"channels_last": draw(st.sampled_from([None, True, False]))}, dtype)


@st.composite
def hadamard_weight(draw):
    dtype, k = draw(dtypes), some_clients(draw)
    size = tuple(draw(st.integers(0, 5)) for _ in range(draw(st.sampled_from([2, 4]))))
    columns = torch.Size(size[1:]).numel()
    args = {}
    for n in (1, 2):
        rank = draw(st.integers(0, 3))
        args[f"x{n}"] = clients_of(draw, k, (size[0], rank), dtype)
        args[f"y{n}"] = clients_of(draw, k, (columns, rank), dtype)
    args |= {"size": size, "personalized": draw(st.booleans()), "channels_last": draw(st.booleans())}
    return Case(ops.hadamard_weight, args, dtype)


def convolution(draw, dtype, k):
    """What all convolutions take, but for u and v: images, bias, size, and the settings."""
    groups = draw(st.sampled_from([1, 1, 2]))
    size = (groups * draw(small), draw(small), draw(small), draw(small))
    stride, padding, dilation = (
        draw(st.one_of(st.integers(low, 3), st.tuples(st.integers(low, 3), st.integers(low, 3)))) for low in (1, 0, 1)
    )
    pad, gap = (x if isinstance(x, tuple) else (x, x) for x in (padding, dilation))
    image = [max(1, gap[d] * (size[2 + d] - 1) + 1 - 2 * pad[d]) + draw(st.integers(0, 4)) for d in range(2)]
    args = {"x": clients_of(draw, k, (draw(st.integers(0, 3)), groups * size[1], *image), dtype)}
    if draw(st.booleans()):
        args["bias"] = clients_of(draw, k, (size[0],), dtype)
    return args | {"size": size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def add_factors(draw, args, layout, dtype, k) -> None:
    rank = draw(st.integers(1, 3))
    for name, shape in zip("uv", rank1_shapes(LAYOUTS[layout], args["size"]), strict=True):
        args[name] = clients_of(draw, k, (rank, *shape), dtype)


def add_mu(draw, args, dtype, k) -> None:
    """μ of the factored layers: none, compact or dense."""
    mu = draw(st.sampled_from(["none", "dense", "compact"]))
    if mu == "dense":
        args["values"] = clients_of(draw, k, args["size"], dtype)
    elif mu == "compact":
        add_support(draw, args, dtype, k)


def add_support(draw, args, dtype, k) -> None:
    args["index"] = positions(draw, torch.Size(args["size"]).numel(), k)
    args["values"] = tensor(draw, args["index"].shape, dtype)


@st.composite
def factored_conv2d(draw):
    dtype, k = draw(dtypes), some_clients(draw, 1)
    args = convolution(draw, dtype, k)
    if draw(st.booleans()):
        add_factors(draw, args, "spatial", dtype, k)
    add_mu(draw, args, dtype, k)
    return Case(ops.factored_conv2d, args | {"repeated": draw(st.booleans())}, dtype)


@st.composite
def separable_conv2d(draw):
    dtype, k = draw(dtypes), some_clients(draw, 1)
    args = convolution(draw, dtype, k)
    add_factors(draw, args, "kernel", dtype, k)
    add_mu(draw, args, dtype, k)
    return Case(ops.separable_conv2d, args, dtype)


@st.composite
def fused_conv2d(draw):
    dtype, k = draw(dtypes), some_clients(draw, 1)
    args = convolution(draw, dtype, k) | {"layout": draw(st.sampled_from(["spatial", "kernel", "view"]))}
    mu = draw(st.sampled_from(["none", "dense", "compact"]))
    if mu == "none" or draw(st.booleans()):
        add_factors(draw, args, args["layout"], dtype, k)
    if mu == "dense":
        args["mu"] = clients_of(draw, k, args["size"], dtype)
    elif mu == "compact":
        add_support(draw, args, dtype, k)
        args["mu"] = args.pop("values")
    return Case(ops.fused_conv2d, args, dtype)


@st.composite
def factored_linear(draw):
    dtype, k = draw(dtypes), some_clients(draw, 1)
    size = (draw(small), draw(small))
    args = {"size": size}
    if draw(st.booleans()):
        add_factors(draw, args, "linear", dtype, k)
    add_mu(draw, args, dtype, k)
    if draw(st.booleans()):
        args["bias"] = clients_of(draw, k, (size[0],), dtype)
    dims = {"u": 2, "v": 2, "values": 1 if "index" in args else 2, "index": 1, "bias": 1}
    own = any(args[name].dim() > dims[name] for name in dims if name in args)
    rows = [draw(st.integers(0, 4)) for _ in range(draw(st.integers(0, 2)))]
    return Case(ops.factored_linear, {"x": tensor(draw, (*([k] if own else []), *rows, size[1]), dtype)} | args, dtype)


@st.composite
def lowrank_linear(draw):
    dtype, k, sizes = draw(dtypes), some_clients(draw, 1), st.integers(0, 5)
    o, i, r = (draw(sizes) for _ in range(3))
    args = {"sigma": clients_of(draw, k, (o, i), dtype), "a": clients_of(draw, k, (r, i), dtype)}
    args |= {"b": clients_of(draw, k, (o, r), dtype), "scaling": draw(st.floats(-2, 2))}
    if draw(st.booleans()):
        args["bias"] = clients_of(draw, k, (o,), dtype)
    own = any(t.dim() > (1 if name == "bias" else 2) for name, t in args.items() if isinstance(t, Tensor))
    shape = (*([k] if own else []), *(draw(sizes) for _ in range(draw(st.integers(0, 2)))), i)
    for name in ("x", "seen")[: draw(st.integers(1, 2))]:
        args[name] = tensor(draw, shape, dtype)
    return Case(ops.lowrank_linear, args, dtype)


@st.composite
def prox_sgd_step(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4))
    momentum = draw(st.sampled_from([0.0, 0.9]))
    kinds = [draw(dtypes) for _ in shapes]
    groups = [[tensor(draw, shape, kind) for shape, kind in zip(shapes, kinds, strict=True)] for _ in range(3)]
    args = {"params": groups[0], "grads": groups[1], "momenta": groups[2] if momentum else []}
    args |= {
        "l1": [draw(st.sampled_from([0.0, 0.5])) for _ in shapes],
        "lr": draw(st.floats(0, 1)),
        "momentum": momentum,
    }
    args |= {"weight_decay": draw(st.floats(0, 1)), "proximal": draw(st.booleans())}

    def step(params, momenta, **others):
        params, momenta = (
            [t.clone() for t in group]
            if isinstance(group, list) and all(isinstance(t, Tensor) for t in group)
            else group
            for group in (params, momenta)
        )
        ops.prox_sgd_step(params, momenta=momenta, **others)
        return (*params, *momenta)

    return Case(step, args, torch.bfloat16)


@st.composite
def bitmap(draw):
    k, dtype = some_clients(draw), draw(dtypes)
    shape = (*([] if k is None else [k]), draw(st.integers(0, 4)), draw(st.integers(0, 40)))
    x = tensor(draw, shape, dtype)
    args = {
        "x": x * (x > draw(st.sampled_from([-9.0, 0.0, 9.0]))),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
    }

    def there_and_back(x, dtype):
        packed = ops.pack_bitmap(x, dtype)
        return ops.unpack_bitmap(*packed, x.shape[-1])

    return Case(there_and_back, args, torch.bfloat16)


@st.composite
def unpack_bitmap(draw):
    n = draw(st.integers(0, 40))
    x = tensor(draw, (draw(st.integers(0, 3)), n))
    bits, values, scale = ops.pack_bitmap(x * (x > 0), draw(st.sampled_from([torch.float32, torch.int8])))
    return Case(ops.unpack_bitmap, {"bits": bits, "values": values, "scale": scale, "n": n}, compare=False)


@st.composite
def similarity_mix(draw):
    m, dtype = draw(st.integers(0, 6)), draw(dtypes)
    keys = tensor(draw, (m, draw(st.integers(0, 5))), dtype)
    if draw(st.booleans()):
        keys = (10 * keys).to(torch.int8)
    widths = draw(st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=3))
    begin = draw(st.integers(0, m))
    args = {"v": keys, "uploads": [tensor(draw, (m, *width), dtype) for width in widths]}
    args |= {"epsilon": draw(st.floats(0, 5)), "tau": draw(st.floats(-1, 1)), "min_matches": draw(st.integers(1, 4))}
    if draw(st.booleans()):
        args["valid"] = torch.rand(m) < 0.5
    # A cosine close to τ may fall on its other side by rounding.
    return Case(ops.similarity_mix, args | {"rows": range(begin, draw(st.integers(begin, m)))}, dtype, compare=False)


@st.composite
def mix(draw):
    k, m, dtype = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(dtypes)
    matrix = torch.rand(k, m)
    if k and draw(st.booleans()):
        matrix = matrix[:1].expand(k, m)
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    return Case(ops.mix, {"matrix": matrix, "x": tensor(draw, (m, *shape), dtype)}, dtype)


@st.composite
def srht(draw):
    d, dtype = draw(st.integers(0, 40)), draw(dtypes)
    shape = (draw(st.integers(0, 3)), d) if draw(st.booleans()) else (d,)
    m = draw(st.integers(1, 1 << max(d - 1, 0).bit_length()))
    compute = torch.promote_types(dtype, torch.float32)
    args = {"x": tensor(draw, shape, dtype), "m": m, "seed": draw(st.integers(0, 5))}
    return Case(ops.srht, args | {"dtype": draw(st.sampled_from([torch.int8, compute]))}, dtype, compare=False)


@st.composite
def gather_rows(draw):
    k, dtype = draw(st.integers(1, 3)), draw(st.sampled_from([*FLOATING, torch.int64, torch.bool, torch.uint8]))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    counts = [draw(st.integers(1, 4)) for _ in range(k)]
    batch = draw(st.integers(0, 4))
    samples = [tensor(draw, (n, *shape)).mul(3).to(dtype) for n in counts]
    index = torch.stack([torch.randint(n, (batch,)) for n in counts])
    return Case(ops.gather_rows, {"samples": samples, "index": index}, dtype)


@st.composite
def cross_entropy(draw):
    b, c, dtype = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(dtypes)
    return Case(ops.cross_entropy, {"logits": tensor(draw, (b, c), dtype), "labels": torch.randint(c, (b,))}, dtype)


CASES = {
    "rank1_weight": rank1_weight(),
    "lowrank_weight": lowrank_weight(),
    "hadamard_weight": hadamard_weight(),
    "factored_conv2d": factored_conv2d(),
    "separable_conv2d": separable_conv2d(),
    "fused_conv2d": fused_conv2d(),
    "factored_linear": factored_linear(),
    "lowrank_linear": lowrank_linear(),
    "prox_sgd_step": prox_sgd_step(),
    "pack_bitmap": bitmap(),
    "unpack_bitmap": unpack_bitmap(),
    "similarity_mix": similarity_mix(),
    "mix": mix(),
    "srht": srht(),
    "gather_rows": gather_rows(),
    "cross_entropy": cross_entropy(),
}


def spoiled_tensor(draw, t: Tensor):
    """Something else in the place of a tensor."""
    ways = {
        "none": lambda: None,
        "list": lambda: t.tolist(),
        "number": lambda: 3,
        "text": lambda: "x",
        "array": lambda: t.float().numpy(),
        "other dtype": lambda: t.to(draw(st.sampled_from([torch.float64, torch.float16, torch.int64, torch.bool]))),
        "float8": lambda: t.float().to(torch.float8_e4m3fn),
        "complex": lambda: t.to(torch.complex64),
        "sparse": lambda: t.to_sparse(),
        "meta": lambda: t.to("meta"),
        "one more axis": lambda: t.unsqueeze(draw(st.integers(0, t.dim()))),
        "one axis less": lambda: t.flatten(0, 1) if t.dim() > 1 else t.sum(),
        "longer": lambda: torch.cat([t, t]) if t.dim() else t,
        "shorter": lambda: t[..., 1:] if t.dim() else t,
        "empty": lambda: t[:0] if t.dim() else t,
        "huge": lambda: t[:1].expand(2**45, *t.shape[1:]) if t.dim() and len(t) else t,
        "transposed": lambda: t.mT if t.dim() > 1 else t,
        "expanded": lambda: t[:1].expand(t.shape) if t.dim() and len(t) else t,
        "not finite": lambda: t.float().mul(float("nan")).to(t.dtype),
        "requires grad": lambda: t.detach().clone().requires_grad_(t.is_floating_point()),
        "shifted": lambda: (
            t + draw(st.sampled_from([-1, 1, 100, 2**31, 2**32, -(2**32)])) if t.dtype == torch.int64 else t + 1
        ),
        "reversed": lambda: t.flip(0) if t.dim() else t,
        "repeated": lambda: torch.zeros_like(t),
    }
    return ways[draw(st.sampled_from(sorted(ways)))]()


ODD = st.sampled_from(
    [
        *(None, 0, -1, 1, 2, 3, 7, 2**15, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 0.5, 1.5),
        *(
            float("nan"),
            float("inf"),
            "x",
            "",
            True,
            {},
            range(2),
            object(),
            torch.float16,
            torch.int8,
            torch.tensor(2),
        ),
        *((), (1,), (1, 2), (2, 2, 2), (0, 0), (-1, 1), (2**31, 1), [1, 1], (1.5, 1), (2**62, 2**62), (4, 4, 3)),
        (2**20, 2**20, 2**20, 2**20),
    ]
)


def spoil(draw, args: dict, name: str) -> None:
    value = args[name]
    if isinstance(value, Tensor):
        args[name] = spoiled_tensor(draw, value)
    elif isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        first = value[at]
        args[name] = [
            *value[:at],
            spoiled_tensor(draw, first) if isinstance(first, Tensor) else draw(ODD),
            *value[at + 1 :],
        ]
    elif isinstance(value, list) and draw(st.booleans()):
        args[name] = value[1:]
    else:
        args[name] = draw(ODD)


def as_float64(value):
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, list):
        return [as_float64(one) for one in value]
    return value


def flat(out) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for one in out for t in flat(one)]


NAMED = re.compile(rf"^({'|'.join(map(re.escape, NAMES))})\b.*: ", re.DOTALL)


def attempt(case: Case, spoils: int) -> None:
    """Call, and compare with the reference in float64 where the arguments fit: the gradients as well, if enabled."""
    truth = case.as_float64() if not spoils else None
    if truth and torch.is_grad_enabled():
        want_gradients(case), want_gradients(truth)
    try:
        out = case.call()
    except (ValueError, TypeError, NotImplementedError) as error:
        assert spoils, f"arguments that fit are refused: {error}"
        assert NAMED.match(str(error)), f"the message names no op: {error!r}"
        return
    except RuntimeError as error:
        assert spoils and "allocate" in str(error), f"{type(error).__name__}: {error}"
        return
    if spoils or not case.compare:
        return
    with use_backend("reference"):
        true = truth.call()
        gradients = backward(truth, true, true)
    for one, other in zip(flat(out), flat(true), strict=True):
        close(one, other, case.dtype)
    for name, gradient in backward(case, out, true).items():
        close(gradient, gradients[name], case.dtype)


def want_gradients(case: Case) -> None:
    for name, value in case.args.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            case.args[name] = value.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def backward(case: Case, out, like) -> dict[str, Tensor]:
    """Gradients by argument of the sum of the outputs times cosines; of those that the outputs depend on."""
    outputs = [(one, true) for one, true in zip(flat(out), flat(like), strict=True) if one.requires_grad]
    inputs = {name: value for name, value in case.args.items() if isinstance(value, Tensor) and value.requires_grad}
    if not outputs or not inputs:
        return {}
    signs = [torch.arange(true.numel(), dtype=torch.float64).cos().reshape(true.shape).to(one) for one, true in outputs]
    found = torch.autograd.grad([one for one, _ in outputs], list(inputs.values()), signs, allow_unused=True)
    return {name: grad for name, grad in zip(inputs, found, strict=True) if grad is not None}


def close(one: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    assert one.shape == true.shape
    scale = 1 + true.double().abs().max().item() if true.numel() else 1
    tolerance = TOLERANCE[dtype] * scale if dtype in TOLERANCE else 0
    torch.testing.assert_close(one.double(), true.double(), rtol=0, atol=tolerance)


def check(draw_from, name: str) -> None:
    case = draw_from.draw(CASES[name])
    spoils = min(draw_from.draw(st.sampled_from([0, 1, 1, 2])), len(case.args))
    for argument in draw_from.draw(st.permutations(sorted(case.args)))[:spoils]:
        spoil(draw_from.draw, case.args, argument)
    grad = draw_from.draw(st.booleans())
    with torch.set_grad_enabled(grad):
        attempt(case, spoils)


def fuzz(name: str, examples: int, number: int | None = None) -> None:
    """Try so many inputs of one op, the same ones for the same number; the smallest that fails is shown."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=number is None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(st.data())
    def one(data):
        check(data, name)

    (one if number is None else seed(number)(one))()


def run(seconds: float, number: int, batch: int = 200) -> int:
    """Inputs of all ops in turn for so long, from this seed on. Returns how many."""
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for name in CASES:
            print(f"{name}: seed {number}", flush=True)
            fuzz(name, batch, number)
            tried += batch
        number += 1
    return tried
