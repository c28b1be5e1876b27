"""Chromium for tests of the viewer: the system's own, driven by Playwright, which brings none here.

A page is asked for what it shows and did: every request that it made, every script error, every line of its console.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

PATIENCE = 60_000  # milliseconds that anything may take before something is wrong
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Tests run as root in containers, where Chromium has no sandbox of its own; /dev/shm may be small there.
OPTIONS = ("--no-sandbox", "--disable-dev-shm-usage")


@cache
def program() -> str | None:
    """Chromium's program; None where it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def lacking() -> str | None:
    """Why no test can use a browser here; None where it can."""
    if program() is None:
        return "Chromium is not installed: make chromium"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install '.[dev]'"
    return None


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of one's own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program(), args=list(OPTIONS), timeout=PATIENCE)
        try:
            yield found
        finally:
            found.close()


class Seen:
    """A page of the viewer, opened. ``requests``: the URLs of all that it asked for, the first its own; ``errors``: of scripts, and
    whatever its policy forbade; ``console``: what it said."""

    def __init__(self, page: Page, place: Path | str) -> None:
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.console: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.console.append(message.text))
        page.on("dialog", self._refuse)
        page.add_init_script(
            "window.violations = []; document.addEventListener('securitypolicyviolation',"
            " (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));"
        )
        page.goto(place.absolute().as_uri() if isinstance(place, Path) else place)
        self.wait("window.viewer?.openedAt !== undefined")

    def _refuse(self, dialog: Dialog) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def ask(self, script: str, given: Any = None) -> Any:
        """What a piece of JavaScript gives, of which a promise is waited for."""
        return self.page.evaluate(script, given)

    def wait(self, script: str, given: Any = None) -> None:
        """Until a piece of JavaScript gives something true; Playwright's own way is what the page's policy forbids."""
        stop = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(script, given):
            assert time.monotonic() < stop, f"never: {script}"
            self.page.wait_for_timeout(20)

    def choose(self, ordinal: int) -> str:
        """Choose a node: the text of its panel."""
        self.ask("(at) => viewer.choose(at)", ordinal)
        return self.page.inner_text("#panel")


@contextmanager
def opened(browser: Browser, place: Path | str, **options: Any) -> Iterator[Seen]:
    """A page in a context of its own."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 860}, "reduced_motion": "reduce"} | options)
    try:
        yield Seen(context.new_page(), place)
    finally:
        context.close()


if __name__ == "__main__":  # is there one?
    sys.exit(program() is None)
