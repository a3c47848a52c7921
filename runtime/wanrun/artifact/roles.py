"""The roles of programs, and what each of them brings: its calls, its cost, its warm-up, and its proof.

A program's role says when it runs. All that has to do with programs (wiring, warm-up, trials, ``verify``,
``plan``, the cost of a generation) goes through this table, and none of it knows a role by name. What runs
the programs of a role does: ``wanrun.generation``.
"""

from __future__ import annotations

__all__ = ["DECODERS", "Counts"]

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

RoleName = Literal[
    "text", "once", "window", "start", "past", "begin", "prepare", "context", "step", "scan", "chunk",
    "remember", "enter", "keys", "layer", "leave", "decode_first", "decode", "decode_tiny", "spread",
    "attention",
]  # fmt: skip
"""The facts of a program in the manifest.

| role | runs | takes | returns |
|---|---|---|---|
| ``text`` | once per prompt; the shortest one that fits it | ``ids``, ``mask`` | ``embeddings`` |
| ``once`` | first, once for all windows | prepared images and videos | inputs of later programs |
| ``window`` | next, once per window | the same, and what the window before has left | the same |
| ``start`` | next, for a video that the steps begin with | this video | its latents, ``start`` |
| ``past`` | next, for each part of what a video goes on after | its frames | ``mean``, ``deviation`` |
| ``begin`` | before the first chunk | nothing | ``cache`` |
| ``prepare`` | before an expert's steps | ``embeddings`` too | inputs of the steps |
| ``context`` | instead of ``prepare`` where layers stream | ``embeddings`` too | inputs of layers |
| ``step`` | once per step | state, a row of the solver's table | state |
| ``scan`` | once for all steps of an expert | state, the solver's table | state |
| ``chunk`` | once per step of a chunk | state, ``cache``, a row of the solver's table | state |
| ``remember`` | between a chunk and the next one | ``cache``, ``latents`` of the chunk | ``cache`` |
| ``enter`` | at the beginning of a streamed step | state | ``carry``, inputs of layers |
| ``keys`` | before a layer's first run | ``context`` | ``kv`` of this layer |
| ``layer`` | once per layer and step | ``carry``, ``kv`` | ``carry`` |
| ``leave`` | at the end of a streamed step | ``carry``, state, a row of the solver's table | state |
| ``decode_first`` | after the last step, once per video | ``latents`` of one frame | ``frames``, state |
| ``decode`` | next, once per piece of a video | ``latents`` of a piece, state | ``frames``, state |
| ``decode_tiny`` | instead of ``decode``, where a request asks for it | ``latents`` | ``frames`` |
| ``spread`` | when a component's weights come to a mesh | ``rows`` | ``weights`` |
| ``attention`` | in no generation: it shows that the steps' kernel is right | ``q``, ``k``, ``v`` | ``out`` |

A program takes its inputs by name: the prepared images and videos, and outputs of the programs before it.
State is the inputs that a program donates: latents, and whatever else steps pass on; of a decoder what pieces
do. A decoder without state makes a whole video in one call. Programs of streamed
layers take one layer of a stack of the transformer, by the stack's name, or ``outside``, what is in no stack.
"""

DecoderName = Literal["full", "tiny"]
"""The decoders of the last latents: the VAE's, or a tiny one."""

DECODERS: Mapping[str, tuple[RoleName, ...]] = MappingProxyType(
    {"full": ("decode_first", "decode"), "tiny": ("decode_tiny",)}
)
"""The roles of each decoder's programs."""

FormName = Literal["step", "scan", "chunks", "stream"]
"""A form of the denoising loop."""

When = Literal["loading", "prompts", "media", "expert", "steps", "video", "attest"]
"""The part of a generation in which a program runs: as weights come to a mesh, for a prompt, for images and
videos, before an expert's steps, in its steps, and after the last one; or in none, where executables built
elsewhere are compared with what is compiled on their chip."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one generation: how often each thing is done, in one place.

    Attributes:
        form: the form of the loop.
        steps: denoising steps of one window.
        guided: those of them that have guidance, and so two passes.
        experts: transformers that make some of them.
        windows: windows or clips that the video is made in.
        chunks: latent frames of each chunk that a window is made in, one after the other; 0 for all of them.
        given: how many chunks before those are given, and make no steps.
        longer: how many more steps the first chunk has than each of those after it.
        known: whether so many are known; else that of one window, as a video that was not read decides it.
        prompts: prompts, the negative one too if a step has guidance.
        videos: videos per prompt.
        media: windows whose steps take images or videos.
        starts: whether the steps begin with a given video.
        past: parts that are encoded of what the video goes on after: a first frame, and chunks.
        noise: whether the solver adds noise, which the host draws, after each step.
        decoder: what makes the frames: one of ``DECODERS``.
        skipping: the steps that have a third pass, which skips layers.
        frames: frames of one video.
        latents: latent frames that are decoded as one video: those of a window, or of a chunk of it.
        decoded: how many videos a window is decoded as: its chunks, where each is decoded alone, or 1.
        blended: latent frames of a video whose windows make each step together; 0 for windows one by one.
    """

    form: str
    steps: int
    guided: int
    experts: int
    windows: int
    prompts: int
    videos: int
    media: int
    noise: bool
    decoder: str = "full"
    starts: bool = False
    past: int = 0
    skipping: int = 0
    frames: int = 1
    latents: int = 1
    decoded: int = 1
    blended: int = 0
    chunks: tuple[int, ...] = (0,)
    given: int = 0
    longer: int = 0
    known: bool = True

    @property
    def rounds(self) -> int:
        """How often all steps are made: window by window, or once, as those that are blended make them."""
        return 1 if self.blended else self.windows

    @property
    def told_steps(self) -> int:
        """The steps that progress shows."""
        return self.rounds * self.steps * len(self.chunks) + self.longer

    @property
    def all_steps(self) -> int:
        """The steps of all windows."""
        return self.windows * self.steps * len(self.chunks) + self.longer

    def after(self, parts: int) -> Counts:
        """Returns the work that is left where an ended run has made parts: clips, or all steps of windows."""
        if parts and self.blended:  # the other parts are decoded windows
            return msgspec.structs.replace(self, steps=0, guided=0, skipping=0, experts=0)
        left = self.windows - parts
        return msgspec.structs.replace(self, windows=left, media=min(self.media, left))

    def made(self, role: RoleName) -> int:
        """Returns the steps of all windows that programs of a role make."""
        form = FORMS[self.form]
        each = sum(form.maker(index) == role for index in range(self.steps))
        return self.windows * len(self.chunks) * each + (self.longer if each else 0)

    def of_chunks(self, frames: int) -> Counts:
        """Returns the part of those chunks that have so many latent frames."""
        return msgspec.structs.replace(self, chunks=tuple(one for one in self.chunks if one == frames))


Proof = Literal["update", "end", "record", "lengths", "weights", "plain"]
"""The proof that a program computes what it should: what is compared.

| proof | what is compared |
|---|---|
| ``update`` | the state after a call with random state and coefficients, with NumPy's; the velocity, with \
the full step's |
| ``end`` | the same of the program that ends its step |
| ``record`` | the recorded video that it helps to make |
| ``lengths`` | all programs of the role with the shortest one, for an input that fits them all |
| ``weights`` | all that runs with the weights that it brings |
| ``plain`` | its result, with that of its function by XLA's own operations, compiled here |
"""


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. It has no defaults: who adds a role says all of it.

    Attributes:
        name: as the manifest has it.
        when: the part of a generation in which its programs run.
        calls: the calls of each of its programs in a generation; of a program of a layer, for each layer; of
            one of a piece of a video, for each piece.
        makes: whether a program that ends steps makes the one with this number; None for all other programs.
        body: of a loop over steps on the device, the role whose programs are its body, which the compiler
            counts once; None for no loop.
        passes: whether a step's passes are turns of a loop in its programs, which the compiler counts once.
        warm: whether a warm-up runs its programs. The text encoder's have their own.
        proven: what shows that they are right.
    """

    name: RoleName
    when: When
    calls: Callable[[Counts], int]
    makes: Callable[[int], bool] | None
    body: RoleName | None
    passes: bool
    warm: bool
    proven: Proof

    def __post_init__(self) -> None:
        if (self.makes is not None) != (self.proven == "update"):
            raise ValueError(
                f"role {self.name}: a program is proven by its update if it makes steps, and only then"
            )

    @property
    def generates(self) -> bool:
        """Whether a generation runs its programs, or loads them to run others."""
        return self.when != "attest"

    def cost(self, counts: Counts, together: bool = False) -> int:
        """Returns how many times the compiler's figures of a program count in a generation.

        Args:
            counts: the generation's.
            together: whether halves of a mesh make both passes of a step at once.
        """
        turns = self.calls(counts) if self.body is None else counts.all_steps
        if not self.passes:
            return turns
        more = counts.skipping + (0 if together else counts.guided)
        return turns + counts.windows * len(counts.chunks) * more


class Form(msgspec.Struct, frozen=True):
    """A form of the denoising loop.

    Attributes:
        name: its name.
        roles: the roles of its programs, as they run. Of those that make steps the first makes the full ones.
        streams: whether layers pass through the device.
        chunked: whether a video is made chunk by chunk: the only form of a model that does so.
    """

    name: FormName
    roles: tuple[RoleName, ...]
    streams: bool = False
    chunked: bool = False

    @property
    def makers(self) -> tuple[RoleName, ...]:
        """The roles whose programs end a step; all of them pass on the same state."""
        return tuple(name for name in self.roles if ROLES[name].makes is not None)

    @property
    def looped(self) -> bool:
        """Whether one call makes several steps: it takes the solver's table, and the rows' range."""
        return any(ROLES[name].body is not None for name in self.makers)

    def maker(self, index: int) -> RoleName:
        """Returns the role that makes the step of this number: of several, the last one."""
        found = (name for name in reversed(self.makers) if (makes := ROLES[name].makes) and makes(index))
        return next(found)


def _experts(counts: Counts) -> int:
    return counts.rounds * counts.experts


def _steps(counts: Counts) -> int:
    return counts.all_steps


def _videos(counts: Counts, decoder: str) -> int:
    windows = 1 if counts.latents == counts.blended else counts.windows
    return windows * counts.videos * counts.decoded if counts.decoder == decoder else 0


def _each(index: int) -> bool:
    return True


def _beside(
    name: RoleName, when: When, calls: Callable[[Counts], int], proven: Proof = "record", warm: bool = True
) -> Role:
    """Returns the row of a role whose programs end no step, and have no loop that is counted once."""
    return Role(
        name=name, when=when, calls=calls, makes=None, body=None, passes=False, warm=warm, proven=proven
    )


_ROWS = (
    _beside("text", "prompts", lambda counts: counts.prompts, proven="lengths", warm=False),
    _beside("once", "media", lambda counts: int(counts.media > 0)),
    _beside("window", "media", lambda counts: counts.media),
    _beside("start", "media", lambda counts: int(counts.starts)),
    _beside("past", "media", lambda counts: counts.past),
    _beside("begin", "expert", _experts),
    _beside("prepare", "expert", _experts),
    _beside("context", "expert", _experts),
    Role(
        name="step",
        when="steps",
        calls=lambda counts: counts.made("step"),
        makes=_each,
        body=None,
        passes=True,
        warm=True,
        proven="update",
    ),
    Role(
        name="scan",
        when="steps",
        calls=lambda counts: _steps(counts) if counts.noise or counts.blended else _experts(counts),
        makes=_each,
        body="step",
        passes=True,
        warm=True,
        proven="update",
    ),
    Role(
        name="chunk",
        when="steps",
        calls=lambda counts: counts.made("chunk"),
        makes=_each,
        body=None,
        passes=True,
        warm=True,
        proven="update",
    ),
    _beside("remember", "steps", lambda counts: counts.windows * (counts.given + len(counts.chunks) - 1)),
    _beside("enter", "steps", _steps, proven="end"),
    _beside("keys", "expert", _experts, proven="end"),
    Role(
        name="layer", when="steps", calls=_steps, makes=None, body=None, passes=True, warm=True, proven="end"
    ),
    Role(
        name="leave",
        when="steps",
        calls=_steps,
        makes=_each,
        body=None,
        passes=False,
        warm=True,
        proven="update",
    ),
    _beside("decode_first", "video", lambda counts: _videos(counts, "full")),
    _beside("decode", "video", lambda counts: _videos(counts, "full")),
    # The tiny decoder's weights are read where a request asks for them.
    _beside("decode_tiny", "video", lambda counts: _videos(counts, "tiny"), warm=False),
    _beside("spread", "loading", lambda counts: 0, proven="weights", warm=False),
    # A kernel that is compiled again repeats its own fault.
    _beside("attention", "attest", lambda counts: 0, proven="plain", warm=False),
)

ROLES: Mapping[str, Role] = MappingProxyType({role.name: role for role in _ROWS})
"""By name, in the order in which they run."""

_FORMS = (
    Form("step", ("prepare", "step")),
    Form("scan", ("prepare", "scan")),
    Form("chunks", ("begin", "prepare", "chunk", "remember"), chunked=True),
    Form("stream", ("context", "enter", "keys", "layer", "leave"), streams=True),
)

FORMS: Mapping[str, Form] = MappingProxyType({form.name: form for form in _FORMS})
"""The forms of the denoising loop, the preferred one first."""

STEPWISE: FormName = "step"
"""The form with a call for each step, and the host's word between them."""


LOOPS = ("both", *FORMS, "all")
"""The forms that a profile is built with: one form, those of whole steps, or all but that of chunks."""


def roles_of(form: str, decoder: str = "full") -> tuple[Role, ...]:
    """Returns the roles of a generation with this form of the loop, without those that bring weights.

    Args:
        form: one of ``FORMS``.
        decoder: one of ``DECODERS``.
    """
    forms = {name for one in FORMS.values() for name in one.roles}
    others = forms | {name for roles in DECODERS.values() for name in roles}
    others -= {*FORMS[form].roles, *DECODERS[decoder]}
    return tuple(
        role for name, role in ROLES.items() if role.when not in ("loading", "attest") and name not in others
    )


def roles_when(*when: When) -> tuple[RoleName, ...]:
    """Returns the names of the roles whose programs run in these parts of a generation."""
    return tuple(role.name for role in ROLES.values() if role.when in when)


def forms_of(loop: str) -> tuple[str, ...]:
    """Returns the forms that a profile is built with, the preferred one first, for its choice of them."""
    every = tuple(form for form in FORMS.values() if not form.chunked)
    whole = tuple(form.name for form in every if not form.streams)
    return {"both": whole, "all": tuple(form.name for form in every)}.get(loop, (loop,))
