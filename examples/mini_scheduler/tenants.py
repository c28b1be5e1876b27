"""Who asks. A tenant is known by a key; all that it names lies below its own name, so nobody can name what is another's."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from mini_scheduler.failures import Refused
from sessiontree import Namespace

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
NOBODY: Final = "default"  # the one tenant of a server without keys


def namespace_of(tenant: str) -> Namespace:
    """Of all that is a tenant's: nodes and KV pages are shared with no other."""
    return Namespace(tenant=tenant, cache_salt=f"tenant:{tenant}")


def salt_of(tenant: str, salt: str | None) -> str | None:
    """Of a request's KV pages; None: those that the tenant's requests share."""
    return None if salt is None else f"tenant:{tenant}:{salt}"


class Tenants:
    """Tenants by API key. Without keys there is one, and it needs none.

    ``keys``: by tenant's name. ``admin_key``: for what is of the whole server. Keys are kept and looked up as digests, so how long
    a look-up takes says nothing of how much of a key was right. Raises ValueError for names that are none and keys of two tenants.
    """

    def __init__(self, keys: Mapping[str, str] | None = None, admin_key: str | None = None) -> None:
        self._names: dict[bytes, str] = {}
        self._admin = None if admin_key is None else _digest(admin_key)
        for name, key in (keys or {}).items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"a tenant's name is 1 to 64 of A-Z a-z 0-9 _ -, not {name!r}")
            if not key or self._names.setdefault(_digest(key), name) != name or _digest(key) == self._admin:
                raise ValueError(f"the key of {name} is empty or somebody else's")

    def name(self, authorization: str | None) -> str:
        """Whose ``Authorization`` this is. Raises Refused, 401."""
        if not self._names:
            return NOBODY
        name = self._names.get(_digest(_bearer(authorization)))
        if name is None:
            raise Refused(401, "this needs the API key of a tenant", type="authentication_error", code="invalid_api_key")
        return name

    def check_admin(self, authorization: str | None) -> None:
        """Raises Refused, 401, where there are keys, of tenants or of an admin, and this is not the admin's."""
        if (self._names or self._admin is not None) and _digest(_bearer(authorization)) != self._admin:
            raise Refused(401, "this needs the admin key", type="authentication_error", code="invalid_api_key")


def read_keys(pairs: Iterable[str], path: Path | None = None) -> dict[str, str]:
    """``NAME=KEY``, from arguments and from the lines of a file, where empty lines and those that begin with # say nothing."""
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for pair in (*pairs, *(line for line in map(str.strip, lines) if line and not line.startswith("#"))):
        name, equals, key = pair.partition("=")
        if not equals or name in found:
            raise ValueError(f"{name!r}: a tenant's key is given once, as NAME=KEY")
        found[name] = key
    return found


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
