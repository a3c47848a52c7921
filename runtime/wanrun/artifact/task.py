"""What the manifest says of a model's task: the images and videos it takes, and what is done with them.

The runtime does what these records say and knows no task by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta

from wanrun.artifact.record import AtLeastOne, Record

MediaOption = Literal[
    "image",
    "last_image",
    "reference_image",
    "video",
    "mask",
    "pose_video",
    "face_video",
    "background_video",
    "mask_video",
]
"""The options of a generation that are images or videos."""

SEVERAL: Final = "reference_image"
"""The one of them that may be given several times."""

Preparation = Literal["resize", "resize_same_aspect", "fit_on_black", "fit_on_white", "greyscale"]
"""How an image or a frame is brought to a size: see ``wanrun.media.preparations``."""

Colour = Annotated[int, Meta(ge=0, le=255)]


class Input(Record, frozen=True, kw_only=True):
    """An image or a video that a model takes.

    Attributes:
        kind: ``image``: an array (1, H, W, C). ``images``: (N, H, W, C), N the profile's number of reference
            images; with none there is no array. ``video``: (F, H, W, C), F the profile's number of frames;
            where a video is made in windows, frames of all of them, and a window's share for the programs.
        array: the input of the programs that takes it.
        prepare: how it is brought to its size, which decides C and the dtype.
        size: pixels of a side of the square that it is brought to; None: width and height of the profile.
        required: whether it must be given; with a mode, in that mode.
        mode: the mode that it has an effect in; None: in any.
        beside: the option without which it has no effect; None where there is none.
        encoded: whether the image encoder takes the image too.
        default: what the array is filled with where it is not given; None: then there is no array.
        flag: the input of the programs that is 1 where it is given and else 0, int32; None for none.
    """

    kind: Literal["image", "images", "video"]
    array: str
    prepare: Preparation = "resize"
    size: AtLeastOne | None = None
    required: bool = False
    mode: str | None = None
    beside: MediaOption | None = None
    encoded: bool = False
    default: Colour | None = None
    flag: str | None = None

    def __post_init__(self) -> None:
        if self.kind != "image" and self.encoded:
            raise ValueError(f"the image encoder takes single images, and {self.array} is {self.kind}")
        if self.kind == "images" and (self.required or self.default is not None):
            raise ValueError(f"{self.array} can be of no images, so it is neither required nor filled")


class Modes(Record, frozen=True, kw_only=True):
    """Ways to use a model, of which a generation names one.

    Attributes:
        names: their names, the default first.
        array: the input of the programs that takes the number of the mode, from 0, int32.
    """

    names: Annotated[tuple[str, ...], Meta(min_length=1)]
    array: str


class Windows(Record, frozen=True, kw_only=True):
    """A video of any length is made in windows of the profile's frames, one after the other.

    A window begins with the last frames of the one before. Its programs take ``overlap``, how many frames
    these are, and ``later``, 0 for the first window and else 1, both int32.

    Attributes:
        frames_of: the option whose frames decide how many the video has. The other videos are cut to that
            length, or padded to it by reflection.
        overlaps: how many frames two windows may share, the default first.
        carried: what goes from window to window: by the input of a window's programs, the output of the
            program that decoded the window before. Zeros stand for it in the first one.
    """

    frames_of: MediaOption
    overlaps: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)]
    carried: Mapping[str, str]


class HeldFrame(Record, frozen=True, kw_only=True):
    """The first latent frame may be given. Then it is not denoised, and is in its place at the end.

    Attributes:
        condition: the input of a step that holds what was encoded.
        latents: the name in it of the frame's latents (C, 1, h, w).
        mask: the input of a step that is 0 for a latent frame that is held and else 1, float32 (T,).
    """

    condition: str
    latents: str
    mask: str


class Order(Record, frozen=True, kw_only=True):
    """The programs of a generation in their order, but those of the text encoder and of the denoising loop.

    A program takes by name what was prepared of images and videos, and what programs before it have returned.

    Attributes:
        once: before everything, once for all windows.
        window: after them, once a window; for a video that is made at once, likewise once.
        expert: before an expert's steps, with the embeddings. The steps take what these return.
        after: after the last step, for each video: they take ``latents`` and return ``frames``.
    """

    once: tuple[str, ...] = ()
    window: tuple[str, ...] = ()
    expert: tuple[str, ...] = ("prepare",)
    after: tuple[str, ...] = ("decode_video",)


class Task(Record, frozen=True, kw_only=True):
    """What a model makes a video of.

    Attributes:
        name: what it is called, for people alone.
        inputs: the images and videos that it takes, by option.
        modes: the ways to use it; None where there is one.
        windows: how a long video is made; None where a video has the profile's frames.
        held: the frame that may be given; None where there is none.
        order: the programs.
    """

    name: str
    inputs: Mapping[MediaOption, Input]
    modes: Modes | None = None
    windows: Windows | None = None
    held: HeldFrame | None = None
    order: Order = Order()

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """What is wrong between the inputs, the modes and the windows."""
        modes = () if self.modes is None else self.modes.names
        for name, item in self.inputs.items():
            if item.mode is not None and item.mode not in modes:
                yield f"{name} is for a mode that there is not: {item.mode}"
            if (item.kind == "images") != (name == SEVERAL):
                yield f"{name} cannot be of kind {item.kind}"
            if item.beside is not None and item.beside not in self.inputs:
                yield f"{name} goes with an input that there is not: {item.beside}"
        arrays = [item.array for item in self.inputs.values()]
        arrays += [item.flag for item in self.inputs.values() if item.flag is not None]
        arrays += [] if self.modes is None else [self.modes.array]
        if twice := [array for array, count in Counter(arrays).items() if count > 1]:
            yield f"two inputs are called {twice[0]}"
        if self.inputs and not self.order.window:
            yield "no program takes the images and videos"
        if self.windows is not None:
            decides = self.inputs.get(self.windows.frames_of)
            if decides is None or decides.kind != "video" or not decides.required or decides.mode is not None:
                yield f"the windows need {self.windows.frames_of}, which is no video that is always given"

    @property
    def counted(self) -> tuple[MediaOption, Input] | None:
        """The option that takes as many images as the profile has, and its record; None for none."""
        return (SEVERAL, self.inputs[SEVERAL]) if SEVERAL in self.inputs else None

    @property
    def always_encodes(self) -> bool:
        """Whether there are arrays to encode whatever is given."""
        return any(item.required or item.default is not None for item in self.inputs.values())
