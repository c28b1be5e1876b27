"""The page, put together from the files beside this one: markup, styles, scripts, and what is told of a session.

Its policy names the style and the scripts by their hashes, so no other one runs, whatever a session holds; forbids every request,
but to the server that it came from where it is live; and has the browser refuse to make markup of text anywhere (trusted types).
What is told of a session stands in blocks of base64, each in an element of a type that no browser runs.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

#: In the order in which they use each other.
_PARTS: Final = "data runs layout drawing elements chart panel compare colours search app"
SCRIPTS: Final = tuple(f"{part}.js" for part in _PARTS.split())
_NAME: Final = re.compile(r"[a-z0-9-]+")

Block = tuple[str, bytes]  # a name of small letters, digits and hyphens, and what packing made


def policy(*, live: bool) -> str:
    """The page's Content-Security-Policy."""
    scripts = " ".join(_hash(_read(name)) for name in SCRIPTS)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(_read('view.css'))}; img-src data:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def page(blocks: Iterable[Block] = (), *, live: bool = False) -> Iterator[str]:
    """The page, piece by piece. ``blocks``: what it shows; ``live``: it asks the server that it came from instead."""
    before, _, behind = _read("page.html").partition("<!-- blocks -->\n")
    yield (
        before.replace("POLICY", policy(live=live)).replace("MODE", "live" if live else "file").replace("STYLE", _read("view.css"))
    )
    for name, data in blocks:
        assert _NAME.fullmatch(name), name
        yield _element(name, b64encode(data).decode())
    yield behind.replace("SCRIPTS", "\n".join(f"<script>{_read(name)}</script>" for name in SCRIPTS))


def block_size(block: Block) -> int:
    """Bytes of a page that a block takes."""
    name, data = block
    return len(_element(name, "")) + -(-len(data) // 3) * 4


def _element(name: str, text: str) -> str:
    return f'<script type="application/octet-stream" id="block-{name}">{text}</script>\n'


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
