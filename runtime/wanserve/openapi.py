"""The description of the API, whose request is made of the rows of ``wanrun``'s options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

import wanrun
from wanserve.catalog import Catalog
from wanserve.fields import FORMATS
from wanserve.names import MEDIA, MERGED, NO_EFFECT, files, options_by_name, without_flags


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


_ID = _path("id")


def openapi(catalog: Catalog) -> bytes:
    """Returns the OpenAPI document, 3.1, as JSON."""
    document = {
        "openapi": "3.1.0",
        "info": {"title": "wanrun serve", "version": wanrun.__version__},
        "paths": _paths(),
        "components": {
            "schemas": {
                "CreateVideo": (create := create_schema(catalog)),
                "ChangeVideo": change_schema(create),
                "Video": _video(),
                "Error": _error(),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
    return msgspec.json.encode(document)


def create_schema(catalog: Catalog) -> dict[str, Any]:
    """Returns the schema of a request: the options that a model has, and what stands for options."""
    there = {name for model in catalog.models.values() for name in model.options}
    rows, properties = {row.key: row for row in wanrun.options()}, dict[str, Any]()
    for key, item in wanrun.schema()["properties"].items():
        row = rows[key]
        if row.name not in there:
            continue
        names = [other for other, name in options_by_name().items() if name == row.name and other != row.name]
        own = {name: value for name, value in item.items() if name != "default" or value != []}
        if row.name in files():
            file = {"type": "string", "format": "binary"}
            own = {"anyOf": [file, {"type": "array", "items": file}]} if row.many else file
        models = f" ({row.models})" if row.models else ""
        text = f"{row.help.rstrip('.')}{models}."
        if row.default:
            text += f" Default: {row.default}."
        properties[row.name] = {**own, "description": without_flags(text), "x-aliases": names}
    sizes = {shape["size"] for model in catalog.models.values() for shape in model.shapes()}
    properties["size"]["examples"] = sorted(sizes)
    seed = properties["seed"]
    properties["seed"] = {
        "anyOf": [{"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, {"const": "random"}],
        **{name: seed[name] for name in ("description", "x-aliases", "default") if name in seed},
    }
    return {
        "type": "object",
        "properties": {**properties, **_own(catalog)},
        "required": ["prompt"],
        "additionalProperties": False,
    }


def change_schema(create: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a change: any field, where null takes one away, and the position."""
    position = {"type": "integer", "minimum": 1, "description": "Place among your waiting videos."}
    fields = {name: {"anyOf": [field, {"type": "null"}]} for name, field in create["properties"].items()}
    return {"type": "object", "properties": {**fields, "position": position}, "additionalProperties": False}


def _own(catalog: Catalog) -> Mapping[str, Any]:
    """The fields that stand for options, or change nothing."""
    suffix = {"enum": list(FORMATS), "default": "mp4", "description": "Format of the video."}
    pixels = {"type": "integer", "description": "With the other one, instead of size. Only built sizes."}
    return {
        "model": {"enum": list(catalog.models), "description": "The model; may be left out if there is one."},
        "seconds": {
            "anyOf": [{"type": "number"}, {"type": "string"}],
            "description": "Length, instead of num_frames. Only built lengths.",
        },
        "width": pixels,
        "height": pixels,
        **dict.fromkeys(("format", "output_format"), suffix),
        **{name: {"description": "An image or a video: a file, or a data: URL."} for name in MEDIA},
        **{name: {"type": "object", "description": "Its entries count as fields."} for name in MERGED},
        **{name: {"description": "Changes nothing."} for name in NO_EFFECT},
    }


def _video() -> dict[str, Any]:
    text, number, whole = {"type": "string"}, {"type": "number"}, {"type": "integer"}
    null = {"type": "null"}

    def maybe(kind: Mapping[str, Any]) -> dict[str, Any]:
        return {"anyOf": [kind, null]}

    return {
        "type": "object",
        "properties": {
            "id": text,
            "object": {"const": "video"},
            "model": text,
            "status": {"enum": ["queued", "in_progress", "completed", "failed", "cancelled"]},
            "phase": maybe(
                {"enum": ["queued", "loading", "media", "text", "steps", "decode", "encode", "cancelling"]}
            ),
            "position": maybe(whole),
            "progress": {"type": "integer", "minimum": 0, "maximum": 100},
            "step": maybe(whole),
            "steps": whole,
            "remaining_seconds": maybe(number),
            "created_at": whole,
            "started_at": maybe(whole),
            "completed_at": maybe(whole),
            "expires_at": maybe(whole),
            "prompt": text,
            "size": text,
            "seconds": text,
            "num_frames": whole,
            "fps": number,
            "seed": whole,
            "num_videos": whole,
            "format": {"enum": list(FORMATS)},
            "attempts": {"type": "integer", "description": "How often it was begun."},
            "ended_at": maybe(whole),
            "inference_time_s": maybe(number),
            "remixed_from_video_id": null,
            "options": {"type": "object", "description": "What was given, to send again."},
            "resolved": maybe({"type": "object", "description": "Every option, as the video's metadata."}),
            "media": {"type": "array"},
            "error": maybe({"type": "object", "properties": {"code": text, "message": text}}),
            "warnings": {"type": "array", "items": text},
            "stage_durations": {"type": "object", "additionalProperties": number},
        },
    }


def _error() -> dict[str, Any]:
    maybe = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    inner = {"message": {"type": "string"}, "type": {"type": "string"}, "param": maybe, "code": maybe}
    return {"type": "object", "properties": {"error": {"type": "object", "properties": inner}}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answers(kind: Mapping[str, Any], media: str = "application/json") -> dict[str, Any]:
    error = {"description": "One line.", "content": {"application/json": {"schema": _reference("Error")}}}
    done = {"description": "Done.", "content": {media: {"schema": kind}}}
    return {"200": done, "4XX": error, "5XX": error}


def _query(name: str, kind: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": kind, "description": text}


def _paths() -> dict[str, Any]:
    """The routes."""
    video, text = _reference("Video"), {"type": "string"}
    kinds = ("application/json", "multipart/form-data")
    body, changed = (
        {"required": True, "content": {kind: {"schema": _reference(name)} for kind in kinds}}
        for name in ("CreateVideo", "ChangeVideo")
    )
    key = {"name": "Idempotency-Key", "in": "header", "schema": text}
    listed = {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": video},
            "first_id": {"anyOf": [text, {"type": "null"}]},
            "last_id": {"anyOf": [text, {"type": "null"}]},
            "has_more": {"type": "boolean"},
        },
    }
    query = [
        _query(
            "limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Videos of a page."
        ),
        _query("after", text, "The last id of the page before."),
        _query("order", {"enum": ["asc", "desc"], "default": "desc"}, "By the time of acceptance."),
        _query("status", text, "States with commas between them."),
        _query("q", text, "Words of the prompt."),
    ]
    content = [
        _ID,
        _query("variant", {"enum": ["video", "thumbnail", "last_frame"]}, "Which file."),
        _query("index", {"type": "integer"}, "Which of several videos."),
    ]
    one, binary = {"parameters": [_ID], "responses": _answers(video)}, {"type": "string", "format": "binary"}
    events = _answers(text, "text/event-stream")
    return {
        "/v1/videos": {
            "post": {"parameters": [key], "requestBody": body, "responses": _answers(video)},
            "get": {"parameters": query, "responses": _answers(listed)},
        },
        "/v1/videos/sync": {
            "post": {"parameters": [key], "requestBody": body, "responses": _answers(binary, "video/mp4")}
        },
        "/v1/videos/generations": {
            "post": {"parameters": [key], "requestBody": body, "responses": _answers(binary, "video/mp4")}
        },
        "/v1/videos/{id}": {
            "get": one,
            "patch": {**one, "requestBody": changed},
            "delete": {"parameters": [_ID], "responses": _answers({"type": "object"})},
        },
        "/v1/videos/{id}/cancel": {"post": one},
        "/v1/videos/{id}/content": {
            "get": {"parameters": content, "responses": _answers(binary, "video/mp4")}
        },
        "/v1/videos/{id}/events": {"get": {"parameters": [_ID], "responses": events}},
        "/v1/events": {
            "get": {
                "description": "video: a job that has changed. queue: the places of all your waiting jobs, "
                "when they have moved. deleted: the id of one that is forgotten.",
                "responses": events,
            }
        },
        "/v1/videos/{id}/media/{option}/{index}": {
            "get": {
                "parameters": [_ID, _path("option"), _path("index")],
                "responses": _answers(binary, "application/octet-stream"),
            }
        },
        "/v1/models": {"get": {"responses": _answers({"type": "object"})}},
        "/v1/models/{name}": {
            "get": {"parameters": [_path("name")], "responses": _answers({"type": "object"})}
        },
    }
