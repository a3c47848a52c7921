"""Signatures of artifacts, in the format of OpenSSF Model Signing (OMS 1.0), made with keys that lie here.

What is signed is ``manifest.json``. It has the digest of every other file, so one small signature covers all;
whoever requires it has every file compared with its digest too (``wanrun.intact``, and ``PartialCopy`` as it
fetches). Source: https://github.com/ossf/model-signing-spec, and the library model-signing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from wanhub.atomic import write_atomic
from wanrun.errors import ArtifactError, UsageError, unwritable

SIGNATURE: Final = "model.sig"
MANIFEST: Final = "manifest.json"


def sign(folder: Path, private_key: Path, password: str | None = None) -> None:
    """Signs an artifact's manifest, and puts the signature beside it.

    Args:
        folder: the artifact's folder.
        private_key: an elliptic curve key, PEM.
        password: of an encrypted key.

    Raises:
        UsageError: if the key is none, or the signature cannot be written.
    """
    library = _library()
    with _manifest_alone(folder) as (alone, signature):
        try:
            config = library.signing.Config()
            config.use_elliptic_key_signer(private_key=private_key, password=password)
            config.sign(alone, signature)
            data = signature.read_bytes()
        except (OSError, ValueError, TypeError) as error:
            raise _unusable(private_key, "private", error) from None
    try:
        write_atomic(folder / SIGNATURE, data)
    except OSError as error:
        raise unwritable(f"the signature {folder / SIGNATURE}", error) from error


def check_signature(folder: Path, public_key: Path) -> None:
    """Checks that an artifact's manifest was signed with a key; reads nothing else of the artifact.

    Raises:
        ArtifactError: if there is no signature, or it is of another manifest or by another key.
        UsageError: if the key is none.
    """
    library = _library()
    try:
        config = library.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (OSError, ValueError, TypeError) as error:
        raise _unusable(public_key, "public", error) from None
    with _manifest_alone(folder) as (alone, signature):
        try:
            shutil.copyfile(folder / SIGNATURE, signature)
        except OSError as error:
            raise ArtifactError(
                f"{folder} is not signed",
                expected=SIGNATURE,
                found=error.strerror,
                remedy="have its maker run wanbuild sign, or leave --require-signature out",
            ) from None
        try:
            config.verify(alone, signature)  # all that was signed, and nothing else
        except Exception as error:  # the library's own, those of JSON, protobuf and cryptography
            other = "Signature mismatch" in str(error)
            raise ArtifactError(
                f"the signature of {folder} does not fit",
                expected=f"one of its {MANIFEST} with the key {public_key}",
                found="one of another manifest" if other else " ".join(str(error).split())[:200],
                remedy="do not run it; ask its maker",
            ) from None


def is_signed(folder: Path) -> bool:
    """Returns whether there is a signature of the manifest as it is now, by whatever key.

    A build changes the manifest, and leaves the signature of the one before it.
    """
    try:
        envelope = json.loads((folder / SIGNATURE).read_bytes())["dsseEnvelope"]
        signed = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["resources"]
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        return [(one["name"], one["digest"]) for one in signed] == [(MANIFEST, digest)]
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def _manifest_alone(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yields a folder with the manifest alone, always of the same name, and a name for a signature."""
    with tempfile.TemporaryDirectory(prefix="wan-signature-") as temporary:
        alone = Path(temporary) / "artifact"
        alone.mkdir()
        try:
            shutil.copyfile(folder / MANIFEST, alone / MANIFEST)
        except OSError as error:
            raise ArtifactError(f"{folder} is not an artifact", found=error.strerror) from None
        yield alone, Path(temporary) / SIGNATURE


def _library() -> Any:
    """Returns the package model-signing. Raises UsageError if it is not installed."""
    try:
        import model_signing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise UsageError(
            f"signatures need {error.name}", remedy="pip install '.[sign]' in the checkout"
        ) from None
    return model_signing


def _unusable(key: Path, kind: str, error: Exception) -> UsageError:
    return UsageError(
        f"{key} is no {kind} key",
        expected="an elliptic curve key, PEM",
        found=str(error)[:200],
        remedy="make one: openssl ecparam -genkey -name prime256v1 -noout -out key.pem; "
        "openssl ec -in key.pem -pubout -out key.pub",
    )
