"""Run in a process of its own: loads an open_clip folder and writes its features for the images and sentences given.

torchvision's compiled operators do not fit every torch build; the two that open_clip's import touches are declared
here, and none is ever called.
"""

import sys

import numpy as np
import torch


def main():
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    library.define("qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor")

    from protodcs import encoders

    name, given, out = sys.argv[1:]
    arrays = np.load(given)
    encoder = encoders.load(name, device="cpu")
    images = [arrays[f"image{number}"] for number in range(int(arrays["images"]))]
    np.savez(
        out,
        features=encoder.encode_pixels(images),
        sentences=encoder.encode_texts([str(sentence) for sentence in arrays["sentences"]]),
        pixels=encoder.preprocessing(images),
        logit_scale=encoder.logit_scale,
    )


if __name__ == "__main__":
    main()
