"""Qwen2.5-Omni and Qwen3-Omni: images, videos, audio, and videos with their audio mixed in, on the axes (t, h, w).

Time is real: a frame or an audio token stands where its second is. Audio in video is one block in which frames and audio tokens
take turns; it is a video with ``audio_feature_length``, between the tokens vision_start, audio_start and audio_end, vision_end.

Rules read from the released sources of transformers 5.24 (hf5), SGLang 0.5.23 and vLLM 0.33. In hf5 what follows a block stands one
past the greatest position of its last piece, which for audio in video can be less than the block's greatest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree.errors import PositionError, Unsupported
from sessiontree.media import MediaItem
from sessiontree.positions.base import Cursor, PositionState
from sessiontree.positions.grid import IDS_2_VL, Qwen2VL, checked_times
from sessiontree.positions.runs import FloatTextRun, FrameRun, Piece, Runs, TextRun, grid_run, packed, parts, write
from sessiontree.tokens import TOKEN_BYTES

_OMNI_DEFAULTS: Mapping[str, Any] = {
    "spatial_merge_size": 2,
    **IDS_2_VL,
    "audio_token_id": None,
    "audio_start_token_id": None,
    "audio_end_token_id": None,
    "position_id_per_seconds": None,
}


class _Omni(Qwen2VL):
    """What both families share: times, lengths, and a block's frames."""

    __slots__ = ()

    pairs: ClassVar[bool] = True  # whether the tokens that open audio in video stand otherwise than text

    def audio_tokens(self, length: int) -> int:
        """Tokens of ``length`` audio features."""
        raise NotImplementedError

    def _audio(self, item: MediaItem) -> int:
        length = item.audio_feature_length
        if length is None:
            raise PositionError(f"{item} has no audio_feature_length; {self.name} places no audio without one", item=item)
        tokens = self.audio_tokens(length)
        if tokens < 1:
            raise PositionError(f"{item}: {length} audio features make no token", item=item, value=length)
        return tokens

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if item.modality == "audio":
            return self._audio(item), 1, 1
        if item.audio_feature_length is not None and item.modality == "image":
            raise PositionError(f"{item} is an image with audio", item=item)
        return self._merged(item, self._params["spatial_merge_size"])

    def num_placeholders(self, item: MediaItem) -> int:
        frames, height, width = self.merged_grid(item)
        if _has_both(item) and self.pairs:
            for name in ("vision_start_token_id", "audio_start_token_id"):
                self._parameter(name, item, "audio in videos")
        return frames * height * width + (self._audio(item) if _has_both(item) else 0)

    def frame_seconds(self, item: MediaItem, first: int, stop: int) -> NDArray[Any]:
        """Times of frames ``[first, stop)`` from the block's base, float32, not yet rounded."""
        if stop == 1:
            return np.zeros(1, np.float32)
        rate = np.float32(self._parameter("position_id_per_seconds", item, "videos"))
        with np.errstate(over="ignore", invalid="ignore"):  # whatever overflows is over the limit
            times = np.arange(first, stop, dtype=np.float32)
            if item.modality == "video":
                times = times * np.float32(1.0 if item.second_per_grid_ts is None else item.second_per_grid_ts)
            return checked_times(self, item, times * rate, stop)

    def frame_times(self, item: MediaItem, first: int, stop: int) -> Sequence[int]:
        whole: list[int] = self.frame_seconds(item, first, stop).astype(np.int64).tolist()
        return whole

    def mixed(self, item: MediaItem, base: Any, first: int, stop: int) -> list[Any]:
        """Runs of placeholders ``[first, stop)`` of audio in video that goes token by token.

        A frame comes before the audio tokens that are not earlier than it.
        """
        video, audio, before, size = self._streams(item, base, stop)
        starts = np.arange(len(before)) * size + before  # where in the block each frame begins
        frame, beyond = max(int(np.searchsorted(starts, first, "right")) - 1, 0), int(np.searchsorted(starts, stop))
        begin = int(starts[frame - 1]) + size if frame else 0
        heard = begin - frame * size
        runs: list[Any] = []
        ahead = before[:beyond].tolist()
        while frame < beyond:
            if ahead[frame] > heard:
                runs.append(audio.part(heard, ahead[frame]))
                heard = ahead[frame]
            later = bisect_right(ahead, heard, frame)
            runs.append(video.part(frame * size, later * size))
            frame = later
        if heard < audio.length:
            runs.append(audio.part(heard, audio.length))
        return parts(runs, first - begin, stop - begin)

    def last_piece(self, item: MediaItem, base: Any) -> Any:
        """What is left of audio in video when it has no more frames, or no more audio: a run."""
        video, audio, before, size = self._streams(item, base, self.num_placeholders(item))
        if before[-1] < audio.length:
            return audio.part(int(before[-1]), audio.length)
        return video.part(int(np.searchsorted(before, audio.length)) * size, video.length)

    def _streams(self, item: MediaItem, base: Any, stop: int) -> tuple[FrameRun, Any, NDArray[np.int64], int]:
        """The frames and the audio of the first ``stop`` placeholders, how much audio comes before each frame, a frame's size."""
        frames, height, width = self.merged_grid(item)
        size = height * width
        video = self._frames(item, base, 0, min(frames, -(-stop // size)), height, width)
        audio = self._heard(min(self._audio(item), stop), base)
        times = video.frame_times()
        starts = np.empty((1, audio.length), times.dtype)
        write([Piece(0, packed([audio]), 0, audio.length)], starts)
        return video, audio, np.searchsorted(starts[0], times + times.dtype.type(base)), size

    def _ends_with(self, data: bytes, opening: int, item: MediaItem | None) -> tuple[bool, int]:
        """Whether text ends with the pair that opens audio in video, as far as that is known, and whether with a vision_start.

        ``opening``: whether a vision_start stood before it; ``item``: what follows, None where the turn ends.
        """
        start, audio = self._params.get("vision_start_token_id"), self._params.get("audio_start_token_id")
        if start is None or audio is None:
            return False, 0
        first = start.to_bytes(TOKEN_BYTES, "little")
        before = data[-2 * TOKEN_BYTES : -TOKEN_BYTES]
        follows = before == first or (not before and bool(opening))
        paired = follows and data[-TOKEN_BYTES:] == audio.to_bytes(TOKEN_BYTES, "little") and (item is None or _has_both(item))
        return paired, int(data[-TOKEN_BYTES:] == first)

    def _frames(self, item: MediaItem, base: Any, first: int, stop: int, height: int, width: int) -> FrameRun:
        """Frames ``[first, stop)`` of a block."""
        times = np.array(self.frame_times(item, first, stop), np.int64)
        return FrameRun((stop - first) * height * width, base, times.tobytes(), height, width, 0)

    def _heard(self, count: int, base: Any) -> Any:
        """``count`` audio tokens."""
        return TextRun(count, base)


def _has_both(item: MediaItem) -> bool:
    return item.modality == "video" and item.audio_feature_length is not None


class _Pair(NamedTuple):
    """What Qwen2.5-Omni carries: whether vision_start was the token before (0 or 1), and how many closing tokens are due."""

    opening: int
    closing: int


class Qwen25Omni(_Omni):
    """``qwen2_5_omni@<rule>``: frames and audio stand at whole positions.

    Before audio in video, or at the end of a turn, an audio_start behind a vision_start shares its position; so do the two tokens
    behind audio in video, which goes by chunks of ``seconds_per_chunk``: frames of a chunk, then its audio. State carries whether
    the last token was a vision_start, and how many tokens of the closing pair are due. Under vllm audio in video is unsupported:
    its table is one token early.
    """

    __slots__ = ()

    family: ClassVar[str] = "qwen2_5_omni"
    carries: ClassVar[tuple[int, ...]] = (2,)
    rules: ClassVar[tuple[str, ...]] = ("hf5", "vllm")
    defaults: ClassVar[Mapping[str, Any]] = {**_OMNI_DEFAULTS, "seconds_per_chunk": 2}

    def audio_tokens(self, length: int) -> int:
        return ((length - 1) // 2 + 1 - 2) // 2 + 1

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if self.rule == "vllm" and _has_both(item):
            raise Unsupported(f"{item}: {self.name} places audio in video one token early", item=item)
        return super().merged_grid(item)

    def advance(self, last_time: int, height: int, width: int) -> int:
        return max(last_time + 1, height, width)

    def initial_state(self) -> PositionState:
        return PositionState(0, 0, -1, (), _Pair(0, 0))

    def carried_behind(self, state: PositionState, media: Sequence[MediaItem], after: Any = None) -> tuple[Any, ...]:
        return _Pair(0, 0)

    def text(self, cursor: Cursor, data: bytes, item: MediaItem | None = None) -> None:
        if self.rule == "vllm":
            super().text(cursor, data)
            return
        opening, closing = cursor.carried
        count = len(data) // TOKEN_BYTES
        for _ in range(min(closing, count)):
            closing -= 1
            super().text(cursor, data[:TOKEN_BYTES])
            if closing:
                cursor.next_position -= 1
            data = data[TOKEN_BYTES:]
        if count:
            paired, opening = self._ends_with(data, opening, item)
            if paired:
                if len(data) > TOKEN_BYTES:
                    super().text(cursor, data[:-TOKEN_BYTES])
                cursor.next_position -= 1
                data = data[-TOKEN_BYTES:]
            if data:
                super().text(cursor, data)
        cursor.carried = _Pair(opening, closing)

    def begin_block(self, cursor: Cursor, item: MediaItem) -> int | float:
        cursor.carried = _Pair(0, 0)
        return cursor.next_position

    def block_runs(self, cursor: Cursor, item: MediaItem, base: Any, first: int, stop: int) -> Sequence[Any]:
        if item.modality == "audio":
            return (TextRun(stop - first, base + first),)
        if not _has_both(item):
            return super().block_runs(cursor, item, base, first, stop)
        return parts(self._chunks(item, base, stop)[0], first, stop)

    def end_block(self, cursor: Cursor, item: MediaItem, base: Any) -> None:
        if item.modality == "audio":
            cursor.next_position = base + self._audio(item)
        elif not _has_both(item):
            super().end_block(cursor, item, base)
        else:
            cursor.next_position = self._chunks(item, base, self.num_placeholders(item))[1] + 1
            cursor.carried = _Pair(0, 2)

    def _chunks(self, item: MediaItem, base: int, stop: int) -> tuple[list[Any], int]:
        """Runs of the first ``stop`` tokens of audio in video, at least, and the greatest position of the last chunk."""
        frames, height, width = self.merged_grid(item)
        size = height * width
        frames = min(frames, -(-stop // size))
        times = self.frame_times(item, 0, frames)
        self._check_limit(base + times[-1])
        video = grid_run(base, 0, times, height, width, 0, frames * size)
        audio = TextRun(min(self._audio(item), stop), base)
        rate = self._parameter("position_id_per_seconds", item, "audio in videos")
        chunk = max(1, int(rate * self._params["seconds_per_chunk"]))
        video_ends = _chunk_ends(np.array(times), size, chunk)
        audio_ends = [*range(chunk, audio.length, chunk), audio.length]
        runs: list[Any] = []
        video_at = audio_at = 0
        for number in range(max(len(video_ends), len(audio_ends))):
            if number < len(video_ends):
                runs.append(video.part(video_at, video_ends[number]))
                video_at = video_ends[number]
            if number < len(audio_ends):
                runs.append(audio.part(audio_at, audio_ends[number]))
                audio_at = audio_ends[number]
        return runs, runs[-1].greatest()


def _chunk_ends(times: NDArray[np.int64], size: int, chunk: int) -> list[int]:
    """Where chunks of ``chunk`` positions end, in tokens of frames of ``size`` tokens: no token ends two of them."""
    ends = []
    end, number = 0, 1
    while (frame := int(np.searchsorted(times, number * chunk))) < len(times):
        end = max(frame * size, end + 1)
        if end >= len(times) * size:
            break
        ends.append(end)
        number += 1
    return [*ends, len(times) * size]


class Qwen3OmniWhole(_Omni):
    """``qwen3_omni@vllm``: whole positions. Times are truncated before the base is added, start and end tokens are plain text.

    Text continues one past a block's greatest position. Audio in video goes token by token, by whole positions.
    """

    __slots__ = ()

    family: ClassVar[str] = "qwen3_omni"
    rules: ClassVar[tuple[str, ...]] = ("vllm",)
    pairs: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {**_OMNI_DEFAULTS, "n_window": 50}  # 50: of every released checkpoint

    def audio_tokens(self, length: int) -> int:
        window = self._params["n_window"] * 2
        left = (length % window - 1) // 2 + 1
        return int(((left - 1) // 2 + 1 - 1) // 2 + 1 + length // window * 13)

    def block_runs(self, cursor: Cursor, item: MediaItem, base: Any, first: int, stop: int) -> Sequence[Any]:
        if item.modality == "audio":
            return (self._heard(stop, base).part(first, stop),)
        if _has_both(item):
            return self.mixed(item, base, first, stop)
        return super().block_runs(cursor, item, base, first, stop)

    def end_block(self, cursor: Cursor, item: MediaItem, base: Any) -> None:
        runs = self.block_runs(cursor, item, base, 0, self.num_placeholders(item))
        cursor.next_position = max(run.greatest() for run in runs) + 1


class _Run(NamedTuple):
    """What Qwen3-Omni carries in float32: where its run of text began and how many tokens it has, since rounding goes by the run.

    ``opening``, ``closing``: as in :class:`_Pair`. ``delta``: what generated tokens are decoded by, for as long as they last.
    """

    base: float
    tokens: int
    opening: int
    closing: int
    delta: float | None


class Qwen3Omni(Qwen3OmniWhole):
    """``qwen3_omni@<rule>``: positions are float32 and may be fractional under hf5 and sglang; whole under vllm.

    Audio in video goes token by token. What follows a block stands one past the greatest position of its last piece. State carries
    where the current run of text began and its length, whether its last token was a vision_start, how many of the tokens that
    close a block are due, and the delta of generated tokens. sglang casts the table to int64 and has no audio in video.
    """

    __slots__ = ()

    rules: ClassVar[tuple[str, ...]] = ("hf5",)
    carries: ClassVar[tuple[int, ...]] = (5,)
    pairs: ClassVar[bool] = True
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float32)
    floats: ClassVar[bool] = True
    usual_delta: ClassVar[bool] = False

    def initial_state(self) -> PositionState:
        return PositionState(0, 0.0, -1.0, (), _Run(0.0, 0, 0, 0, None))

    def mrope_position_delta(self, state: PositionState) -> int | float:
        delta: float | None = state.carried[-1]
        return delta if delta is not None else _single(_single(state.max_position + 1) - state.num_tokens)

    def carried_behind(self, state: PositionState, media: Sequence[MediaItem], after: Any = None) -> tuple[Any, ...]:
        return _Run(after, 0, 0, 0, None)

    def compact(self, runs: list[Any]) -> Runs:
        """Text at whole positions is kept as an int, as in other families: float32 has them exactly."""
        if len(runs) == 1 and type(runs[0]) is FloatTextRun and runs[0].base.is_integer():
            return int(runs[0].base) + runs[0].skip
        return packed(runs)

    def plan_decode(self, state: PositionState, count: int) -> tuple[Runs, PositionState]:
        if state.open_block is not None or not count:
            return super().plan_decode(state, count)
        delta = self.mrope_position_delta(state)
        run = FloatTextRun(count, delta, state.num_tokens)
        last = run.greatest()
        self._check_limit(last)
        after = _single(last + 1)
        carried = _Run(after, 0, 0, 0, delta)
        return self.compact([run]), PositionState(state.num_tokens + count, after, max(last, state.max_position), (), carried)

    def text(self, cursor: Cursor, data: bytes, item: MediaItem | None = None) -> None:
        base, tokens, opening, closing, _ = cursor.carried
        count = len(data) // TOKEN_BYTES
        at = 0
        if closing:
            at = min(closing, count)
            closing -= at
            _add_text(cursor, base, tokens, at)
            tokens += at
            opening = 0
            if not closing:
                base, tokens = _single(_single(base + (tokens - 1)) + 1), 0
        if at < count:
            paired, opening = self._ends_with(data[at * TOKEN_BYTES :], opening, item)
            if paired:  # a run that begins at the vision_start
                if at < count - 1:
                    _add_text(cursor, base, tokens, count - 1 - at)
                    tokens += count - 1 - at
                base, tokens, at = _single(base + (tokens - 1)), 1, count - 1
            _add_text(cursor, base, tokens, count - at)
            tokens += count - at
        cursor.next_position = _single(base + tokens)
        cursor.carried = _Run(base, tokens, opening, closing, None)

    def begin_block(self, cursor: Cursor, item: MediaItem) -> float:
        base, tokens, opening, closing, _ = cursor.carried
        cursor.carried = _Run(base, tokens, opening, closing, None)  # no generated token is the last any more
        opened = 2 if _has_both(item) else 1  # the tokens that open it are a run of their own
        if tokens < opened or closing:
            return _single(base + tokens)
        return _single(_single(base + (tokens - opened)) + opened)

    def block_runs(self, cursor: Cursor, item: MediaItem, base: Any, first: int, stop: int) -> Sequence[Any]:
        if item.modality == "audio" or _has_both(item):
            return super().block_runs(cursor, item, base, first, stop)
        _, height, width = self.merged_grid(item)
        frame = first // (height * width)
        skip = frame * height * width
        return (self._frames(item, base, frame, -(-stop // (height * width)), height, width).part(first - skip, stop - skip),)

    def end_block(self, cursor: Cursor, item: MediaItem, base: Any) -> None:
        if _has_both(item):
            last = self.last_piece(item, base)
        else:
            (last,) = self.block_runs(cursor, item, base, 0, self.num_placeholders(item))
        after = _single(last.greatest() + 1)
        cursor.next_position = after
        cursor.carried = _Run(after, 0, 0, 2 if _has_both(item) else 1, None)

    def _frames(self, item: MediaItem, base: Any, first: int, stop: int, height: int, width: int) -> FrameRun:
        times = self.frame_seconds(item, first, stop)
        return FrameRun((stop - first) * height * width, base, times.tobytes(), height, width, 0)

    def _heard(self, count: int, base: Any) -> Any:
        return FloatTextRun(count, base, 0)


class Qwen3OmniCast(Qwen3Omni):
    """``qwen3_omni@sglang``: the float32 table of hf5, cast to int64 at the end; no audio in video."""

    __slots__ = ()

    rules: ClassVar[tuple[str, ...]] = ("sglang",)
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int64)

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if _has_both(item):
            raise Unsupported(f"{self.name} has no audio in video, {item} cannot be placed", item=item)
        return super().merged_grid(item)


def _single(value: float) -> float:
    """Rounded to float32."""
    return float(np.float32(value))


def _add_text(cursor: Cursor, base: float, tokens: int, count: int) -> None:
    """``count`` tokens more of a run of text that began at ``base`` and has ``tokens``."""
    run = FloatTextRun(count, base, tokens)
    cursor.add(run, run.greatest())
