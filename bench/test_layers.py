"""`pytest bench`: the layers over the convolutions of ResNet-9, ours and the dense layer, as pytest-benchmark has them.

`fastfact bench layers` measures the same sides in turn, with more rivals, and gives ratios.
"""

import pytest

from fastfact.bench import layers
from fastfact.bench.common import FORMATS, RESNET9, name_of


@pytest.mark.parametrize("side", ["ours", "dense"])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", dict.fromkeys(RESNET9), ids=name_of)
def test_layer(benchmark, shape, fmt, training, density, side):
    i, o, kernel, stride, image = shape
    geometry = (i, o, kernel, stride, 1, image)
    sides, more = layers.convolution(geometry, density, fmt, batch=64, training=training, rivals=False)
    benchmark.group = f"{name_of(shape)}, {fmt}, {'training' if training else 'forward'}, density {density}"
    benchmark.extra_info.update(more)
    benchmark.pedantic(sides[side], rounds=5, warmup_rounds=1)
