"""A stream of features, decided one by one, and why: `python examples/features.py`. Needs the extra `demo`.

The features come from the encoder of the demo. One image in five shows an object that is not on the list of classes.
Fog comes after half of the stream.
"""

from protodcs import StreamDCS, StreamDCSConfig, encoders
from protodcs.demo import KNOWN, DemoStream

encoder = encoders.load("demo")
stream = DemoStream(600, unknown=0.2, shifts=("clean", "fog"), seed=3)
features = encoder.encode(sample.image for sample in stream)

engine = StreamDCS(encoder.prototypes(KNOWN), KNOWN, StreamDCSConfig(temperature=1 / encoder.logit_scale))
correct = 0
for step, (feature, label) in enumerate(zip(features, stream.labels, strict=True)):
    decision = engine.observe(feature)  # decide, and learn
    correct += decision.label == (KNOWN[label] if label >= 0 else None)
    if step % 100 == 99:
        answer = decision.label or "unknown"
        print(f"after {step + 1} images: {correct / (step + 1):.0%} correct so far, the last answer is {answer}")

unknown = features[stream.labels < 0][-1]
print(f"\nWhy the engine rejects the last unknown image:\n{engine.explain(unknown)}")
