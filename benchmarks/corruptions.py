"""The corruptions beside a loop over images, and a contact sheet of all of them.

    python benchmarks/corruptions.py speed            # this library against the same operations in NumPy and SciPy
    python benchmarks/corruptions.py generate         # all of a CIFAR-10-C, timed (use a GPU)
    python benchmarks/corruptions.py sheet PHOTO OUT  # 19 corruptions x 5 severities of one photograph

Only the ratio of two times of one run means anything: machines differ, and so does what else they do. The loop is what
one writes first: one image at a time, each step a call of NumPy, SciPy or Pillow, randomness drawn once per image. It
is not handicapped: kernels are made once, and the walk of the glass blur draws its moves in one call.
"""

from __future__ import annotations

import argparse
import io
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from scipy import ndimage

from hardsphere.corruptions import ALL, CORRUPTIONS, EXTRA, SEVERITIES, corrupt, frost_source
from hardsphere.corruptions.blur import disk, trail_weights
from hardsphere.corruptions.constants import SETTINGS
from hardsphere.corruptions.frost import Photographs, photographs

Image_ = np.ndarray
Loop = Callable[[Image_, tuple[float, ...], np.random.Generator], Image_]


def to_8_bits(x: Image_) -> Image_:
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def gaussian(x: Image_, sigma: float) -> Image_:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest", truncate=4.0)


def gaussian_noise(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    return to_8_bits(image / 255 + rng.normal(scale=c[0], size=image.shape))


def shot_noise(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    return to_8_bits(rng.poisson(image / 255 * c[0]) / c[0])


def impulse_noise(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    out = image.copy()
    hit, salt = rng.random(image.shape) < c[0], rng.random(image.shape) < 0.5
    out[hit & salt], out[hit & ~salt] = 255, 0
    return out


def defocus_blur(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    kernel = disk(*c).numpy()
    x = image / 255
    return to_8_bits(np.stack([ndimage.correlate(x[..., k], kernel, mode="mirror") for k in range(3)], axis=-1))


def glass_blur(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    sigma, reach, rounds = c[0], int(c[1]), int(c[2])
    x = to_8_bits(gaussian(image / 255, sigma))
    height, width = x.shape[:2]
    for _ in range(rounds):
        moves = rng.integers(-reach, reach, size=(height, width, 2)).tolist()
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                dx, dy = moves[h - 1][w - 1]
                x[h, w] = x[h + dy, w + dx]
    return to_8_bits(gaussian(x / 255, sigma))


def shifted(image: Image_, down: int, right: int) -> Image_:
    rows = np.clip(np.arange(image.shape[0]) + down, 0, image.shape[0] - 1)
    cols = np.clip(np.arange(image.shape[1]) + right, 0, image.shape[1] - 1)
    return image[rows[:, None], cols]


def trail(image: Image_, radius: float, sigma: float, degrees: float) -> Image_:
    angle = math.radians(degrees)
    total = np.zeros(image.shape)
    for i, weight in enumerate(trail_weights(radius, sigma)):
        total += weight * shifted(image, math.ceil(i * math.sin(angle) - 0.5), math.ceil(i * math.cos(angle) - 0.5))
    return (total + 0.5).astype(np.uint8)


def motion_blur(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    return trail(image, c[0], c[1], rng.uniform(-45, 45))


def clipped_zoom(x: Image_, factor: float) -> Image_:
    height = x.shape[0]
    crop = math.ceil(height / factor)
    top = (height - crop) // 2
    part = x[top : top + crop, top : top + crop]
    part = ndimage.zoom(part, (factor, factor) + (1,) * (x.ndim - 2), order=1)
    trim = (part.shape[0] - height) // 2
    return part[trim : trim + height, trim : trim + height]


def zoom_blur(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    x = (image / 255).astype(np.float32)
    factors = np.arange(1, *c)
    total = x + sum(clipped_zoom(x, factor) for factor in factors)
    return to_8_bits(total / (len(factors) + 1))


def snow(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    mean, deviation, zoom, threshold, radius, sigma, kept = c
    layer = clipped_zoom(rng.normal(mean, deviation, size=image.shape[:2]), zoom)
    layer[layer < threshold] = 0
    layer = trail(to_8_bits(layer), radius, sigma, rng.uniform(-135, -45))[..., None] / 255
    x = image / 255
    grey = (x @ np.array([0.299, 0.587, 0.114]))[..., None]
    return to_8_bits(kept * x + (1 - kept) * np.maximum(x, grey * 1.5 + 0.5) + layer + np.rot90(layer, 2))


def frost_of(photos: Photographs) -> Loop:
    sizes = (photos.heights * photos.widths).tolist()
    parts = np.split(photos.pixels.T.numpy(), np.cumsum(sizes)[:-1])
    images = [part.reshape(int(h), int(w), 3) for part, h, w in zip(parts, photos.heights, photos.widths, strict=True)]

    def frost(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
        photo = images[rng.integers(len(images))]
        top, left = rng.integers(photo.shape[0] - image.shape[0]), rng.integers(photo.shape[1] - image.shape[1])
        crop = photo[top : top + image.shape[0], left : left + image.shape[1]]
        return np.clip(c[0] * image + c[1] * crop, 0, 255).astype(np.uint8)

    return frost


def plasma(side: int, decay: float, rng: np.random.Generator) -> Image_:
    field = np.zeros((side, side))
    step, rough = side, 100.0
    while step >= 2:
        half, shape = step // 2, (side // step, side // step)
        corners = field[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        centres = (pairs + np.roll(pairs, -1, 1)) / 4 + rough * rng.uniform(-rough, rough, shape)
        across = (centres + np.roll(centres, 1, 0) + corners + np.roll(corners, -1, 1)) / 4
        down = (centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 0)) / 4
        field[half::step, half::step] = centres
        field[::step, half::step] = across + rough * rng.uniform(-rough, rough, shape)
        field[half::step, ::step] = down + rough * rng.uniform(-rough, rough, shape)
        step, rough = half, rough / decay
    field -= field.min()
    return field / field.max()


def fog(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    x = image / 255
    brightest = x.max()
    side = 1 << (image.shape[0] - 1).bit_length()
    x = x + c[0] * plasma(side, c[1], rng)[: image.shape[0], : image.shape[1], None]
    return to_8_bits(x * brightest / (brightest + c[0]))


def brightness(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    x = image / 255
    value = x.max(axis=2, keepdims=True)
    ratio = np.divide(x, value, out=np.ones_like(x), where=value > 0)
    return to_8_bits(np.minimum(value + c[0], 1) * ratio)


def contrast(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    x = image / 255
    mean = x.mean(axis=(0, 1), keepdims=True)
    return to_8_bits((x - mean) * c[0] + mean)


def elastic_transform(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    amplitude, smoothness, jitter = c
    x = image / 255
    height, width = x.shape[:2]
    a, b, size = height // 2, width // 2, min(height, width) // 3
    corners = np.array([[a + size, b + size], [a + size, b - size], [a - size, b - size]], dtype=float)
    moved = corners + rng.uniform(-jitter, jitter, size=corners.shape)
    back = np.linalg.solve(np.c_[moved, np.ones(3)], corners)
    row, column = np.mgrid[:height, :width]
    source_x, source_y = (back[0, k] * column + back[1, k] * row + back[2, k] for k in (0, 1))
    channels = [ndimage.map_coordinates(x[..., k], (source_y, source_x), order=1, mode="mirror") for k in range(3)]
    if amplitude > 0:
        down, right = (
            ndimage.gaussian_filter(rng.uniform(-1, 1, (height, width)), smoothness, mode="reflect", truncate=3)
            for _ in range(2)
        )
        place = (row + amplitude * down, column + amplitude * right)
        channels = [ndimage.map_coordinates(channel, place, order=1, mode="reflect") for channel in channels]
    return to_8_bits(np.stack(channels, axis=-1))


def pixelate(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    height, width = image.shape[:2]
    small = Image.fromarray(image).resize((int(width * c[0]), int(height * c[0])), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(image: Image_, c: tuple[float, ...], rng: np.random.Generator) -> Image_:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=int(c[0]))
    return np.asarray(Image.open(file))


LOOPS: dict[str, Loop] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost_of(photographs(frost_source(), "cifar")),
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}


def pictures(count: int, side: int = 32) -> torch.Tensor:
    """Smooth random images with edges: what the operations cost does not depend on what the pictures show."""
    rng = np.random.default_rng(0)
    planes = ndimage.gaussian_filter(rng.normal(size=(count, 3, side, side)), (0, 0, 2, 2))
    planes = (planes - planes.min()) / (planes.max() - planes.min())
    planes[:, :, side // 3 :, side // 2 :] *= 0.5
    return torch.from_numpy((planes * 255).astype(np.uint8))


def speed(batch: int, loop_images: int, severities: list[int]) -> None:
    images = pictures(batch)
    singles = list(images[:loop_images].permute(0, 2, 3, 1).contiguous().numpy())
    rng = np.random.default_rng(0)
    frost = frost_source()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"batch {batch}, 32 x 32 pixels, mean of severities {severities}; loop timed on {loop_images} images")
    print(f"frost: {frost.origin}")
    print(f"{'microseconds per image':24}{'loop':>9}{'here':>9}{'ratio':>8}")
    ours, loops = {}, {}
    for name in CORRUPTIONS:
        here = there = 0.0
        for severity in severities:
            c = SETTINGS["cifar"][name][severity - 1]
            corrupt(images[:2], name, severity, seed=0, frost=frost)
            start = time.perf_counter()
            corrupt(images, name, severity, seed=0, frost=frost)
            here += (time.perf_counter() - start) / batch
            LOOPS[name](singles[0], c, rng)
            start = time.perf_counter()
            for image in singles:
                LOOPS[name](image, c, rng)
            there += (time.perf_counter() - start) / loop_images
        ours[name], loops[name] = here / len(severities) * 1e6, there / len(severities) * 1e6
        print(f"{name:24}{loops[name]:9.1f}{ours[name]:9.1f}{loops[name] / ours[name]:8.1f}")
    for title, names in (
        ("mean of the 15", CORRUPTIONS),
        ("  without glass blur", tuple(name for name in CORRUPTIONS if name != "glass_blur")),
    ):
        loop_mean, our_mean = (sum(times[name] for name in names) / len(names) for times in (loops, ours))
        print(f"{title:24}{loop_mean:9.1f}{our_mean:9.1f}{loop_mean / our_mean:8.1f}")
    typical = math.exp(sum(math.log(loops[name] / ours[name]) for name in CORRUPTIONS) / len(CORRUPTIONS))
    print(f"geometric mean of the 15 ratios {typical:.1f}")


def generate(count: int, device: str) -> None:
    """All 15 x 5 of a set of ``count`` 32-pixel images, without writing it."""
    images = pictures(count).to(device)
    frost = frost_source()
    begin = time.perf_counter()
    for name in CORRUPTIONS:
        start = time.perf_counter()
        for severity in SEVERITIES:
            corrupt(images, name, severity, seed=0, frost=frost).cpu()
        print(f"{name:24}{time.perf_counter() - start:8.2f} s")
    print(f"{f'75 x {count}':24}{time.perf_counter() - begin:8.2f} s on {device}")


def sheet(photo: Path, out: Path, side: int = 112) -> None:
    """A row for each corruption, a column for each severity, with the constants for 224 pixels, shown at half size."""
    image = Image.open(photo).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    image = image.crop((left, top, left + 224, top + 224))
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
    source = frost_source()
    label, gap, half = 18, 2, math.ceil(len(ALL) / 2)
    tile, block = side + gap, 5 * (side + gap) + 14
    page = Image.new("RGB", (2 * block - 14, half * (tile + label)), "white")
    draw = ImageDraw.Draw(page)
    for number, name in enumerate(ALL):
        x, y = number // half * block, number % half * (tile + label)
        note = " (extra)" if name in EXTRA else " (STAND-IN)" if name == "frost" and source.stand_in else ""
        draw.text((x + 2, y + 3), name + note, fill="black")
        for severity in SEVERITIES:
            result = corrupt(pixels, name, severity, seed=0, variant="imagenet", frost=source)[0]
            small = Image.fromarray(result.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.LANCZOS)
            page.paste(small, (x + (severity - 1) * tile, y + label))
    x, y = block, (half - 1) * (tile + label)
    draw.text((x + 2, y + 3), "the photograph", fill="black")
    page.paste(image.resize((side, side), Image.Resampling.LANCZOS), (x, y + label))
    page.save(out, quality=75, optimize=True)
    print(f"wrote {out}: {page.width} x {page.height}, {out.stat().st_size // 1024} KB, frost: {source.origin}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("speed")
    verb.add_argument("--batch", type=int, default=1000)
    verb.add_argument("--loop-images", type=int, default=100)
    verb.add_argument("--severities", type=int, nargs="+", default=list(SEVERITIES))
    verb = verbs.add_parser("generate")
    verb.add_argument("--count", type=int, default=10_000)
    verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    verb = verbs.add_parser("sheet")
    verb.add_argument("photo", type=Path)
    verb.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.verb == "speed":
        speed(args.batch, args.loop_images, args.severities)
    elif args.verb == "generate":
        generate(args.count, args.device)
    else:
        sheet(args.photo, args.out)


if __name__ == "__main__":
    main()
