"""Whole architectures: factorized, made compact, trained a step, evaluated, made dense again, with the same function.

All families of torchvision and two dozen architectures of timm: the suite has each once, of equal blocks one after
another the first, `make test-all` with every parameterization in both memory formats, as deep as they are.
"""

import itertools
import re
import warnings
from unittest import mock

import pytest
import timm
import torch
import torchvision
from torch import nn

import fastfact as ff

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
SPECS = {
    "rank1": ff.Rank1(),
    "kernel": ff.Rank1(layout="kernel", rank=2),
    "lowrank": ff.LowRank(ratio=0.2),
    "hadamard": ff.Hadamard(),
}
FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


def _small_head(name):
    """AlexNet and VGG with 32 in place of 4096 hidden units, which are nine tenths of their time here."""

    def build():
        with torch.device("meta"):
            model = torchvision.models.get_model(name, weights=None, num_classes=5)
        inputs = model.classifier[1 if name == "alexnet" else 0].in_features
        model.classifier = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 5))
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    return build


def _named(name, **options):
    return lambda: torchvision.models.get_model(name, weights=None, **{"num_classes": 5} | options)


def _vision_transformer():
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)


def _swin():
    make = torchvision.models.swin_transformer.SwinTransformer
    return make([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=5)


def _maxvit():
    return torchvision.models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, stochastic_depth_prob=0.0, num_classes=5)


def _densenet():
    return torchvision.models.DenseNet(8, (2, 2, 2, 2), 16, num_classes=5)


def _narrow(self, block, planes, *rest, **options):
    return _make_layer(self, block, planes // 4, *rest, **options)


_make_layer = torchvision.models.ResNet._make_layer


def _fcn():
    """On a ResNet-50 of a quarter of the channels."""
    with mock.patch.object(torchvision.models.ResNet, "_make_layer", _narrow):
        trunk = torchvision.models.resnet50(weights=None, replace_stride_with_dilation=[False, True, True])
    parts = torchvision.models.segmentation.fcn
    trunk = torchvision.models._utils.IntermediateLayerGetter(trunk, {"layer4": "out"})
    return parts.FCN(trunk, parts.FCNHead(512, 5))


def _detector(name):
    """With a quarter of a ResNet's channels, and 64 in place of 1024 hidden units in the head of what has boxes."""

    def build():
        with mock.patch.object(torchvision.models.ResNet, "_make_layer", _narrow):
            model = _named(name, weights_backbone=None, min_size=64, max_size=64)()
        if hasattr(model, "roi_heads"):
            heads, parts = model.roi_heads, torchvision.models.detection.faster_rcnn
            heads.box_head = parts.TwoMLPHead(heads.box_head.fc6.in_features, 64)
            heads.box_predictor = parts.FastRCNNPredictor(64, 5)
        return model

    return build


CLASSIFIERS = {
    "alexnet": (_small_head("alexnet"), 64),
    "vgg": (_small_head("vgg11"), 32),
    "squeezenet": (_named("squeezenet1_1"), 32),
    "shufflenet": (_named("shufflenet_v2_x0_5"), 32),
    "mobilenet_v2": (_named("mobilenet_v2", width_mult=0.25), 32),
    "mobilenet_v3": (_named("mobilenet_v3_small", width_mult=0.5), 32),
    "mnasnet": (_named("mnasnet0_5"), 32),
    "resnet": (_named("resnet18"), 32),
    "bottleneck": (_named("resnet50"), 32),
    "resnext": (_named("resnext50_32x4d"), 32),
    "densenet": (_densenet, 32),
    "googlenet": (_named("googlenet", init_weights=False, aux_logits=False), 32),
    "inception": (_named("inception_v3", init_weights=False, aux_logits=False), 96),
    "efficientnet": (_named("efficientnet_b0"), 32),
    "efficientnet_v2": (_named("efficientnet_v2_s"), 32),
    "regnet": (_named("regnet_y_400mf"), 32),
    "convnext": (_named("convnext_tiny"), 32),
    "vit": (_vision_transformer, 32),
    "swin": (_swin, 32),
    "maxvit": (_maxvit, 32),
}
SEGMENTERS = {"fcn_resnet50": (_fcn, 64)} | {
    name: (_named(name, weights_backbone=None), 64)
    for name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
}
DETECTORS = {
    name: (_detector(name), 64)
    for name in (
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        "fcos_resnet50_fpn",
        "retinanet_resnet50_fpn",
        "maskrcnn_resnet50_fpn",
        "keypointrcnn_resnet50_fpn",
    )
} | {name: (_named(name, weights_backbone=None), 64) for name in ("ssd300_vgg16", "ssdlite320_mobilenet_v3_large")}
LONG = ("keypointrcnn_resnet50_fpn", "ssd300_vgg16")
"""Half a minute each: with all that is slow."""
DENSE_FAILS = {
    ("keypointrcnn_resnet50_fpn", "channels_last"),  # torchvision calls `view` on logits that do not lie in order
    # PyTorch's backward of 1×1, stride 2, from fewer than 8 channels, writes beyond its memory.
    ("fastvit_t8", "channels_last"),
    ("repvgg_a0", "channels_last"),
}
"""What does not train before it is factorized either, seen with PyTorch 2.14 on a processor with AVX2."""
TIMM = [
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "coat_tiny",
    "convmixer_768_32",
    "convnextv2_atto",
    "crossvit_tiny_240",
    "darknet53",
    "deit_tiny_patch16_224",
    "dla34",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformerv2_s0",
    "efficientnet_lite0",
    "eva02_tiny_patch14_224",
    "fastvit_t8",
    "ghostnet_100",
    "hrnet_w18_small",
    "levit_128s",
    "mixer_s32_224",
    "mobilenetv4_conv_small",
    "mobilevit_xxs",
    "poolformer_s12",
    "repvgg_a0",
    "res2net50_14w_8s",
    "resnetv2_50",
    "rexnet_100",
    "tf_efficientnet_b0",
    "tresnet_m",
    "vit_tiny_patch16_224",
    "xcit_nano_12_p16_224",
]
OWN_SIZES = ("crossvit_tiny_240",)
"""Their images have to be of 240 pixels, for patches of two sizes; others' are small where the network is short."""


def loss_of(model, x, detection):
    if not detection:
        out = model(x)
        out = out["out"] if isinstance(out, dict) else out
        return sum(part.square().mean() for part in (out if isinstance(out, (tuple, list)) else [out]))
    corners = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    target = {"boxes": corners, "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64, dtype=torch.uint8)}
    target["keypoints"] = torch.cat([corners.reshape(1, 2, 2), torch.ones(1, 2, 1)], -1)[:, [0, 1] * 8 + [0]]
    return sum(model(list(x), [target] * len(x)).values())


def outputs(model, x, detection):
    """What the model computes, as one vector; of a detector the features, whose order no threshold changes."""
    out = model.backbone(model.transform(list(x))[0].tensors) if detection else model(x)
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else [out]
    return torch.cat([part.flatten() for part in parts])


@pytest.fixture
def deep(request):
    """Whether the network has all its blocks."""
    return request.node.get_closest_marker("slow") is not None


def _shorten(model):
    """Leave out the blocks that are as the one before."""
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            before = ""
            for name, child in list(module.named_children()):
                text = re.sub(r"(p|drop_prob)=[\d.]+", "", repr(child))
                if text == before and any(True for _ in child.parameters()):
                    delattr(module, name)
                before = text


def check(build, side, spec, layout, deep, detection=False):
    torch.manual_seed(0)
    model = build().to(memory_format=FORMATS[layout])
    if not deep:
        _shorten(model)
    x = torch.randn(2, 3, side, side).to(memory_format=FORMATS[layout])
    state = set(model.state_dict())
    ff.factorize(model, spec, init="random" if isinstance(spec, ff.Hadamard) else "svd", unsupported="skip")
    layers = ff.factorized_layers(model)
    assert layers
    weights = sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules())
    assert weights <= 0.1 * len(layers), f"{weights} layers were left out, {len(layers)} converted"
    if isinstance(spec, ff.Rank1):
        for layer in layers.values():
            layer.compact(0.2)
    optimizer = ff.optim.ProxSGD(model.parameters(), lr=1e-4, momentum=0.9, l1=1e-4)
    loss = loss_of(model.train(), x, detection)
    loss.backward()
    assert any(layer.factors()[next(iter(layer.factors()))].grad is not None for layer in layers.values())
    # Two images of few pixels: batch-norm over two numbers has gradients of any size, of the dense network too.
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        wanted = outputs(model, x, detection)
        again = outputs(model, x, detection)
    torch.testing.assert_close(again, wanted)
    model = ff.densify(model)
    assert set(model.state_dict()) == state and not ff.factorized_layers(model)
    with torch.no_grad():
        dense = outputs(model, x, detection)
    # Sums in another order, through a hundred layers: 1e-3 of the outputs' size.
    assert (dense - wanted).norm() <= 1e-3 * wanted.norm() + 1e-5


def cases(names):
    """Every name with every spec in both formats; the suite has each name once, with the next spec and format."""
    ways = list(itertools.product(SPECS, FORMATS))
    return pytest.mark.parametrize(
        "name, spec, layout",
        [
            pytest.param(
                name, *way, marks=() if number == 3 * place % len(ways) and name not in LONG else pytest.mark.slow
            )
            for place, name in enumerate(names)
            for number, way in enumerate(ways)
            if (name, way[1]) not in DENSE_FAILS
        ],
    )


@cases(CLASSIFIERS)
def test_classifiers(name, spec, layout, deep):
    check(*CLASSIFIERS[name], SPECS[spec], layout, deep)


@cases(SEGMENTERS)
def test_segmenters(name, spec, layout, deep):
    check(*SEGMENTERS[name], SPECS[spec], layout, deep)


@cases(DETECTORS)
def test_detectors(name, spec, layout, deep):
    check(*DETECTORS[name], SPECS[spec], layout, deep, detection=True)


@cases(TIMM)
def test_architectures_of_timm(name, spec, layout, deep):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The smallest of its family has 86 million numbers.
        small = {"depth": 2, "embed_dim": 64, "num_heads": 4} if name.startswith("beit") else {}
        config = timm.get_pretrained_cfg(name)
        side = config.input_size[-1] if config.fixed_input_size else 64
        if not deep and name not in OWN_SIZES and config.fixed_input_size:
            small["img_size"] = side = 64
        model = timm.create_model(name, num_classes=5, **small)
    # The branches of HRNet are counted when it is made.
    check(lambda: model, side, SPECS[spec], layout, deep or name.startswith("hrnet"))


def test_convolutions_that_standardize_their_weight_are_named_and_left_out():
    model = timm.create_model("nfnet_l0", num_classes=5)
    with pytest.raises(ValueError, match=r"stem\.conv1 is a ScaledStdConv2d, which has a forward of its own"):
        ff.factorize(model, ff.Rank1(), unsupported="error")
    ff.factorize(model, ff.LowRank(rank=2), only=["head.*"], unsupported="skip")
    assert list(ff.factorized_layers(model)) == ["head.fc"]
