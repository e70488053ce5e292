"""The published constants of each corruption, per family, for the severities 1 to 5. Data, and nothing else.

They are those of the generators of CIFAR-10-C, Tiny-ImageNet-C and ImageNet-C, digit by digit: changing one makes
results that can no longer be compared with published ones.
"""

from typing import TypeAlias

Scalars: TypeAlias = dict[str, tuple[float, float, float, float, float]]
Tuples: TypeAlias = dict[str, tuple[tuple[float, ...], ...]]

# Standard deviation of the noise, on a scale where white is 1.
GAUSSIAN_NOISE: Scalars = {
    "cifar": (0.04, 0.06, 0.08, 0.09, 0.10),
    "tiny-imagenet": (0.04, 0.08, 0.12, 0.15, 0.18),
    "imagenet": (0.08, 0.12, 0.18, 0.26, 0.38),
}
# Photons of a white pixel.
SHOT_NOISE: Scalars = {
    "cifar": (500, 250, 100, 75, 50),
    "tiny-imagenet": (250, 100, 50, 30, 15),
    "imagenet": (60, 25, 12, 5, 3),
}
# Share of the values that are replaced.
IMPULSE_NOISE: Scalars = {
    "cifar": (0.01, 0.02, 0.03, 0.05, 0.07),
    "tiny-imagenet": (0.01, 0.02, 0.05, 0.08, 0.14),
    "imagenet": (0.03, 0.06, 0.09, 0.17, 0.27),
}
# Standard deviation of the noise, relative to the pixel.
SPECKLE_NOISE: Scalars = {
    "cifar": (0.06, 0.1, 0.12, 0.16, 0.2),
    "tiny-imagenet": (0.15, 0.2, 0.25, 0.3, 0.35),
    "imagenet": (0.15, 0.2, 0.35, 0.45, 0.6),
}
# Standard deviation, in pixels.
GAUSSIAN_BLUR: Scalars = {
    "cifar": (0.4, 0.6, 0.7, 0.8, 1),
    "tiny-imagenet": (0.5, 0.75, 1, 1.25, 1.5),
    "imagenet": (1, 2, 3, 4, 6),
}
# Standard deviation of the blur, reach of the exchange, rounds.
GLASS_BLUR: dict[str, tuple[tuple[float, int, int], ...]] = {
    "cifar": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "tiny-imagenet": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "imagenet": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
}
# Radius of the disk, standard deviation that softens its edge.
DEFOCUS_BLUR: Tuples = {
    "cifar": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "tiny-imagenet": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "imagenet": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
}
# Radius and standard deviation, in pixels.
MOTION_BLUR: Tuples = {
    "cifar": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "tiny-imagenet": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "imagenet": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
}
# Start, end and step of the zoom factors, as for numpy.arange: with these steps it may reach the end.
ZOOM_BLUR: Tuples = {
    "cifar": ((1, 1.06, 0.01), (1, 1.11, 0.01), (1, 1.16, 0.01), (1, 1.21, 0.01), (1, 1.26, 0.01)),
    "tiny-imagenet": ((1, 1.06, 0.01), (1, 1.11, 0.01), (1, 1.16, 0.01), (1, 1.21, 0.01), (1, 1.26, 0.01)),
    "imagenet": ((1, 1.11, 0.01), (1, 1.16, 0.01), (1, 1.21, 0.02), (1, 1.26, 0.02), (1, 1.31, 0.03)),
}
# Strength, and how fast the wobble decays from one scale to the next.
FOG: Tuples = {
    "cifar": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "tiny-imagenet": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    "imagenet": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
}
# Share of the image, share of the overlay.
FROST: Tuples = {
    "cifar": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "tiny-imagenet": ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
    "imagenet": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
}
# By how much the overlays are scaled.
FROST_SCALE: dict[str, float] = {"cifar": 0.2, "tiny-imagenet": 0.3, "imagenet": 1.0}
# Mean and standard deviation of the flakes, zoom, threshold, radius and deviation of the fall, share of the image.
SNOW: Tuples = {
    "cifar": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "tiny-imagenet": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "imagenet": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
}
# Mean and standard deviation of the liquid, its smoothing, threshold, strength, and 0 for water or 1 for mud.
SPATTER: Tuples = {
    "cifar": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "tiny-imagenet": (
        (0.62, 0.1, 0.7, 0.7, 0.6, 0),
        (0.65, 0.1, 0.8, 0.7, 0.6, 0),
        (0.65, 0.3, 1, 0.69, 0.6, 0),
        (0.65, 0.1, 0.7, 0.68, 0.6, 1),
        (0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ),
    "imagenet": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
}
# What is left of the distance to the mean.
CONTRAST: Scalars = {
    "cifar": (0.75, 0.5, 0.4, 0.3, 0.15),
    "tiny-imagenet": (0.4, 0.3, 0.2, 0.1, 0.05),
    "imagenet": (0.4, 0.3, 0.2, 0.1, 0.05),
}
# Added to the value of hue, saturation, value.
BRIGHTNESS: Scalars = {
    "cifar": (0.05, 0.1, 0.15, 0.2, 0.3),
    "tiny-imagenet": (0.1, 0.2, 0.3, 0.4, 0.5),
    "imagenet": (0.1, 0.2, 0.3, 0.4, 0.5),
}
# Factor on the saturation, and what is added to it.
SATURATE: Tuples = {
    "cifar": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    "tiny-imagenet": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
    "imagenet": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
}
# Quality.
JPEG_COMPRESSION: dict[str, tuple[int, ...]] = {
    "cifar": (80, 65, 58, 50, 40),
    "tiny-imagenet": (65, 58, 50, 40, 25),
    "imagenet": (25, 18, 15, 10, 7),
}
# Share of the side that is left.
PIXELATE: Scalars = {
    "cifar": (0.95, 0.9, 0.85, 0.75, 0.65),
    "tiny-imagenet": (0.9, 0.8, 0.7, 0.6, 0.5),
    "imagenet": (0.6, 0.5, 0.4, 0.3, 0.25),
}
# Strength, smoothing and shift of the corners, each in sides of the image.
ELASTIC_TRANSFORM: Tuples = {
    "cifar": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "tiny-imagenet": ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
    "imagenet": ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
}
# The side that the published ImageNet-C took for 224.
PUBLISHED_ELASTIC_SIDE = 244
