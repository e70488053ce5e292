"""The corruptions of CIFAR-10-C, Tiny-ImageNet-C and ImageNet-C, made on the fly from clean images.

    >>> import numpy as np
    >>> from protodcs.data.corruptions import corrupt
    >>> images = np.full((2, 32, 32, 3), 128, dtype=np.uint8)
    >>> corrupt(images, "gaussian_noise", 3, source="cifar10-test", indices=[0, 1]).shape
    (2, 32, 32, 3)

The pixels of an image depend on the source's name, its index in it, the corruption, severity, family and variant, and
on nothing else: not on the batch, the order, the threads or earlier calls. There are three families of constants,
"cifar" (32x32), "tiny-imagenet" (64x64) and "imagenet" (224x224); at those sizes the arithmetic is that of the
published generator, step by step. Other sizes and other shapes than squares work too.

The variant "published" keeps the generator's quirks. The variant "fixed" differs in these four and no others:

- results are rounded to whole levels; the published ones are truncated (glass blur does so twice);
- glass blur swaps two pixels; the published swap is in effect a copy;
- frost draws all six overlays; the published generator never reaches the sixth;
- elastic_transform of the family "imagenet" scales with the image; the published one takes its side to be 244.

Two departures are common to both: where the published spatter divides by zero, because no drop fell, the image is
left as it is; and where a frost overlay is not larger than the image, it is continued by reflection.
"""

from .generator import corrupt, family_of
from .register import EXTRA, NAMES, STANDARD
from .task import FAMILIES, VARIANTS, Variant

__all__ = ["EXTRA", "FAMILIES", "NAMES", "STANDARD", "VARIANTS", "Variant", "corrupt", "family_of"]
