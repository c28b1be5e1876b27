"""``python -m mini_scheduler``: serve a tiny model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
import uvicorn

from mini_scheduler.limits import Limits
from mini_scheduler.model import MODELS
from mini_scheduler.server import make_app
from mini_scheduler.service import Config
from mini_scheduler.tenants import Tenants, read_keys


class Server(uvicorn.Server):
    """Asked to stop, it takes no more requests; ``end`` waits for those that run, and aborts them when they have had their time."""

    def __init__(self, config: uvicorn.Config, end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(super().shutdown(sockets), self._end())


def main(argv: list[str] | None = None) -> None:
    limits = Limits()
    parser = argparse.ArgumentParser(prog="mini_scheduler", description="Serve a tiny model over HTTP, from a session store.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--store", metavar="PATH|URL", help="keep sessions there, or in PostgreSQL; by default in .sessions-MODEL")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--seed", type=int, default=3, help="of the model's weights")
    parser.add_argument("--api-key", action="append", default=[], metavar="NAME=KEY", help="a tenant and its key; repeatable")
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="the same, one a line")
    parser.add_argument("--admin-key", metavar="KEY", help="for /metrics, where there are tenants' keys")
    parser.add_argument("--num-pages", type=int, default=256, help="of KV")
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--max-batch-tokens", type=int, default=64)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--memory-bytes", type=int, default=256 * 2**20, help="what the store holds of its sessions")
    parser.add_argument("--max-body-bytes", type=int, default=limits.body_bytes)
    parser.add_argument("--max-image-bytes", type=int, default=limits.image_bytes)
    parser.add_argument("--max-image-pixels", type=int, default=limits.image_pixels)
    parser.add_argument("--timeout", type=float, default=limits.timeout, help="seconds for a request")
    parser.add_argument("--grace", type=float, default=limits.grace, help="seconds for running requests at the end")
    options = parser.parse_args(argv)
    try:
        tenants = Tenants(read_keys(options.api_key, options.api_keys), options.admin_key)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    config = Config(
        store=options.store or Path(f".sessions-{options.model}"),
        model=options.model,
        seed=options.seed,
        tenants=tenants,
        limits=Limits(options.max_body_bytes, options.max_image_bytes, options.max_image_pixels, options.timeout, options.grace),
        memory_bytes=options.memory_bytes,
        engine={
            "num_pages": options.num_pages,
            "page_size": options.page_size,
            "max_batch_tokens": options.max_batch_tokens,
            "max_running": options.max_running,
            "max_waiting": options.max_waiting,
        },
    )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)  # more would only wait for each other on so small a model
    app = make_app(config)
    Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="info",  # which says where it is served: --port 0 is any that is free
            access_log=False,
            timeout_graceful_shutdown=round(options.grace) + 10,  # in vain: by then nothing runs
        ),
        lambda: app.state.service.sessions.end(options.grace),
    ).run()


if __name__ == "__main__":
    main()
