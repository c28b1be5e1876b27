"""In what one JSON value differs from another: how a file comes out as it was, though most of it is made again from turns.

A format makes JSON of a turn. What it read may say the same a little otherwise: a null that is left out, a key of its own. It keeps
the difference of the two, and puts that over what it makes. So text that stands in both is kept once, what was said of a turn since
is written, and what came in goes out without a rule for each way to write it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from sessiontree.interchange.losses import Losses

#: [path, value] where a value is another one, [path] where there is none. A path is the keys and indices that lead to it.
Change = list[Any]
#: For what is made only to be compared: what it cannot hold was no loss.
NOWHERE: Final = Losses("", salvage=True)


def difference(made: Any, actual: Any) -> list[Change]:
    """What to change in ``made`` for it to be ``actual``. Types count, also of numbers: 1 is neither 1.0 nor true."""
    changes: list[Change] = []
    waiting: list[tuple[list[Any], Any, Any]] = [([], made, actual)]
    while waiting:
        path, one, other = waiting.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            changes.extend([[*path, key]] for key in one.keys() - other.keys())
            for key, value in other.items():
                if key in one:
                    waiting.append(([*path, key], one[key], value))
                else:
                    changes.append([[*path, key], value])
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            if _flat(one, other):
                continue
            waiting.extend(([*path, at], *both) for at, both in enumerate(zip(one, other, strict=True)))
        elif type(one) is not type(other) or (one != other and not (one != one and other != other)):  # noqa: PLR0124
            changes.append([path, other])
    return changes


def _flat(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists are the same numbers or words: most are, and may be long."""
    kinds = set(map(type, one))
    return len(kinds) == 1 and kinds <= {int, float, bool, str} and set(map(type, other)) == kinds and one == other


def put_over(made: Any, changes: Sequence[Sequence[Any]]) -> Any:
    """``made`` with its changes, in place. A change of what is no longer there is left out."""
    for path, *rest in changes:
        value = [_copied(each) for each in rest]
        if not path:
            made = value[0]
            continue
        at = made
        for step in path[:-1]:
            at = at[step] if _has(at, step) else None
        last = path[-1]
        if isinstance(at, dict) and value:
            at[last] = value[0]
        elif isinstance(at, dict):
            at.pop(last, None)
        elif _has(at, last) and value:
            at[last] = value[0]
    return made


def _copied(value: Any) -> Any:
    """A value that may be changed; by way of its text, which may be nested as deep as text that was read."""
    return json.loads(json.dumps(value)) if isinstance(value, (dict, list)) else value


def _has(value: Any, step: Any) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value
