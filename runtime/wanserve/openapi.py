"""The description of the API, whose request is made of the rows of ``wanrun``'s options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

import wanrun
from wanserve.catalog import Catalog
from wanserve.field_names import LORA, MEDIA, MERGED, NO_EFFECT, api_text, files, options_by_name
from wanserve.fields import MOST_SEEDS
from wanserve.route import ERROR, FORMATS, TEXT, Content, Route, RouteParameter, schema_of
from wanserve.shown import ShownVideo


def openapi(catalog: Catalog, routes: Iterable[Route]) -> bytes:
    """Returns the OpenAPI document of these routes, 3.1, as JSON."""
    document = {
        "openapi": "3.1.0",
        "info": {"title": "wanrun serve", "version": wanrun.__version__},
        "paths": _paths(routes),
        "components": {
            "schemas": {
                "CreateVideo": (create := create_schema(catalog)),
                "ChangeVideo": change_schema(create),
                **_video(),
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
        text = api_text(row)
        properties[row.name] = {**own, "description": text, "x-aliases": names}
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
    """Returns the schema of a change: any field of one video, where null takes one away, and the position."""
    position = {"type": "integer", "minimum": 1, "description": "Place among your waiting videos."}
    of_one = {name: field for name, field in create["properties"].items() if name != "seeds"}
    fields = {name: {"anyOf": [field, {"type": "null"}]} for name, field in of_one.items()}
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
        "live": {
            "type": "boolean",
            "default": False,
            "description": "The video plays while it is made, of a model whose `live` is true. Without "
            "num_frames or seconds it has no end but the server's limit.",
        },
        "seeds": {
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": MOST_SEEDS},
                {"type": "string"},
            ],
            "description": "Instead of seed, as a list or `1,2,3`: a video of its own for each of them.",
        },
        "width": pixels,
        "height": pixels,
        **dict.fromkeys(("format", "output_format"), suffix),
        **{
            name: {"description": f"Of a single LoRA its {what}, instead of lora."}
            for name, what in LORA.items()
        },
        **{name: {"description": "An image or a video: a file, or a data: URL."} for name in MEDIA},
        **{name: {"type": "object", "description": "Its entries count as fields."} for name in MERGED},
        **{name: {"description": "Changes nothing."} for name in NO_EFFECT},
    }


def _video() -> dict[str, Any]:
    """The schema of a video, and of what it holds, by name."""
    template = schema_of("{name}")["$ref"]
    _, schemas = msgspec.json.schema_components([ShownVideo], ref_template=template)
    return {"Video": {**schemas.pop(ShownVideo.__name__), "title": "Video"}, **schemas}


def _error() -> dict[str, Any]:
    maybe = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    texts = ("message", "expected", "found", "remedy", "type", "code")
    inner = {**{name: {"type": "string"} for name in texts}, "param": maybe}
    return {"type": "object", "properties": {"error": {"type": "object", "properties": inner}}}


def _paths(routes: Iterable[Route]) -> dict[str, dict[str, Any]]:
    """The routes by path and method."""
    paths = defaultdict[str, dict[str, Any]](dict)
    for route in routes:
        paths[route.path][route.method.lower()] = _operation(route)
    return dict(paths)


def _operation(route: Route) -> dict[str, Any]:
    """A route."""
    shown: dict[str, Any] = {"description": route.text}
    in_path = [_in_path(name) for name in route.path_parameters]
    if parameters := [*in_path, *map(_parameter, route.parameters)]:
        shown["parameters"] = parameters
    if route.body is not None:
        shown["requestBody"] = {"required": True, **_content(route.body)}
    done = "204" if route.answer is None else "200"
    shown["responses"] = {
        done: {"description": "Done.", **_content(route.answer)},
        "4XX": {"description": "One line.", **_content(ERROR)},
        "5XX": {"description": "One line.", **_content(route.failure)},
    }
    if not route.needs_key:
        shown["security"] = []
    return shown


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": TEXT}


def _parameter(one: RouteParameter) -> dict[str, Any]:
    return {"name": one.name, "in": one.place, "schema": one.schema, "description": one.text}


def _content(content: Content | None) -> dict[str, Any]:
    if content is None:
        return {}
    return {"content": {kind: {"schema": content.schema} for kind in content.kinds}}
