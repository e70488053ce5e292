"""Small randomly initialised dual encoders, saved in the formats of real ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# Words enough for the sentences of the tests; every other character is spelled out.
CORPUS = [
    "a photo of a cat.",
    "a blurry photo of the dog",
    "number 0 1 2 3 4 5 6 7 8 9",
    "airplane ship truck deer frog",
]
SIDE, WIDTH, DIMENSION, LENGTH = 64, 64, 48, 40


def tiny_clip(folder: Path, activation: str = "quick_gelu", seed: int = 0, vocabulary: Path | None = None):
    """A CLIP of transformers with its processor and tokenizer; `vocabulary` is open_clip's, else one is made."""
    import transformers

    tokenizer = clip_tokenizer(folder, vocabulary)
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 3, "hidden_act": activation}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPConfig(
        vision_config={**shape, "num_attention_heads": 4, "image_size": SIDE, "patch_size": 16},
        text_config={
            **shape,
            "num_attention_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": LENGTH,
            "pad_token_id": tokenizer.pad_token_id,
            **ends,
        },
        projection_dim=DIMENSION,
    )
    model = _awake(transformers.CLIPModel(config))
    model.save_pretrained(folder)
    settings = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor(
        folder,
        "CLIPImageProcessor",
        settings,
        [0.48145466, 0.4578275, 0.40821073],
        [0.26862954, 0.26130258, 0.27577711],
    )
    return model


def tiny_siglip(folder: Path, dimension: int = WIDTH):
    """A SigLIP of transformers with its processor and a tokenizer of the same kind of interface."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    plain = Tokenizer(models.Unigram())
    plain.normalizer = normalizers.Lowercase()
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.train_from_iterator(
        CORPUS * 20, trainers.UnigramTrainer(vocab_size=80, special_tokens=["</s>", "<unk>"], unk_token="<unk>")
    )
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="</s>", pad_token="</s>", unk_token="<unk>", model_max_length=LENGTH
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.SiglipConfig(
        vision_config={**shape, "hidden_size": dimension, "image_size": SIDE, "patch_size": 16},
        text_config={
            **shape,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": LENGTH,
            "projection_size": dimension,
        },
    )
    model = _awake(transformers.SiglipModel(config))
    model.save_pretrained(folder)
    processor(folder, "SiglipImageProcessor", {"size": {"height": SIDE, "width": SIDE}}, [0.5] * 3, [0.5] * 3)
    return model


def as_open_clip(model, folder: Path, **settings) -> None:
    """The same weights in the format of open_clip's local folders."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_cfg": {
            "embed_dim": DIMENSION,
            "quick_gelu": True,
            "vision_cfg": {"image_size": SIDE, "layers": 3, "width": WIDTH, "head_width": WIDTH // 4, "patch_size": 16},
            "text_cfg": {
                "context_length": LENGTH,
                "vocab_size": model.config.text_config.vocab_size,
                "width": WIDTH,
                "heads": 2,
                "layers": 3,
            },
            **settings,
        },
        "preprocess_cfg": {
            "mean": [0.48145466, 0.4578275, 0.40821073],
            "std": [0.26862954, 0.26130258, 0.27577711],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(_open_clip_weights(model.state_dict()), folder / "open_clip_model.safetensors")


def _open_clip_weights(ours):
    theirs = {
        "logit_scale": ours["logit_scale"],
        "visual.class_embedding": ours["vision_model.embeddings.class_embedding"],
        "visual.positional_embedding": ours["vision_model.embeddings.position_embedding.weight"],
        "visual.conv1.weight": ours["vision_model.embeddings.patch_embedding.weight"],
        "visual.proj": ours["visual_projection.weight"].T,
        "positional_embedding": ours["text_model.embeddings.position_embedding.weight"],
        "token_embedding.weight": ours["text_model.embeddings.token_embedding.weight"],
        "text_projection": ours["text_projection.weight"].T,
    }
    for kind in ("weight", "bias"):
        theirs[f"visual.ln_pre.{kind}"] = ours[f"vision_model.pre_layrnorm.{kind}"]
        theirs[f"visual.ln_post.{kind}"] = ours[f"vision_model.post_layernorm.{kind}"]
        theirs[f"ln_final.{kind}"] = ours[f"text_model.final_layer_norm.{kind}"]
        for here, there in (("vision_model.", "visual."), ("text_model.", "")):
            for layer in range(3):
                old, new = f"{here}encoder.layers.{layer}.", f"{there}transformer.resblocks.{layer}."
                rows = [ours[f"{old}self_attn.{part}_proj.{kind}"] for part in "qkv"]
                theirs[f"{new}attn.in_proj_{kind}"] = torch.cat(rows)
                theirs[f"{new}attn.out_proj.{kind}"] = ours[f"{old}self_attn.out_proj.{kind}"]
                theirs[f"{new}ln_1.{kind}"] = ours[f"{old}layer_norm1.{kind}"]
                theirs[f"{new}ln_2.{kind}"] = ours[f"{old}layer_norm2.{kind}"]
                theirs[f"{new}mlp.c_fc.{kind}"] = ours[f"{old}mlp.fc1.{kind}"]
                theirs[f"{new}mlp.c_proj.{kind}"] = ours[f"{old}mlp.fc2.{kind}"]
    return {name: tensor.detach().clone().contiguous() for name, tensor in theirs.items()}


def _awake(model):
    # The usual start is so small that all images look alike; larger weights make features that can differ.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.ndim >= 2:
                parameter.normal_(std=1.5 / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def processor(folder, kind, settings, mean, std):
    about = {
        "image_processor_type": kind,
        "resample": 3,
        "image_mean": mean,
        "image_std": std,
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, **about}))


def clip_tokenizer(folder, vocabulary):
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    if vocabulary is None:
        words, merges = _own_vocabulary()
    else:
        words, merges = _open_clip_vocabulary(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = transformers.CLIPTokenizer(words, [tuple(merge.split()) for merge in merges], model_max_length=LENGTH)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _characters():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def _own_vocabulary():
    letters = _characters()
    merges = ["p h", "ph o", "pho t", "phot o</w>", "o f</w>", "c a", "ca t</w>"]
    words = letters + [letter + "</w>" for letter in letters] + [merge.replace(" ", "") for merge in merges]
    return {word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}, merges


def _open_clip_vocabulary(file):
    import gzip

    letters = _characters()
    merges = gzip.decompress(file.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    words = letters + [letter + "</w>" for letter in letters] + [merge.replace(" ", "") for merge in merges]
    return {word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}, merges
