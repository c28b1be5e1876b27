"""Makes the export in this folder: python tests/golden/interchange/chatgpt/make.py

ChatGPT writes its exports on its servers, so no tool makes one here. What stands in them is as people who read theirs published it
until September 2026: the fields of conversations and messages, every content type that was met, the two ways in which pictures are
named, and the files beside them of exports since 2026 (shards, a manifest, pictures called ".dat", nodes without ``children``).
All that is said in it is made up.
"""

from __future__ import annotations

import base64
import json
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(64)) + b"\xff\xd9"

_numbers = count(1)


def uuid() -> str:
    return f"0a1b2c3d-0000-4000-8000-{next(_numbers):012x}"


def message(role: str, content: dict[str, Any], *, name: str | None = None, hidden: bool = False, **said: Any) -> dict[str, Any]:
    metadata = {"can_save": True, "timestamp_": "absolute", "message_type": "next"}
    if role == "assistant":
        metadata |= {"model_slug": "gpt-5-thinking", "default_model_slug": "gpt-5-thinking", "is_complete": True}
        metadata |= {"finish_details": {"type": "stop", "stop_tokens": [200002]}, "citations": [], "content_references": []}
    if hidden:
        metadata["is_visually_hidden_from_conversation"] = True
    return {
        "id": "",
        "author": {"role": role, "name": name, "metadata": {}},
        "create_time": 1762989084.391352 + next(_numbers),
        "update_time": None,
        "content": content,
        "status": "finished_successfully",
        "end_turn": None,
        "weight": 1.0,
        "metadata": metadata | said.pop("metadata", {}),
        "recipient": "all",
        "channel": None,
    } | said


def text(*parts: Any) -> dict[str, Any]:
    return {"content_type": "text" if all(isinstance(part, str) for part in parts) else "multimodal_text", "parts": list(parts)}


def picture(pointer: str, data: bytes, **metadata: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "dalle": None,
        "gizmo": None,
        "generation": None,
        "container_pixel_height": None,
        "container_pixel_width": None,
    }
    made |= {"emu_omit_glimpse_image": None, "emu_patches_override": None, "sanitized": True, "asset_pointer_link": None}
    return {
        "content_type": "image_asset_pointer",
        "asset_pointer": pointer,
        "size_bytes": len(data),
        "width": 1,
        "height": 1,
        "fovea": None,
        "metadata": made | metadata,
    }


def audio(pointer: str) -> dict[str, Any]:
    return {
        "content_type": "audio_asset_pointer",
        "expiry_datetime": None,
        "asset_pointer": pointer,
        "size_bytes": 90318,
        "format": "wav",
        "tool_audio_direction": None,
        "metadata": {"start_timestamp": None, "end_timestamp": None, "interruptions": None, "start": 0.0, "end": 1.88},
    }


class Mapping:
    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}

    def add(self, parent: str | None, said: dict[str, Any] | None, node_id: str = "") -> str:
        node_id = node_id or uuid()
        if said is not None:
            said["id"] = node_id
        self.nodes[node_id] = {"id": node_id, "message": said, "parent": parent, "children": []}
        if parent is not None:
            self.nodes[parent]["children"].append(node_id)
        return node_id


def conversation(title: str | None, mapping: Mapping, current: str, **said: Any) -> dict[str, Any]:
    name = uuid()
    return {
        "title": title,
        "create_time": 1762989084.391352,
        "update_time": 1762989171.03061,
        "mapping": mapping.nodes,
        "moderation_results": [],
        "current_node": current,
        "plugin_ids": None,
        "conversation_id": name,
        "conversation_template_id": None,
        "gizmo_id": None,
        "gizmo_type": None,
        "is_archived": False,
        "is_starred": None,
        "safe_urls": ["https://example.org/a"],
        "blocked_urls": [],
        "default_model_slug": "gpt-5-thinking",
        "conversation_origin": None,
        "is_read_only": None,
        "voice": None,
        "async_status": None,
        "disabled_tool_ids": [],
        "is_do_not_remember": False,
        "memory_scope": "global_enabled",
        "context_scopes": None,
        "sugar_item_id": None,
        "sugar_item_visible": False,
        "pinned_time": None,
        "is_study_mode": False,
        "owner": None,
        "id": name,
    } | said


def tools() -> dict[str, Any]:
    """One with every content type, hidden and system messages in between, and answers that were asked for again."""
    made = Mapping()
    root = made.add(None, None, "client-created-root")
    at = made.add(root, message("system", text(""), hidden=True, end_turn=True, weight=0.0, create_time=None))
    about = {"content_type": "user_editable_context", "user_profile": "I sail.", "user_instructions": "Be brief."}
    told = {"user_context_message_data": {"about_user_message": "I sail.", "about_model_message": "Be brief."}}
    at = made.add(at, message("user", about, hidden=True, metadata=told, create_time=None))
    question = made.add(at, message("user", text("How far is it?"), metadata={"request_id": uuid(), "selected_sources": []}))
    first = made.add(question, message("assistant", text("Far."), end_turn=True, channel="final"))
    made.add(first, message("user", text("Thanks – merci – 谢谢 🚢")))
    at = made.add(question, message("system", text("The user is at sea."), hidden=True))
    memory = {"content_type": "model_editable_context", "model_set_context": "", "repository": None, "repo_summary": None}
    at = made.add(at, message("assistant", memory | {"structured_context": None}))
    thoughts = [{"summary": "Measuring", "content": "A chart would help.", "chunks": ["A chart ", "would help."], "finished": True}]
    thoughts.append({"summary": "Searching", "content": "Look it up.", "chunks": [], "finished": True})
    at = made.add(at, message("assistant", {"content_type": "thoughts", "thoughts": thoughts, "source_analysis_msg_id": uuid()}))
    query = {
        "content_type": "code",
        "language": "unknown",
        "response_format_name": None,
        "text": '{"search_query":[{"q":"miles"}]}',
    }
    at = made.add(at, message("assistant", query, recipient="web.run", end_turn=False))
    shown = {
        "content_type": "tether_browsing_display",
        "result": "Miles: 1,852 m",
        "summary": "",
        "assets": None,
        "tether_id": None,
    }
    at = made.add(at, message("tool", shown, name="web.run"))
    quote = {
        "content_type": "tether_quote",
        "url": "https://example.org/a",
        "domain": "example.org",
        "text": "1,852",
        "title": "Mile",
    }
    at = made.add(at, message("tool", quote | {"tether_id": None}, name="web.run", hidden=True))
    program = {"content_type": "code", "language": "unknown", "response_format_name": None, "text": "print(1852 * 3)\n"}
    at = made.add(at, message("assistant", program, recipient="python", end_turn=False))
    result = {"content_type": "execution_output", "text": "5556\n"}
    aggregate: dict[str, Any] = {
        "aggregate_result": {"status": "success", "run_id": uuid(), "messages": [], "code": "", "final_expression_output": None}
    }
    at = made.add(at, message("tool", result, name="python", metadata=aggregate))
    made.add(at, message("tool", {"content_type": "system_error", "name": "tool_error", "text": "It is gone."}, name="file_search"))
    recap = {"content_type": "reasoning_recap", "content": "Thought for 54s"}
    at = made.add(at, message("assistant", recap, end_turn=False, metadata={"finished_duration_sec": 54}))
    later = {"content_type": "of_next_year", "lines": [["a", 1], {"b": None}], "text": "Anyone there?"}
    at = made.add(at, message("assistant", later))
    at = made.add(at, message("assistant", text("5,556 m."), end_turn=True, channel="final"))
    return conversation("Miles", made, at)


def pictures() -> dict[str, Any]:
    """One with pictures, of which one is not there, and with what was said aloud."""
    made = Mapping()
    root = made.add(None, None)
    shown = [picture("file-service://file-Ab12Cd34Ef56Gh78Ij90Kl12", PNG), picture("sediment://file_0000000011aa", JPEG)]
    attached = {
        "attachments": [{"id": "file-Ab12Cd34Ef56Gh78Ij90Kl12", "name": "sea.png", "size": len(PNG), "mime_type": "image/png"}]
    }
    asked = message("user", text(*shown, "What are these?"), metadata=attached)
    at = made.add(root, asked)
    prompt = {
        "content_type": "code",
        "language": "json",
        "response_format_name": None,
        "text": '{"prompt":"a ship","size":"1024x1024"}',
    }
    at = made.add(at, message("assistant", prompt, recipient="dalle.text2im"))
    dalle = {
        "gen_id": "Gx1",
        "prompt": "a ship",
        "seed": 7,
        "parent_gen_id": None,
        "edit_op": None,
        "serialization_title": "DALL-E",
    }
    made_picture = picture("file-service://file-Zz98Yy76Xx54Ww32Vv10Uu98", PNG, dalle=dalle)
    at = made.add(at, message("tool", text(made_picture, "One picture was made."), name="dalle.text2im"))
    said = {"content_type": "audio_transcription", "text": "Lovely.", "direction": "in", "decoding_id": None}
    spoken: dict[str, Any] = {
        "content_type": "real_time_user_audio_video_asset_pointer",
        "expiry_datetime": None,
        "frames_asset_pointers": [],
        "video_container_asset_pointer": None,
        "audio_asset_pointer": audio("sediment://file_0000000022bb"),
        "audio_start_timestamp": 19.34,
    }
    at = made.add(at, message("user", text(said, spoken)))
    answered = text({**said, "text": "Is it not?", "direction": "out"}, audio("sediment://file_0000000033cc"))
    at = made.add(at, message("assistant", answered))
    gone = picture("sediment://file_0000000044dd", JPEG)
    at = made.add(at, message("user", text("And this?", gone)))
    return conversation(None, made, at, is_archived=True)


def without_children(value: dict[str, Any]) -> dict[str, Any]:
    nodes = {
        node_id: {name: said for name, said in node.items() if name != "children"} for node_id, node in value["mapping"].items()
    }
    return value | {"mapping": nodes}


def main() -> None:
    names = ("conversations-000.json", "conversations-001.json")
    files: dict[str, Any] = {
        names[0]: [tools()],
        names[1]: [without_children(pictures())],
        "export_manifest.json": {
            "version": 1,
            "export_files": [{"path": name} for name in names],
            "logical_files": {"conversations.json": {"files": list(names), "sharded": True}},
        },
        "conversation_asset_file_names.json": {"file_0000000011aa.dat": "sun.jpg"},
        "user.json": {"id": "user-1", "email": "someone@example.org"},
    }
    for name, value in files.items():
        (HERE / name).write_text(json.dumps(value, indent=1) + "\n")
    (HERE / "file-Ab12Cd34Ef56Gh78Ij90Kl12-sea.png").write_bytes(PNG)
    (HERE / "file_0000000011aa.dat").write_bytes(JPEG)
    (HERE / "dalle-generations").mkdir(exist_ok=True)
    (HERE / "dalle-generations" / "file-Zz98Yy76Xx54Ww32Vv10Uu98-1f0b.webp").write_bytes(PNG)


if __name__ == "__main__":
    main()
