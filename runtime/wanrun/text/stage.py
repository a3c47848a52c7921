"""The text stage: turns prompts into embeddings, for all profiles whose embeddings are equal."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from wanrun.artifact.programs import with_role
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.text.artifact_encoder import ArtifactTextEncoder, embedding_stores
from wanrun.text.encoder import PromptEncoder, Warn, silent
from wanrun.text.tokenizer import ArtifactTokenizer, clean_prompt
from wanrun.timing.timings import Timings
from wanrun.weights.bound_programs import Programs
from wanrun.weights.buffers import DTYPES
from wanrun.weights.store import WeightStore


class TextStage:
    """Tokenizer, text encoder and stored embeddings in one compute dtype.

    ``opened`` is the artifact on the device that the encoder's programs run on.
    """

    def __init__(
        self, opened: OpenedArtifact, tokenizer: ArtifactTokenizer, encoder: ArtifactTextEncoder, dtype: str
    ) -> None:
        self.opened, self.tokenizer, self.encoder, self._dtype = opened, tokenizer, encoder, DTYPES[dtype]
        self._width = opened.manifest.model.text_width
        self._low_memory = opened.policy.low_memory
        self.prompts = PromptEncoder(
            tokenizer,
            encoder,
            embedding_stores(opened, encoder),
            length=tokenizer.max_length,
            width=self._width,
            dtype=self._dtype,
        )

    def encode(self, prompts: Sequence[str], timings: Timings, warn: Warn = silent) -> np.ndarray:
        """Returns embeddings (P, L, D) in the compute dtype, zero past each length; warns of cut prompts.

        Raises ArtifactError if the text encoder cannot be loaded, or a stored embedding is damaged; WanError
        if the encoder gives NaN or infinity.
        """
        with timings.phase("text"):
            embeddings = self.prompts(prompts, warn)
            self.spare()
            return embeddings

    def warm_up(self) -> None:
        """Runs the encoder once at every length that it has a program for."""
        self.encoder.warm_up()
        self.spare()

    def at_lengths(self, prompt: str) -> dict[int, np.ndarray]:
        """Returns a prompt's embedding (tokens of the prompt, D) by each program that it fits.

        The keys are the lengths of the programs, shortest first.
        """
        tokens = self.tokenizer([clean_prompt(prompt)])
        (own,) = tokens.lengths
        return {length: rows[:own] for length, rows in self.encoder.at_lengths(tokens.ids[0], tokens.mask[0])}

    def blank(self, prompts: int) -> np.ndarray:
        """Returns zero embeddings, for a warm-up of the stages after this one."""
        return np.zeros((prompts, self.tokenizer.max_length, self._width), self._dtype)

    def spare(self) -> None:
        """Releases the text encoder if memory is low."""
        if self._low_memory:
            self.encoder.release()


class TextStages:
    """The text stages of an opened artifact.

    Profiles share a stage if their embeddings have the same bits: the same compute dtype and the same text
    encoder programs. ``beside`` are the text encoder's weights and executables on the CPU, one copy for all
    profiles; None where it runs with the other programs.
    """

    def __init__(self, opened: OpenedArtifact, beside: WeightStore | None = None) -> None:
        self._beside = beside
        self._opened, self._lock = opened, threading.Lock()
        self._tokenizer = ArtifactTokenizer(opened.artifact)
        self._stages: dict[tuple[str, ...], TextStage] = {}

    def of(self, programs: Programs, dtype: str) -> TextStage:
        """Returns a profile's stage. Raises ArtifactError if a program of the CPU is missing or damaged."""
        opened = self._opened
        if self._beside is not None:
            opened, profile = self._beside.opened, programs.profile
            programs = Programs(profile, self._beside, with_role(opened.programs(profile), "text"))
        names = with_role(programs, "text")
        key = (dtype, *(programs[name].sha256 for name in names))
        with self._lock:
            if key not in self._stages:
                encoder = ArtifactTextEncoder(programs, opened.environment)
                self._stages[key] = TextStage(opened, self._tokenizer, encoder, dtype)
            return self._stages[key]

    def close(self) -> None:
        """Releases every text encoder."""
        with self._lock:
            for stage in self._stages.values():
                stage.encoder.release()
        if self._beside is not None:
            self._beside.close()
