"""What Hypothesis draws: the same in every run of a commit, in whatever order and process; more, and new ones, at soak length.

And a PostgreSQL server: one for the whole run, a new database in it for each test, or a server of a test's own.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

import engine_bridge
import sessiontree
from tests import postgres_server as postgres

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


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection has to look through it, of the hundreds that tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres_programs() -> None:
    """Skips what needs PostgreSQL where it is not installed; under PG_REQUIRED that is an error."""
    if postgres.programs() is None:
        assert not os.environ.get("PG_REQUIRED"), "PG_REQUIRED is set, and PostgreSQL is not installed: make postgres"
        pytest.skip("PostgreSQL is not installed")


@pytest.fixture(scope="session")
def postgres_server(
    postgres_programs: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> postgres.Server:
    """The server of this run, which all its processes share: a test neither stops it nor changes its settings.

    It waits for no disk: a commit is acknowledged as ever, and outlives a kill of the server, but not a failure of the machine.
    """
    place = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # one of pytest-xdist's processes, whose directories lie in their parent's
        return postgres.shared(place.parent, owner=os.getppid())
    return postgres.shared(place, owner=os.getpid())


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """A new database of the shared server."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def own_postgres(postgres_programs: None) -> Iterator[postgres.Server]:
    """A server of the test's own, durable as PostgreSQL is by default, to stop and to kill."""
    with postgres.Server.make() as server:
        yield server
