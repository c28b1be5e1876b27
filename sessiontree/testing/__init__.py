"""A suite of tests that any backend of a :class:`~sessiontree.SessionStore` can run, over the public interface alone.

``class TestMine(StoreConformance)`` with a fixture ``make_store`` runs all of it: docs/conformance.md. Needs pytest and hypothesis:
``pip install 'sessiontree[testing]'``.
"""

from sessiontree.testing import _rewrite  # noqa: F401  # before the others
from sessiontree.testing.annotations import AnnotationTests
from sessiontree.testing.base import Conformance, Home, Opener
from sessiontree.testing.depth import DepthTests
from sessiontree.testing.durability import DurabilityTests
from sessiontree.testing.forks import ForkTests
from sessiontree.testing.heads import HeadTests
from sessiontree.testing.keeping import KeepingTests
from sessiontree.testing.machine import MachineTests, StoreMachine, run_machine
from sessiontree.testing.media import MediaTests
from sessiontree.testing.sharing import SharingTests
from sessiontree.testing.turns import TurnTests

__all__ = [
    "AnnotationTests",
    "Conformance",
    "DepthTests",
    "DurabilityTests",
    "ForkTests",
    "HeadTests",
    "Home",
    "KeepingTests",
    "MachineTests",
    "MediaTests",
    "Opener",
    "SharingTests",
    "StoreConformance",
    "StoreMachine",
    "TurnTests",
    "run_machine",
]


class StoreConformance(
    TurnTests,
    AnnotationTests,
    ForkTests,
    HeadTests,
    MediaTests,
    KeepingTests,
    DurabilityTests,
    SharingTests,
    DepthTests,
    MachineTests,
):
    """All of the suite. Override the fixture ``make_store``, and say by class attributes what the store can do."""
