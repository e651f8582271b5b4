"""What `corrupt` promises for every corruption."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hardsphere import HardsphereError
from hardsphere.corruptions import ALL, CORRUPTIONS, EXTRA, SEVERITIES, corrupt
from hardsphere.corruptions.constants import SETTINGS, VARIANTS

# The published constants themselves are not monotonic here.
NOT_MONOTONIC = {"glass_blur", "frost", "elastic_transform", "spatter", "saturate"}
RANDOM = set(ALL) - {"defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "saturate", "pixelate"}
RANDOM -= {"jpeg_compression"}


def run(
    images: Tensor, name: str, severity: int, seed: int = 0, variant: str = "cifar", ids: Tensor | None = None
) -> Tensor:
    return corrupt(images, name, severity, seed=seed, variant=variant, ids=ids, frost="stand-in")


def test_names() -> None:
    assert len(CORRUPTIONS) == 15
    assert len(EXTRA) == 4
    assert all(set(SETTINGS[variant]) == set(ALL) for variant in VARIANTS)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_the_batch_does_not_matter(name: str, severity: int, small: Tensor) -> None:
    """Not its size, not its order, not what else is in it, not the layout in memory."""
    whole = run(small, name, severity)
    assert whole.dtype == torch.uint8
    assert whole.shape == small.shape
    ids = torch.tensor([40, 3, 17])
    assert torch.equal(run(small[ids], name, severity, ids=ids), whole[ids])
    assert torch.equal(run(small[5:6], name, severity, ids=torch.tensor([5])), whole[5:6])
    assert torch.equal(run(small.to(memory_format=torch.channels_last), name, severity), whole)


@pytest.mark.parametrize("name", ALL)
def test_threads_do_not_matter(name: str, small: Tensor) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(small, name, 4)
        torch.set_num_threads(3)
        assert torch.equal(run(small, name, 4), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ALL)
def test_large_images(name: str, large: Tensor) -> None:
    out = run(large, name, 3, variant="imagenet")
    assert out.shape == large.shape
    assert out.dtype == torch.uint8
    assert not torch.equal(out, large)
    assert torch.equal(run(large[1:], name, 3, variant="imagenet", ids=torch.tensor([1])), out[1:])


@pytest.mark.parametrize("name", ALL)
def test_seed_severity_and_id_each_matter(name: str, small: Tensor) -> None:
    images = small[:1].expand(2, -1, -1, -1)
    out = run(images, name, 2)
    assert torch.equal(run(images, name, 2), out)
    assert torch.equal(out[0], out[1]) == (name not in RANDOM)
    assert torch.equal(run(images, name, 2, seed=1), out) == (name not in RANDOM)
    assert not torch.equal(run(images, name, 3), out)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name in ALL if name not in NOT_MONOTONIC])
def test_error_grows_with_severity(name: str, variant: str, small: Tensor, large: Tensor) -> None:
    images = small if variant == "cifar" else large
    errors = [(run(images, name, s, variant=variant).float() - images.float()).pow(2).mean().item() for s in SEVERITIES]
    # Motion blur of 32 pixels goes from (6, 2) to (8, 2), which is the same but for the angles drawn.
    slack = 0.9 if name in {"motion_blur", "snow"} else 1.0
    assert all(later > slack * earlier for earlier, later in itertools.pairwise(errors)), errors
    assert errors[-1] > errors[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0, 255])
def test_flat_images_stay_in_range(name: str, value: int) -> None:
    """Black and white: nothing divides by zero and nothing wraps around."""
    out = run(torch.full((2, 3, 32, 32), value, dtype=torch.uint8), name, 3).float()
    assert (out - value).abs().mean() < 170


@pytest.mark.parametrize(
    "name", ["gaussian_blur", "defocus_blur", "zoom_blur", "motion_blur", "glass_blur", "pixelate"]
)
@pytest.mark.parametrize("value", [0, 1, 77, 200, 255])
def test_blurs_keep_flat_images(name: str, value: int) -> None:
    images = torch.full((1, 3, 32, 32), value, dtype=torch.uint8)
    for severity in SEVERITIES:
        assert torch.equal(run(images, name, severity), images)


@pytest.mark.parametrize("name", ALL)
def test_other_shapes(name: str) -> None:
    images = torch.randint(0, 256, (3, 3, 40, 51), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = run(images, name, 2)
    assert out.shape == images.shape
    assert run(images[:0], name, 2).shape == (0, 3, 40, 51)


def test_errors() -> None:
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    cases = [
        ({"name": "gausian_noise"}, "Did you mean 'gaussian_noise'"),
        ({"severity": 6}, "severity is 6"),
        ({"severity": 0}, "severity is 0"),
        ({"variant": "mnist"}, "Unknown variant 'mnist'"),
        ({"images": images.float()}, "need 8-bit images"),
        ({"images": images[:, :1]}, "RGB images"),
        ({"images": images[0]}, "RGB images"),
        ({"images": images[:, :, :8, :8]}, "too small"),
        ({"ids": torch.arange(3)}, "give one id to each"),
        (
            {"name": "frost", "frost": "stand-in", "images": torch.zeros(1, 3, 224, 224, dtype=torch.uint8)},
            "do not fit",
        ),
    ]
    for change, message in cases:
        arguments = {"images": images, "name": "fog", "severity": 1, "seed": 0} | change
        with pytest.raises(HardsphereError, match=message):
            corrupt(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_devices_agree(name: str, small: Tensor) -> None:
    """Integers and double precision agree to the bit; single-precision logarithms and cosines nearly so."""
    here = run(small, name, 3)
    there = run(small.cuda(), name, 3)
    assert there.is_cuda
    difference = (here.int() - there.cpu().int()).abs()
    assert (difference > 0).float().mean() < 1e-4
