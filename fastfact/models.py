"""The networks of the papers' experiments, by name.

Every builder takes the shape of one sample and the number of classes. Layers with a weight are registered in the order
in which they run, the classifier `fc` last, so that "the layer before the classifier" is the last but one of them.
All weights but those of embeddings and norms belong to `nn.Conv2d` and `nn.Linear`, so that `ff.factorize` and the
client axis (`vmap`) work on each: the recurrent and attention layers are written with linear layers for that reason.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn


def _channels(base: int, width: float) -> int:
    """`base` · `width`, rounded to the nearest multiple of 8 and at least 8: whole vector registers of channels."""
    return max(8, round(base * width / 8) * 8)


def _image_shape(model: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ValueError(
            f"{model}: shape={tuple(shape)}, must be (channels, height, width), at least {smallest} pixels each way"
        )
    return shape


def _check(model: str, num_classes: int, width: float) -> None:
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(f"{model}: num_classes={num_classes!r}, must be an integer of at least 1")
    if not 0 < width < math.inf:
        raise ValueError(f"{model}: width={width}, must be positive and finite")


HEADS = ("", "2fc", "2fc-bn")


def _head(features: int, num_classes: int, head: str) -> nn.Module:
    """The classifier: one linear layer; two with ReLU between them ("2fc"); also with batch-norm ("2fc-bn").

    The last two are those of Factorized-FL's Figure 8 (h), which does not say how wide: as wide as the input.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r}, must be one of {', '.join(map(repr, HEADS))}")
    if not head:
        return nn.Linear(features, num_classes)
    norm = [nn.BatchNorm1d(features)] if head == "2fc-bn" else []
    return nn.Sequential(nn.Linear(features, features), *norm, nn.ReLU(), nn.Linear(features, num_classes))


class ResNet9(nn.Module):
    """ResNet-9 of Factorized-FL (arXiv version, Table 3): eight bias-free convolutions and a linear classifier.

    Each convolution is followed by batch-norm and ReLU. conv2 has stride 2, a max-pool of 2 follows conv5, an adaptive
    max-pool to 1×1 follows conv8; identity skips go around conv3–conv4 and conv6–conv7. Padding keeps the size, so
    images of 3×3 pixels and up work. The table gives no padding and does not say where the skips are: they go around
    the pairs with as many channels before as after, as in the published code, which leaves conv8 unpadded, though
    (images must then have 11×11 pixels).

    x [n, in_channels, h, w] → logits [n, num_classes]. 2,568,384 convolution and classifier weights for 3 channels and
    10 classes, besides 2,944 of batch-norm and the classifier's bias.
    """

    def __init__(self, in_channels: int, num_classes: int, width: float = 1.0, head: str = ""):
        super().__init__()
        _check("resnet9", num_classes, width)
        a, b, c = (_channels(base, width) for base in (64, 128, 256))
        plan = [(in_channels, a, 3, 1), (a, b, 5, 2), (b, b, 3, 1), (b, b, 3, 1)]
        plan += [(b, c, 3, 1), (c, c, 3, 1), (c, c, 3, 1), (c, c, 3, 1)]
        for index, (i, o, kernel, stride) in enumerate(plan, 1):
            self.add_module(f"conv{index}", nn.Conv2d(i, o, kernel, stride, padding=kernel // 2, bias=False))
            self.add_module(f"norm{index}", nn.BatchNorm2d(o))
        self.fc = _head(c, num_classes, head)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        y = F.relu(self.norm3(self.conv3(x)))
        x = x + F.relu(self.norm4(self.conv4(y)))
        x = F.max_pool2d(F.relu(self.norm5(self.conv5(x))), 2)
        y = F.relu(self.norm6(self.conv6(x)))
        x = x + F.relu(self.norm7(self.conv7(y)))
        x = F.relu(self.norm8(self.conv8(x)))
        return self.fc(F.adaptive_max_pool2d(x, 1).flatten(1))


def resnet9(in_channels: int, num_classes: int, width: float = 1.0, head: str = "") -> ResNet9:
    """`ResNet9`; `width` multiplies 64, 128 and 256 channels, rounded to multiples of 8 and at least 8. head: "", or
    "2fc" and "2fc-bn" of Factorized-FL's Figure 8 (h), two linear layers without and with batch-norm between them."""
    return ResNet9(in_channels, num_classes, width, head)


class CNN2(nn.Module):
    """The CNN of FedAvg (McMahan et al., 2017): two 5×5 convolutions with max-pools of 2, then two linear layers.

    x [n, channels, h, w] → logits [n, num_classes].
    `padding=2` keeps the size (the paper's 1,663,370 parameters on 28×28, one channel); `padding=0` is the form other
    federated libraries use (878,538 on 32×32, three channels).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, width: float = 1.0, padding: int = 2):
        super().__init__()
        _check("cnn2", num_classes, width)
        channels, *size = _image_shape("cnn2", shape, 4 if padding else 16)
        a, b, hidden = (_channels(base, width) for base in (32, 64, 512))
        shrink = 4 - 2 * padding
        height, wide = (((s - shrink) // 2 - shrink) // 2 for s in size)
        self.conv1 = nn.Conv2d(channels, a, 5, padding=padding)
        self.conv2 = nn.Conv2d(a, b, 5, padding=padding)
        self.fc1 = nn.Linear(b * height * wide, hidden)
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(F.relu(self.fc1(x.flatten(1))))


def cnn2(shape: tuple[int, int, int], num_classes: int, width: float = 1.0, padding: int = 2) -> CNN2:
    """`CNN2`; `width` multiplies 32 and 64 channels and 512 hidden units, rounded to multiples of 8."""
    return CNN2(shape, num_classes, width, padding)


class MLP(nn.Module):
    """The multilayer perceptron of FedAvg (McMahan et al., 2017): two hidden layers of 200 units with ReLU.

    199,210 parameters for 28×28 images and 10 classes. `layers=1` is the network of FedFac's simulation (§4.3.1) and
    of its Figure 1. x [n, …] is flattened; → logits [n, num_classes].
    """

    def __init__(self, in_features: int, num_classes: int, width: float = 1.0, layers: int = 2):
        super().__init__()
        _check("mlp", num_classes, width)
        if layers < 1:
            raise ValueError(f"mlp: layers={layers}, must be at least 1")
        hidden = _channels(200, width)
        sizes = [in_features] + [hidden] * layers
        for index, (i, o) in enumerate(pairwise(sizes), 1):
            self.add_module(f"fc{index}", nn.Linear(i, o))
        self.layers = layers
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for index in range(1, self.layers + 1):
            x = F.relu(getattr(self, f"fc{index}")(x))
        return self.fc(x)


def mlp(in_features: int, num_classes: int, width: float = 1.0, layers: int = 2) -> MLP:
    """`MLP`; `width` multiplies the 200 hidden units, rounded to a multiple of 8."""
    return MLP(in_features, num_classes, width, layers)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a skip (He et al., 2016), a strided 1×1 convolution on it where the shape changes."""

    def __init__(self, i: int, o: int, stride: int):
        super().__init__()
        self.shortcut = nn.Conv2d(i, o, 1, stride, bias=False) if stride > 1 or i != o else None
        self.norm = nn.BatchNorm2d(o) if self.shortcut is not None else None
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, padding=1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.shortcut is None or self.norm is None else self.norm(self.shortcut(x))
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + skip)


class ResNet(nn.Module):
    """Residual network (He et al., 2016): `blocks` basic blocks in each stage, of 64, 128, 256, 512 channels.

    stem: "wide" is a 7×7 convolution of stride 2 and a 3×3 max-pool of stride 2, "narrow" one 3×3 convolution. From the
    second stage on the first block has stride 2. The classifier follows global average pooling: any image size works.
    x [n, in_channels, h, w] → logits [n, num_classes].
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        blocks: tuple[int, ...],
        stem: str,
        width: float = 1.0,
        head: str = "",
    ):
        super().__init__()
        _check("resnet", num_classes, width)
        if stem not in ("wide", "narrow"):
            raise ValueError(f"resnet: stem={stem!r}, must be wide or narrow")
        self.wide = stem == "wide"
        channels = [_channels(64 * 2**stage, width) for stage in range(len(blocks))]
        kernel, stride = (7, 2) if self.wide else (3, 1)
        self.conv = nn.Conv2d(in_channels, channels[0], kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels[0])
        made, last = [], channels[0]
        for stage, (o, count) in enumerate(zip(channels, blocks, strict=True)):
            for index in range(count):
                made.append(BasicBlock(last, o, 2 if stage and not index else 1))
                last = o
        self.blocks = nn.Sequential(*made)
        self.fc = _head(last, num_classes, head)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if self.wide:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        return self.fc(self.blocks(x).mean((2, 3)))


def _resnet_of_feddecomp(
    shape: tuple[int, ...], num_classes: int, width: float = 1.0, *, name: str, blocks: tuple[int, ...]
) -> ResNet:
    """With the stem of FedDecomp's published code, made for large images; below 32 pixels with the narrow one."""
    channels, *size = _image_shape(name, shape, 3)
    return ResNet(channels, num_classes, blocks, "wide" if min(size) >= 32 else "narrow", width)


def resnet8(shape: tuple[int, int, int], num_classes: int, width: float = 1.0) -> ResNet:
    """ResNet-8 of FedDecomp: one block in each of three stages; 1,235,274 parameters on 3×32×32, 10 classes."""
    return _resnet_of_feddecomp(shape, num_classes, width, name="resnet8", blocks=(1, 1, 1))


def resnet10(shape: tuple[int, int, int], num_classes: int, width: float = 1.0) -> ResNet:
    """ResNet-10 of FedDecomp: one block in each of four stages; 4,957,092 parameters on 3×32×32, 100 classes."""
    return _resnet_of_feddecomp(shape, num_classes, width, name="resnet10", blocks=(1, 1, 1, 1))


def resnet18(shape: tuple[int, int, int], num_classes: int, width: float = 1.0, head: str = "") -> ResNet:
    """ResNet-18 for small images (Factorized-FL Figure 8, FedFac): a 3×3 stem; 11,173,962 parameters, 10 classes.

    head: see `resnet9`."""
    return ResNet(_image_shape("resnet18", shape, 3)[0], num_classes, (2, 2, 2, 2), "narrow", width, head)


class VGG16(nn.Module):
    """VGG-16 (Simonyan & Zisserman, 2015, configuration D): thirteen 3×3 convolutions and three linear layers.

    As usual for small images, batch-norm follows each convolution, the hidden linear layers have 512 units instead of
    4,096, and there is no dropout. A max-pool of 2, rounded up, ends each of the five stages; what is left is averaged.
    FedFac, which uses it, does not describe it further. x [n, in_channels, h, w] → logits [n, num_classes].
    """

    stages = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

    def __init__(self, in_channels: int, num_classes: int, width: float = 1.0):
        super().__init__()
        _check("vgg16", num_classes, width)
        last, index = in_channels, 0
        for base, count in self.stages:
            for _ in range(count):
                index += 1
                o = _channels(base, width)
                self.add_module(f"conv{index}", nn.Conv2d(last, o, 3, padding=1))
                self.add_module(f"norm{index}", nn.BatchNorm2d(o))
                last = o
        self.fc1, self.fc2, self.fc = nn.Linear(last, last), nn.Linear(last, last), nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        index = 0
        for _, count in self.stages:
            for _ in range(count):
                index += 1
                x = F.relu(getattr(self, f"norm{index}")(getattr(self, f"conv{index}")(x)))
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = F.relu(self.fc1(x.mean((2, 3))))
        return self.fc(F.relu(self.fc2(x)))


def vgg16(in_channels: int, num_classes: int, width: float = 1.0) -> VGG16:
    """`VGG16`; `width` multiplies all its channels and hidden units, rounded to multiples of 8."""
    return VGG16(in_channels, num_classes, width)


class LSTM2(nn.Module):
    """Embedding, two LSTM layers, two linear layers on the output at the last token (FedFac's for Shakespeare).

    tokens [n, t], any integer dtype → logits [n, num_classes]. `embedding` numbers a token, `hidden` units a layer
    (8 and 256: LEAF's network for Shakespeare). padding: the token that fills short texts up at the end, if any.
    No paper factorizes it; the four gates of a layer are two linear layers, `input` on the layer's input and `recur` on
    its last output, with one bias, else as `nn.LSTM` (gates in its order i, f, g, o).
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        width: float = 1.0,
        embedding: int = 8,
        hidden: int = 256,
        padding: int | None = None,
    ):
        super().__init__()
        _check("lstm", num_classes, width)
        hidden, self.padding = _channels(hidden, width), padding
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.input1, self.recur1 = nn.Linear(embedding, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.input2, self.recur2 = nn.Linear(hidden, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.fc1, self.fc = nn.Linear(hidden, hidden), nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        x = self.embedding(tokens)
        x = _lstm(self.input1(x), self.recur1.weight)
        x = _lstm(self.input2(x), self.recur2.weight)
        if self.padding is None:
            x = x[:, -1]
        else:
            last = ((tokens != self.padding).sum(1) - 1).clamp(min=0)
            x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
        return self.fc(F.relu(self.fc1(x)))


def _lstm(gates: Tensor, recur: Tensor) -> Tensor:
    """Outputs [n, t, h] of an LSTM layer from its input gates [n, t, 4h] and the weight [4h, h] on its last output.

    The weight is an argument, so that factors make it once and not at each of the t steps.
    """
    output = cell = gates.new_zeros(gates.shape[0], gates.shape[2] // 4)
    outputs = []
    for step in gates.unbind(1):
        i, f, g, o = F.linear(output, recur).add(step).chunk(4, dim=1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        output = torch.sigmoid(o) * torch.tanh(cell)
        outputs.append(output)
    return torch.stack(outputs, 1)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017), its four projections linear layers."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(features, features), nn.Linear(features, features)
        self.value, self.out = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """x [n, t, features]; hidden [n, t]: True for tokens that nothing may attend to."""
        query, key, value = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if hidden is None:
            return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(hidden[:, None, None], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Self-attention and a two-layer perceptron, each with a skip around it and layer-norm before it."""

    def __init__(self, features: int, heads: int, activation: Callable[[Tensor], Tensor] = F.relu):
        super().__init__()
        self.activation = activation
        self.norm1, self.attention = nn.LayerNorm(features), Attention(features, heads)
        self.norm2 = nn.LayerNorm(features)
        self.expand, self.contract = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.contract(self.activation(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """A small encoder for classifying texts (FedDecomp uses a Transformer for AG_NEWS and gives no sizes).

    tokens [n, t], any integer dtype, t ≤ length, `padding` at the end of short ones → logits [n, num_classes]: an
    embedding of `features` numbers plus a learned position, `layers` encoder blocks, the mean over the tokens, `fc`.
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        length: int,
        width: float = 1.0,
        features: int = 128,
        heads: int = 4,
        layers: int = 2,
        padding: int = 0,
    ):
        super().__init__()
        _check("transformer", num_classes, width)
        features, self.padding = _channels(features, width), padding
        self.embedding, self.position = nn.Embedding(vocabulary, features), nn.Embedding(length, features)
        self.blocks = nn.ModuleList(EncoderBlock(features, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(features)
        self.fc = nn.Linear(features, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        hidden = tokens == self.padding
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, hidden)
        x = self.norm(x).masked_fill(hidden[:, :, None], 0)
        return self.fc(x.sum(1) / (~hidden).sum(1, keepdim=True).clamp(min=1))


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al., 2021) for small images: patches, encoder blocks with GELU, `fc` on the class token.

    x [n, channels, h, w] → logits [n, num_classes]. `patches` of the smallest size from 2 on by which there are at most
    64 (8×8 images: 2, 28×28 and 32×32: 4); what is missing to whole ones at the right and below is zero. The class
    token is the first row of `position`, heads are of about 64 numbers.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        width: float = 1.0,
        features: int = 192,
        depth: int = 12,
    ):
        super().__init__()
        channels, *sides = _image_shape("vit-tiny", shape, 2)
        _check("vit-tiny", num_classes, width)
        if depth < 1:
            raise ValueError(f"vit-tiny: depth={depth}, must be at least 1")
        features = _channels(features, width)
        heads = next(n for n in range(max(1, round(features / 64)), 0, -1) if features % n == 0)
        self.patch = next(p for p in range(2, max(sides) + 2) if math.prod(-(-side // p) for side in sides) <= 64)
        # What `F.pad` takes: the last axis first.
        self.missing = [add for side in reversed(sides) for add in (0, -side % self.patch)]
        tokens = math.prod(-(-side // self.patch) for side in sides)
        self.patches = nn.Conv2d(channels, features, self.patch, stride=self.patch)
        self.position = nn.Embedding(1 + tokens, features)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(EncoderBlock(features, heads, F.gelu) for _ in range(depth))
        self.norm = nn.LayerNorm(features)
        self.fc = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(F.pad(x, self.missing) if any(self.missing) else x).flatten(2).transpose(1, 2)
        x = F.pad(x, (0, 0, 1, 0)) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.fc(self.norm(x[:, 0]))


def vit_tiny(shape: tuple[int, int, int], num_classes: int, width: float = 1.0) -> VisionTransformer:
    """`VisionTransformer` of 12 blocks; `width` multiplies its 192 features. 5,353,546 parameters on 1×28×28, 10
    classes."""
    return VisionTransformer(shape, num_classes, width)


def _text(model: str, shape: tuple[int, ...], vocabulary: int) -> int:
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"{model}: shape={tuple(shape)}, must be (tokens,)")
    if vocabulary < 1:
        raise ValueError(f"{model}: vocabulary={vocabulary}, must be at least 1")
    return shape[0]


def lstm(shape: tuple[int], num_classes: int, width: float = 1.0, *, vocabulary: int) -> LSTM2:
    """`LSTM2` for characters; `width` multiplies the 256 hidden units. 883,664 parameters with 80 characters."""
    _text("lstm", shape, vocabulary)
    return LSTM2(vocabulary, num_classes, width)


def lstm_words(shape: tuple[int], num_classes: int, width: float = 1.0, *, vocabulary: int) -> LSTM2:
    """`LSTM2` for words: 128 numbers a word, 0 fills up; `width` multiplies the 256 hidden units."""
    _text("lstm-words", shape, vocabulary)
    return LSTM2(vocabulary, num_classes, width, embedding=128, padding=0)


def transformer(shape: tuple[int], num_classes: int, width: float = 1.0, *, vocabulary: int) -> Transformer:
    """`Transformer`; `width` multiplies its 128 features (and four times as many hidden units)."""
    return Transformer(vocabulary, num_classes, _text("transformer", shape, vocabulary), width)


@dataclass(frozen=True)
class Model:
    """`build(shape, num_classes, width)` → module, and a line on what it is.

    input: "image" (channels, height, width), "features" (any float shape) or "tokens" (length,), whose `build` takes
    `vocabulary=` besides. whole: paths (`skip=` of `ff.factorize`) of the layers the paper that factorizes this network
    leaves as they are.
    """

    build: Callable[..., nn.Module]
    summary: str
    input: str = "image"
    whole: tuple[str, ...] = ()


MODELS = {
    "resnet9": Model(
        lambda shape, classes, width: resnet9(_image_shape("resnet9", shape, 3)[0], classes, width),
        "ResNet-9 of Factorized-FL, 2.57 M parameters",
    ),
    "cnn2": Model(cnn2, "CNN of FedAvg, two convolutions and two linear layers"),
    "mlp": Model(
        lambda shape, classes, width: mlp(math.prod(shape), classes, width),
        "two hidden layers of 200 units",
        input="features",
    ),
    "mlp1": Model(
        lambda shape, classes, width: mlp(math.prod(shape), classes, width, layers=1),
        "one hidden layer of 200 units (FedFac's simulation)",
        input="features",
    ),
    "resnet8": Model(resnet8, "ResNet-8 of FedDecomp, 1.24 M parameters"),
    "resnet10": Model(resnet10, "ResNet-10 of FedDecomp, 4.95 M parameters"),
    "resnet18": Model(resnet18, "ResNet-18 for small images, 11.2 M parameters"),
    "vgg16": Model(
        lambda shape, classes, width: vgg16(_image_shape("vgg16", shape, 1)[0], classes, width),
        "VGG-16 with batch-norm, 15.2 M parameters",
    ),
    "vit-tiny": Model(vit_tiny, "vision transformer for small images, 12 blocks of 192 numbers, 5.4 M parameters"),
    "lstm": Model(lstm, "two LSTM layers on characters, two linear layers", input="tokens"),
    "lstm-words": Model(lstm_words, "two LSTM layers on words, two linear layers", input="tokens"),
    "transformer": Model(
        transformer,
        "two encoder blocks on words; FedDecomp factorizes attention and classifier",
        input="tokens",
        whole=("blocks.*.expand", "blocks.*.contract"),
    ),
    **{
        f"resnet9-{head}": Model(
            lambda shape, classes, width, head=head: resnet9(
                _image_shape("resnet9", shape, 3)[0], classes, width, head
            ),
            f"ResNet-9, {what}",
        )
        for head, what in (("2fc", "two linear layers"), ("2fc-bn", "two linear layers, batch-norm between"))
    },
    **{
        f"resnet18-{head}": Model(functools.partial(resnet18, head=head), f"ResNet-18, {what}")
        for head, what in (("2fc", "two linear layers"), ("2fc-bn", "two linear layers, batch-norm between"))
    },
}


def build(
    name: str,
    shape: Sequence[int],
    num_classes: int,
    width: float = 1.0,
    vocabulary: int | None = None,
    weights: str | None = None,
) -> nn.Module:
    """The model called `name` for samples of `shape`: (channels, height, width), or (length,) for tokens.

    vocabulary: how many tokens there are, for the models that read tokens; None for the others. weights: a safetensors
    file for `load_weights`.

    Raises ValueError for an unknown name, samples the model cannot take, `num_classes` < 1 or `width` ≤ 0, and what
    `load_weights` raises.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r}, must be one of {', '.join(MODELS)}")
    model = MODELS[name]
    if (model.input == "tokens") != (vocabulary is not None):
        fit = ", ".join(n for n, m in MODELS.items() if (m.input == "tokens") == (vocabulary is not None))
        kind = "numbers" if vocabulary is None else "tokens"
        raise ValueError(f"model={name!r} takes {model.input}, the samples are {kind}; for those there are {fit}")
    words = {} if vocabulary is None else {"vocabulary": vocabulary}
    built = model.build(tuple(shape), num_classes, width, **words)
    return built if weights is None else load_weights(built, weights)


def load_weights(model: nn.Module, path: str | Path, classifier: str = "fc") -> nn.Module:
    """Put the tensors of a safetensors file (of a `state_dict`) into `model` and return it.

    What the file has must be what the model has, but for the classifier: one of other classes, or none, leaves the
    model's own. Values are cast to the model's dtypes. Raises ValueError, before anything is changed, for a file that
    cannot be read and for tensors that are missing, unknown or of another shape.
    """
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights={str(path)!r}: {error}") from None
    wanted = model.state_dict()
    head = {name for name in wanted if name.startswith(f"{classifier}.")}
    if any(name not in found or found[name].shape != wanted[name].shape for name in head):
        found = {name: tensor for name, tensor in found.items() if name not in head}
        wanted = {name: tensor for name, tensor in wanted.items() if name not in head}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not in the model" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name].shape)}, must be {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"weights={str(path)!r}: {problems[0]}{more}")
    model.load_state_dict(found, strict=False)
    return model
