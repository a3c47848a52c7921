"""The codes of answers and failures that are the server's own; ``wanrun.codes`` has the others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from wanrun.codes import Code, ErrorCode

ServerCode = Literal[
    "already_ended",
    "build_failed",
    "closing",
    "idempotency_conflict",
    "invalid_api_key",
    "invalid_form",
    "invalid_json",
    "method_not_allowed",
    "model_not_found",
    "not_begun",
    "not_live",
    "not_ready",
    "not_waiting",
    "queue_full",
    "timeout",
    "too_deep",
    "too_many_fields",
    "too_many_files",
    "too_many_items",
    "too_many_requests",
    "too_many_uploads",
    "unavailable",
    "unsupported_media_type",
    "withheld",
    "worker_died",
    "wrong_host",
    "wrong_origin",
]

AnyCode = ErrorCode | ServerCode

SERVER_CODES: Mapping[ServerCode, Code] = MappingProxyType(
    {
        "already_ended": Code("The video has ended.", "make a new one"),
        "build_failed": Code("The shape could not be built.", "ask for one that is built, or see the log"),
        "closing": Code("The server is ending.", "send it again after Retry-After"),
        "idempotency_conflict": Code(
            "The Idempotency-Key was sent with another request.", "use a new key for a new request"
        ),
        "invalid_api_key": Code("The key is missing or not valid.", "send Authorization: Bearer KEY"),
        "invalid_form": Code("The form cannot be read.", "send multipart/form-data in UTF-8"),
        "invalid_json": Code("The body is not a JSON object.", "send a JSON object"),
        "method_not_allowed": Code("The address does not take the method.", "see openapi.json"),
        "model_not_found": Code("No model has this name.", "choose one of GET /v1/models"),
        "not_begun": Code("What the video needs is gone since it was accepted.", "ask for it again"),
        "not_live": Code("The video is not live.", "wait for it, and get its content"),
        "not_ready": Code("The video is not there yet.", "wait until its status is completed"),
        "not_waiting": Code("The video runs, and this can be changed only before.", "make a new one"),
        "queue_full": Code("As many jobs wait as may wait.", "send it again after Retry-After"),
        "timeout": Code("The request came too slowly.", "send it again"),
        "too_deep": Code("The request is nested too deep.", "send a flat one"),
        "too_many_fields": Code("The request has too many fields.", "send fewer"),
        "too_many_files": Code("The request has too many files.", "send fewer"),
        "too_many_items": Code("The request has too many items.", "send fewer"),
        "too_many_requests": Code("The key has as many open requests as it may.", "wait for one to end"),
        "too_many_uploads": Code("As many uploads are taken as can be.", "send it again after Retry-After"),
        "unavailable": Code("The server cannot take requests now.", "send it again after Retry-After"),
        "unsupported_media_type": Code("The content type is not understood.", "send JSON or a form"),
        "withheld": Code("The video waits for the server's next start.", "start the server again"),
        "worker_died": Code(
            "The process that made the video has ended.",
            "ask for it again; what was made of a live video is its content",
        ),
        "wrong_host": Code("The server is not called so.", "start it with --allow-host"),
        "wrong_origin": Code("Pages of this site may not call the server.", "start it with --cors"),
    }
)
