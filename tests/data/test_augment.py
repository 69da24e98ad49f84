"""Augmentation of batches."""

import pickle

import pytest
import torch

from fastfact import data


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_random_shift_moves_whole_images():
    x = torch.zeros(2000, 1, 5, 5)
    x[:, 0, 2, 2] = 1
    moved = data.random_shift(x, torch.Generator().manual_seed(0), pixels=2)
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(2000))
    frequency = moved.mean(0)[0]
    assert float(frequency.min()) > 0.025 and float(frequency.max()) < 0.056  # 25 places, 1/25 each


def test_random_shift_keeps_channels_together_and_repeats_edges():
    x = torch.arange(9.0).view(1, 1, 3, 3).expand(64, 2, 3, 3) + torch.tensor([0.0, 100.0]).view(1, 2, 1, 1)
    moved = data.random_shift(x, torch.Generator().manual_seed(1), pixels=1)
    assert torch.equal(moved[:, 1] - moved[:, 0], torch.full((64, 3, 3), 100.0))
    left = torch.tensor([[0.0, 0, 1], [3, 3, 4], [6, 6, 7]])
    assert any(torch.equal(image, left) for image in moved[:, 0])
    again = data.random_shift(x, torch.Generator().manual_seed(1), pixels=1)
    assert torch.equal(moved, again) and data.random_shift(x, torch.Generator(), pixels=0) is x


def test_random_shift_refuses_negative_pixels():
    with pytest.raises(ValueError, match="pixels=-1"):
        data.random_shift(torch.zeros(1, 1, 4, 4), torch.Generator(), pixels=-1)


def test_random_flip_mirrors_half_of_them():
    x = torch.rand(1000, 3, 4, 5)
    y = data.random_flip(x, generator())
    mirrored = (y == x.flip(3)).flatten(1).all(1)
    assert torch.equal(y[~mirrored], x[~mirrored]) and 0.45 < mirrored.float().mean() < 0.55


def test_random_resized_crop_is_a_rectangle_of_the_image():
    # Each pixel is its own place: the crop of a linear ramp is a ramp, which says where it was taken from.
    ramp = (torch.arange(16.0) + 0.5) / 16
    x = torch.stack([ramp.expand(16, 16), ramp[:, None].expand(16, 16)]).expand(4000, 2, 16, 16)
    y = data.random_resized_crop(x, generator())
    inner = y[:, :, 2:-2, 2:-2]
    wide, high = (inner[:, 0, :, -1] - inner[:, 0, :, 0]).mean(1), (inner[:, 1, -1] - inner[:, 1, 0]).mean(1)
    width, height = wide * 16 / 11, high * 16 / 11
    assert float(y.min()) >= 1 / 32 - 1e-6 and float(y.max()) <= 1 - 1 / 32 + 1e-6
    small = (width < 0.85) & (height < 0.85)
    ratio = (width / height)[small]
    assert 0.73 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.37
    area = (width * height).sort().values
    assert area[0] < 0.1 and float(area[2000]) == pytest.approx(0.54, abs=0.04)
    center = inner.mean((2, 3))
    assert center.mean(0).sub(0.5).abs().max() < 0.01 and center.std(0).min() > 0.08


def still(**change):
    return {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0, "probability": 1, "grey": 0, **change}


def test_color_jitter_does_one_thing_at_a_time():
    x = torch.rand(200, 3, 6, 6) * 0.5 + 0.1
    torch.testing.assert_close(data.color_jitter(x, generator(), **still()), x, rtol=1e-4, atol=1e-4)
    brighter = data.color_jitter(x, generator(), **still(brightness=0.4)) / x
    torch.testing.assert_close(brighter, brighter[:, :1, :1, :1].expand_as(x), rtol=1e-3, atol=1e-3)
    factors = brighter[:, 0, 0, 0]
    assert 0.6 <= factors.min() < 0.65 and 1.35 < factors.max() <= 1.4 + 1e-3
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    for change in ({"saturation": 0.2}, {"hue": 0.1}):
        changed = data.color_jitter(x, generator(), **still(**change))
        torch.testing.assert_close((changed * luma).sum(1), (x * luma).sum(1), rtol=0, atol=2e-2)
        assert (changed - x).abs().max() > 0.02
    contrast = data.color_jitter(x, generator(), **still(contrast=0.4))
    torch.testing.assert_close((contrast * luma).sum(1).mean((1, 2)), (x * luma).sum(1).mean((1, 2)), rtol=0, atol=1e-3)
    spread = contrast.std((1, 2, 3)) / x.std((1, 2, 3))
    assert 0.55 < spread.min() < 0.75 and 1.25 < spread.max() < 1.45
    grey = data.color_jitter(x, generator(), **still(grey=1))
    torch.testing.assert_close(grey, (x * luma).sum(1, keepdim=True).expand_as(x), rtol=0, atol=1e-4)


def test_color_jitter_turns_hue_like_a_colour_wheel():
    # A third of a turn takes red to green to blue, up to what the colour range cuts off.
    red = torch.tensor([0.5, 0.4, 0.4]).view(1, 3, 1, 1).expand(400, 3, 2, 2)
    y = data.color_jitter(red, generator(), **still(hue=0.5))[:, :, 0, 0]
    assert {0, 1, 2} == set(y.argmax(1).tolist())
    assert (y.amax(1) - y.amin(1)).min() > 0.05


def test_color_jitter_stays_in_range_and_takes_grey_images():
    x = torch.rand(100, 3, 4, 4)
    y = data.color_jitter(x, generator())
    assert y.min() >= 0 and y.max() <= 1
    untouched = (y == x).flatten(1).all(1).float().mean()
    assert 0.08 < untouched < 0.26  # .2 without a change of colours, .8 of those not made grey
    grey = data.color_jitter(x[:, :1], generator())
    assert grey.shape == (100, 1, 4, 4) and not torch.equal(grey, x[:, :1])
    with pytest.raises(ValueError, match="2 channels"):
        data.color_jitter(x[:, :2], generator())


def test_augment_repeats_and_pickles():
    scale = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    augment = data.Augment(shift=1, crop=True, flip=True, jitter=True, scale=scale)
    x = torch.randn(20, 3, 8, 8)
    first = augment(x, generator(3))
    assert torch.equal(first, pickle.loads(pickle.dumps(augment))(x, generator(3)))
    assert not torch.equal(first, augment(x, generator(4)))
    assert first.dtype == x.dtype and data.Augment()(x, generator()) is x
    mean, deviation = (torch.tensor(part).view(3, 1, 1) for part in scale)
    only = data.Augment(jitter=True, scale=scale)((x.clamp(-1, 1)), generator())
    restored = only * deviation + mean
    assert restored.min() > -1e-6 and restored.max() < 1 + 1e-6


def test_augment_checks_its_settings():
    with pytest.raises(ValueError, match="shift=-1"):
        data.Augment(shift=-1)
    with pytest.raises(ValueError, match="needs scale="):
        data.Augment(jitter=True)
