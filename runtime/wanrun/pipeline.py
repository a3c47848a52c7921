"""The runtime: restore, load executables, and run them in order. It knows no model code."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from wanrun.environment import configure_jax, device_mismatches
from wanrun.errors import ArtifactError, Mismatch, WanError, artifact_mismatch
from wanrun.executables import Executables, check_entries, overlay_folder
from wanrun.files import digest_found
from wanrun.manifest import Manifest, Profile, read_manifest
from wanrun.noise import initial_noise
from wanrun.options import check_latents, latents_shape, resolve_options
from wanrun.prompt import PromptTokenizer, clean_prompt
from wanrun.restore import Restore, default_threads
from wanrun.select import SelectedTarget, select_profile, select_target
from wanrun.solvers import COLUMNS, SolverTable, solver_table
from wanrun.timing import Timings

HISTORY = ("last", "m1", "m2")
"""Solver history: the last corrected sample and the two newest data predictions."""

Warn = Callable[[str], None]


def _no_warning(message: str) -> None:
    del message


@dataclass(frozen=True)
class Result:
    """What one generation made.

    Args:
        frames: uint8 (B, T, H, W, 3).
        latents: final latents, float32 (B, C, T, h, w), normalised.
        options: prompt, seed, solver and everything else that was used, for the video's metadata.
        timings: what loading and every generation of this pipeline took so far.
    """

    frames: np.ndarray
    latents: np.ndarray
    options: Mapping[str, Any]
    timings: Timings


class Pipeline:
    """One profile of an artifact, loaded on its device; made by ``load``."""

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        profile: Profile,
        selected: SelectedTarget,
        *,
        allow_compile: bool = False,
        verify: str = "fast",
        timings: Timings | None = None,
        warn: Warn = _no_warning,
    ) -> None:
        self.artifact, self.manifest, self.profile = artifact, manifest, profile
        self.timings = Timings() if timings is None else timings
        self._selected, self._warn = selected, warn
        self._allow_compile, self._verify = allow_compile, verify
        self._tokenizer = self._load_tokenizer()
        self._programs: dict[str, Callable[..., Any]] = {}
        self._weights: dict[str, Any] = {}
        self._device = self._open_device()
        self._load()

    def _load_tokenizer(self) -> PromptTokenizer:
        record = self.manifest.tokenizer
        path = self.artifact / record["file"]
        found = digest_found(path)
        if found != record["sha256"]:
            raise ArtifactError(
                f"the tokenizer {path} is damaged",
                expected=f"sha256 {record['sha256']}",
                found=found,
                remedy="copy the artifact again or rebuild it",
            )
        return PromptTokenizer(path, record["max_length"], record["pad_id"])

    def _open_device(self) -> Any:
        """Imports jax, sets its flags and checks the device, before any weight is read."""
        target = self._selected.target
        if not self._allow_compile:  # or what is missing is compiled
            check_entries(self.artifact, target, self.profile.name)
        with self.timings.phase("import"):
            import jax
            import jax.export
        with self.timings.phase("device"):
            configure_jax(target.environment["platform"])
            try:
                devices = jax.devices(target.environment["platform"])
            except RuntimeError as error:
                raise ArtifactError(
                    f"there is no {target.environment['platform']} device: {error}",
                    remedy="run where there is one, or compile a target for this machine",
                ) from None
        mismatches: Sequence[Mismatch] = device_mismatches(target.environment, devices)
        if mismatches and not self._allow_compile:
            raise artifact_mismatch(f"target {self._selected.name}", mismatches)
        self._foreign = bool(mismatches or self._selected.mismatches)
        if self._foreign:
            reasons = "; ".join(map(str, [*self._selected.mismatches, *mismatches]))
            self._warn(f"the artifact's executables are not used, its programs are compiled here: {reasons}")
        return devices[0]

    def _load(self) -> None:
        """Reads weights with a pool of threads while this thread loads executables."""
        import jax

        with ThreadPoolExecutor(default_threads(), thread_name_prefix="restore") as pool:
            # In the order of use: the pool takes files in the order they were asked for.
            names = [
                name for name in ("text_encoder", "transformer", "vae") if name in self.manifest.components
            ]
            started = self.timings.now()
            restores = [
                Restore(
                    self.artifact,
                    name,
                    self.manifest.components[name],
                    pool,
                    self._verify,
                    clock=self.timings.now,
                )
                for name in names
            ]
            try:
                with self.timings.phase("executables"):
                    self._load_programs()
                programs = self.profile.programs[self._selected.target.environment["platform"]]
                bits = any(program.weight_bits for program in programs.values())
                for restore in restores:
                    tree = restore.result(bits)
                    self.timings.add("restore", started, restore.finished_at)
                    with self.timings.phase("transfer"):
                        self._weights[restore.name] = jax.device_put(tree, self._device)
                    if restore.name == "transformer":
                        self.timings.mark_ready()
            except BaseException:
                for restore in restores:
                    restore.cancel()
                raise

    def _load_programs(self) -> None:
        target = self._selected.target
        if self._foreign:
            target = dataclasses.replace(target, executables={})
        overlay = functools.partial(overlay_folder, self.manifest, self._selected.name)
        executables = Executables(
            self.artifact,
            target,
            self.profile,
            self._device,
            overlay if self._allow_compile else None,
            self._warn,
        )
        try:
            for name in self.profile.programs[target.environment["platform"]]:
                self._programs[name] = executables.load(name)
        finally:
            self.timings.cache_hits += executables.hits
            self.timings.cache_misses += executables.misses

    @property
    def latents_shape(self) -> tuple[int, int, int, int, int]:
        """Shape (B, C, T, h, w) of the latents."""
        return latents_shape(self.manifest, self.profile)

    def encode_prompts(self, prompts: Sequence[str]) -> np.ndarray:
        """Embeddings (P, 512, text_dim) of these prompts, in the compute dtype, zero past each length."""
        with self.timings.phase("text"):
            tokens = self._tokenizer([clean_prompt(prompt) for prompt in prompts])
            for cut in tokens.cut:
                if cut is not None:
                    length = self.manifest.tokenizer["max_length"]
                    self._warn(f"the prompt is longer than {length} tokens; this was cut: {cut!r}")
            embeddings = [
                self._run("encode_text", ids=tokens.ids[i : i + 1], mask=tokens.mask[i : i + 1])["embeddings"]
                for i in range(len(prompts))
            ]
            return np.concatenate([np.asarray(embedding) for embedding in embeddings])

    def component_weights(self, name: str) -> Mapping[str, Any]:
        """A component's weights on the device, as nested dicts by path."""
        return self._weights[name]

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Normalised latents (B, C, T, h, w) to frames, uint8 (B, T, H, W, 3), one video at a time."""
        with self.timings.phase("decode"):
            return np.stack([np.asarray(self._run("decode_video", latents=one)["frames"]) for one in latents])

    def velocity(
        self, latents: np.ndarray, prompts: Sequence[str], timestep: float, guidance_scale: float
    ) -> np.ndarray:
        """The model's guided output at these latents, for comparing it with another implementation.

        A step with σ = 1 that returns the data prediction m0 = x − v, so no program of its own is needed.

        Args:
            latents: float32 (B, C, T, h, w).
            prompts: positive, and with guidance negative.
            timestep: in training timesteps, 0 to 1000.
            guidance_scale: unused without guidance.

        Returns:
            float32 of latents' shape.
        """
        row = np.zeros(len(COLUMNS), np.float32)
        row[[COLUMNS.index("sigma"), COLUMNS.index("p_0")]] = 1
        table = SolverTable("velocity", np.array([timestep], np.float32), row[None], np.zeros(2))
        prepared = self._run("prepare", embeddings=self.encode_prompts(prompts))
        options = {"guidance_scale": guidance_scale}
        return latents - self._denoise(latents, table, prepared, options, lambda step, total: None)

    def _run(self, name: str, **values: Any) -> dict[str, Any]:
        """Runs one program; a component's weights are passed under its name."""
        return self._programs[name](**values, **self._weights)

    def generate(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        *,
        seed: int = 0,
        num_steps: int | None = None,
        guidance_scale: float | None = None,
        flow_shift: float | None = None,
        solver: str | None = None,
        latents: np.ndarray | None = None,
        on_step: Callable[[int, int], None] = lambda step, total: None,
    ) -> Result:
        """Generates the profile's number of videos for one prompt.

        Args:
            prompt: what to show.
            negative_prompt: what to avoid; the manifest's default where None. Unused without guidance.
            seed: of the initial noise.
            num_steps: denoising steps; this and the next three are the manifest's defaults where None.
            guidance_scale: strength of classifier-free guidance; unused by a profile without it.
            flow_shift: shift of the sigmas towards noise.
            solver: 'unipc', 'dpm++' or 'euler'.
            latents: initial noise instead of the seed's, float32 (B, C, T, h, w).
            on_step: told after each step how many of how many are done.

        Raises:
            UsageError: for an option out of range or latents of a wrong shape.
            WanError: if the latents are not finite.
        """
        options = resolve_options(
            self.manifest,
            self.profile,
            prompt=prompt,
            negative_prompt=negative_prompt,
            seed=seed,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            flow_shift=flow_shift,
            solver=solver,
        )
        table = solver_table(
            options["solver"],
            options["num_steps"],
            options["flow_shift"],
            self.manifest.model["num_train_timesteps"],
        )
        noise = initial_noise(seed, self.latents_shape) if latents is None else latents
        check_latents(noise, self.latents_shape)
        prompts = [prompt, options["negative_prompt"]] if self.profile.guidance else [prompt]
        embeddings = self.encode_prompts(prompts)
        with self.timings.phase("prepare"):
            prepared = self._run("prepare", embeddings=embeddings)
        with self.timings.phase("denoise"):
            final = self._denoise(noise, table, prepared, options, on_step)
        return Result(
            self.decode(final),
            final,
            {**options, "content_digest": self.manifest.content_digest},
            self.timings,
        )

    def _denoise(
        self,
        noise: np.ndarray,
        table: SolverTable,
        prepared: Mapping[str, Any],
        options: Mapping[str, Any],
        on_step: Callable[[int, int], None],
    ) -> np.ndarray:
        import jax

        state: dict[str, Any] = {
            "latents": noise,
            "history": {name: np.zeros_like(noise) for name in HISTORY},
        }
        constant = dict(prepared)
        if self.profile.guidance:
            constant["guidance_scale"] = np.float32(options["guidance_scale"])
        total = len(table.timesteps)
        for step, (timestep, coefficients) in enumerate(
            zip(table.timesteps, table.coefficients, strict=True)
        ):
            started = time.perf_counter()
            state = self._run(
                "denoise_step", **constant, **state, timestep=np.float32(timestep), coefficients=coefficients
            )
            jax.block_until_ready(state)
            self.timings.step(time.perf_counter() - started)
            if step == 0:
                self.timings.mark_first_step()
                _check_finite(np.asarray(state["latents"]), "after the first step")
            on_step(step + 1, total)
        final = np.asarray(state["latents"])
        _check_finite(final, "at the end")
        return final

    def close(self) -> None:
        """Lets go of weights and executables."""
        self._programs.clear()
        self._weights.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_finite(latents: np.ndarray, when: str) -> None:
    """Raises WanError for NaN or infinity: checked early, and before anything is decoded from them."""
    wrong = latents.size - np.count_nonzero(np.isfinite(latents))
    if wrong:
        raise WanError(
            f"the latents are not finite {when}",
            expected="numbers",
            found=f"{wrong} NaN or infinite of {latents.size} values",
            remedy="check the weights with wanbuild verify, or build with --dtype float32",
        )


def load(
    artifact: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    num_frames: int | None = None,
    num_videos: int = 1,
    guidance: bool = True,
    target: str | None = None,
    allow_compile: bool = False,
    verify: str = "fast",
    timings: Timings | None = None,
    warn: Warn = _no_warning,
) -> Pipeline:
    """Loads one profile of an artifact, ready to generate.

    Args:
        artifact: the artifact's folder.
        size: (width, height) in pixels; the first built profile's where None.
        num_frames: frames; the first built profile's where None.
        num_videos: videos per prompt.
        guidance: whether classifier-free guidance is on.
        target: a target's name; the one that matches this machine where None.
        allow_compile: compile from the StableHLO where no executable fits, into the user's cache.
        verify: 'fast' checks every row's crc32c while reading; 'sha256' also every parameter's sha256.
        timings: where to record what it took.
        warn: told what does not stop the run but should be known.

    Raises:
        ArtifactError: if the artifact is damaged, was built for another machine, or has no such profile.
    """
    folder = Path(artifact).resolve()
    if timings is None:
        timings = Timings()
    with timings.phase("manifest"):
        manifest = read_manifest(folder)
        profile = select_profile(manifest, folder, size, num_frames, num_videos, guidance)
        selected = select_target(manifest, profile, target, allow_compile)
    return Pipeline(
        folder,
        manifest,
        profile,
        selected,
        allow_compile=allow_compile,
        verify=verify,
        timings=timings,
        warn=warn,
    )
