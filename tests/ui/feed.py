"""Prepare a service for the browser tests: streams, drawn images, keys. Each command prints one JSON object."""

import io
import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from protodcs import Client
from protodcs.demo import DemoStream, draw
from protodcs.demo.story import told


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def drawings(kind, count, seed):
    rng = np.random.default_rng(seed)
    return [png(draw(kind, rng)) for _ in range(count)]


def demo(stream, count, seed):
    """Observe images of the demo; a third of them is unknown."""
    for sample in DemoStream(count, unknown=0.3, seed=seed):
        stream.observe(png(sample.image))
    return {"observed": count}


def story(stream, count, seed):
    """Observe the first images of a round of the demo, with the truth in their references."""
    for image, reference in islice(
        told([DemoStream(300, unknown=0.3, shifts=("clean", "fog", "clean"), seed=seed)]), count
    ):
        stream.observe(png(image), image_ref=reference)
    return {"observed": count}


def planted(stream, kind, count, seed):
    """Observe images of known kinds with those of one unknown kind between them."""
    images = [png(sample.image) for sample in DemoStream(2 * count, unknown=0.0, seed=seed)]
    for place, image in enumerate(drawings(kind, count, seed)):
        stream.observe(images[2 * place])
        stream.observe(images[2 * place + 1])
        stream.observe(image)
    return {"observed": 3 * count}


def recognised(stream, kind, count, seed):
    """Return the share of new images of a kind that get this name."""
    answers = [stream.peek(image).decision for image in drawings(kind, count, seed)]
    return {"share": sum(answer.label == kind for answer in answers) / count}


def burst(stream, rate, seconds, seed):
    """Observe at a steady rate, for measurements."""
    import time

    images = [png(sample.image) for sample in DemoStream(200, unknown=0.3, seed=seed)]
    start = time.monotonic()
    for place in range(rate * seconds):
        time.sleep(max(0.0, start + place / rate - time.monotonic()))
        stream.observe(images[place % 200])
    return {"observed": rate * seconds, "seconds": round(time.monotonic() - start, 1)}


def keys(folder):
    """Create a file of keys for two tenants."""
    from protodcs.serve.access.keys import create_key

    file = Path(folder) / "keys.json"
    wanted = {"admin": ("acme", "admin"), "reader": ("acme", "read"), "rival": ("rival", "admin")}
    made = {name: create_key(file, *about)[1] for name, about in wanted.items()}
    return {"file": str(file), **made, "viewer": create_key(file, "acme", "read", images=True)[1]}


def main(action, *given):
    if action == "keys":
        return keys(*given)
    base_url, key, name, *rest = given
    with Client(base_url, key=key or None) as client:
        if action == "create":
            client.create(name, classes="demo")
            return {"created": name}
        values = [int(value) if value.isdigit() else value for value in rest]
        actions = {"demo": demo, "planted": planted, "recognised": recognised, "burst": burst, "story": story}
        return actions[action](client.stream(name), *values)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
