"""The command ``sessiontree``: looks at stores and bundles, and keeps them healthy. docs/cli.md says what each command does.

It needs the extra ``cli``. Nothing of the library imports it. ``app`` puts the commands together; there is one module for each
group of them (``reading``, ``drawing``, ``running``, ``health``, ``moving``), and what they share: ``source`` opens stores and
finds what a name means, ``shape`` knows a tree without reading its nodes, ``facts`` describes nodes, ``words`` turns ids into
text, ``output`` writes text that is safe for terminals, or JSON, and ends a command with an exit code.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        from sessiontree.cli.app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"sessiontree: the command line needs {error.name}: pip install 'sessiontree[cli]'", file=sys.stderr)
        sys.exit(8)
    app(prog_name="sessiontree")
