"""The names of the common corruptions and what each severity means (Hendrycks & Dietterich, ICLR 2019).

Two published sets of constants exist: one for 32-pixel images (CIFAR-10-C) and one for 224-pixel images (ImageNet-C).
They are kept as published, with their oddities: the elastic lengths of the large set are multiples of 244, not 224, and
several sequences are not monotonic.
"""

from __future__ import annotations

from hardsphere.errors import HardsphereError, nearest

CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""The 15 that the mean is taken over, in the official order."""

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""Four more, meant by their authors for validation; no mean includes them."""

ALL = CORRUPTIONS + EXTRA

SEVERITIES = (1, 2, 3, 4, 5)

VARIANTS = ("cifar", "imagenet")

Setting = tuple[float, ...]
_Five = tuple[Setting, Setting, Setting, Setting, Setting]


def _singles(*values: float) -> _Five:
    a, b, c, d, e = values
    return (a,), (b,), (c,), (d,), (e,)


def _times(factor: float, *settings: Setting) -> _Five:
    a, b, c, d, e = (tuple(factor * value for value in setting) for setting in settings)
    return a, b, c, d, e


_CIFAR: dict[str, _Five] = {
    "gaussian_noise": _singles(0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": _singles(500, 250, 100, 75, 50),  # photons at full brightness
    "impulse_noise": _singles(0.01, 0.02, 0.03, 0.05, 0.07),  # share of the values hit
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, sigma of the smoothed rim
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sigma, reach, rounds
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sigma
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),  # end, step of the factors
    "snow": (  # mean, deviation, zoom, threshold, blur radius, blur sigma, share of the image kept
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # weights of the image and of the frost
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # amount, decay of the roughness
    "brightness": _singles(0.05, 0.1, 0.15, 0.2, 0.3),  # added to the value
    "contrast": _singles(0.75, 0.5, 0.4, 0.3, 0.15),  # factor around the mean
    "elastic_transform": _times(  # amplitude, smoothness, affine jitter, in pixels
        32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
    ),
    "pixelate": _singles(0.95, 0.9, 0.85, 0.75, 0.65),  # size of the small image
    "jpeg_compression": _singles(80, 65, 58, 50, 40),  # quality
    "speckle_noise": _singles(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": _singles(0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (  # mean, deviation, smoothness, threshold, strength, 0 for water and 1 for mud
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),  # factor and offset of the saturation
}

_IMAGENET: dict[str, _Five] = {
    "gaussian_noise": _singles(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _singles(60, 25, 12, 5, 3),
    "impulse_noise": _singles(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": _singles(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _singles(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": _times(
        244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)
    ),
    "pixelate": _singles(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _singles(25, 18, 15, 10, 7),
    "speckle_noise": _singles(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _singles(1, 2, 3, 4, 6),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
}

SETTINGS = {"cifar": _CIFAR, "imagenet": _IMAGENET}


def setting(variant: str, name: str, severity: int) -> Setting:
    """The constants of one corruption at one severity."""
    check_names([name])
    if variant not in VARIANTS:
        raise HardsphereError(
            f"Unknown variant '{variant}': use 'cifar' (the constants for 32 pixels) or 'imagenet' (for 224 pixels)."
        )
    if severity not in SEVERITIES:
        raise HardsphereError(f"The severity is {severity}, but it must be 1, 2, 3, 4 or 5.")
    return SETTINGS[variant][name][severity - 1]


def check_names(names: tuple[str, ...] | list[str]) -> None:
    """Refuse a name that is no corruption, and say which is nearest."""
    for name in names:
        if name not in ALL:
            raise HardsphereError(f"Unknown corruption '{name}': use one of {', '.join(ALL)}.{nearest(name, ALL)}")
