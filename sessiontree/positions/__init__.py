"""Position schemes by name: which positions a model family has under which engine's rule.

``scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)`` gives the rule with its parameters; its name and
parameters are stored with every session and never inferred again. A new family is a class in a module of its own and a line in
``_FAMILIES``.
"""

from __future__ import annotations

from typing import Any, Final

from sessiontree.errors import UnknownScheme
from sessiontree.positions.base import (
    DEFAULT_POSITION_LIMIT,
    MODES,
    RULES,
    ExternalPositions,
    Mode,
    PositionScheme,
    PositionState,
)
from sessiontree.positions.grid import Qwen2VL, Qwen25VL
from sessiontree.positions.text import Text

__all__ = [
    "DEFAULT_POSITION_LIMIT",
    "MODES",
    "RULES",
    "ExternalPositions",
    "Mode",
    "PositionScheme",
    "PositionState",
    "known_schemes",
    "scheme",
]

_FAMILIES: Final[dict[str, type[PositionScheme]]] = {family.family: family for family in (Text, Qwen2VL, Qwen25VL)}


def known_schemes() -> tuple[str, ...]:
    """Every name that :func:`scheme` takes."""
    return tuple(f"{family}@{rule}" for family in _FAMILIES for rule in RULES)


def scheme(name: str, **params: Any) -> PositionScheme:
    """The position scheme ``family@rule`` with its parameters.

    Families: text, qwen2_vl, qwen2_5_vl. Rules: hf5, sglang, vllm. Raises UnknownScheme naming what is known, PositionError for
    a parameter the family does not have or a value that cannot be.

    >>> scheme("qwen2_vl@hf5", spatial_merge_size=2).num_axes
    3
    """
    if not isinstance(name, str):
        raise TypeError(f"a scheme is named by text, not {type(name).__name__}")
    family, _, rule = name.partition("@")
    if family not in _FAMILIES or rule not in RULES:
        raise UnknownScheme(
            f"no position scheme {name!r}; known are {', '.join(known_schemes())}", name=name, known=known_schemes()
        )
    return _FAMILIES[family](rule, params)
