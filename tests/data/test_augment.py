"""The batched augmentation against a loop that says in NumPy what each transformation means."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import hardsphere.noise as noise_module
from hardsphere.data import Augment, augment, cutmix
from hardsphere.data.augment import box_sides, training_batch
from hardsphere.errors import HardsphereError
from hardsphere.noise import Noise


def batch(count: int, channels: int = 3, height: int = 6, width: int = 5) -> torch.Tensor:
    values = Noise(5, torch.arange(count)).integers(1, 256, channels, height, width)  # no 0, which is the filling
    return values.to(torch.uint8)


def noise_for(count: int, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(count)).fold("augment", 0)


def naive(pixels: torch.Tensor, noise: Noise, spec: Augment) -> np.ndarray:
    """Pad, crop, flip and cut out, one image at a time."""
    corners = noise.fold("crop").integers(-spec.pad, spec.pad + 1, 2).tolist()
    flips = noise.fold("flip").integers(0, 2, 1).squeeze(1).tolist()
    height, width = pixels.shape[2:]
    row = noise.fold("cutout").fold("row").integers(0, height, 1).squeeze(1).tolist()
    col = noise.fold("cutout").fold("column").integers(0, width, 1).squeeze(1).tolist()
    out = []
    for index, image in enumerate(pixels.numpy()):
        sides = ((0, 0), (spec.pad, spec.pad), (spec.pad, spec.pad))
        padded = np.pad(image, sides, mode="reflect" if spec.padding == "reflect" else "constant")
        top, left = (corner + spec.pad for corner in corners[index])
        image = padded[:, top : top + height, left : left + width].copy()
        if spec.flip and flips[index]:
            image = image[:, :, ::-1].copy()
        if spec.cutout:
            first_row, first_col = row[index] - spec.cutout // 2, col[index] - spec.cutout // 2
            image[
                :,
                max(first_row, 0) : max(first_row + spec.cutout, 0),
                max(first_col, 0) : max(first_col + spec.cutout, 0),
            ] = 0
        out.append(image)
    return np.stack(out)


@settings(max_examples=60, deadline=None)
@given(
    pad=st.integers(0, 4),
    padding=st.sampled_from(["zero", "reflect"]),
    flip=st.booleans(),
    cutout=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_equals_the_naive_loop(pad: int, padding: str, flip: bool, cutout: int, seed: int) -> None:
    spec = Augment(pad=pad, padding=padding, flip=flip, cutout=cutout)
    pixels, noise = batch(9), noise_for(9, seed)
    assert np.array_equal(augment(pixels, noise, spec).numpy(), naive(pixels, noise, spec))


def test_a_planted_pixel_moves_where_the_crop_says() -> None:
    pixels = torch.zeros(400, 1, 8, 8, dtype=torch.uint8)
    pixels[:, 0, 4, 4] = 255
    noise = noise_for(400)
    moved = augment(pixels, noise, Augment(pad=2))
    where = moved.flatten(1).argmax(1)
    corner = noise.fold("crop").integers(-2, 3, 2)
    assert torch.equal(where, (4 - corner[:, 0]) * 8 + 4 - corner[:, 1])
    assert set(corner.flatten().tolist()) == {-2, -1, 0, 1, 2}


def test_half_of_the_images_flip() -> None:
    pixels = torch.zeros(4000, 1, 1, 2, dtype=torch.uint8)
    pixels[..., 0] = 1
    flipped = augment(pixels, noise_for(4000), Augment(flip=True))[:, 0, 0, 1].float().mean()
    assert abs(flipped - 0.5) < 4 * 0.5 / 4000**0.5


def test_a_sample_s_numbers_do_not_depend_on_the_batch() -> None:
    spec, pixels = Augment(pad=2, flip=True, cutout=3), batch(20)
    whole = augment(pixels, noise_for(20), spec)
    rows = torch.tensor([13, 2])
    assert torch.equal(whole[rows], augment(pixels[rows], Noise(0, rows).fold("augment", 0), spec))


def test_floats_and_bytes_travel_alike() -> None:
    spec, pixels = Augment(pad=2, padding="reflect", flip=True, cutout=3), batch(8)
    assert torch.equal(augment(pixels.float(), noise_for(8), spec), augment(pixels, noise_for(8), spec).float())


@pytest.mark.check
def test_the_whole_augmentation_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number comes back to the host and no branch depends on one, so that it can be compiled and captured."""
    purpose = torch.compiler.assume_constant_result(noise_module._number)  # a digest of text, which is not traced
    monkeypatch.setattr(noise_module, "_number", purpose)
    spec, pixels, labels = Augment(pad=2, flip=True, cutout=3, cutmix=1.0), batch(8), torch.arange(8) % 3
    sides = box_sides(1.0)

    def step(ids: torch.Tensor, epoch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return training_batch(pixels, labels, Noise(0, ids).fold("augment", epoch), spec, sides, 3)

    arguments = torch.arange(8), torch.tensor(0)
    compiled = torch.compile(step, fullgraph=True, backend="eager")(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(compiled, step(*arguments), strict=True))


def test_nothing_asked_nothing_done() -> None:
    pixels = batch(3)
    assert torch.equal(augment(pixels, noise_for(3), Augment()), pixels)


def test_cutmix_labels_are_the_area_that_was_pasted() -> None:
    """Constant images, so that each pixel says whose it is."""
    count, classes = 64, 10
    pixels = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 6).contiguous()
    labels = torch.arange(count) % classes
    mixed, y = cutmix(pixels, labels, noise_for(count), box_sides(1.0), classes)
    areas = []
    for index in range(count):
        partner = (index - 1) % count
        foreign = (mixed[index, 0] == partner).sum().item()
        assert foreign + (mixed[index, 0] == index).sum().item() == 48
        assert torch.equal(mixed[index, 0], mixed[index, 2])
        expected = torch.zeros(classes)
        expected[labels[index]] += 1 - foreign / 48
        expected[labels[partner]] += foreign / 48
        torch.testing.assert_close(y[index], expected, atol=1e-6, rtol=0)
        areas.append(foreign)
    assert len(set(areas)) > 10
    torch.testing.assert_close(y.sum(1), torch.ones(count), atol=1e-6, rtol=0)


def test_cutmix_boxes_are_rectangles() -> None:
    pixels = torch.zeros(50, 1, 9, 9, dtype=torch.uint8)
    pixels[::2] = 1
    mixed, _ = cutmix(pixels, torch.zeros(50, dtype=torch.int64), noise_for(50), box_sides(1.0), 2)
    for index in range(50):
        foreign = mixed[index, 0] != pixels[index, 0]
        rows, cols = foreign.any(1), foreign.any(0)
        assert torch.equal(foreign, rows[:, None] & cols[None, :])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0, 2.0, 8.0])
def test_box_sides_follow_the_beta_distribution(alpha: float) -> None:
    shares = 1 - (box_sides(alpha).double() / 65536) ** 2
    levels = (np.arange(4096) + 0.5) / 4096
    assert np.abs(shares.numpy() - stats.beta(alpha, alpha).ppf(levels)).max() < 2e-3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"padding": "reflekt"}, "Did you mean 'reflect'"),
        ({"pad": -1}, "neither may be below 0"),
        ({"cutout": -2}, "neither may be below 0"),
        ({"cutmix": -0.5}, "cutmix is -0.5"),
        ({"cutmix": float("nan")}, "cutmix is nan"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(HardsphereError, match=sentence):
        Augment(**wrong)  # type: ignore[arg-type]


def test_reflection_needs_room() -> None:
    Augment(pad=7, padding="reflect").check(8, 8)
    Augment(pad=8).check(8, 8)
    with pytest.raises(HardsphereError, match="too much to reflect"):
        Augment(pad=8, padding="reflect").check(8, 8)
