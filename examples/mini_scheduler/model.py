"""Two tiny models over a paged KV cache: Qwen2.5-VL, and a text-only Qwen2. Weights are random, layers are those of transformers.

What a token's row comes out as depends on its path alone, bit for bit: not on the requests beside it, nor on how its prompt was cut
into chunks, nor on whether its prefix was computed now or found. So a reply can be held to one over a whole history, exactly. It
rests on three habits: rows are computed by the multiple of ``ROWS``, so that each matrix product goes through the same code for
every row; keys are read ``KEYS`` at a time, whatever the length; and sums over them are taken in the order of the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from qwen_reference import IMAGE_PAD, MERGE, VIDEO_PAD, VISION_END, VISION_START, VOCABULARY, tiny_model
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from mini_scheduler.text import IM_END
from sessiontree import Unsupported
from sessiontree.positions import PositionScheme, scheme

ROWS: Final = 16
KEYS: Final = 128
MODELS: Final = ("tiny-qwen2.5-vl", "tiny-qwen2")
_ATTENTION: Final = "mini_scheduler"


@attrs.frozen(eq=False)
class PagedBatch:
    """Where the tokens of a batch stand in the KV cache. T tokens, R rows: T rounded up to the multiple of ``ROWS``.

    ``places``: (T,) where each token's own keys and values go. ``block_table``: (B, pages) page numbers, 0 behind a request's
    last; the width is a multiple of a block of keys. ``requests``: (R,) which row of it each token reads through. ``indices``: (R,)
    path indices: a token sees the keys of indices 0 to its own.
    """

    places: torch.Tensor
    block_table: torch.Tensor
    requests: torch.Tensor
    indices: torch.Tensor


class PagedCache:
    """Keys and values of all layers, by page. Requests see them through block tables alone."""

    def __init__(self, num_layers: int, num_pages: int, page_size: int, num_heads: int, head_dim: int) -> None:
        if KEYS % page_size:
            raise Unsupported(f"pages of {page_size} tokens; keys are read {KEYS} at a time, so that must be a multiple")
        self.page_size = page_size
        self.keys = torch.zeros(num_layers, num_pages * page_size, num_heads, head_dim)
        self.values = torch.zeros_like(self.keys)
        self._within = torch.arange(page_size)

    def places(self, pages: torch.Tensor) -> torch.Tensor:
        """(..., n) page numbers to the (..., n * page_size) places of their tokens."""
        return (pages[..., None] * self.page_size + self._within).flatten(-2)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: tuple[PagedCache, PagedBatch],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the batch's keys and values to their pages, then attend through the block table. Transformers' attention interface:
    ``query`` is (1, heads, R, head_dim), the result (1, R, heads, head_dim)."""
    cache, batch = paged
    keys, values = cache.keys[module.layer_idx], cache.values[module.layer_idx]
    count = len(batch.places)
    keys[batch.places] = key[0, :, :count].transpose(0, 1)
    values[batch.places] = value[0, :, :count].transpose(0, 1)

    heads, rows, width = query.shape[1:]
    groups = keys.shape[1]  # of query heads that share a key
    asked = query[0].transpose(0, 1).reshape(rows * groups, heads // groups, width) * scaling
    tables = torch.split(batch.block_table, KEYS // cache.page_size, dim=1)
    blocks = [cache.places(table)[batch.requests] for table in tables]  # (R, KEYS) each
    scores = []
    for number, places in enumerate(blocks):
        block = keys[places].permute(0, 2, 3, 1).reshape(rows * groups, width, KEYS)
        unseen = torch.arange(number * KEYS, (number + 1) * KEYS) > batch.indices[:, None]
        score = torch.bmm(asked, block).view(rows, groups, -1, KEYS)
        scores.append(score.masked_fill(unseen[:, None, None], -torch.inf))
    greatest = torch.stack([score.amax(-1) for score in scores]).amax(0)[..., None]
    total = torch.zeros(rows, groups, heads // groups, 1)
    result = torch.zeros(rows * groups, heads // groups, width)
    for score, places in zip(scores, blocks, strict=True):
        weights = torch.exp(score - greatest)
        total += weights.sum(-1, keepdim=True)
        block = values[places].transpose(1, 2).reshape(rows * groups, KEYS, width)
        result += torch.bmm(weights.view(rows * groups, -1, KEYS), block)
    attended = result.view(rows, groups, heads // groups, width) / total
    return attended.view(1, rows, heads, width), None


AttentionInterface.register(_ATTENTION, paged_attention)


class Model:
    """A model, and what a scheduler has to know of it.

    ``scheme``: the rule of its positions. ``fingerprint``: what its sessions are bound to. ``max_tokens``: of a path.
    ``vocab_size``: ids below it are tokens. ``num_position_axes``: rows of the positions it takes.
    """

    eos_token_id: Final = IM_END
    max_tokens: Final = 8192
    vocab_size: Final = VOCABULARY

    def __init__(self, name: str, whole: Any, rule: PositionScheme, seed: int) -> None:
        self.name = name
        self.scheme = rule
        self.version = 0  # of the weights
        self.fingerprint = f"{name}/{seed}"
        self.num_position_axes = rule.num_axes
        self.takes_images = name == "tiny-qwen2.5-vl"
        self._whole = whole
        self._text = whole.model.language_model if self.takes_images else whole.model
        self._config = self._text.config
        self._config._attn_implementation = _ATTENTION

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        config = self._config
        width = config.hidden_size // config.num_attention_heads
        return PagedCache(config.num_hidden_layers, num_pages, page_size, config.num_key_value_heads, width)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take other weights, under transformers' names; those that are not named stay. Raises Unsupported for what it has not.

        What was computed before does not fit them: a scheduler's own ``load_weights`` sees to that.
        """
        own = self._whole.state_dict()
        for name, weight in weights.items():
            if name not in own or own[name].shape != weight.shape:
                raise Unsupported(f"{self.name} has no {name!r} of {tuple(weight.shape)}")
        self._whole.load_state_dict(weights, strict=False)
        self.version = version

    @torch.inference_mode()
    def encode(self, pixel_values: torch.Tensor, grid_thw: tuple[int, int, int]) -> torch.Tensor:
        """One picture: (patches, 1176) float32 to (placeholders, width)."""
        (rows,) = self._whole.model.get_image_features(pixel_values, torch.tensor([grid_thw])).pooler_output
        return rows.clone()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        pictures: Sequence[tuple[int, int, torch.Tensor]],
        logits_indices: torch.Tensor,
        cache: PagedCache,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Logits, (B, vocabulary), of the rows at ``logits_indices``.

        ``input_ids``: (R,) and ``positions``: (axes, R), whatever stands behind the batch's own tokens. ``pictures``: (start, stop,
        rows), encoder outputs for columns ``[start, stop)``.
        """
        embeds = self._text.embed_tokens(input_ids)
        for start, stop, rows in pictures:
            embeds[start:stop] = rows
        hidden = self._text(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None] if self.takes_images else positions,
            attention_mask={"full_attention": None},
            use_cache=False,
            cache=None,
            paged=(cache, batch),
        ).last_hidden_state[0]
        count = len(logits_indices)
        wanted = torch.zeros(-(-count // ROWS) * ROWS, dtype=torch.int64)
        wanted[:count] = logits_indices
        logits: torch.Tensor = self._whole.lm_head(hidden[wanted])
        return logits[:count]


def tiny_text_model(seed: int) -> Any:
    """Transformers' Qwen2 in small, as :func:`qwen_reference.tiny_model` is."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float().eval()


def load_model(name: str, seed: int = 3) -> Model:
    """One of ``MODELS``; equal seeds give equal weights. Raises Unsupported."""
    if name == "tiny-qwen2.5-vl":
        whole = tiny_model(seed)
        rule = scheme(
            "qwen2_5_vl@hf5",
            image_token_id=IMAGE_PAD,
            video_token_id=VIDEO_PAD,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            spatial_merge_size=MERGE,
            tokens_per_second=whole.config.vision_config.tokens_per_second,
        )
        return Model(name, whole, rule, seed)
    if name == "tiny-qwen2":
        return Model(name, tiny_text_model(seed), scheme("text@hf5"), seed)
    raise Unsupported(f"no model {name!r}; there are {', '.join(MODELS)}")
