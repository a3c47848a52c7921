"""The codes of errors: what a program that calls this one can act on, where a person reads the sentence."""

from __future__ import annotations

__all__ = ["CODES", "Code", "ErrorCode"]

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ErrorCode = Literal[
    "busy",
    "cancelled",
    "changed",
    "closed",
    "conflict",
    "damaged",
    "exists",
    "failed",
    "internal_error",
    "invalid_value",
    "mismatch",
    "missing_file",
    "missing_parameter",
    "no_effect",
    "no_space",
    "not_built",
    "not_finite",
    "not_found",
    "not_installed",
    "other_release",
    "other_results",
    "out_of_memory",
    "out_of_range",
    "process_lost",
    "too_large",
    "unknown_name",
    "unknown_parameter",
    "unreachable",
    "unreadable",
    "unsupported",
    "untrusted",
    "unwritable",
    "wrong_kind",
    "wrong_machine",
    "wrong_type",
]


@dataclass(frozen=True)
class Code:
    """The meaning of a code.

    Attributes:
        when: what has happened, a clause without a subject's name.
        remedy: what helps, as far as that can be said for all errors of the code.
    """

    when: str
    remedy: str


CODES: Mapping[ErrorCode, Code] = MappingProxyType(
    {
        "busy": Code("Another process or thread uses it now.", "wait until that has ended"),
        "cancelled": Code("The caller has cancelled the call.", "nothing"),
        "changed": Code(
            "Something was changed after it was read, checked or made.", "load, read or make it again"
        ),
        "closed": Code("It was closed, or JAX runs in a state that cannot be changed.", "load it again"),
        "conflict": Code("Two values exclude each other, or one is given twice.", "leave one of them out"),
        "damaged": Code(
            "A file is not what was written: cut off, changed, or without its digest.", "copy it again"
        ),
        "exists": Code(
            "An output is there already, or would replace what is read.",
            "choose another name, or --overwrite or --force where the message names it",
        ),
        "failed": Code("The work failed for a reason without a code.", "do what the message says"),
        "internal_error": Code(
            "A fault of this program.", "run it again with --debug, and report the traceback"
        ),
        "invalid_value": Code("A value cannot be used.", "give one of those that are expected"),
        "mismatch": Code(
            "Two parts do not fit each other, such as weights and their config.",
            "give parts that belong together",
        ),
        "missing_file": Code(
            "A file or a folder is not there, such as that of an artifact.", "look at the path"
        ),
        "missing_parameter": Code("A value that is needed was not given.", "give it"),
        "no_effect": Code("A value would change nothing.", "leave it out, or give what it needs"),
        "no_space": Code(
            "The disk or the quota is full, or a file reaches the largest size.",
            "free some space, or raise the limit",
        ),
        "not_built": Code(
            "No profile, target or option of the artifact fits the request.",
            "run the command that the message names: it adds one",
        ),
        "not_finite": Code(
            "Latents, weights or embeddings have values that are not finite.",
            "look at the weights, and at guidance and steps",
        ),
        "not_found": Code(
            "A remote address is not there, or may not be read.", "check the address, or log in"
        ),
        "not_installed": Code("A package or a program is missing.", "install it as the message says"),
        "other_release": Code(
            "Another release has written it.", "use that release, or make it again with this one"
        ),
        "other_results": Code(
            "Results differ from the recorded ones, the reference, or the plain form of a program.",
            "see the figures; build it again, or compile on the chip",
        ),
        "out_of_memory": Code(
            "The device or the process has too little memory.", "use --memory low or a smaller profile"
        ),
        "out_of_range": Code("A value is too small, too large, too long or too many.", "stay in the range"),
        "process_lost": Code(
            "Another process of a run of several has failed, is gone, or never came.",
            "see what that process says",
        ),
        "too_large": Code("An image, a file or a program is larger than it may be.", "give a smaller one"),
        "unknown_name": Code("No command, profile, target, model or chip has this name.", "choose another"),
        "unknown_parameter": Code("No option or field has this name.", "choose another"),
        "unreachable": Code("An address, the hub or an object store does not answer.", "try again later"),
        "unreadable": Code("A file cannot be opened, decoded or understood.", "give a readable one"),
        "unsupported": Code("This model, artifact, target or machine cannot do it.", "leave it out"),
        "untrusted": Code(
            "A signature is missing or does not fit, or a file is of a kind that is never loaded.",
            "take the file from its author",
        ),
        "unwritable": Code("A file or a folder cannot be written.", "choose another place"),
        "wrong_kind": Code(
            "A file or a folder is of another kind, such as a checkpoint where an artifact is expected.",
            "look at the path",
        ),
        "wrong_machine": Code(
            "It was built for another machine, or this one lacks the device.", "compile it for this one"
        ),
        "wrong_type": Code("A value has the wrong type.", "give one of the expected type"),
    }
)
