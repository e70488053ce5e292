"""Images on their way into the encoder."""

import io

from PIL import Image

from protodcs.serve.encoder import encoding


def png(side):
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_large_images_are_decoded_a_few_at_a_time_and_bad_ones_are_told_why(monkeypatch):
    monkeypatch.setattr(encoding, "_DECODED_BYTES", 3 * 100 * 100)
    images = [png(100), png(90), b"no image", png(10), png(10), png(100), png(100)]
    answers = [""] * len(images)
    groups = list(encoding.decoded_in_groups(images, answers))
    assert [places for places, _ in groups] == [[0, 1], [3, 4, 5], [6]]
    assert [[one.shape[0] for one in pixels] for _, pixels in groups] == [[100, 90], [10, 10, 100], [100]]
    assert [place for place, answer in enumerate(answers) if answer] == [2]
