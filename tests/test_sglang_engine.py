"""What tests call SGLang's own code is that, and loading it leaves nothing behind that others could take for real."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sglang_engine import WANTED, engine, needs_sglang

pytestmark = needs_sglang

MODULES = (
    "sglang.srt.managers.io_struct",
    "sglang.srt.managers.mm_utils",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.session.session_controller",
)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_loaded_from_sglangs_own_file(name: str) -> None:
    file = engine(name).__file__
    assert file is not None
    assert Path(file).parts[-len(name.split(".")) :] == (*name.split(".")[:-1], name.rsplit(".", maxsplit=1)[-1] + ".py")


def test_nobody_else_meets_a_stub() -> None:
    """In a process of its own: what was there before is as it was, and what was not is not."""
    wanted = [name for name in WANTED if find_spec(name) is None]
    code = f"""
import importlib.util, sys
import torch.utils._triton
from tests.sglang_engine import engine
for name in {MODULES!r}:
    engine(name)

assert not [name for name in {wanted!r} if name in sys.modules or importlib.util.find_spec(name)]
assert torch.utils._triton.has_triton_package() == {find_spec("triton") is not None}
assert "torch._inductor" not in sys.modules and "transformers.modeling_utils" not in sys.modules
assert torch.compile.__module__ == "torch"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
