"""Beside its requests a server tells the store the time, closes idle sessions, and gives back what nobody can reach."""

from __future__ import annotations

import asyncio
import logging
import time

from mini_scheduler.sessions import Sessions
from sessiontree import SessionTreeError
from sessiontree.aio import AsyncStore

_logger = logging.getLogger("mini_scheduler")
RECENT = 10_000  # nodes of a session that gc leaves though no head leads to them: what stateless clients come back to


async def keep_up(store: AsyncStore, sessions: Sessions, *, every: float = 1.0, collect_every: float = 600.0) -> None:
    """Until it is cancelled. Seconds."""
    collected, said = time.monotonic(), ""
    while True:
        await asyncio.sleep(every)
        try:
            await store.tick(time.monotonic())
            await sessions.close_idle()
            if time.monotonic() - collected >= collect_every:
                await store.gc(recent=RECENT)
                collected, said = time.monotonic(), ""
        except Exception as error:  # it goes on; what is the store's, health says too
            if str(error) != said:
                _logger.error("upkeep: %s", error, exc_info=not isinstance(error, SessionTreeError))
            said = str(error)
