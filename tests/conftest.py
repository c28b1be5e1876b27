"""What Hypothesis draws: the same in every run of a commit, in whatever order and process; more, and new ones, at soak length."""

from __future__ import annotations

import importlib
import os
import pkgutil
from contextlib import suppress

from hypothesis import HealthCheck, settings

import engine_bridge
import sessiontree

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"

# No test depends on how fast the machine is.
settings.register_profile("test", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("soak" if SOAK else "test")

# Hypothesis also draws constants that it finds in the modules under test: in those that are loaded by then, so all of them are.
for package in (sessiontree, engine_bridge):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # of an optional install
                importlib.import_module(module.name)
