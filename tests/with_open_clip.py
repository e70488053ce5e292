"""Run in a process of its own: loads open_clip encoders and writes their features for the images and sentences given.

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

    given, out, *names = sys.argv[1:]
    arrays = np.load(given)
    images = [arrays[f"image{number}"] for number in range(int(arrays["images"]))]
    sentences = [str(sentence) for sentence in arrays["sentences"]]
    results = {}
    for number, name in enumerate(names):
        results.update({f"{number}.{key}": value for key, value in outcome(name, images, sentences).items()})
    np.savez(out, **results)


def outcome(name, images, sentences):
    from protodcs import encoders
    from protodcs.errors import EncoderError

    try:
        encoder = encoders.load(name, device="cpu")
    except EncoderError as problem:
        return {"refused": str(problem)}
    return {
        "features": encoder.encode_pixels(images),
        "sentences": encoder.encode_texts(sentences),
        "prototypes": encoder.prototypes(["red fox (Vulpes vulpes)", "badger"]),
        "pixels": encoder.preprocessing(images),
        "logit_scale": encoder.logit_scale,
        "fingerprint": encoder.fingerprint,
    }


if __name__ == "__main__":
    main()
