"""Classify images of the demo and count errors: `python examples/images.py`. Needs the extra `demo`."""

from protodcs import OpenSetClassifier
from protodcs.demo import KNOWN, UNKNOWN, DemoStream


def main():
    stream = DemoStream(400, unknown=0.25, seed=7)
    samples = list(stream)  # each access to the stream draws the image again
    classifier = OpenSetClassifier.from_pretrained("demo", classes=KNOWN)
    # The order of a collection does not matter. Use classifier.stream(images) for images that arrive one by one.
    decisions = classifier.classify(sample.image for sample in samples)
    known = stream.labels >= 0
    print(f"{sum(~decisions.known & ~known)} of {sum(~known)} unknown images found")
    print(f"{sum(~decisions.known & known)} of {sum(known)} known images rejected")

    for kind in UNKNOWN:
        shown = [place for place, sample in enumerate(samples) if sample.kind == kind]
        answers = [decisions[place].label or "unknown" for place in shown]
        print(f"{kind:8} {answers.count('unknown'):2} of {len(answers):2} found; last answer: {answers[-1]}")


if __name__ == "__main__":
    main()
