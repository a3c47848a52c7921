"""The manifest's records of a model's task: its images and videos, their preparation, and its windows.

The runtime follows these records and knows no task by name.
"""

from __future__ import annotations

__all__ = ["HeldFrame", "Input", "Modes", "Task", "Windows"]

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from msgspec import Meta

from wanrun.artifact.media import FIRST, SEVERAL, MediaOption
from wanrun.artifact.record import AtLeastOne, NotNegative, Record

Preparation = Literal["resize", "resize_same_aspect", "fit_on_black", "fit_on_white", "greyscale"]
"""A way to bring an image or a frame to a size: see ``wanrun.media.preparations``."""

Colour = Annotated[int, Meta(ge=0, le=255)]


class Input(Record, frozen=True, kw_only=True):
    """An image or a video that a model takes.

    Attributes:
        kind: ``image``: an array (1, H, W, C). ``images``: (N, H, W, C), N the profile's number of reference
            images; there is no array if N is 0. ``video``: (F, H, W, C), F the profile's number of frames;
            for a model with windows the array has the frames of all windows, and a program takes F of them.
        array: the program input that takes the array.
        prepare: the preparation, which decides C and the dtype.
        size: pixels of a side of the square that it is brought to; None for the profile's width and height.
        required: whether it must be given; if it has a mode, in this mode only.
        mode: the only mode in which it has an effect; None for all modes.
        beside: the option without which it has no effect; None if there is no such option.
        encoded: whether the image encoder takes the image too.
        default: the array's value if the option is not given; None for no array.
        flag: the program input, int32, that is 1 if the option is given and else 0; None for no such input.
        count: the program input, int32, that takes how many frames are given, where the result begins with
            them, as whole chunks: the array is that of a video, with zeros behind them. One of several
            inputs of one array may be given. None for a whole array, and a manifest leaves it out.
        past: where the result goes on after the given frames instead of beginning with them, the latent
            frames of a past that a chunk's steps take: the array is that of a chunk, of which those are
            encoded one by one. 0 elsewhere, and a manifest leaves it out.
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
    count: str | None = None
    past: NotNegative = 0

    @property
    def fits(self) -> bool:
        """Whether the option ``fit`` decides its shape.

        Other preparations have their own rules, and what belongs to another input has that one's shape.
        """
        return self.prepare in ("resize", "greyscale") and self.beside is None

    def __post_init__(self) -> None:
        if self.kind != "image" and self.encoded:
            raise ValueError(f"the image encoder takes single images, and {self.array} is {self.kind}")
        if self.kind == "images" and (self.required or self.default is not None):
            raise ValueError(f"{self.array} may have no images, so it is neither required nor filled")
        if self.count is not None and self.kind == "images":
            raise ValueError(f"{self.array} begins a video, which no images do")
        if self.past and self.count is None:
            raise ValueError(f"{self.array} is a video's past, and nothing takes how many frames it has")


class Modes(Record, frozen=True, kw_only=True):
    """The modes of a model; a generation uses one of them.

    Attributes:
        names: the modes' names, the default first.
        array: the program input, int32, that takes the number of the mode, from 0.
    """

    names: Annotated[tuple[str, ...], Meta(min_length=1)]
    array: str


class Windows(Record, frozen=True, kw_only=True):
    """The windows of a model that makes videos of any length. Each window has the profile's frames.

    A window begins with the last frames of the one before. Its programs take ``overlap``, the number of these
    frames, and ``later``, 0 for the first window and else 1, both int32.

    Attributes:
        frames_of: the option whose number of frames is that of the result. The other videos are cut to this
            length, or padded to it by reflection.
        overlaps: the possible values of ``overlap``, the default first.
        carried: arrays that pass from window to window: by the input of a window's programs, the output of
            the program that decoded the window before. The first window gets zeros.
    """

    frames_of: MediaOption
    overlaps: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)]
    carried: Mapping[str, str]


class HeldFrame(Record, frozen=True, kw_only=True):
    """The first latent frames, if they may be given. They are not denoised and are kept in the result.

    Attributes:
        condition: the input of a step with the encoded images.
        latents: the key of their latents (C, 1, h, w) in the condition; (C, T, h, w) where an input has a
            ``count``, and as many as it says are held.
        mask: the input of a step, float32 (T,), that is 0 for a held latent frame and else 1; empty where
            they are the first chunks of a video that is made in chunks.
    """

    condition: str
    latents: str
    mask: str = ""


class Task(Record, frozen=True, kw_only=True):
    """A model's task: its inputs besides the prompt, and how a video is made of them.

    Attributes:
        name: the task's name, for people only.
        inputs: the images and videos that it takes, by option.
        modes: the model's modes; None for a model with a single one.
        windows: the windows of a long video; None if every video has the profile's frames.
        held: the first frame that may be given; None if there is no such frame.
        start: the video whose latents, with noise, the steps may begin with, instead of only noise; None if
            no profile is built for it, and then a manifest leaves it out.
    """

    name: str
    inputs: Mapping[MediaOption, Input]
    modes: Modes | None = None
    windows: Windows | None = None
    held: HeldFrame | None = None
    start: MediaOption | None = None

    @property
    def fits(self) -> bool:
        """Whether the option ``fit`` decides the shape of an input."""
        return any(item.fits for item in self.inputs.values())

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """Yields the contradictions between the inputs, the modes and the windows."""
        modes = () if self.modes is None else self.modes.names
        for name, item in self.inputs.items():
            if item.mode is not None and item.mode not in modes:
                yield f"{name} is for an unknown mode: {item.mode}"
            if (item.kind == "images") != (name == SEVERAL):
                yield f"{name} cannot be of kind {item.kind}"
            if item.beside is not None and item.beside not in self.inputs:
                yield f"{name} goes with an unknown input: {item.beside}"
        begun = {(one.array, one.count, one.prepare, one.past) for one in self.inputs.values() if one.count}
        arrays = [name for array, count, *_ in begun for name in (array, count)]
        arrays += [item.array for item in self.inputs.values() if item.count is None]
        arrays += [item.flag for item in self.inputs.values() if item.flag is not None]
        arrays += [] if self.modes is None else [self.modes.array]
        if twice := [array for array, count in Counter(arrays).items() if count > 1]:
            yield f"two inputs are called {twice[0]}"
        if self.start is not None:
            begins = self.inputs.get(self.start)
            if begins is None or begins.kind != "video" or begins.required:
                yield f"steps cannot begin with {self.start}, which is no optional video"
        if self.windows is not None:
            decides = self.inputs.get(self.windows.frames_of)
            if decides is None or decides.kind != "video" or not decides.required or decides.mode is not None:
                yield f"the windows need {self.windows.frames_of}, which is not a video required in all modes"

    @property
    def conditions(self) -> Mapping[MediaOption, Input]:
        """The inputs that steps take, by option: without what they may begin with, or go on after."""
        return {name: item for name, item in self.inputs.items() if name != self.start and not item.past}

    @property
    def past(self) -> Mapping[MediaOption, Input]:
        """The inputs that a video may go on after, by option."""
        return {name: item for name, item in self.inputs.items() if item.past}

    @property
    def counted(self) -> tuple[MediaOption, Input] | None:
        """The option with the profile's number of reference images, and its record; None if there is none."""
        return (SEVERAL, self.inputs[SEVERAL]) if SEVERAL in self.inputs else None

    @property
    def chained(self) -> Input | None:
        """The image that a video begins with, where any frame can be it, and it alone; None if there is none.

        A clip then continues another one whose last frame it takes.
        """
        first, others = self.inputs.get(FIRST), [one for name, one in self.inputs.items() if name != FIRST]
        if first is None or first.past or self.windows is not None or any(one.required for one in others):
            return None
        return first if first.prepare == "resize" and first.size is None else None

    @property
    def always_encodes(self) -> bool:
        """Whether there are arrays to encode even if no image or video is given."""
        return any(item.required or item.default is not None for item in self.inputs.values())
