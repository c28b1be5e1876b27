"""vLLM's own Python code in tests, on a machine that has neither its kernels nor its web server.

The Makefile installs the release named here without dependencies and with nothing compiled. :func:`load` imports a module of it as
it is. What that module asks for on its way in and no test uses is a stub: packages that are not installed, and the two parts of
vLLM that need most of them. Every class and function that tests get is vLLM's.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock

import pytest
from transformers.utils import is_torchvision_available

RELEASE: Final = "0.33.0"
#: Packages that vLLM imports and that may be missing; those that are here are used.
STUBBED: Final = frozenset(
    {
        "aiohttp",
        "blake3",
        "cloudpickle",
        "cpuinfo",
        "cv2",
        "einops",
        "fastapi",
        "openai",
        "openai_harmony",
        "partial_json_parser",
        "prometheus_client",
        "psutil",
        "pybase64",
        "torchvision",
        "uvloop",
        "xgrammar",
        "zmq",
    }
)
#: A package of vLLM that is not loaded, and one of which only modules are.
LEFT_OUT: Final = "vllm.model_executor.layers.quantization.compressed_tensors"
HOLLOW: Final = "vllm.v1.structured_output"

is_torchvision_available()  # remembered from here on: a stub is not it


def installed() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def can_run() -> bool:
    """Whether the release is here, with the few packages that its hashes and messages are made by."""
    return installed() == RELEASE and all(importlib.util.find_spec(name) for name in ("cachetools", "cbor2", "msgspec"))


needs_vllm = pytest.mark.skipif(
    not can_run(), reason=f"vllm {RELEASE} and what it hashes with are not installed (vllm: {installed()})"
)


def load(name: str) -> Any:
    """The module of vLLM of this name, such as ``vllm.v1.core.kv_cache_utils``."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with stubs(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextmanager
def stubs() -> Iterator[None]:
    """Inside, what is stubbed can be imported; afterwards nobody else finds it."""
    finder = _Stubs()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StubModule)]:
            if not name.startswith("vllm."):
                del sys.modules[name]


class _Anything:
    """Stands for a class of a package that is not here: in a type hint it allows every value."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        return {"type": "any"}


class _StubModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # what makes it a package
        if name == HOLLOW:
            package = importlib.util.find_spec("vllm")
            assert package is not None and package.submodule_search_locations is not None
            self.__path__ = [os.path.join(*package.submodule_search_locations, *name.split(".")[1:])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (_Anything,), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.missing = {name for name in STUBBED if name not in sys.modules and importlib.util.find_spec(name) is None}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.missing or name == HOLLOW or f"{name}.".startswith(f"{LEFT_OUT}."):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
