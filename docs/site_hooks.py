"""What mkdocs does beside its plugins: docstrings name code by Sphinx's roles, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)([^<]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """A page with plain code in place of roles; of a name behind ``~`` its last part."""
    return _ROLE.sub(lambda role: f"<code>{role[2].rpartition('.')[2] if role[1] else role[2]}</code>", html)
