"""In and out of what people already have: conversations of other tools as sessions, and sessions as their files.

:func:`import_file` and :func:`export_file` take the name of a format (:func:`formats`) and say what it cannot hold. See
docs/interchange.md. Other packages add formats by the entry point group ``sessiontree.formats``.
"""

from sessiontree.interchange.appending import append_messages
from sessiontree.interchange.conversations import Conversation, Image, Message, Tree, Turn, text_of
from sessiontree.interchange.formats import LACKING, Format, format_named, formats
from sessiontree.interchange.loading import DEFAULT_SCHEME, ImportReport, import_file
from sessiontree.interchange.losses import Loss, Losses
from sessiontree.interchange.saving import ExportReport, export_file
from sessiontree.interchange.source import SourceFile
from sessiontree.interchange.templates import ChatTemplate
from sessiontree.interchange.words import created_at_of, message_of, title_of

__all__ = [
    "DEFAULT_SCHEME",
    "LACKING",
    "ChatTemplate",
    "Conversation",
    "ExportReport",
    "Format",
    "Image",
    "ImportReport",
    "Loss",
    "Losses",
    "Message",
    "SourceFile",
    "Tree",
    "Turn",
    "append_messages",
    "created_at_of",
    "export_file",
    "format_named",
    "formats",
    "import_file",
    "message_of",
    "text_of",
    "title_of",
]
