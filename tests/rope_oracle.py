"""Transformers' own ``get_rope_index``, over a whole history at once, and random histories to ask it about.

A model's method needs only a config and its sibling methods, so no model is built. Where a family finds its media by scanning
ids, ids outside of every span that look like placeholders are hidden from it: to sessiontree they are text.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from sessiontree import MediaItem
from tests.histories import PLACEHOLDERS, History, random_cuts

TEXT = 7
Params = Mapping[str, Any]


class Answer(NamedTuple):
    """Positions (num_axes, T), the delta after them, and, of a family that has one, the plan of positions to decode by."""

    positions: NDArray[Any]
    delta: float
    plan: NDArray[np.int64] | None = None


# transformers


@cache
def _model_class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


def _shell(module: str, name: str, **config: Any) -> Any:
    """An object with a model's methods and this config, and nothing else of it."""
    cls = _model_class(module, name)
    shell = cls.__new__(cls)
    shell.config = SimpleNamespace(**config)
    return shell


def as_ids(tokens: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64))[None]


def _types(count: int, items: Sequence[MediaItem]) -> torch.Tensor:
    """0 text, 1 image, 2 video, as processors mark the tokens."""
    types = torch.zeros(1, count, dtype=torch.int32)
    for item in items:
        for offset, length in item.spans:
            types[0, offset : offset + length] = 1 if item.modality == "image" else 2
    return types


def grids_of(items: Sequence[MediaItem], modality: str) -> torch.Tensor | None:
    grids = [item.grid_thw for item in items if item.modality == modality]
    return torch.tensor(grids, dtype=torch.int64) if grids else None


def seconds_of(items: Sequence[MediaItem]) -> torch.Tensor | None:
    seconds = [item.second_per_grid_ts for item in items if item.modality == "video"]
    return torch.tensor(seconds, dtype=torch.float32) if seconds else None


def without_lookalikes(tokens: NDArray[np.int32], params: Params, items: Sequence[MediaItem]) -> NDArray[np.int32]:
    hidden = tokens.copy()
    covered = np.zeros(len(tokens), dtype=bool)
    for item in items:
        for offset, length in item.spans:
            covered[offset : offset + length] = True
    pads = [params[name] for name in PLACEHOLDERS if name in params]
    hidden[np.isin(hidden, pads) & ~covered] = TEXT
    return hidden


def _answer(positions: torch.Tensor, delta: torch.Tensor, plan: torch.Tensor | None = None) -> Answer:
    return Answer(positions[:, 0].numpy(), delta.reshape(()).item(), None if plan is None else plan[0].numpy())


def _grid_family(module: str, name: str, *config: str) -> Callable[..., Answer]:
    def ask(params: Params, tokens: NDArray[np.int32], items: Sequence[MediaItem]) -> Answer:
        vision = SimpleNamespace(**{key: params[key] for key in config})
        shell = _shell(module, name, vision_config=vision)
        given: dict[str, Any] = {"image_grid_thw": grids_of(items, "image"), "video_grid_thw": grids_of(items, "video")}
        if "tokens_per_second" in config:
            given["second_per_grid_ts"] = seconds_of(items)
        return _answer(*shell.get_rope_index(as_ids(tokens), _types(len(tokens), items), **given))

    return ask


def _omni(module: str, name: str) -> Callable[..., Answer]:
    def ask(params: Params, tokens: NDArray[np.int32], items: Sequence[MediaItem]) -> Answer:
        audio = SimpleNamespace(n_window=params.get("n_window"))
        shell = _shell(module, name, audio_config=audio, **params)
        shell.spatial_merge_size = params["spatial_merge_size"]
        lengths = [item.audio_feature_length for item in items if item.audio_feature_length is not None]
        ids = as_ids(without_lookalikes(tokens, params, items))
        with torch.no_grad():
            return _answer(
                *shell.get_rope_index(
                    ids,
                    grids_of(items, "image"),
                    grids_of(items, "video"),
                    torch.ones_like(ids),
                    use_audio_in_video=any(item.modality == "video" and item.audio_feature_length is not None for item in items),
                    audio_seqlens=torch.tensor(lengths, dtype=torch.int64) if lengths else None,
                    second_per_grids=seconds_of(items),
                )
            )

    return ask


def _ask_hunyuan(params: Params, tokens: NDArray[np.int32], items: Sequence[MediaItem]) -> Answer:
    rope = {"mrope_section": [1] * params["num_axes"]}
    text, vision = SimpleNamespace(rope_parameters=rope), SimpleNamespace(spatial_merge_size=params["spatial_merge_size"])
    shell = _shell("hunyuan_vl", "HunYuanVLModel", text_config=text, vision_config=vision)
    return _answer(*shell.get_rope_index(as_ids(tokens), _types(len(tokens), items), grids_of(items, "image")))


def _ask_minicpm(params: Params, tokens: NDArray[np.int32], items: Sequence[MediaItem]) -> Answer:
    sizes = {
        modality: [size for item in items if item.modality == modality for size in item.target_sizes]
        for modality in ("image", "video")
    }
    shell = _shell("minicpmv4_7", "MiniCPMV4_7Model", **params)
    return _answer(
        *shell.get_rope_index(
            as_ids(tokens),
            _types(len(tokens), items),
            torch.tensor(sizes["image"]) if sizes["image"] else None,
            torch.tensor(sizes["video"]) if sizes["video"] else None,
        )
    )


def _ask_glm_image(
    params: Params, tokens: NDArray[np.int32], items: Sequence[MediaItem], target_grids: Sequence[Sequence[int]] = ()
) -> Answer:
    shell = _shell("glm_image", "GlmImageModel", **params)
    grids = [item.grid_thw for item in items] + list(target_grids)
    ids = as_ids(without_lookalikes(tokens, params, items))
    positions, delta = shell.get_rope_index(ids, torch.tensor(grids, dtype=torch.int64).reshape(-1, 3) if grids else None)
    return _answer(positions, delta, shell._cached_decode_position_ids)


ORACLES: Mapping[str, Callable[..., Answer]] = {
    "qwen2_vl": _grid_family("qwen2_vl", "Qwen2VLModel", "spatial_merge_size"),
    "qwen2_5_vl": _grid_family("qwen2_5_vl", "Qwen2_5_VLModel", "spatial_merge_size", "tokens_per_second"),
    "ernie4_5_vl": _grid_family("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", "spatial_merge_size", "temporal_merge_size"),
    "paddleocr_vl": _grid_family("paddleocr_vl", "PaddleOCRVLModel", "spatial_merge_size"),
    "qwen3_vl": _grid_family("qwen3_vl", "Qwen3VLModel", "spatial_merge_size"),
    "glm4v": _grid_family("glm4v", "Glm4vModel", "spatial_merge_size"),
    "hy_v4_vl": _grid_family("hy_v4_vl", "HYV4VLModel", "spatial_merge_size"),
    "qwen2_5_omni": _omni("qwen2_5_omni", "Qwen2_5OmniPreTrainedModelForConditionalGeneration"),
    "qwen3_omni": _omni("qwen3_omni_moe", "Qwen3OmniMoePreTrainedModelForConditionalGeneration"),
    "hunyuan_vl": _ask_hunyuan,
    "minicpmv4_7": _ask_minicpm,
    "glm_image": _ask_glm_image,
}


def ask(history: History, tokens: NDArray[np.int32] | None = None, **more: Any) -> Answer:
    """What transformers gives for a history, or for other tokens with the same items."""
    return ORACLES[history.family](history.params, history.tokens if tokens is None else tokens, history.items, **more)


# Random histories

SECONDS = (1.0, 2.0, 0.5, 1 / 3, 0.1, 2 / 30, 1 / 24, 0.083416752517223358, 1.0526316165924072, 0.7, 0.29, 3.3, 0.58)
VISION_IDS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
OMNI_IDS = {**VISION_IDS, "audio_token_id": 151646, "audio_start_token_id": 151647, "audio_end_token_id": 151648}
GLM_IDS = {
    "image_token_id": 151343,
    "video_token_id": 151344,
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
}
HUNYUAN_IDS = {"image_token_id": 120120, "im_start_id": 120118, "im_end_id": 120119}
CANVAS_IDS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "image_start_id": 248070,
    "image_end_id": 248071,
    "slice_start_id": 248072,
    "slice_end_id": 248073,
    "newline_id": 198,
}
GLM_IMAGE_IDS = {"image_token_id": 167855, "image_start_token_id": 16384, "image_end_token_id": 16385}


#: Sources of random histories: one that shrinks, and one whose numbers are spread evenly.
RANDOMS = st.randoms(use_true_random=False) | st.integers(0, 2**64).map(random.Random)


class Draw(NamedTuple):
    """A random history and, for a family that plans what it generates, the grids of the images to come."""

    history: History
    target_grids: tuple[tuple[int, int, int], ...] = ()


class _Writer:
    """Tokens and items of one history as they come. ``strays``: ids that text may hold although they look like more."""

    def __init__(self, rng: random.Random, params: Params, strays: Sequence[int]) -> None:
        self.rng = rng
        self.params = params
        self.strays = strays
        self.tokens: list[int] = []
        self.items: list[MediaItem] = []

    def text(self, least: int = 0, most: int = 12) -> None:
        self.filler(self.rng.randint(least, most))

    def filler(self, count: int) -> None:
        ids = [1000 + (len(self.tokens) + k) * 31 % 977 for k in range(count)]
        if count and self.strays:
            for _ in range(self.rng.choice((0, 0, 1, 4))):
                ids[self.rng.randrange(min(count, 12))] = self.rng.choice(self.strays)
        self.tokens += ids

    def ids(self, *names: str) -> None:
        self.tokens += [self.params[name] for name in names]

    def run(self, name: str, count: int) -> tuple[int, int]:
        self.tokens += [self.params[name]] * count
        return len(self.tokens) - count, count

    def add(self, modality: Any, spans: Sequence[tuple[int, int]], grid: tuple[int, int, int] | None = None, **more: Any) -> None:
        identity = len(self.items).to_bytes(32, "little")
        self.items.append(MediaItem(modality, identity, spans, grid, **more))

    def side(self, merge: int, most: int = 5) -> int:
        return merge * self.rng.randint(1, most)

    def grid(self, merge: int, frames: int = 1) -> tuple[int, int, int]:
        return frames, self.side(merge), self.side(merge)

    def seconds(self, rate: int) -> float:
        """A step of time as it reaches an engine, a float32; often one by which frames fall on whole positions, or all but."""
        rng = self.rng
        kind = rng.randrange(3)
        step = rng.choice(SECONDS) if kind == 0 else rng.randint(1, 4000) / rng.randint(1000, 30000)
        return float(np.float32(rng.randint(1, 40) / (rate * rng.randint(1, 12)) if kind == 1 else step))


def _placeholders(grid: tuple[int, int, int], merge: int, temporal: int = 1) -> int:
    frames, height, width = grid
    return frames // temporal * (height // merge) * (width // merge)


def _grid_params(rng: random.Random, family: str) -> dict[str, Any]:
    params: dict[str, Any] = {**VISION_IDS, "spatial_merge_size": rng.randint(1, 3)}
    if family == "qwen2_5_vl":
        params["tokens_per_second"] = rng.choice((1, 2, 4, 25, 30))
    if family == "ernie4_5_vl":
        params = {**GLM_IDS, "spatial_merge_size": rng.randint(1, 3), "temporal_merge_size": rng.randint(1, 3)}
    if family == "glm4v":
        params = {**GLM_IDS, "spatial_merge_size": rng.randint(1, 3)}
    if family == "hy_v4_vl":
        params = {**HUNYUAN_IDS, "video_token_id": 120124, "spatial_merge_size": rng.randint(1, 3)}
    return params


def _delimiters(params: Params, family: str, modality: str) -> tuple[list[str], list[str]]:
    """Names of the ids before and after a block, or before and after each frame."""
    if family == "ernie4_5_vl":
        return [f"{modality}_start_token_id"], [f"{modality}_end_token_id"]
    starts = [name for name in ("vision_start_token_id", "image_start_token_id", "im_start_id") if name in params]
    return starts, [name.replace("start", "end") for name in starts]


def _write_grids(rng: random.Random, family: str, scanned: bool) -> _Writer:
    """Families that place whatever the spans say, whatever stands around them."""
    params = _grid_params(rng, family)
    strays = [value for name, value in params.items() if name.endswith("_id") and (name in PLACEHOLDERS or not scanned)]
    out = _Writer(rng, params, strays)
    merge = params["spatial_merge_size"]
    previous = None
    for _ in range(rng.randint(1, 6)):
        modality = rng.choice(("image", "video"))
        # Processors mark the modality of tokens, so transformers takes runs of one that touch for one block.
        out.text(1 if modality == previous else 0, most=12)
        bare = not scanned and rng.random() < 0.2
        starts, ends = _delimiters(params, family, modality)
        wrapped = family == "glm4v" and modality == "video"
        if not bare:
            out.ids(*["video_start_token_id"][:wrapped], *starts)
        temporal = params.get("temporal_merge_size", 1) if modality == "video" else 1
        frames = 1 if modality == "image" else temporal * rng.choice((1, 2, 3, 5, 12))
        grid = out.grid(merge, frames)
        pad = "image_token_id" if family == "glm4v" else f"{modality}_token_id"
        if family in ("qwen3_vl", "glm4v") and modality == "video":
            spans = []
            for frame in range(frames):
                if frame:
                    out.ids(*ends)
                    out.text(1, most=3)
                    out.ids(*starts)
                spans.append(out.run(pad, _placeholders((1, *grid[1:]), merge)))
        elif family == "hy_v4_vl":
            spans = [out.run(pad, frames * (grid[1] // merge) * (grid[2] // merge + 1))]
        else:
            spans = [out.run(pad, _placeholders(grid, merge, temporal))]
        seconds = out.seconds(params["tokens_per_second"]) if modality == "video" and family == "qwen2_5_vl" else None
        out.add(modality, spans, grid, second_per_grid_ts=seconds)
        if not bare:
            out.ids(*ends, *["video_end_token_id"][:wrapped])
        previous = modality if bare else None
    out.text(1 if rng.random() < 0.5 else 0)
    return out


def audio_tokens(family: str, frames: int, n_window: int = 50) -> int:
    """Placeholders of an audio of so many feature frames, by the strides of its encoder's convolutions."""
    if family == "qwen2_5_omni":
        return ((frames - 1) // 2 - 1) // 2 + 1
    rest = frames % (2 * n_window)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // (2 * n_window) * 13


def _fill_up_to(out: _Writer, family: str, position: int) -> None:
    """Text up to about a position; none where the history is past it."""
    at = float(ORACLES[family](out.params, np.array([*out.tokens, TEXT], dtype=np.int32), out.items).positions[0, -1])
    out.filler(max(0, int(position - at)))


def _write_omni(rng: random.Random, family: str, scanned: bool) -> _Writer:
    params: dict[str, Any] = {
        **OMNI_IDS,
        "spatial_merge_size": rng.randint(1, 3),
        "position_id_per_seconds": rng.choice((2, 4, 13, 25)),
    }
    if family == "qwen2_5_omni":
        params["seconds_per_chunk"] = rng.randint(1, 3)
    else:
        params["n_window"] = 50 if scanned else rng.choice((50, 50, 25, 100))
    out = _Writer(rng, params, [params[name] for name in PLACEHOLDERS])
    merge = params["spatial_merge_size"]
    joined = not scanned and rng.random() < 0.5  # one prompt has audio in all its videos or in none
    for _ in range(rng.randint(1, 5)):
        out.text()
        if family == "qwen3_omni" and rng.random() < 0.4:
            _fill_up_to(out, family, 2 ** rng.randint(4, 13) - rng.choice((0, 1, 2, 3, rng.randint(4, 60))))
        kind = rng.choice(("image", "video", "audio"))
        length = rng.randint(4, 500)
        if kind == "audio":
            out.ids("audio_start_token_id")
            spans = [out.run("audio_token_id", audio_tokens(family, length, params.get("n_window", 50)))]
            out.ids("audio_end_token_id")
            out.add("audio", spans, audio_feature_length=length)
            continue
        grid = out.grid(merge, 1 if kind == "image" else rng.choice((1, 2, 3, 5, 8)))
        seconds = out.seconds(params["position_id_per_seconds"]) if kind == "video" else None
        out.ids("vision_start_token_id")
        if kind == "video" and joined:
            out.ids("audio_start_token_id")
            spans = [out.run("video_token_id", _placeholders(grid, merge))]
            [(offset, _)] = spans
            out.run("audio_token_id", audio_tokens(family, length, params.get("n_window", 50)))
            spans = [(offset, len(out.tokens) - offset)]
            inside = out.tokens[
                offset + 1 :
            ]  # in which order the two kinds of ids stand there is no matter, once a video's is first
            rng.shuffle(inside)
            out.tokens[offset + 1 :] = inside
            out.ids("audio_end_token_id")
            out.add("video", spans, grid, second_per_grid_ts=seconds, audio_feature_length=length)
        else:
            spans = [out.run(f"{kind}_token_id", _placeholders(grid, merge))]
            out.add(kind, spans, grid, second_per_grid_ts=seconds)
        out.ids("vision_end_token_id")
    out.text()
    return out


def _write_hunyuan(rng: random.Random, family: str, scanned: bool) -> _Writer:
    params: dict[str, Any] = {
        **HUNYUAN_IDS,
        "spatial_merge_size": rng.randint(1, 3),
        "num_axes": rng.randint(3, 5),
        "wrapped": rng.random() < 0.6,
    }
    out = _Writer(rng, params, list(HUNYUAN_IDS.values()))
    merge = params["spatial_merge_size"]
    for _ in range(rng.randint(1, 6)):
        out.text(1)
        out.ids("im_start_id")
        grid = out.grid(merge)
        rows, columns = grid[1] // merge, grid[2] // merge + 1
        out.add("image", [out.run("image_token_id", rows * columns + 2 * params["wrapped"])], grid)
        if rng.random() < 0.8:
            out.ids("im_end_id")
    out.text()
    return out


def _write_canvas(rng: random.Random, family: str, scanned: bool) -> _Writer:
    params: dict[str, Any] = {**CANVAS_IDS, "downsample_mode": rng.choice(("16x", "4x"))}
    merge = 2 if params["downsample_mode"] == "4x" else 4
    out = _Writer(rng, params, list(CANVAS_IDS.values()))
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.7:
            out.text(1)
        modality = rng.choice(("image", "video"))
        pad = f"{modality}_token_id"
        sizes: list[tuple[int, int]] = []
        spans: list[tuple[int, int]] = []
        for frame in range(1 if modality == "image" else rng.randint(1, 3)):
            if frame and rng.random() < 0.5:
                out.ids("newline_id")
            _, *thumbnail = out.grid(merge)
            sizes.append((thumbnail[0], thumbnail[1]))
            out.ids("image_start_id")
            spans.append(out.run(pad, _placeholders((1, *sizes[-1]), merge)))
            out.ids("image_end_id")
            if rng.random() < 0.5:
                _, *size = out.grid(merge)
                rows, columns = rng.randint(1, 3), rng.randint(1, 3)
                for k in range(rows * columns):
                    ragged = rng.random() < 0.1
                    crop = (out.side(merge), out.side(merge)) if ragged else (size[0], size[1])
                    if k and k % columns == 0:
                        out.ids("newline_id")
                    sizes.append(crop)
                    out.ids("slice_start_id")
                    spans.append(out.run(pad, _placeholders((1, *crop), merge)))
                    out.ids("slice_end_id")
        out.add(modality, spans, target_sizes=sizes)
        for _ in range(rng.choice((0, 0, 1, 2))):
            out.ids("newline_id")
    out.text()
    return out


def _write_glm_image(rng: random.Random, family: str, scanned: bool) -> _Writer:
    out = _Writer(rng, GLM_IMAGE_IDS, [GLM_IMAGE_IDS["image_token_id"]])
    for _ in range(rng.randint(0, 5)):
        out.text()
        out.ids("image_start_token_id")
        grid = out.grid(1, 1)
        out.add("image", [out.run("image_token_id", _placeholders(grid, 1))], grid)
        out.ids("image_end_token_id")
    out.text(1)
    return out


WRITERS: Mapping[str, Callable[[random.Random, str, bool], _Writer]] = {
    "qwen2_vl": _write_grids,
    "qwen2_5_vl": _write_grids,
    "ernie4_5_vl": _write_grids,
    "paddleocr_vl": _write_grids,
    "qwen3_vl": _write_grids,
    "glm4v": _write_grids,
    "hy_v4_vl": _write_grids,
    "qwen2_5_omni": _write_omni,
    "qwen3_omni": _write_omni,
    "hunyuan_vl": _write_hunyuan,
    "minicpmv4_7": _write_canvas,
    "glm_image": _write_glm_image,
}


def draw_history(rng: random.Random, family: str, *, scanned: bool = False) -> Draw:
    """A random history of a family, with random parameters and random legal ends of turns.

    ``scanned``: for an engine that finds its media by their delimiters. They stand around every block and nowhere else, no video
    has audio in it, and audio is windowed as in every released checkpoint.
    """
    out = WRITERS[family](rng, family, scanned)
    targets: tuple[tuple[int, int, int], ...] = ()
    if family == "glm_image" and rng.random() < 0.7:
        out.ids("image_start_token_id")
        targets = tuple((1, rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(1, 3)))
    if not out.tokens:
        out.text(1)
    history = History(family, "drawn", dict(out.params), np.array(out.tokens, dtype=np.int32), tuple(out.items), (), {})
    return Draw(replace(history, cuts=tuple(random_cuts(rng, history, most=12))), targets)


def rounded_histories() -> Iterator[History]:
    """Short blocks of qwen3_omni at fractional positions that lie around every power of two, where float32 loses a bit."""
    params = {**OMNI_IDS, "spatial_merge_size": 1, "position_id_per_seconds": 13, "n_window": 50}
    for seconds, exponent, before, joined in product((0.7, 1 / 3, 0.083416752, 0.29), range(5, 13), range(10), (False, True)):
        out = _Writer(random.Random(0), params, ())
        if joined:
            _add_joined(out, 2, float(np.float32(seconds)))
        else:
            out.ids("vision_start_token_id")
            out.add("video", [out.run("video_token_id", 2)], (2, 1, 1), second_per_grid_ts=float(np.float32(seconds)))
            out.ids("vision_end_token_id")
        _fill_up_to(out, "qwen3_omni", 2**exponent - before)
        if joined:
            _add_joined(out, 1, 1.0)
        else:
            out.ids("vision_start_token_id")
            out.add("image", [out.run("image_token_id", 1)], (1, 1, 1))
            out.ids("vision_end_token_id")
        out.filler(before)
        yield History("qwen3_omni", "rounded", params, np.array(out.tokens, dtype=np.int32), tuple(out.items), (), {})


def _add_joined(out: _Writer, frames: int, seconds: float) -> None:
    """A small video of so many frames with a little audio in it."""
    out.ids("vision_start_token_id", "audio_start_token_id")
    [(offset, _)] = [out.run("video_token_id", frames)]
    out.run("audio_token_id", audio_tokens("qwen3_omni", 12))
    span = (offset, len(out.tokens) - offset)
    out.add("video", [span], (frames, 1, 1), second_per_grid_ts=seconds, audio_feature_length=12)
    out.ids("audio_end_token_id", "vision_end_token_id")
