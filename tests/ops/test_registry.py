"""What the declarations of the ops tell PyTorch."""

from pathlib import Path

import pytest
import torch

from fastfact.base.formats import KERNEL, LINEAR, SPATIAL, VIEW, rank1_equation, rank1_shapes, rank1_size
from fastfact.ops.registry import BACKENDS, OPS, op

SCHEMAS = Path(__file__).with_name("schemas.txt").read_text().splitlines()
"""The schemas that compiled libraries implement: one that is built with another has to be built again."""


def test_the_schemas_are_those_of_the_compiled_libraries():
    declared = {str(getattr(torch.ops.fastfact, name).default._schema) for name in OPS}
    assert declared == {f"fastfact::{line}" for line in SCHEMAS}


def test_the_step_says_what_it_writes_to():
    arguments = torch.ops.fastfact.prox_sgd_step.default._schema.arguments
    assert [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write] == ["params", "momenta"]


def test_a_kernel_that_is_declared_is_there():
    """In the library that is built here, and among the Triton kernels."""
    from fastfact import kernels

    for name, declared in OPS.items():
        assert set(declared.kernels) <= set(BACKENDS)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastfact::{name}", "CPU") == ("cpu" in declared.kernels)
        assert hasattr(kernels, name) == ("triton" in declared.kernels)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="gpu must be of cpu, cuda, triton"):
        op(lambda x: x, kernels=("gpu",))


@pytest.mark.parametrize("layout", [LINEAR, SPATIAL, KERNEL, VIEW])
def test_the_shapes_of_rank1_factors_and_of_their_weight(layout):
    size = (5, 4) if layout == LINEAR else (5, 4, 3, 2)
    u, v = rank1_shapes(layout, size)
    assert rank1_size(layout, u, v) == size
    weight = torch.einsum(rank1_equation(layout), torch.ones(1, 1, *u), torch.ones(1, 1, *v))
    assert weight.numel() == torch.Size(size).numel() and (layout == VIEW or weight.shape[1:] == size)
