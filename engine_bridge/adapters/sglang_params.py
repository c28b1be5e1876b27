"""What SGLang's ``session_params`` mean, as a pure function of what is known of a session's requests.

For gateways and schedulers: it needs neither SGLang nor a tree, and changes nothing. The wire format is that of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from sessiontree import OutOfRange, UnknownNode, Unsupported
from sessiontree.frozen import checked_text
from sessiontree.tokens import as_index

__all__ = ["Context", "Continuation", "check_types", "continuation"]

_PARAMS: Final = (("rid", str), ("offset", int), ("replace", bool), ("drop_previous_output", bool))


class Context(NamedTuple):
    """What is known of a request of a session: the tokens of its prompt, of prompt and reply, and whether it has finished."""

    prompt_len: int
    stop: int
    finished: bool = True


class Continuation(NamedTuple):
    """Where a request goes on.

    ``rid``: the request whose context it continues; None: from nothing. ``length``: of that context, tokens ``[0, length)`` are
    kept. ``aborts``: rids of the requests to abort. ``forgets``: whether the session begins anew, and no earlier request has a rid
    any more.
    """

    rid: str | None
    length: int
    aborts: tuple[str, ...] = ()
    forgets: bool = False


def continuation(
    params: Any,
    context_of: Callable[[str], Context | None],
    *,
    in_flight: Iterable[str] = (),
    streaming: bool = False,
    tip: str | None = None,
) -> Continuation:
    """Where a request with these ``session_params`` goes on.

    ``params``: SGLang's SessionParams, or a mapping with the same names, as in a request's JSON. ``context_of``: what is known of a
    rid, None for an unknown one; a dict's ``get`` will do. ``in_flight``: rids that have not finished. ``tip``: which request a
    streaming session goes on from where none is named; None before the first.

    - No ``rid``: from nothing; a streaming session, from its tip.
    - ``rid``: behind that request's reply. It must have finished.
    - ``drop_previous_output``: behind its prompt.
    - ``offset``: of the context so far, keep tokens ``[0, offset)``. None and 0 keep it all, and a negative one counts from its
      end: clients of SGLang send 0 for no offset and -1 to drop the last sampled token. Outside the context it is an error; SGLang
      takes it for the end. Where there is no context there is nothing to cut.
    - ``replace``: the named request is aborted if it is running. What it has generated so far is no history: its context is its
      prompt, and the new turn stands beside what it would have replied. Finished requests, and whatever goes on from them, stay;
      SGLang deletes them. Without a ``rid`` all that run are aborted, and the session begins anew.
    - A streaming session runs one request at a time, and only appends: behind its tip or, by ``rid``, behind any finished request.

    With a tree, the rest is ``session.append(session.truncate(reply_of[rid], length), token_ids)``; truncate refuses to cut media.

    Raises UnknownNode for a rid that is not known, OutOfRange for an offset outside the context, Unsupported for what streaming or
    unfinished requests do not allow, TypeError.
    """
    rid, offset, replace, drop = (_param(params, name, kind) for name, kind in _PARAMS)
    running = tuple(in_flight)
    if streaming:
        for name, given in (("replace", replace), ("drop_previous_output", drop), ("offset", offset)):
            if given:
                raise Unsupported(f"a streaming session only appends; this request has {name}={given!r}")
        if running:
            raise Unsupported(
                f"a streaming session runs one request at a time, and {running[0]!r} has not finished", rid=running[0]
            )
        rid = tip if rid is None else rid
    if rid is None:
        return Continuation(None, 0, running if replace else (), bool(replace))
    found = context_of(rid)
    if found is None:
        raise UnknownNode(f"no request {rid!r} has finished in this session", rid=rid)
    if not found.finished and not replace:
        raise Unsupported(f"request {rid!r} has not finished; nothing can go on from it", rid=rid)
    length = found.prompt_len if drop or not found.finished else found.stop
    if offset:
        kept = offset if offset > 0 else length + offset
        if not 0 <= kept <= length:
            raise OutOfRange(f"offset {offset} outside the {length} tokens of context behind {rid!r}", value=offset, limit=length)
        length = kept
    return Continuation(rid, length, () if found.finished else (rid,))


def check_types(params: Any) -> None:
    """Whether SGLang's SessionParams, or a mapping with the same names, hold what these fields are. Raises TypeError."""
    for name, kind in (("id", str), *_PARAMS):
        value = _param(params, name, kind)
        if kind is str and value is not None:
            checked_text(value, name)


def _param(params: Any, name: str, kind: type) -> Any:
    try:
        value = params.get(name) if isinstance(params, Mapping) else getattr(params, name)
    except AttributeError:
        raise TypeError(f"session_params are SGLang's or a mapping, not {type(params).__name__}") from None
    if value is None:
        return None
    if kind is int:
        return as_index(value, name)
    if not isinstance(value, kind):
        raise TypeError(f"{name} is of type {kind.__name__}, not {type(value).__name__}")
    return value
