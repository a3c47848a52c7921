"""Signatures of artifacts, in the format of OpenSSF Model Signing (OMS 1.0), made with local keys.

Only ``manifest.json`` is signed. It has the digest of every other file, so one small signature covers all;
whoever requires it has every file compared with its digest too (``wanhub.check_signed``, and ``Copy`` as it
fetches). Source: https://github.com/ossf/model-signing-spec, and the library model-signing.
"""

from __future__ import annotations

__all__ = ["KEY_PASSWORD", "SIGNATURE", "is_signed", "signer"]

import base64
import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import wanrun
from wanrun.errors import ArtifactError, UsageError, unwritable

SIGNATURE: Final = "model.sig"
MANIFEST: Final = "manifest.json"
MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, MAX_KEY_BYTES = 2**26, 2**20, 2**16

KEY_PASSWORD: Final = "WANBUILD_KEY_PASSWORD"
"""The environment variable with the password of an encrypted key."""

_PASSWORDS: Final = (
    ("Password was not given", f"set {KEY_PASSWORD}"),
    ("Password was given", f"unset {KEY_PASSWORD}"),
    ("Incorrect password", f"set {KEY_PASSWORD} to the password of this key"),
)
"""The library's texts about passwords, and the remedy of each."""

Signer = Callable[[Path], None]
"""Signs the manifest of an artifact's folder, and puts the signature next to it."""


def signer(private_key: Path, password: str | None = None) -> Signer:
    """Reads a key, and returns a function that signs with it.

    Args:
        private_key: an elliptic curve key, PEM.
        password: of an encrypted key.

    Returns:
        A function of the artifact's folder. It raises ArtifactError if there is no artifact, and UsageError
        if the signature cannot be written.

    Raises:
        UsageError: if ``private_key`` is not a key.
    """
    config = _library().signing.Config()
    secret = None if password is None else password.encode()
    _use(private_key, "private", lambda key: config.use_elliptic_key_signer(private_key=key, password=secret))

    def sign(folder: Path) -> None:
        try:
            with _manifest_alone(folder) as (alone, signature):
                config.sign(alone, signature)
                data = signature.read_bytes()
            wanrun.replace_file(folder / SIGNATURE, data)
        except OSError as error:
            raise unwritable(f"the signature {folder / SIGNATURE}", error) from error

    return sign


def check_signature(folder: Path, public_key: Path) -> bytes:
    """Checks that an artifact's manifest was signed with a key, and returns the bytes that it checked.

    It reads nothing else of the artifact. Raises ArtifactError if there is no signature, or it is of another
    manifest or by another key, and UsageError if ``public_key`` is not a key.
    """
    config = _library().verifying.Config()
    _use(public_key, "public", lambda key: config.use_elliptic_key_verifier(public_key=key))
    with _manifest_alone(folder) as (alone, signature):
        try:
            signature.write_bytes(wanrun.read_bounded(folder / SIGNATURE, MAX_SIGNATURE_BYTES))
        except OSError as error:
            raise ArtifactError(
                "untrusted",
                f"{folder} is not signed",
                expected=SIGNATURE,
                found=error.strerror,
                remedy="have its maker run wanbuild sign, or leave --require-signature out",
            ) from None
        manifest = (alone / MANIFEST).read_bytes()
        try:
            config.verify(alone, signature)  # all that was signed, and nothing else
        except Exception as error:  # the library's own, those of JSON, protobuf and cryptography
            other = "Signature mismatch" in str(error)
            said = " ".join(str(error).split()).replace(str(alone.parent), str(folder))
            raise ArtifactError(
                "untrusted",
                f"the signature of {folder} does not fit",
                expected=f"one of its {MANIFEST} with the key {public_key}",
                found="one of another manifest" if other else said[:200],
                remedy="do not run it; ask its maker",
            ) from None
        return manifest


def is_signed(folder: Path) -> bool:
    """Returns whether there is a signature of the present manifest, by any key.

    A build changes the manifest, and leaves the signature of the one before it.
    """
    try:
        envelope = json.loads(wanrun.read_bounded(folder / SIGNATURE, MAX_SIGNATURE_BYTES))["dsseEnvelope"]
        signed = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["resources"]
        manifest = wanrun.read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
        digest = hashlib.sha256(manifest).hexdigest()
        return [(one["name"], one["digest"]) for one in signed] == [(MANIFEST, digest)]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


@contextlib.contextmanager
def _manifest_alone(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yields a folder with only the manifest, always of the same name, and a path for a signature."""
    with tempfile.TemporaryDirectory(prefix="wan-signature-") as temporary:
        alone = Path(temporary) / "artifact"
        alone.mkdir()
        try:
            manifest = wanrun.read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
            (alone / MANIFEST).write_bytes(manifest)
        except OSError as error:
            raise ArtifactError("wrong_kind", f"{folder} is not an artifact", found=error.strerror) from None
        yield alone, Path(temporary) / SIGNATURE


def _library() -> Any:
    """Returns the package model-signing. Raises UsageError if it is not installed."""
    try:
        import model_signing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise UsageError(
            "not_installed", f"signatures need {error.name}", remedy="pip install '.[sign]' in the checkout"
        ) from None
    return model_signing


def _use(key: Path, kind: str, use: Callable[[Path], object]) -> None:
    """Lets the library read a key by the descriptor of a small regular file: it would open any path."""
    try:
        with wanrun.open_regular(key, MAX_KEY_BYTES) as file:
            use(Path(f"/dev/fd/{file.fileno()}"))
    except OSError as error:
        remedy = f"name the file of a {kind} key"
        raise UsageError(
            "unreadable", f"the {kind} key {key} cannot be read", found=error.strerror, remedy=remedy
        ) from None
    except Exception as error:  # the library's own, and those of cryptography
        found = str(error)[:200]
        make = (
            "make one: openssl ecparam -genkey -name prime256v1 -noout -out key.pem;"
            " openssl ec -in key.pem -pubout -out key.pub"
        )
        raise UsageError(
            "unsupported",
            f"{key} cannot be used as a {kind} key",
            expected="an elliptic curve key (P-256, P-384 or P-521), PEM",
            found="a key of another kind" if isinstance(error, AttributeError) else found,
            remedy=next((remedy for said, remedy in _PASSWORDS if said in found), make),
        ) from None
