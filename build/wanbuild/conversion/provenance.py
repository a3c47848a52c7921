"""Records the origin of an artifact: repository, revision, and a digest of every file that was read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wanbuild.components import kind_of
from wanbuild.config import read_bytes
from wanbuild.source.checkpoint import Source
from wanbuild.source.configs import FILES, SCHEDULER
from wanbuild.source.scheduler import read_scheduler
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import Manifest
from wanrun.files import canonical_json, sha256_of


@dataclass(frozen=True)
class SmallFiles:
    """Size and digest (``records``) of files without weights by name, and the content of tokenizer.json.

    They are read before the long work, during which they may change.
    """

    records: Mapping[str, Mapping[str, Any]]
    tokenizer: bytes


def read_small_files(source: Source) -> SmallFiles:
    """Reads the files without weights."""
    weights = {path for component in source.components.values() for path in component.files}
    files = source.files()
    contents = {name: read_bytes(path) for name, path in files.items() if path not in weights}
    records = {
        name: {"bytes": len(data), "digest": f"sha256:{sha256_of(data)}"} for name, data in contents.items()
    }
    tokenizer = next(name for name, path in files.items() if path == source.tokenizer.file)
    return SmallFiles(records, contents[tokenizer])


def source_record(
    source: Source,
    small: SmallFiles,
    filled: Mapping[str, Collection[str]],
    crcs: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Returns repository, revision, a digest of every file that was read, and which configs were given.

    A weight file's digest is the sha256 of its tensors' names, dtypes, shapes and crc32c, which are computed
    during conversion, and the digest of an 8-bit tensor's scale. A tensor that fills nothing is not read and
    has no crc32c. Other files are small, and their digest is the sha256 of their bytes.

    ``filled`` has the tensors that fill a parameter by component, ``crcs`` their crc32c by component and
    name.
    """
    tensors: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    for name, component in source.components.items():
        for key, tensor in component.tensors.items():
            checksum = crcs[name][key] if key in filled[name] else None
            record = [str(tensor.entry.dtype), list(tensor.entry.shape), checksum]
            if tensor.eight_bit is not None:
                record.append(tensor.eight_bit.digest)
            place = source.name_of(name, tensor.file.path)
            tensors.setdefault(place, {})[key] = record
            sizes[place] = tensor.file.nbytes
    weights = {
        name: {
            "bytes": sizes[name],
            "digest": f"tensors-crc32c-sha256:{sha256_of(canonical_json(content))}",
        }
        for name, content in tensors.items()
    }
    files = dict(sorted({**small.records, **weights}.items()))
    assumed = {"assumed": list(source.assumed)} if source.assumed else {}
    configs = {name: source.name_of(name, path) for name, path in source.configs.items()}
    return {
        "repository": source.repository,
        "revision": source.revision,
        "files": files,
        **assumed,
        **({"configs": configs} if configs else {}),
    }


def recognised_lines(manifest: Manifest, given: Collection[str] = ()) -> Iterator[str]:
    """Yields what conversion has recognised or assumed because no file says it.

    ``given`` are the default options that the user has given.
    """
    yield from _recognised(manifest)
    scheduler = read_scheduler(manifest.configs[SCHEDULER])
    if scheduler.assumed and "flow_shift" not in given:
        published = variants()[manifest.model.variant].flow_shift
        yield (
            f"{FILES[SCHEDULER]} has no shift: {scheduler.flow_shift:g} is taken, as diffusers does; "
            f"{manifest.model.variant} is published with others: --default flow_shift={published:g}"
        )


def _recognised(manifest: Manifest) -> Iterator[str]:
    """Yields what was recognised or assumed of weight files; nothing for a folder."""
    assumed, configs = manifest.source.get("assumed"), manifest.source.get("configs")
    if not assumed and not configs:
        return
    record = manifest.configs["transformer"]
    config = kind_of("transformer", record.get("_class_name")).parse(record, "transformer")
    yield (
        f"recognised {manifest.model.variant}: a transformer of {config.num_layers} layers with "
        f"{config.num_attention_heads} heads"
    )
    if assumed:
        yield f"assumed as published, since files of weights do not say: {', '.join(assumed)}"
        yield (
            "if the model has others, give its configs: --config FOLDER, or --config "
            "transformer=FILE,vae=FILE,scheduler=FILE; or a folder with them as SOURCE"
        )
