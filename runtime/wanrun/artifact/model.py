"""What the manifest says of the model: its geometry, and what it is run with where its user says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from wanrun.artifact.record import AtLeastOne, NotNegative, Record
from wanrun.artifact.task import Task

Number = int | float
"""As the JSON has it: 16 stays 16, so that a manifest that is read and written again has the same digest."""

Colours = tuple[Number, Number, Number]
"""A number for red, green and blue."""


class ImageProcessor(Record, frozen=True, kw_only=True):
    """How an image becomes what the image encoder takes: the settings of transformers' CLIPImageProcessor.

    Attributes:
        shortest_edge: pixels that the short edge is scaled to.
        crop: pixels of a side of the square that is cut out of the middle.
        resample: Pillow's number of the filter.
        rescale_factor: multiplies a colour of 0 to 255.
        mean: taken off each colour.
        std: each colour is divided by it.
    """

    shortest_edge: AtLeastOne
    crop: AtLeastOne
    resample: Annotated[int, Meta(ge=0, le=5)]
    rescale_factor: Number
    mean: Colours
    std: Colours


class Defaults(Record, frozen=True, kw_only=True):
    """What stands for the options that every model has, where a generation does not give them.

    Attributes:
        num_steps: denoising steps.
        guidance_scale: strength of guidance; of two experts, the high-noise one's.
        flow_shift: shift of the sigmas.
        solver: name of the solver.
        fps: frames per second of the video file.
        negative_prompt: what to avoid.
        timesteps: explicit ones, falling, as a distilled model has; None for the solver's own.
    """

    num_steps: AtLeastOne
    guidance_scale: Number
    flow_shift: Number
    solver: str
    fps: Number
    negative_prompt: str
    timesteps: tuple[Number, ...] | None = None


class Model(Record, frozen=True, kw_only=True):
    """The facts of a model that the runtime needs; it knows no model code.

    Attributes:
        variant: its name, as ``wanbuild --variant`` spells it.
        text_width: values of an embedded token.
        latent_channels: channels of the latents.
        vae_spatial: pixels of a latent cell, in each direction.
        vae_temporal: frames of a latent frame, but for the first, which is one.
        size_multiple: pixels that widths and heights are multiples of.
        leading_latents: latent frames in front of the video's own, besides those of reference images.
        num_train_timesteps: the timestep of pure noise.
        expand_timesteps: whether each latent frame has a timestep of its own.
        defaults: of the options that every model has.
        options: the options that this model has and not every model, with their defaults; but the overlap
            of windows, which is with these. A step that has an input of an option's name takes its value.
        image_processor: what prepares images for the image encoder; None where there is none.
        task: which images and videos it takes, and what is done with them.
    """

    variant: str
    text_width: AtLeastOne
    latent_channels: AtLeastOne
    vae_spatial: AtLeastOne
    vae_temporal: AtLeastOne
    size_multiple: AtLeastOne
    leading_latents: NotNegative = 0
    num_train_timesteps: AtLeastOne
    expand_timesteps: bool = False
    defaults: Defaults
    options: Mapping[str, str | int | float]
    image_processor: ImageProcessor | None = None
    task: Task

    def __post_init__(self) -> None:
        encoded = [name for name, item in self.task.inputs.items() if item.encoded]
        if encoded and self.image_processor is None:
            raise ValueError(f"{encoded[0]} is encoded, and there is no image processor")

    def default_options(self) -> dict[str, Any]:
        """Returns the default of every option that has one here, by name; the model has these options."""
        everywhere, windows = msgspec.structs.asdict(self.defaults), self.task.windows
        overlap = {} if windows is None else {"segment_overlap": windows.overlaps[0]}
        defaults = {name: value for name, value in everywhere.items() if value is not None}
        return {**defaults, **overlap, **self.options}
