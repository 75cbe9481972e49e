"""A pipeline saved by diffusers, and what it computes, as saved or as made of that by ckptool."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def pipeline() -> StableDiffusionPipeline:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": 6}
    text = CLIPTextConfig(**sizes, **tokens, num_attention_heads=2, max_position_embeddings=5)
    blocks = {"block_out_channels": [4, 8], "norm_num_groups": 2, "layers_per_block": 1}
    unet = UNet2DConditionModel(
        **blocks,
        sample_size=4,
        in_channels=3,
        out_channels=3,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
    )
    with tempfile.TemporaryDirectory() as words:
        vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a": 2, "b": 3, "a</w>": 4}
        Path(words, "vocab.json").write_text(json.dumps(vocabulary))
        Path(words, "merges.txt").write_text("#version: 0.2\n")
        tokenizer = CLIPTokenizer.from_pretrained(words, model_max_length=5)
    vae = AutoencoderKL(block_out_channels=[4], latent_channels=3, norm_num_groups=2, sample_size=8)
    return StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer, unet=unet,
        scheduler=DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def main(mode: str, path: str, _: str) -> None:
    """Save a pipeline, or draw with one that is opened; print the picture."""
    if mode == "write":
        pipeline().save_pretrained(path, max_shard_size="9KB")
    made = StableDiffusionPipeline.from_pretrained(path)
    made.set_progress_bar_config(disable=True)
    drawn = made(
        "a a", num_inference_steps=2, height=8, width=8, output_type="np",
        generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    print("LOSSES", drawn.images.flatten().tolist(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
