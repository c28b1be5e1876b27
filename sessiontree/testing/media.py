"""Media: items as they were declared, features by content, aliases by namespace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sessiontree import KeyTaken, MediaItem, UnknownAlias, media_identity
from sessiontree.positions import scheme
from sessiontree.testing.base import Conformance, Home
from sessiontree.testing.model import PLACEHOLDER, Picture

SECONDS = 0.36136263608932495  # which no short decimal or float32 is


def features_of(number: int, rows: int = 8) -> dict[str, NDArray[Any]]:
    """Arrays of a picture: float32 with NaN and negative zero, float16, and one of no elements."""
    pixels = np.random.default_rng(number).standard_normal((rows, 64)).astype(np.float32)
    pixels[0, :3] = np.nan, -0.0, np.inf
    return {"pixel_values": pixels, "embeddings": pixels[:, ::2].astype(np.float16), "nothing": np.zeros((0, 3), np.int64)}


class MediaTests(Conformance):
    def test_items_come_back_as_they_were_declared(self, home: Home) -> None:
        rule = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=25, image_token_id=1000, video_token_id=1001)
        session = home.session(scheme=rule)
        extra = {"num_crops": 3, "scale": 0.5, "nested": {"list": [1, 1.0, None, "ä"]}}
        image = MediaItem("image", media_identity("image", b"1"), [(1, 4)], grid_thw=(1, 4, 4), extra=extra)
        moved = MediaItem("image", image.identity, [(0, 4)], grid_thw=(1, 4, 4), extra=extra)
        video = MediaItem("video", media_identity("video", b"2"), [(6, 2)], grid_thw=(2, 2, 2), second_per_grid_ts=SECONDS)
        node = session.append(session.root, [7, *[1000] * 4, 7, *[1001] * 2, 7], media=[video, image])
        same_again = session.append(node, [1000] * 4, media=[moved])
        for reader in home.twice(session):
            found = reader.node(node.id)
            assert list(found.media) == [image, video]
            assert found.media[0].extra == image.extra
            assert found.media[1].second_per_grid_ts == video.second_per_grid_ts
            spans = reader.node(same_again.id).media_spans()
            assert [(item.content(), start, stop) for item, start, stop in spans] == [
                (image.content(), 1, 5),
                (video.content(), 6, 8),
                (image.content(), 9, 13),
            ]
            assert reader.scheme == rule

    def test_an_item_in_parts(self, home: Home) -> None:
        session = home.session()
        item = Picture(1, 1, 2, 4, at=1).item()
        whole = session.append(session.root, [5, *[PLACEHOLDER] * 8, 6], media=[item])
        fields = {"modality": item.modality, "identity": item.identity, "grid_thw": item.grid_thw}
        first = session.append(
            session.root,
            [5, *[PLACEHOLDER] * 3],
            media=[MediaItem(**fields, spans=[(1, 3)], unfinished=True)],  # type: ignore[arg-type]
        )
        session = home.again(session)
        rest = MediaItem(**fields, spans=[(0, 5)], placeholders_before=3)  # type: ignore[arg-type]
        second = session.append(first.id, [*[PLACEHOLDER] * 5, 6], media=[rest])
        found = home.again(session).node(second.id)
        assert np.array_equal(found.positions(), whole.positions())
        assert [(each.placeholders_before, each.unfinished, start, stop) for each, start, stop in found.media_spans()] == [
            (0, True, 1, 4),
            (3, False, 4, 9),
        ]

    def test_features_come_back_to_the_bit(self, home: Home) -> None:
        session = home.session()
        picture = Picture(1, 1, 2, 4, at=0)
        session.append(session.root, [PLACEHOLDER] * 8, media=[picture.item()])
        given = features_of(1)
        home.store.put_features(picture.item(), given)
        wanted = {name: (array.dtype, array.shape, array.tobytes()) for name, array in given.items()}
        given["pixel_values"][:] = 0
        for reopened in (False, True) if self.keeps_features else (False,):
            if reopened:
                home.reopen()
            found = home.store.get_features(Picture(1, 1, 2, 4, at=0).item())
            assert found is not None
            assert {name: (found[name].dtype, found[name].shape, found[name].tobytes()) for name in found} == wanted
            assert not found["pixel_values"].flags.writeable
            assert home.store.get_features(Picture(2, 1, 2, 4, at=0).item()) is None

    def test_features_of_one_content_are_kept_once(self, home: Home) -> None:
        session = home.session()
        item = Picture(1, 1, 2, 4, at=3).item()
        held = []
        for number in range(3):
            session.append(session.root, [number, 0, 0, *[PLACEHOLDER] * 8], media=[item])
            home.store.put_features(item, features_of(1))
            held.append(home.store.usage().feature_bytes)
        assert held == [held[0]] * 3
        with pytest.raises(KeyTaken):
            home.store.put_features(item, features_of(2))
        home.reopen()
        found = home.store.get_features(item)
        if self.keeps_features:
            assert found is not None
            assert found["embeddings"].tobytes() == features_of(1)["embeddings"].tobytes()
        home.store.drop_features(item)
        del found
        assert home.store.get_features(item) is None

    def test_an_alias_never_names_other_bytes(self, home: Home) -> None:
        one, two = media_identity("image", b"1"), Picture(2, 1, 1, 1, at=0).item()
        assert home.store.alias_media("uuid ä", one) == one
        assert home.store.alias_media("uuid ä", two, "tenant") == two.identity
        for _ in range(2):
            assert home.store.alias_media("uuid ä", one) == one
            with pytest.raises(KeyTaken) as refusal:
                home.store.alias_media("uuid ä", two)
            assert (refusal.value.key, refusal.value.identity) == ("uuid ä", one)
            assert home.store.aliased_media("uuid ä") == one
            assert home.store.aliased_media("uuid ä", {"tenant": "tenant"}) == two.identity
            for unknown, space in (("uuid", None), ("uuid ä", "other"), ("uuid ä", {"lora": "tenant"})):
                with pytest.raises(UnknownAlias):
                    home.store.aliased_media(unknown, space)
            home.reopen()
        home.store.drop_alias("uuid ä")
        for _ in range(2):
            with pytest.raises(UnknownAlias):
                home.store.aliased_media("uuid ä")
            assert home.store.aliased_media("uuid ä", "tenant") == two.identity
            home.reopen()
        assert home.store.alias_media("uuid ä", two) == two.identity
