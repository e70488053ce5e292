"""A stream of features, decided one by one. Needs no model and no download: the features are made here.

Text prototypes lie in one narrow cone and images in another, as CLIP's do; half of the images belong to classes that
are not on the list, and half way through the stream a shift sets in.
"""

import numpy as np

from protodcs import StreamDCS

rng = np.random.default_rng(0)
names = ["cat", "dog", "elk", "fox", "hen", "owl"]
width, samples = 64, 1000


def directions(count):
    rows = rng.normal(size=(count, width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


text_cone, image_cone, shift = directions(3)
known, strange = directions(len(names)), directions(20)
prototypes = text_cone + 0.5 * known

labels = np.where(rng.random(samples) < 0.5, -1, rng.integers(len(names), size=samples))
content = np.where(labels[:, None] < 0, strange[rng.integers(20, size=samples)], known[labels])
features = image_cone + 0.3 * text_cone + 0.5 * content + 0.3 * directions(samples)
features[samples // 2 :] += 0.3 * shift

engine = StreamDCS(prototypes, classes=names)
right = 0
for step, (feature, label) in enumerate(zip(features, labels, strict=True)):
    decision = engine.observe(feature)
    right += decision.label == (names[label] if label >= 0 else None)
    if step % 200 == 199:
        said = decision.label or "unknown"
        print(f"after {step + 1:4d} samples: {right / (step + 1):.0%} right so far, the last one is {said}")

print()
print("Why the next sample would be decided as it would:")
print(engine.explain(features[0]))
