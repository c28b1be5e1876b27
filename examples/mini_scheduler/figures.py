"""``/metrics``: what the store measures of itself, and what the engine has done, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mini_scheduler.engine import Engine
from sessiontree import SessionStore
from sessiontree.metrics import StoreMetrics


class Figures:
    def __init__(self, store: SessionStore, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._engine = engine
        self._metrics = StoreMetrics(store, self._registry)
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        usage = attrs.asdict(self._engine.usage())
        counters = usage.pop("counters")
        for name, value in usage.items():
            yield GaugeMetricFamily(f"mini_scheduler_{name}", f"{name.replace('_', ' ')}, now", value=value)
        for name, value in counters.items():
            yield CounterMetricFamily(f"mini_scheduler_{name}", f"{name.replace('_', ' ')} since the start", value=value)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def close(self) -> None:
        self._metrics.close()
