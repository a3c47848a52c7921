"""Faults in what users give besides artifacts: recipes, 8-bit weights, and files at the output's place."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from campaign.damage import copied, damage_file
from campaign.fault import Call, Case
from campaign.sources import STORED, Sources
from helpers.checkpoint_files import load_file, save_file
from wanrun.media.write_video import write_video

_TOML = (
    *("true", "0", "-1", "1", "9" * 5000, "1e400", "nan", "-inf", "0x7fffffffffffffff", "1979-05-27", '""'),
    *('"a"', '"a\\u0000b"', '"../x"', '"\\u202e"', f'"{"é" * 300}"', "[]", "[[]]", "{}", "[1, 'a']", "["),
    *(f"{'[' * 2000}{']' * 2000}", '["64x32", "64x32"]', '["0x0"]', '"64x32"', "[5]", "[1000000000001]"),
)
_SCALES = (0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38)


def hostile_recipe(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """A recipe with some other values is refused in one line, or they mean something."""
    checkpoint, artifact = rng.choice(sources.samples).checkpoint, folder / "artifact"
    tables: dict[str, dict[str, str]] = {
        "": {"source": json.dumps(str(checkpoint)), "artifact": json.dumps(str(artifact))},
        "convert": {"weights_dtype": '"float32"', "revision": '"main"', "lora": "[]", "config": '""'},
        "convert.defaults": {"steps": "2", "boundary": "0.5", "timesteps": "[1000, 500]", "fps": "16"},
        "compile": {"targets": '["local"]', "sizes": '["64x32"]', "frames": "[5]", "mesh": '""'},
    }
    changes = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        table = rng.choice(sorted(tables))
        name = rng.choice([*tables[table], "other", "a.b"])
        tables[table][name] = value = rng.choice(_TOML)
        changes.append(f"{table}.{name} = {value:.60}")
    lines = (
        line
        for table, values in tables.items()
        for line in (f"[{table}]" * bool(table), *(f"{name} = {value}" for name, value in values.items()))
    )
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join(lines))
    call = Call("wanbuild", ["build", str(recipe)], frozenset({0, 2, 4}))
    return Case("hostile recipe", "; ".join(changes), [call], artifact=artifact, clean=[folder])


def odd_scales(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """8-bit weights whose scales are missing or no scales are refused by name."""
    checkpoint = copied(rng.choice(sources.samples).checkpoint, folder / "checkpoint")
    (file,) = (checkpoint / "transformer").glob("*.safetensors")
    state = load_file(file)
    names = [name for name in state if name.endswith("ffn.net.2.weight")]
    for name in names:
        state[name] = state[name].astype(ml_dtypes.float8_e4m3fn)
        state[f"{name.removesuffix('weight')}scale_weight"] = np.float32([1.0])
    state["scaled_fp8"] = np.zeros(2, ml_dtypes.float8_e4m3fn)
    name = f"{rng.choice(names).removesuffix('weight')}scale_weight"
    value: float | None = rng.choice((None, *_SCALES, 0.5))
    if value is None:
        del state[name]
    else:
        state[name] = np.float32([value])
    save_file(state, file)
    codes = {4} if value is None or not (0 < value < 1e38) else {0}
    arguments = ["convert", str(checkpoint), "--artifact", str(folder / "artifact"), *STORED]
    call = Call("wanbuild", arguments, frozenset(codes | ({0, 4} if value in (1e-45, 3e38) else set())))
    return Case("odd scales", f"{name} = {value}", [call], artifact=folder / "artifact", clean=[folder])


def other_output(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """A damaged video at the output's place is one line that fails, and the next line's video is made."""
    sample, suffix = rng.choice(sources.samples), rng.choice((".png", ".webp", ".gif", ".mp4", ".npy"))
    there, output = folder / f"there{suffix}", folder / "made.npy"
    facts = {"prompt": "a", "seed": rng.choice((1, 2**64 - 1)), "nested": [[[]]], "wanrun": "0"}
    write_video(np.zeros((2, 16, 16, 3), np.uint8), there, 8, facts)
    target = rng.choice([there, folder / "there.npy.json"]) if suffix == ".npy" else there
    if rng.randrange(6):
        what = damage_file(rng, target)
    else:
        target.unlink()
        target.symlink_to("nowhere")
        what = "a link that leads nowhere"
    prompts = folder / "prompts.jsonl"
    first, second = (
        {"prompt": "a fox in the snow", "negative_prompt": "blurred", "output": str(path)}
        for path in (there, output)
    )
    prompts.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    arguments = sample.generation(sample.artifact, output)
    start, end = arguments.index("--prompt"), arguments.index("--output")
    arguments = [*arguments[:start], *arguments[start + 4 : end], "--prompts", str(prompts)]
    call = Call("wanrun", arguments, frozenset({0, 2}), output)
    return Case("damaged output", f"{suffix}: {what}", [call], {sample.video}, clean=[folder])


def placed_output(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """An output in an artifact, or in the place of a user's file, is refused before any work."""
    sample = rng.choice(sources.samples)
    artifact, kept = (
        copied(sample.artifact, folder / "artifact"),
        folder / rng.choice(("a.txt", "a.mp4", "a.json")),
    )
    kept.write_bytes(rng.choice((b"{}", b"notes", b"<!doctype html>", rng.randbytes(2000))))
    inside = (artifact / "manifest.json", artifact / "weights" / "new", artifact / "model.sig", artifact)
    place = rng.choice((kept, *inside))
    if rng.randrange(4) == 0:
        place = Path(shutil.copy(kept, folder / "b.txt")).with_name("link")
        place.symlink_to(rng.choice((kept, *inside)))
    run = sample.run(artifact, folder / "video.npy").arguments
    calls = [
        *(
            ("wanrun", [*run, option, str(place)])
            for option in ("--timing-json", "--report", "--save-latents")
        ),
        ("wanrun", sample.run(artifact, place).arguments),
        *(("wanbuild", ["verify", str(artifact), option, str(place)]) for option in ("--json", "--report")),
        ("wanbuild", ["sbom", str(artifact), "-o", str(place)]),
        ("wanbuild", ["oci", str(artifact), "-o", str(place)]),
        ("wanbuild", ["toy", str(place)]),
    ]
    command, arguments = rng.choice(calls)
    call = Call(command, arguments, frozenset({2}))
    what = f"{arguments[-2] if arguments[0] != 'toy' else 'toy'} {place.name}"
    files = {kept: kept.read_bytes()}
    return Case("placed output", what, [call], artifact=artifact, clean=[folder], kept=files)
