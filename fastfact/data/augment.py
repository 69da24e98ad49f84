"""Augmentation of a whole batch at once, on its own device, every draw from the generator given.

Images are x [n, c, h, w], floating point, normalised; the generator lives on the device of x. Each image gets a draw of
its own.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def random_shift(x: Tensor, generator: torch.Generator, pixels: int = 1) -> Tensor:
    """Each image of x [n, c, h, w] moved by −pixels … pixels each way, the uncovered border its own edge repeated.

    This is the usual random crop of a padded image. `generator` lives on the device of `x`.
    Raises ValueError for `pixels` < 0.
    """
    if pixels < 0:
        raise ValueError(f"random_shift: pixels={pixels}, must not be negative")
    if pixels == 0:
        return x
    n, c, h, w = x.shape
    padded = F.pad(x, (pixels,) * 4, mode="replicate")
    offsets = torch.randint(2 * pixels + 1, (2, n, 1), generator=generator, device=x.device)
    rows = (offsets[0] + torch.arange(h, device=x.device)).view(n, 1, h, 1)
    columns = (offsets[1] + torch.arange(w, device=x.device)).view(n, 1, 1, w)
    sample = torch.arange(n, device=x.device).view(n, 1, 1, 1)
    return padded[sample, torch.arange(c, device=x.device).view(1, c, 1, 1), rows, columns]


def _uniform(x: Tensor, generator: torch.Generator, low: float, high: float, rows: int = 1) -> Tensor:
    """[rows, n, 1, 1, 1] uniform draws in low … high, `rows` for each image."""
    shape = (rows, len(x), 1, 1, 1)
    return torch.rand(shape, generator=generator, device=x.device, dtype=x.dtype) * (high - low) + low


def random_flip(x: Tensor, generator: torch.Generator, probability: float = 0.5) -> Tensor:
    """Each image of x [n, c, h, w] mirrored left to right with this probability; shape and dtype of x."""
    return torch.where(_uniform(x, generator, 0, 1)[0] < probability, x.flip(3), x)


def random_resized_crop(x: Tensor, generator: torch.Generator, smallest: float = 0.08) -> Tensor:
    """A random rectangle of each image of x [n, c, h, w], scaled to the whole size (bilinear): Inception's crop.

    Its area is uniform in smallest … 1 of the image's, its aspect ratio log-uniform in 3/4 … 4/3; a side that is then
    longer than the image is cut to it.
    """
    area = _uniform(x, generator, smallest, 1)[0].flatten()
    ratio = _uniform(x, generator, math.log(3 / 4), math.log(4 / 3))[0].flatten().exp()
    size = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).clamp(max=1)
    center = (1 - size) * _uniform(x, generator, -1, 1, rows=2).reshape(2, -1).T
    theta = torch.cat([torch.diag_embed(size), center[:, :, None]], 2)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


_GREY = (0.299, 0.587, 0.114)
# Luma and two chroma axes (YIQ): a turn of the chroma plane is a shift of hue.
_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def color_jitter(
    x: Tensor,
    generator: torch.Generator,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.2,
    hue: float = 0.1,
    probability: float = 0.8,
    grey: float = 0.2,
) -> Tensor:
    """Colours of images x [n, c, h, w] with values 0 … 1 changed at random; the last two steps need three channels.

    With `probability`, in this order: all values times 1 ± brightness, the distance from the image's mean grey times
    1 ± contrast, from each pixel's grey times 1 ± saturation, hue turned by ± hue of a full turn, cut to 0 … 1 after
    each. Then, with probability `grey`, the image without colour. Raises ValueError unless c is 1 or 3.
    """
    colours = x.shape[1]
    if colours not in (1, 3):
        raise ValueError(f"color_jitter: x has {colours} channels, must have 1 or 3")
    weights = x.new_tensor(_GREY if colours == 3 else (1.0,)).view(1, colours, 1, 1)

    def luma(image: Tensor) -> Tensor:
        return (image * weights).sum(1, keepdim=True)

    factors = [_uniform(x, generator, 1 - s, 1 + s)[0] for s in (brightness, contrast, saturation)]
    turn = 2 * math.pi * _uniform(x, generator, -hue, hue)[0].flatten()
    chosen, colourless = _uniform(x, generator, 0, 1, rows=2)
    y = (x * factors[0]).clamp(0, 1)
    y = torch.lerp(luma(y).mean((2, 3), keepdim=True), y, factors[1]).clamp(0, 1)
    if colours == 3:
        y = torch.lerp(luma(y), y, factors[2]).clamp(0, 1)
        to = torch.tensor(_YIQ, dtype=torch.float64)
        cos, sin, one, zero = turn.cos(), turn.sin(), torch.ones_like(turn), torch.zeros_like(turn)
        rotation = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
        matrix = to.inverse().to(x) @ rotation @ to.to(x)
        y = torch.einsum("nij,njhw->nihw", matrix, y).clamp(0, 1)
    y = torch.where(chosen < probability, y, x)
    return torch.where(colourless < grey, luma(y).expand_as(y), y) if colours == 3 else y


@dataclass(frozen=True)
class Augment:
    """x, generator → x: what happens to a training batch, as `ff.Federation(augment=)` takes it.

    shift: `random_shift` by this many pixels; crop: `random_resized_crop`; flip: `random_flip`; jitter: `color_jitter`.
    scale: (mean, deviation) of each channel, as `Dataset.scale` has them: colours are changed before normalisation, so
    they are needed for jitter.

    The papers say "cropping, flipping, jittering, etc." (Factorized-FL, appendix C.3) and no more; crop, flip and
    jitter with their defaults are what its published code does, but for the order of the colour changes (there random).
    """

    shift: int = 0
    crop: bool = False
    flip: bool = False
    jitter: bool = False
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def __post_init__(self):
        if self.shift < 0:
            raise ValueError(f"Augment(shift={self.shift}): must not be negative")
        if self.jitter and self.scale is None:
            raise ValueError("Augment(jitter=True): needs scale=, the mean and deviation the images are normalised by")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if self.shift:
            x = random_shift(x, generator, self.shift)
        if self.crop:
            x = random_resized_crop(x, generator)
        if self.flip:
            x = random_flip(x, generator)
        if self.jitter and self.scale is not None:
            mean, deviation = (x.new_tensor(part).view(-1, 1, 1) for part in self.scale)
            x = (color_jitter(x * deviation + mean, generator) - mean) / deviation
        return x
