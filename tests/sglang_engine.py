"""SGLang 0.5.23's own modules on a machine without its kernels: its sessions, requests, multimodal types and caches, on the CPU.

``pip install --no-deps sglang==0.5.23``, and the few small packages of the extra ``sglang``, are all it takes. What a kernel, a
model or a server would do is a stub: whole packages of SGLang (:data:`STUBBED`), and the packages it would want beside it
(:data:`WANTED`), these only while a module of SGLang is being imported and only where they are not installed, so that nobody else
takes them for the real ones. SGLang's ``__init__`` is left out: it patches transformers, whose own answers other tests need.

    engine("sglang.srt.managers.schedule_batch").MultimodalDataItem

After :func:`engine` was called once, plain imports of SGLang's modules work too, those inside of functions included.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import pytest

RELEASE: Final = "0.5.23"
#: Small packages that SGLang's modules really use here.
NEEDED: Final = ("msgspec", "orjson", "psutil", "pybase64", "pydantic", "requests")
#: Packages of SGLang that are stubs, with all that is in them.
STUBBED: Final = (
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.entrypoints",
    "sglang.srt.function_call",
    "sglang.srt.layers",
    "sglang.srt.model_loader",
    "sglang.srt.models",
    "sglang.srt.multimodal.evs",
    "sglang.srt.parser",
)
#: Modules in them that are not.
REAL: Final = ("sglang.srt.layers.rotary_embedding.mrope_rope_index",)
#: What imports much of transformers and PyTorch. Those come first, before there is any stub that they could take for real.
AFTER_TRANSFORMERS: Final = ("sglang.srt.managers.scheduler", "sglang.srt.multimodal.processors")
#: Packages that SGLang would import, stubs where they are not installed.
WANTED: Final = (
    "IPython",
    "aiohttp",
    "cuda",
    "dill",
    "einops",
    "fastapi",
    "flashinfer",
    "openai",
    "partial_json_parser",
    "prometheus_client",
    "pynvml",
    "setproctitle",
    "sgl_kernel",
    "starlette",
    "torchaudio",
    "torchvision",
    "triton",
    "uvicorn",
    "uvloop",
    "xgrammar",
    "zmq",
)


def missing() -> str | None:
    """Why SGLang's code cannot run here; None if it can."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return f"sglang {RELEASE} is not installed: make .venv/sglang.stamp"
    if found != RELEASE:
        return f"sglang {found} is installed, not {RELEASE}: make .venv/sglang.stamp"
    lacking = [name for name in NEEDED if find_spec(name) is None]
    return f"sglang needs {', '.join(lacking)}: make .venv/sglang.stamp" if lacking else None


#: Marks tests that ask SGLang itself.
needs_sglang = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def engine(name: str) -> ModuleType:
    """SGLang's module ``name``, its own code."""
    _install()
    if _within(name, AFTER_TRANSFORMERS):
        importlib.import_module("transformers.processing_utils")
    return importlib.import_module(name)


class _StubType(type):
    """Attributes of a stub class, and what its name is indexed or joined with in annotations, are stubs as well."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubType(name, (_Stub,), {})

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __or__


class _Stub(metaclass=_StubType):
    """A class to derive from, an object that has every attribute, a decorator that changes nothing."""

    def __new__(cls, *given: Any, **options: Any) -> Any:
        return given[0] if _decorates(given, options) else super().__new__(cls)

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def __call__(self, *given: Any, **options: Any) -> Any:
        return given[0] if _decorates(given, options) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()


def _decorates(given: Sequence[Any], options: dict[str, Any]) -> bool:
    return len(given) == 1 and not options and callable(given[0])


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = _StubType(name, (_Stub,), {"__module__": self.__name__})
        setattr(self, name, stub)
        return stub


class _StubLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        module.__dict__["__version__"] = "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "dill":  # called at import, for a default that nobody here reads
            module.__dict__["dumps"] = lambda *_: b""


class _AmongStubs(Loader):
    """Loads a module of SGLang as ever, with the packages that it wants in reach."""

    def __init__(self, finder: _Finder, loader: Any) -> None:
        self.finder, self.loader = finder, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        with self.finder.reaching():
            self.loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:  # sources for tracebacks and the like
        return getattr(self.loader, name)


class _Finder(MetaPathFinder):
    def __init__(self, package: Path) -> None:
        self.package = package
        self.loading = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "sglang":
            if name not in REAL and _within(name, STUBBED):
                return ModuleSpec(name, _StubLoader(), is_package=True)
            folder = self.package.joinpath(*name.split(".")[1:-1])
            spec = PathFinder.find_spec(name, [str(folder)])
            if spec is not None and spec.loader is not None:
                spec.loader = _AmongStubs(self, spec.loader)
            return spec
        if self.loading and _within(name, WANTED):
            top = name.partition(".")[0]
            if isinstance(sys.modules.get(top), _StubModule) or PathFinder.find_spec(top) is None:
                return ModuleSpec(name, _StubLoader(), is_package=True)
        return None

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """The stubs of :data:`WANTED` can be imported, and are gone afterwards; nothing is compiled, no warning is an error."""
        import torch

        self.loading += 1
        try:
            with warnings.catch_warnings(), patch.object(torch, "compile", _uncompiled):
                warnings.simplefilter("ignore")
                yield
        finally:
            self.loading -= 1
            if not self.loading:
                for name in [name for name, module in sys.modules.items() if isinstance(module, _StubModule)]:
                    if not _within(name, STUBBED):
                        del sys.modules[name]


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else lambda given: given


@cache
def _install() -> None:
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations is not None, missing()
    sglang = ModuleType("sglang")
    sglang.__path__ = list(package.submodule_search_locations)
    sglang.__dict__["__version__"] = RELEASE
    sys.modules["sglang"] = sglang
    sys.meta_path.insert(0, _Finder(Path(sglang.__path__[0])))
