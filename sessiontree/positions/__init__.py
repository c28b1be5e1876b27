"""Position schemes by name: which positions a model family has under which engine's rule.

``scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)`` gives the rule with its parameters; its name and
parameters are stored with every session and never inferred again. A new family of an existing kind is a class of a few lines that
says its parameters, and a line in ``_FAMILIES``.
"""

from __future__ import annotations

from typing import Any, Final

from sessiontree.errors import UnknownScheme, Unsupported
from sessiontree.positions.absolute import HunYuanVL
from sessiontree.positions.base import (
    DEFAULT_POSITION_LIMIT,
    MODES,
    RULES,
    ExternalPositions,
    Mode,
    PositionScheme,
    PositionState,
)
from sessiontree.positions.canvas import MiniCPMV47
from sessiontree.positions.config import scheme_of_config
from sessiontree.positions.grid import Ernie45VL, Glm4V, GlmImage, HyV4VL, PaddleOCRVL, Qwen2VL, Qwen3VL, Qwen25VL
from sessiontree.positions.omni import Qwen3Omni, Qwen3OmniCast, Qwen3OmniWhole, Qwen25Omni
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

_FAMILIES: Final[tuple[type[PositionScheme], ...]] = (
    Text,
    Qwen2VL,
    PaddleOCRVL,
    Qwen25VL,
    Ernie45VL,
    Qwen3VL,
    Glm4V,
    Qwen25Omni,
    Qwen3Omni,
    Qwen3OmniCast,
    Qwen3OmniWhole,
    HyV4VL,
    HunYuanVL,
    MiniCPMV47,
    GlmImage,
)
_SCHEMES: Final = {f"{family.family}@{rule}": family for family in _FAMILIES for rule in family.rules}
_NAMES: Final = frozenset(family.family for family in _FAMILIES)
_REFUSED: Final = {
    "isaac": "a later image moves the positions of earlier text, so no table that only grows can be right",
    "minicpmv4_7@sglang": "SGLang 0.5.23 gives newlines beside pictures other positions than the model, by a rule not shown",
    "glm_image@vllm": "vLLM 0.33 does not run it",
    "qwen2_5_omni@sglang": "SGLang 0.5.23 does not run it",
    **{
        f"{family}@{rule}": "neither SGLang 0.5.23 nor vLLM 0.33 has positions for it"
        for family in ("hunyuan_vl", "hy_v4_vl")
        for rule in ("sglang", "vllm")
    },
}


def known_schemes() -> tuple[str, ...]:
    """Every name that :func:`scheme` takes."""
    return tuple(_SCHEMES)


def scheme(name: str, *, config: Any = None, engine: str | None = None, **params: Any) -> PositionScheme:
    """The position scheme ``family@rule`` with its parameters.

    Rules: hf5, sglang, vllm. ``"auto"`` finds family and parameters from a model's ``config``, the content of its config.json, and
    the rule from the ``engine``: "sglang", "vllm", or "transformers" (hf5). What it chose is the ``name`` and ``params`` of what
    comes back; ``params`` given here go before those of the config.

    Raises UnknownScheme naming what is known, Unsupported with the reason for a family or rule that
    cannot be had, PositionError for a parameter the family does not have or a value that cannot be.

    >>> scheme("qwen2_vl@hf5", spatial_merge_size=2).num_axes
    3
    """
    if not isinstance(name, str):
        raise TypeError(f"a scheme is named by text, not {type(name).__name__}")
    if name == "auto":
        name, found = scheme_of_config(config, engine, {family.family: family.defaults for family in _FAMILIES})
        params = {**found, **params}
    elif config is not None or engine is not None:
        raise TypeError(f'config= and engine= go with "auto", not with {name!r}')
    family, _, rule = name.partition("@")
    if name in _SCHEMES:
        return _SCHEMES[name](rule, params)
    why = _REFUSED.get(name, _REFUSED.get(family))
    if why is not None and rule in RULES:
        raise Unsupported(f"no positions for {name}: {why}", scheme=name)
    if name in _NAMES:
        ways = " or ".join(each for each in _SCHEMES if each.startswith(f"{name}@"))
        raise UnknownScheme(f"no position scheme {name!r}: a rule belongs to it, {ways}", name=name, known=known_schemes())
    raise UnknownScheme(f"no position scheme {name!r}; known are {', '.join(known_schemes())}", name=name, known=known_schemes())
