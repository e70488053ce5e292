"""Encoders: parity between back-ends, preprocessing as in transformers, fingerprints, and every way to go wrong."""

import io
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from protodcs import encoders
from protodcs.cli import app
from protodcs.data import open_source
from protodcs.data.prompts import species_names, templates
from protodcs.encoders import Preprocessing, prototypes
from protodcs.encoders.base import Encoder
from protodcs.errors import EncoderError, InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

SENTENCES = ["a photo of a cat.", "a blurry photo of the dog", "number 7"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def open_clip_site():
    """The folder of open_clip and torchvision: apart, since transformers breaks beside a torchvision that fails."""
    folder = os.environ.get("PROTODCS_OPEN_CLIP")
    if not folder or not (Path(folder) / "open_clip").is_dir():
        pytest.skip("PROTODCS_OPEN_CLIP does not name a folder with open_clip and torchvision")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a small CLIP and a small SigLIP."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.tiny_clip(folder / "clip")
    tiny_models.tiny_siglip(folder / "siglip")
    return folder


@pytest.fixture(scope="session")
def odd_images(data_folder):
    """200 real images, each cut and stretched to an odd size."""
    return odd_sized(open_source("tiny-imagenet-val"), 200)


def odd_sized(source, count):
    rng = np.random.default_rng(7)
    images = []
    for image in source.read(list(range(0, 40 * count, 40))):
        width, height = (int(side) for side in rng.integers(19, 401, size=2))
        images.append(np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)))
    return images


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_preprocessing_equals_that_of_transformers_on_200_odd_sizes(kind, tiny, odd_images):
    processor = transformers.AutoImageProcessor.from_pretrained(tiny / kind)
    ours = encoders.load(tiny / kind).preprocessing
    pairs = [
        (ours([image])[0], processor(Image.fromarray(image), return_tensors="np")["pixel_values"][0])
        for image in odd_images
    ]
    scale = np.array(ours.std, dtype=np.float32)[:, None, None]
    assert max(float(np.abs((a - b) * scale).max()) for a, b in pairs) <= 1 / 255


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_features_equal_those_of_transformers_called_by_hand(kind, tiny, odd_images):
    encoder = encoders.load(tiny / kind)
    model = transformers.AutoModel.from_pretrained(tiny / kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny / kind)
    padding = {"padding": "max_length", "max_length": tiny_models.LENGTH} if kind == "siglip" else {"padding": True}
    with torch.inference_mode():
        pixels = torch.from_numpy(encoder.preprocessing(odd_images[:8]))
        images = model.get_image_features(pixel_values=pixels).pooler_output
        tokens = tokenizer(SENTENCES, return_tensors="pt", **padding)
        if kind == "siglip":
            tokens = {"input_ids": tokens["input_ids"]}
        texts = model.get_text_features(**tokens).pooler_output
    assert_close(encoder.encode_pixels(odd_images[:8]), torch.nn.functional.normalize(images, dim=-1))
    assert_close(encoder.encode_texts(SENTENCES), torch.nn.functional.normalize(texts, dim=-1))


@pytest.fixture(scope="module")
def exported_folder(tiny, tmp_path_factory):
    """`exported_folder(kind)`: a folder with the export of a small model, which tests must not change."""
    pytest.importorskip("onnxruntime")
    from protodcs.encoders.export import export

    @cache
    def folder(kind):
        found = tmp_path_factory.mktemp("export") / kind
        parity = export(encoders.load(tiny / kind), found)
        assert max(parity.images, parity.texts) <= 1e-4
        return found

    return folder


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_an_export_gives_the_same_features_and_the_same_fingerprint(kind, tiny, exported_folder, odd_images):
    folder = exported_folder(kind)
    encoder, exported = encoders.load(tiny / kind), encoders.load(f"onnx:{folder}")
    assert_close(exported.encode_pixels(odd_images[:40]), encoder.encode_pixels(odd_images[:40]))
    assert_close(exported.encode_texts(SENTENCES), encoder.encode_texts(SENTENCES))
    assert exported.fingerprint == encoder.fingerprint
    with pytest.raises(EncoderError, match="abacus"):
        encoders.load(f"onnx:{folder}", device="abacus")
    everything = b"".join(file.read_bytes() for file in folder.iterdir())
    for path in (str(folder.parent), str(tiny), str(Path(encoders.__file__).parent), sys.prefix):
        assert path.encode() not in everything


def test_the_command_exports_the_mini_encoder_with_prototypes_of_names_and_prints_its_proof(
    tmp_path, data_folder, odd_images
):
    pytest.importorskip("onnxruntime")
    mini = encoders.load("mini")
    run = CliRunner().invoke(app, ["export", "mini", str(tmp_path / "exported"), "--classes", "cifar10", "--json"])
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["largest_difference"]["images"] <= 1e-4
    exported = encoders.load(f"onnx:{tmp_path / 'exported'}")
    assert_close(exported.encode_pixels(odd_images[:10]), mini.encode_pixels(odd_images[:10]))
    assert_close(exported.prototypes(["ship", "cat"]), mini.prototypes(["ship", "cat"]))
    with pytest.raises(InputError, match="exported without 'sofa'"):
        exported.prototypes(["sofa"])
    refused = CliRunner().invoke(app, ["export", "mini", str(tmp_path / "other")])
    assert refused.exit_code == 1
    assert "name the classes" in refused.stderr


# open_clip, in a process of its own.

TWO_HEADS = {"image_size": 64, "layers": 3, "width": 64, "head_width": 32, "patch_size": 16}


@pytest.fixture(scope="session")
def in_open_clip(open_clip_site, tmp_path_factory, odd_images):
    """What open_clip makes of one small CLIP, saved in several ways, and of names it would get wrong."""
    folder = tmp_path_factory.mktemp("open_clip")
    vocabulary = open_clip_site / "open_clip" / "bpe_simple_vocab_16e6.txt.gz"
    model = tiny_models.tiny_clip(folder / "transformers", vocabulary=vocabulary)
    kinds = {"plain": {}, "own text tower": {"custom_text": True}, "gelu": {"quick_gelu": False}}
    kinds |= {"two heads": {"vision_cfg": TWO_HEADS}, "no weights": {}, "no logit scale": {}}
    for kind, settings in kinds.items():
        tiny_models.as_open_clip(model, folder / kind, **settings)
    (folder / "no weights" / "open_clip_model.safetensors").unlink()
    without_tensors(folder / "no logit scale" / "open_clip_model.safetensors", ["logit_scale"])
    # The cache of Hugging Face, as after a download.
    place, commit = folder / "cache" / "models--imageomics--bioclip-2", "0" * 40
    tiny_models.as_open_clip(model, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    names = {kind: f"open_clip:local-dir:{folder / kind}" for kind in kinds} | {"bioclip-2": "bioclip-2"}
    names |= {name: f"open_clip:{name}" for name in ("ViT-B-32", "ViT-Z-99/openai", "ViT-B-32-quickgelu/laion2b_e16")}
    images = {f"image{number}": image for number, image in enumerate(odd_images[:50])}
    np.savez(folder / "given.npz", images=50, sentences=SENTENCES, **images)
    path = os.pathsep.join([str(open_clip_site), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = [Path(__file__).with_name("with_open_clip.py"), folder / "given.npz", folder / "out.npz", *names.values()]
    variables = {"PYTHONPATH": path, "HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, *child], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    outcomes = {name: {} for name in names}
    with np.load(folder / "out.npz") as written:
        for key, value in written.items():
            number, _, what = key.partition(".")
            outcomes[list(names)[int(number)]][what] = value
    return folder / "transformers", outcomes


def test_open_clip_transformers_and_onnx_agree_on_the_same_weights(in_open_clip, tmp_path, odd_images):
    pytest.importorskip("onnxruntime")
    from protodcs.encoders.export import export

    folder, outcomes = in_open_clip
    encoder, theirs, images = encoders.load(folder), outcomes["plain"], odd_images[:50]
    # Text graphs are compared above: here only the images are, and each graph takes seconds to export.
    export(encoder, tmp_path / "onnx", classes=["cat", "dog"])
    assert_close(theirs["features"], encoder.encode_pixels(images))
    assert_close(theirs["sentences"], encoder.encode_texts(SENTENCES))
    assert_close(theirs["logit_scale"], encoder.logit_scale)
    assert np.array_equal(theirs["pixels"], encoder.preprocessing(images))
    assert_close(encoders.load(f"onnx:{tmp_path / 'onnx'}").encode_pixels(images), theirs["features"])


def test_a_text_tower_of_its_own_in_open_clip_gives_the_same(in_open_clip):
    _, outcomes = in_open_clip
    for key in ("features", "sentences"):
        assert_close(outcomes["plain"][key], outcomes["own text tower"][key])


def test_bioclip_2_reads_common_and_scientific_names(in_open_clip):
    folder, outcomes = in_open_clip
    assert_close(outcomes["bioclip-2"]["features"], outcomes["plain"]["features"])
    fox = ["a photo of Vulpes vulpes.", "a photo of red fox.", "a photo of Vulpes vulpes with common name red fox."]
    mean = encoders.load(folder).encode_texts(fox).mean(axis=0)
    badger = encoders.load(folder).encode_texts(["a photo of badger."])[0]
    assert_close(outcomes["bioclip-2"]["prototypes"], [mean / np.linalg.norm(mean), badger])
    assert np.abs(outcomes["plain"]["prototypes"] - outcomes["bioclip-2"]["prototypes"]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "common", "scientific"),
    [
        ("red fox (Vulpes vulpes)", "red fox", "Vulpes vulpes"),
        ("house cat (Felis silvestris catus)", "house cat", "Felis silvestris catus"),
        ("Vulpes vulpes", "Vulpes vulpes", "Vulpes vulpes"),
        ("cup (large)", "cup (large)", "cup (large)"),
        ("(Vulpes vulpes)", "(Vulpes vulpes)", "(Vulpes vulpes)"),
    ],
)
def test_a_scientific_name_may_stand_behind_a_common_one(name, common, scientific):
    assert species_names(name) == (common, scientific)


@pytest.mark.parametrize(
    "wrong", [["a photo."], ["{} {}"], ["{} {common}"], ["{scientific} {scientific}"], ["{common}"], []]
)
def test_templates_have_places_that_every_class_can_fill(wrong):
    with pytest.raises(InputError, match="template"):
        templates(wrong)


@pytest.mark.parametrize("kind", ["gelu", "two heads"])
def test_what_the_weights_do_not_tell_changes_features_and_fingerprint(kind, in_open_clip):
    _, outcomes = in_open_clip
    assert np.abs(outcomes["plain"]["features"] - outcomes[kind]["features"]).max() > 1e-3
    assert str(outcomes["plain"]["fingerprint"]) != str(outcomes[kind]["fingerprint"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no weights", "cannot be loaded with open_clip"),
        ("no logit scale", "logit_scale"),
        ("ViT-B-32", "names no weights"),
        ("ViT-Z-99/openai", "no architecture 'ViT-Z-99'"),
        ("ViT-B-32-quickgelu/laion2b_e16", "'laion2b_e16' is not a known tag"),
    ],
)
def test_what_open_clip_would_get_wrong_is_refused(name, words, in_open_clip):
    _, outcomes = in_open_clip
    assert words in str(outcomes[name]["refused"])


def assert_close(ours, theirs):
    assert float(np.abs(np.asarray(ours) - np.asarray(theirs)).max()) <= 1e-4


# The mini encoder.


def test_the_mini_encoder_gives_its_check_values(data_folder):
    from safetensors.numpy import load_file

    check = load_file(data_folder / "mini" / "check.safetensors")
    encoder = encoders.load("mini")
    images = open_source("cifar10-test").read(check["image_index"].tolist())
    assert_close(encoder.encode_pixels(images), check["features"])
    assert_close(encoder.prototypes("cifar10"), check["cifar10_prototypes"])


def test_the_mini_encoder_classifies_clean_cifar10_as_its_readme_says(data_folder):
    encoder = encoders.load("mini", batch_size=500)
    source = open_source("cifar10-test")
    part = list(range(0, 10_000, 4))
    similarity = encoder.encode_pixels(source.read(part)) @ encoder.prototypes("cifar10").T
    # A quarter of the set: the full table is in docs/results.
    assert abs(float((similarity.argmax(1) == source.labels[part]).mean()) - 0.885) < 0.015


def test_the_mini_encoder_refuses_a_class_it_has_no_embedding_for(data_folder):
    with pytest.raises(InputError, match="no embedding for 'unicorn'"):
        encoders.load("mini").prototypes(["cat", "unicorn"])


def test_without_its_folder_the_mini_encoder_says_where_it_looks(monkeypatch, tmp_path):
    monkeypatch.delenv("PROTODCS_DATA", raising=False)
    with pytest.raises(EncoderError, match="PROTODCS_DATA"):
        encoders.load("mini")
    with pytest.raises(EncoderError, match=r"mini\.safetensors"):
        encoders.load(f"mini:{tmp_path}")


# One encoder, whatever the call.


def test_a_feature_does_not_depend_on_its_batch(tiny, odd_images):
    encoder = encoders.load(tiny / "clip", batch_size=7)
    together = encoder.encode_pixels(odd_images[:20])
    alone = np.concatenate([encoder.encode_pixels([image]) for image in odd_images[:20]])
    assert float(np.abs(together - alone).max()) < 1e-5


def test_paths_bytes_pictures_and_arrays_are_one_and_the_same(tiny, odd_images, tmp_path):
    encoder = encoders.load(tiny / "clip")
    image = odd_images[0]
    stored = io.BytesIO()
    Image.fromarray(image).save(stored, "PNG")
    (tmp_path / "image.png").write_bytes(stored.getvalue())
    rows = encoder.encode(
        [image, Image.fromarray(image), stored.getvalue(), tmp_path / "image.png", str(tmp_path / "image.png")]
    )
    assert np.abs(rows - rows[0]).max() < 1e-6


def test_a_very_long_strip_costs_no_more_memory_than_a_square(tiny):
    import tracemalloc

    strip = np.zeros((1, 60_000, 3), dtype=np.uint8)
    preprocessing = encoders.load(tiny / "clip").preprocessing
    tracemalloc.start()
    preprocessing([strip])
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


def test_prototypes_are_the_unit_mean_of_unit_sentences(tiny):
    encoder = encoders.load(tiny / "clip", templates=["a photo of a {}.", "the {}"])
    by_hand = sum(
        encoder.encode_texts([template.format(name) for name in ("cat", "dog")]) for template in encoder.templates
    )
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    assert_close(encoder.prototypes(["cat", "dog"]), by_hand)


def test_prototypes_are_read_from_the_cache_and_made_again_when_it_is_damaged(tiny, tmp_path, monkeypatch):
    encoder = encoders.load(tiny / "clip")
    first = encoder.prototypes(["cat", "dog"])
    (file,) = (tmp_path / "cache" / "prototypes").iterdir()
    calls = []
    names = encoder.text_tower.names
    monkeypatch.setattr(
        encoder,
        "text_tower",
        type("Counted", (), {"names": staticmethod(lambda *args: calls.append(1) or names(*args))}),
    )
    assert np.array_equal(encoder.prototypes(["cat", "dog"]), first)
    assert not calls
    file.write_bytes(b"damaged")
    assert np.array_equal(encoder.prototypes(["cat", "dog"]), first)
    assert len(calls) == 1


def test_the_fingerprint_tells_weights_preprocessing_and_templates_apart(tiny, tmp_path):
    first = encoders.load(tiny / "clip")
    again = encoders.load(tiny / "clip")
    assert first.fingerprint == again.fingerprint
    other_templates = encoders.load(tiny / "clip", templates="cifar")
    assert other_templates.fingerprint != first.fingerprint
    assert other_templates.image_fingerprint == first.image_fingerprint
    tiny_models.tiny_clip(tmp_path / "gelu", activation="gelu")
    assert encoders.load(tmp_path / "gelu").weights != first.weights
    tiny_models.tiny_clip(tmp_path / "seed", seed=3)
    assert encoders.load(tmp_path / "seed").weights != first.weights
    half = encoders.load(tiny / "clip", dtype="bfloat16")
    assert half.weights != first.weights
    assert half.logit_scale == first.logit_scale


def test_a_tokenizer_with_two_words_exchanged_is_another_encoder(tiny, tmp_path):
    def change(content):
        vocabulary = content["model"]["vocab"]
        vocabulary["a</w>"], vocabulary["cat</w>"] = vocabulary["cat</w>"], vocabulary["a</w>"]

    changed = rewritten(tiny, tmp_path, "tokenizer.json", change)
    first, other = encoders.load(tiny / "clip"), encoders.load(changed)
    assert np.abs(first.prototypes(["cat"]) - other.prototypes(["cat"])).max() > 1e-3
    assert first.fingerprint != other.fingerprint


def test_other_sentence_embeddings_are_another_mini_encoder(data_folder, tmp_path):
    import shutil

    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(data_folder / "mini", tmp_path / "mini")
    folder.chmod(0o755)
    file = folder / "sentences.safetensors"
    file.chmod(0o644)
    with safe_open(file, "np") as opened:
        about = opened.metadata()
    save_file(
        {name: np.ascontiguousarray(array[::-1]) for name, array in load_file(file).items()}, file, metadata=about
    )
    first, other = encoders.load("mini"), encoders.load(f"mini:{folder}")
    assert first.fingerprint != other.fingerprint
    assert np.abs(first.prototypes(["cat"]) - other.prototypes(["cat"])).max() > 1e-3


def test_a_siglip_whose_common_space_is_wider_than_its_text_is_taken(tmp_path):
    tiny_models.tiny_siglip(tmp_path / "wide", 96)
    assert encoders.load(tmp_path / "wide").encode_texts(SENTENCES).shape == (3, 96)


def test_half_precision_is_near(tiny, odd_images):
    whole, half = (
        encoders.load(tiny / "clip", dtype=dtype).encode_pixels(odd_images[:6]) for dtype in (None, "bfloat16")
    )
    assert 1e-6 < np.abs(whole - half).max() < 0.1


# Every way to go wrong.


def rewritten(tiny, tmp_path, file, change):
    import shutil

    folder = shutil.copytree(tiny / "clip", tmp_path / "changed")
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


def test_openai_weights_without_quick_gelu_are_refused(tiny, tmp_path):
    def change(config):
        config["_name_or_path"] = "openai/clip-vit-base-patch32"
        config["vision_config"]["hidden_act"] = config["text_config"]["hidden_act"] = "gelu"

    with pytest.raises(EncoderError, match="QuickGELU"):
        encoders.load(rewritten(tiny, tmp_path, "config.json", change))


def test_weights_without_a_logit_scale_are_refused(tiny, tmp_path):
    folder = without(tiny, tmp_path, ["logit_scale"])
    with pytest.raises(EncoderError, match="no logit_scale"):
        encoders.load(folder)


def test_weights_that_would_be_random_are_refused(tiny, tmp_path):
    folder = without(tiny, tmp_path, ["visual_projection.weight", "text_projection.weight"])
    with pytest.raises(EncoderError, match="would be random"):
        encoders.load(folder)


def without(tiny, tmp_path, names):
    import shutil

    folder = shutil.copytree(tiny / "clip", tmp_path / "lacking")
    without_tensors(folder / "model.safetensors", names)
    return folder


def without_tensors(file, names):
    from safetensors.torch import load_file, save_file

    kept = {name: tensor for name, tensor in load_file(file).items() if name not in names}
    save_file(kept, file, metadata={"format": "pt"})


def test_a_processor_of_another_image_size_is_refused(tiny, tmp_path):
    def change(settings):
        settings["size"] = {"shortest_edge": 224}
        settings["crop_size"] = {"height": 224, "width": 224}

    with pytest.raises(EncoderError, match="224 x 224, and the tower takes 64 x 64"):
        encoders.load(rewritten(tiny, tmp_path, "preprocessor_config.json", change))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("do_normalize", False, "do_normalize is off"),
        ("rescale_factor", 1.0, "rescale_factor"),
        ("size", "large", "size is 'large'"),
        ("size", {"height": 0, "width": 64}, "size is"),
        ("crop_size", None, "crop_size is None"),
        ("resample", "bicubic", "resample is 'bicubic'"),
        ("resample", 9, "resample is 9"),
        ("rescale_factor", None, "rescale_factor is None"),
        ("image_std", [0, 0, 0], "divides by"),
        ("image_std", [0.5], "three numbers"),
        ("image_mean", None, "image_mean is None"),
    ],
)
def test_a_processor_that_makes_no_sense_is_refused_by_its_setting(key, value, words, tiny, tmp_path):
    with pytest.raises(EncoderError, match=words):
        encoders.load(
            rewritten(tiny, tmp_path, "preprocessor_config.json", lambda settings: settings.update({key: value}))
        )


def test_a_model_of_another_kind_is_refused(tmp_path):
    transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match="type 'vit'"):
        encoders.load(tmp_path)


def test_an_empty_folder_and_an_unknown_name_are_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (tmp_path, "nobody/no-such-model"):
        with pytest.raises(EncoderError, match="cannot be loaded with transformers"):
            encoders.load(name)


@pytest.mark.parametrize("name", ["mini", "open_clip:ViT-B-32/openai", "onnx:folder"])
def test_a_revision_is_refused_where_there_are_none(name):
    with pytest.raises(EncoderError, match="has no revisions"):
        encoders.load(name, revision="main")


def test_a_back_end_that_is_not_installed_says_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from protodcs import encoders, errors\n"
        "try: encoders.load('mini')\n"
        "except errors.EncoderError as problem: print(problem)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "needs the package 'torch'" in said
    assert "pip install" in said


@pytest.mark.parametrize(("limit", "value"), [("_MAX_FILES", 3), ("_MAX_BYTES", 3 * 250)])
def test_the_cache_of_prototypes_keeps_the_most_recently_used_files(tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(prototypes, limit, value)
    moment = 0
    real = os.utime

    def use(file):
        nonlocal moment
        moment += 1
        real(file, (moment, moment))

    monkeypatch.setattr(prototypes.os, "utime", use)
    made = []

    def remember(key):
        def compute():
            made.append(key)
            return np.ones((1, 32), dtype=np.float32)

        prototypes.remembered(key, (1, 32), compute)
        use(prototypes.folder() / f"{key}.safetensors")

    for key in ("a", "b", "c", "a", "d", "a", "c", "b"):
        remember(key)
    assert made == ["a", "b", "c", "d", "b"]
    assert len(list(prototypes.folder().iterdir())) == 3


def test_damaged_weights_give_no_feature(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = without(tiny, tmp_path, [])
    tensors = load_file(folder / "model.safetensors")
    tensors["visual_projection.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EncoderError, match="zero or not finite"):
        encoders.load(folder).encode_pixels([np.zeros((8, 8, 3), np.uint8)])


def test_a_sentence_that_would_be_cut_is_refused(tiny):
    with pytest.raises(InputError, match="tokens, and the text tower reads"):
        encoders.load(tiny / "clip").prototypes(["x " * 60])


@pytest.mark.parametrize("given", [{"device": "abacus"}, {"device": "cuda:63"}, {"dtype": "int3"}])
def test_a_device_or_number_type_that_does_not_exist_is_refused(given, tiny):
    with pytest.raises(EncoderError, match=next(iter(given.values()))):
        encoders.load(tiny / "clip", **given)


def test_a_changed_export_is_refused(tiny, tmp_path, exported_folder):
    from protodcs.encoders.export import export

    folder = shutil.copytree(exported_folder("clip"), tmp_path / "exported")
    with pytest.raises(InputError, match="exists already"):
        export(encoders.load(tiny / "clip"), folder)
    graph = folder / "image.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EncoderError, match="was changed after the export"):
        encoders.load(f"onnx:{folder}")
    graph.unlink()
    with pytest.raises(EncoderError, match=r"holds no 'image\.onnx'"):
        encoders.load(f"onnx:{folder}")
    with pytest.raises(EncoderError, match=r"holds no encoder\.json"):
        encoders.load(f"onnx:{tmp_path}")


def test_a_failed_export_leaves_nothing_behind(tiny, tmp_path, exported_folder, monkeypatch):
    from protodcs.encoders import export as module

    finished = exported_folder("clip")

    def copy_graph(*arguments):
        shutil.copy(finished / arguments[-1].name, arguments[-1])

    # Exporting the same graphs again would take seconds.
    monkeypatch.setattr(module, "_write_graph", copy_graph)
    monkeypatch.setattr(module, "TOLERANCE", 0.0)
    with pytest.raises(EncoderError, match="nothing was written"):
        module.export(encoders.load(tiny / "clip"), tmp_path / "exported")
    assert list(tmp_path.glob("*export*")) == list(tmp_path.glob(".*draft*")) == []


def test_an_encoder_proves_what_its_towers_give():
    def build(tower, **changes):
        settings = {
            "name": "test",
            "back_end": "test",
            "preprocessing": Preprocessing(8, 8, "squash", 8, "bicubic", (0.5,) * 3, (0.5,) * 3),
            "image_tower": tower,
            "text_tower": None,
            "dimension": 4,
            "logit_scale": 10.0,
            "weights": "0" * 64,
            "templates": "photo",
            "batch_size": 2,
        }
        return Encoder(**{**settings, **changes})

    image = np.zeros((5, 9, 3), np.uint8)
    assert build(lambda pixels: np.ones((len(pixels), 4), np.float32)).encode_pixels([image] * 3).shape == (3, 4)
    with pytest.raises(EncoderError, match="and \\(N, 4\\) is wanted"):
        build(lambda pixels: np.ones((len(pixels), 5), np.float32)).encode_pixels([image])
    with pytest.raises(EncoderError, match="zero or not finite"):
        build(lambda pixels: np.zeros((len(pixels), 4), np.float32)).encode_pixels([image])
    with pytest.raises(EncoderError, match="logit scale"):
        build(None, logit_scale=float("nan"))
    with pytest.raises(InputError, match="batch_size"):
        build(None, batch_size=0)
