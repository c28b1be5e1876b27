"""Blobs in a bucket of an object store that speaks S3, through obstore. Needs the extra ``s3``.

An object is put whole, in one request that says "only where there is none": the first one stays. Parts of a multipart upload cannot
be sent under that condition, so there are none, and an object has at most the 5 GiB that S3 takes in one request. Requests are
repeated after errors a bounded number of times, with pauses of random length; all of them may be.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, TypeVar

from sessiontree.errors import NeedsExtra, StoreFailed, Unsupported
from sessiontree.locks import new_lock

_ATTEMPTS: Final = 6
_PAUSE: Final = 0.1  # seconds, at most, after the first error; then twice that, and so on
_LONGEST: Final = 60.0  # seconds after which no further attempt begins
_AT_ONCE: Final = 1000  # objects of a listing
_CLOCK: Final = ".clock"  # an object that is written to learn what time it is there
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_T = TypeVar("_T")


class BucketBlobs:
    """The objects below ``url``: ``s3://bucket`` or ``s3://bucket/prefix``; ``memory:///`` for tests.

    ``options``: obstore's for S3 (``endpoint``, ``region``, ``access_key_id``, ``secret_access_key``, ``client_options``); what
    is not given is taken from the environment: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on. An endpoint of ``http://`` is used as
    such. A server without conditional puts needs ``conditional_put="disabled"``: of two that put one name in the same moment the
    last one stays then, which is no harm where both put the same. ``read_only``: nothing is written, and ages are those beside the
    newest object.

    Raises NeedsExtra without obstore, Unsupported for another kind of URL; every method raises StoreFailed where the bucket is not
    there, cannot be reached or refuses, Unsupported in a forked child, where obstore would wait for ever.
    """

    def __init__(self, url: str, *, read_only: bool = False, **options: Any) -> None:
        try:
            import obstore  # noqa: PLC0415
            from obstore import store  # noqa: PLC0415
        except ImportError as error:
            raise NeedsExtra("blobs in a bucket need obstore: pip install 'sessiontree[s3]'", extra="s3") from error
        if not url.startswith(("s3://", "memory://")):
            raise Unsupported(f"blobs lie in 'database' or s3://bucket/prefix, or nowhere (None), not in {url!r}")
        if url.startswith("s3://"):
            endpoint = options.get("endpoint") or next((os.environ[each] for each in _ENDPOINTS if os.environ.get(each)), "")
            client = {"connect_timeout": "5s", "timeout": "120s", "allow_http": endpoint.startswith("http://")}
            options["client_options"] = client | options.get("client_options", {})
            options.setdefault("retry_config", {"max_retries": 0})  # all of it is done here
        try:
            self._store = store.from_url(url, **options)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise Unsupported(f"no bucket can be reached by {url!r}: {_first_line(error)}") from error
        self._obstore = obstore
        self._url = url
        self._read_only = read_only
        self._pid = os.getpid()
        self._lock = new_lock()
        self._ahead: float | None = None  # of this process's monotonic clock, in seconds

    def put(self, name: str, data: bytes) -> bool:
        """Whether it is new. False too where an earlier attempt of this call has put it, and its answer was lost."""
        return self._tried(f"put {name}", lambda: self._put(name, data))

    def _put(self, name: str, data: bytes) -> bool:
        try:
            self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            return True
        except self._obstore.exceptions.AlreadyExistsError:
            if self._is_there(name):
                return False
            raise  # S3 says so as well where another put is under way, which may yet fail
        except NotImplementedError:
            if self._is_there(name):
                return False
            self._obstore.put(self._store, name, data, use_multipart=False)
            return True

    def _is_there(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            self._obstore.head(self._store, name)
            return True
        return False

    def get(self, name: str) -> bytes | None:
        def get() -> bytes | None:
            try:
                return b"".join(self._obstore.get(self._store, name).stream())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

        return self._tried(f"get {name}", get)

    def names(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        """Names that begin so, with their age in seconds by the server's clock, which S3 tells in whole ones."""
        folder = prefix.rpartition("/")[0]  # by which obstore lists
        found = self._tried(f"list {prefix}", lambda: list(self._listed(folder)))
        now = max((at for _, at in found), default=0.0) if self._read_only else self._now()
        for name, at in found:
            if name.startswith(prefix) and name != _CLOCK:
                yield name, max(0.0, now - at)

    def _listed(self, folder: str) -> Iterator[tuple[str, float]]:
        for chunk in self._obstore.list(self._store, folder or None, chunk_size=_AT_ONCE):
            for each in chunk:
                yield each["path"], each["last_modified"].timestamp()

    def _now(self) -> float:
        """The server's time. It is asked once: from then on this process's monotonic clock counts, which stands still in sleep.

        So nothing is taken for older than it is.
        """

        def ahead() -> float:
            self._obstore.put(self._store, _CLOCK, b"", use_multipart=False)
            return float(self._obstore.head(self._store, _CLOCK)["last_modified"].timestamp()) - time.monotonic()

        if self._ahead is None:
            self._ahead = self._tried("learn what time it is", ahead)
        return self._ahead + time.monotonic()

    def delete(self, names: Iterable[str]) -> int:
        """How many of them were there: they are listed before."""
        wanted = set(names)
        if not wanted:
            return 0
        folder = os.path.commonprefix(list(wanted)).rpartition("/")[0]  # noqa: RUF071 (of characters, then of whole names)
        there = [name for name, _ in self._tried(f"list {folder}", lambda: list(self._listed(folder))) if name in wanted]
        if there:
            self._tried(f"delete {len(there)} objects", lambda: self._obstore.delete(self._store, there))
        return len(there)

    def _tried(self, what: str, call: Callable[[], _T]) -> _T:
        """What a call returns, which is repeated where that may help."""
        if os.getpid() != self._pid:
            raise Unsupported(f"the bucket {self._url} was connected before this process was forked: connect anew")
        exceptions = self._obstore.exceptions
        began = time.monotonic()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, FileNotFoundError, ValueError) as error:
                raise self._failed(what, error) from error
            except exceptions.BaseError as error:
                if attempt == _ATTEMPTS or time.monotonic() - began > _LONGEST:
                    raise self._failed(f"{what} in {attempt} attempts", error) from error
                time.sleep(random.uniform(0, _PAUSE * 2 ** (attempt - 1)))
        raise AssertionError("the last attempt returns or raises")

    def _failed(self, what: str, error: Exception) -> StoreFailed:
        return StoreFailed(f"{self._url}: could not {what}: {_first_line(error)}", path=self._url)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
