"""The commands, put together."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from sessiontree import __version__
from sessiontree.cli import drawing, health, moving, reading, running, viewing
from sessiontree.cli.output import command, without_passwords, write_json
from sessiontree.cli.source import say_of_shared

_EXIT_CODES: Final = (
    "Exit codes: 0 fine; 1 something was found: a difference, damage, what cannot be run again; 2 asked wrongly, or nothing of "
    "that name; 3 no store there; 4 another process writes to it; 5 damage is in the way; 6 made by a newer version, or something "
    "else; 7 the disk refused; 8 a package is missing."
)

_UsageError: Any = typer.BadParameter.__base__  # what options and arguments that are none raise


class _Commands(TyperGroup):
    """Commands of which one that is asked wrongly says so in JSON too, where JSON is asked for."""

    def invoke(self, ctx: Any) -> Any:
        wants_json = "--json" in (*ctx._protected_args, *ctx.args)
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = without_passwords(error.message)
            if getattr(error, "option_name", None) in ("--tenant", "--blobs"):
                error.message += f"; it stands before the command, as in sessiontree {error.option_name} ... ls"
            if wants_json:
                write_json({"error": {"type": "Usage", "message": error.format_message()}})
            raise


app: Final = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sessiontree {__version__}")
        raise typer.Exit()


@app.callback()
def sessiontree(
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a store at a URL: see that tenant's sessions alone.", envvar="SESSIONTREE_TENANT"),
    ] = None,
    blobs: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Of a store at a URL: where features of media lie, database, s3://BUCKET/PREFIX or none.",
            envvar="SESSIONTREE_BLOBS",
        ),
    ] = "database",
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Look at stores of sessions and at bundles, and keep them healthy.

    STORE is a directory that a SessionStore was opened in, a postgresql:// URL, or, where nothing is changed, a bundle's file. A
    place in it is SESSION/NODE, SESSION or NODE: sessions by id, nodes by head or id, ids also by their beginning. Commands that
    only look may be used while another process writes to the store.
    """
    say_of_shared(tenant, blobs)


for _name, _run in (
    ("ls", reading.ls),
    ("tree", drawing.tree),
    ("show", reading.show),
    ("log", reading.log),
    ("diff", reading.diff),
    ("replay", running.replay),
    ("view", viewing.view),
    ("serve", viewing.serve),
    ("stats", health.stats),
    ("fsck", health.fsck),
    ("export", moving.export),
    ("import", moving.import_),
    ("copy", moving.copy),
    ("fork", moving.fork),
    ("pin", health.pin),
    ("unpin", health.unpin),
    ("drop", health.drop),
    ("gc", health.gc),
):
    app.command(_name)(command(_run))
