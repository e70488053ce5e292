"""Models for measurements: of the right size, with no weights worth having."""

from pathlib import Path

import torch

from benchmarks.timing import ROOT, load


def vision_transformer(folder: Path) -> str:
    """A CLIP of the size of ViT-B/16 with random weights: only its speed is real."""
    import transformers

    models = load(ROOT / "tests" / "tiny_models.py", "tiny_models")
    tokenizer = models.clip_tokenizer(folder, None)
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        vision_config={"patch_size": 16},
        text_config={"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id},
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    settings = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    models.processor(folder, "CLIPImageProcessor", settings, [0.48, 0.46, 0.41], [0.27, 0.26, 0.28])
    return str(folder)
