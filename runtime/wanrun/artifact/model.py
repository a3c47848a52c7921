"""The manifest's records of the model: its geometry and its default options."""

from __future__ import annotations

__all__ = ["Chunking", "Model", "Pyramid"]

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from wanrun.artifact.record import MAX_SIZE, AtLeastOne, NotNegative, Record
from wanrun.artifact.task import Task

MAX_STEPS: Final = 10_000
"""The most steps. A table of ten times more takes seconds to compute, and the video gains nothing."""

MAX_FLOAT32: Final = 3.4028234663852886e38

SolverName = Literal[
    "unipc", "dpm++", "euler", "lcm", "dmd", "rcm-ode", "rcm-sde", "flow-map", "self-forcing"
]  # fmt: skip

# Integers are numbers too, as the JSON has them: 16 stays 16, so that a manifest that is read and written
# again has the same digest.
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)] | Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
Positive = Annotated[int, Meta(ge=1, le=2**53)] | Annotated[float, Meta(gt=0, le=MAX_FLOAT32)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[int, Meta(ge=1, le=240)] | Annotated[float, Meta(ge=0.1, le=240)]
Factor = Annotated[int, Meta(ge=1, le=10**6)] | Annotated[float, Meta(ge=1e-12, le=1e6)]
"""A factor or a divisor: zero would give one colour, or infinity."""

Colour = Annotated[int, Meta(ge=-(10**6), le=10**6)] | Annotated[float, Meta(ge=-1e6, le=1e6)]

OPTION_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "guidance_scale_2": (-MAX_FLOAT32, MAX_FLOAT32),
        "guidance_start": (0.0, 1.0),
        "guidance_end": (0.0, 1.0),
        "boundary": (0.0, 1.0),
        "conditioning_scale": (-MAX_FLOAT32, MAX_FLOAT32),
        "segment_overlap": (1, MAX_SIZE),
    }
)
"""The least and the most value of each option that only some models have, or have a default of."""


class ImageProcessor(Record, frozen=True, kw_only=True):
    """The preparation of images for the image encoder: the settings of transformers' CLIPImageProcessor.

    Attributes:
        shortest_edge: pixels that the short edge is scaled to.
        crop: pixels of a side of the square that is cut out of the middle.
        resample: Pillow's number of the filter.
        rescale_factor: the factor of a colour of 0 to 255.
        mean: subtracted from each rescaled colour.
        std: the divisor of each colour after that.
    """

    shortest_edge: Annotated[int, Meta(ge=1, le=4096)]
    crop: Annotated[int, Meta(ge=1, le=4096)]
    resample: Annotated[int, Meta(ge=0, le=5)]
    rescale_factor: Factor
    mean: tuple[Colour, Colour, Colour]
    std: tuple[Factor, Factor, Factor]


class Defaults(Record, frozen=True, kw_only=True):
    """The defaults of the options that every model has.

    Attributes:
        num_steps: denoising steps.
        guidance_scale: strength of guidance; with two experts, that of the high-noise one.
        flow_shift: shift of the sigmas.
        solver: name of the solver.
        fps: frames per second of the video file.
        negative_prompt: description of what the video must not show.
        timesteps: explicit decreasing timesteps, as a distilled model has; None for the solver's own.
    """

    num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)]
    guidance_scale: Number
    flow_shift: Positive
    solver: SolverName
    fps: Rate
    negative_prompt: str
    timesteps: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_STEPS)] | None = None


class Pyramid(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The steps of a chunk that begins smaller than it ends: see ``denoising.pyramid``.

    Attributes:
        stages: how many sizes it has, each with twice the rows and columns of the one before.
        shift: how noise levels are shifted by the tokens; None for not at all.
        gamma: the negative covariance of the noise between two stages, in each block.
        doubled: whether the first chunk of a video has twice the steps.
    """

    stages: AtLeastOne
    shift: Literal["exponential", "linear"] | None = None
    gamma: Annotated[float, Meta(gt=0, le=1 / 3)] = 1 / 3
    doubled: bool = False


class Chunking(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How a model cuts a video into chunks that it makes one after the other.

    Attributes:
        first: latent frames of the first chunk.
        each: latent frames of every other one; the last one may have fewer.
        alone: whether chunks are decoded one by one, as if each were a video. All of them are whole then: the
            last one has more frames than a video needs.
        pyramid: how steps of a chunk are laid out; None for those of the solver's own grid.
    """

    first: AtLeastOne
    each: AtLeastOne
    alone: bool = False
    pyramid: Pyramid | None = None

    def __post_init__(self) -> None:
        if self.first > self.each:
            raise ValueError(f"the first chunk has {self.first} latent frames, and others have {self.each}")

    def lengths(self, frames: int, window: int | None = None) -> tuple[int, ...]:
        """Returns the latent frames of the chunks of a video.

        Args:
            frames: its latent frames.
            window: those of the profile that makes it; None for as many. A last chunk for whose length it has
                no program is as long as the others, and only a part of it is the video's.
        """
        whole, rest = divmod(max(frames - self.first, 0), self.each)
        chunks = (min(self.first, frames), *(self.each,) * whole, *((rest,) if rest else ()))
        if window is None or chunks[-1] in (self.each, *self.lengths(window)):
            return chunks
        return *chunks[:-1], self.each if chunks[:-1] else self.first

    def within(self, frames: int) -> int:
        """Returns how many whole chunks so many latent frames are."""
        return 0 if frames < self.first else 1 + (frames - self.first) // self.each

    def videos(self, frames: int) -> int:
        """Returns as how many videos so many latent frames are decoded: chunk by chunk, or as one."""
        return max(frames // self.each, 1) if self.alone else 1


class Model(Record, frozen=True, kw_only=True):
    """The facts of a model that the runtime needs; the runtime has no model code.

    Attributes:
        variant: the variant's name, as in ``wanbuild toy --variant``.
        text_width: values of an embedded token.
        latent_channels: channels of the latents.
        vae_spatial: pixels of a latent cell's side.
        vae_temporal: frames of each latent frame except the first, which is one frame.
        size_multiple: widths and heights are multiples of this number of pixels.
        leading_latents: latent frames in front of the video's own, besides those of reference images.
        num_train_timesteps: the timestep of pure noise.
        expand_timesteps: whether each latent frame has its own timestep.
        flow_map: whether a step takes the timestep at which it ends too, as ``next_timestep``. A manifest
            leaves false out.
        chunks: how a video is made chunk by chunk; None for a model that makes it at once, a manifest leaves
            that out.
        defaults: the defaults of the options that every model has.
        options: the defaults of this model's other options, except the overlap of windows, which is in
            ``task``. A step with an input of an option's name takes the option's value.
        image_processor: the preparation for the image encoder; None for a model without one.
        task: the images and videos that it takes, and the programs that use them.
    """

    variant: str
    text_width: AtLeastOne
    latent_channels: AtLeastOne
    vae_spatial: AtLeastOne
    vae_temporal: AtLeastOne
    size_multiple: AtLeastOne
    leading_latents: NotNegative = 0
    num_train_timesteps: Annotated[int, Meta(ge=2, le=MAX_SIZE)]
    expand_timesteps: bool = False
    flow_map: bool = False
    chunks: Chunking | None = None
    defaults: Defaults
    options: Mapping[str, int | float]
    image_processor: ImageProcessor | None = None
    task: Task

    def __post_init__(self) -> None:
        encoded = [name for name, item in self.task.inputs.items() if item.encoded]
        if encoded and self.image_processor is None:
            raise ValueError(f"{encoded[0]} is encoded, and there is no image processor")
        for name, item in self.task.inputs.items():
            apart = None if self.chunks is None else self.chunks.alone
            if item.count is not None and not item.past and (apart is None or self.task.held is None):
                raise ValueError(f"{name} is the first chunks of a video that is not made in chunks")
            if item.past and not apart:
                raise ValueError(f"{name} is the past of a video whose chunks are not decoded alone")
        for name, value in self.options.items():
            least, most = OPTION_RANGES.get(name, (0, -1))
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"the default of the option {name} is {value!r}")

    @property
    def guided(self) -> bool:
        """Whether steps can have guidance; models of chunks that see one another have it in their weights."""
        return self.chunks is None or self.chunks.alone

    @property
    def stages(self) -> int:
        """The sizes in which a chunk is made, each with its own program; 1 for other models."""
        return 1 if self.chunks is None or self.chunks.pyramid is None else self.chunks.pyramid.stages

    @property
    def chunk_frames(self) -> int:
        """The frames of a chunk after the first one: fewer where it is decoded alone, as if it were that."""
        assert self.chunks is not None
        return self.chunks.each * self.vae_temporal - self.chunks.alone * (self.vae_temporal - 1)

    def latent_frames(self, num_frames: int) -> int:
        """Returns the latent frames, of whole chunks where those are decoded alone, of so many frames."""
        if self.chunks is None or not self.chunks.alone:
            return (num_frames - 1) // self.vae_temporal + 1
        return self.chunks.each * -(-num_frames // self.chunk_frames)

    def default_options(self) -> dict[str, Any]:
        """Returns the default of every option that has one, by name; these are options of this model."""
        everywhere, windows = msgspec.structs.asdict(self.defaults), self.task.windows
        overlap = {} if windows is None else {"segment_overlap": windows.overlaps[0]}
        defaults = {name: value for name, value in everywhere.items() if value is not None}
        return {**defaults, **overlap, **self.options}
