"""The manifest's records of programs, of their static shapes (profiles), and of program sets."""

from __future__ import annotations

__all__ = ["PlainFile", "num_pieces"]

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import force_setattr

from wanrun.artifact.guiders import SKIPPED_LAYERS, GuiderName
from wanrun.artifact.mesh import check_rules, check_sizes
from wanrun.artifact.record import AtLeastOne, Dtype, ListedFile, NotNegative, Record
from wanrun.artifact.roles import DECODERS, ROLES, FormName, RoleName, forms_of
from wanrun.errors import ArtifactError
from wanrun.files import canonical_json, plain_relative, sha256_of

_DTYPE = r"(?:bool|u?int(?:4|8|16|32|64)|bfloat16|float(?:16|32|64)|float8_[a-z0-9]{1,14})"
_AVAL = re.compile(_DTYPE + r"\[(?:[0-9]{1,12}(?:,[0-9]{1,12}){0,7})?\]")


def aval(text: str) -> tuple[str, tuple[int, ...]]:
    """Returns dtype and shape of an array described as ``float32[2,3]``."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return dtype, tuple(int(size) for size in sizes.split(",") if size)


def _check_avals(avals: Any, where: str) -> None:
    """Raises ValueError unless these are descriptions of arrays, in nested dicts or not."""
    if isinstance(avals, Mapping):
        for name, item in avals.items():
            _check_avals(item, f"{where}.{name}")
    elif not (isinstance(avals, str) and _AVAL.fullmatch(avals)):
        raise ValueError(f"{where} is described as {avals!r}, not as float32[2,3]")


class PlainFile(ListedFile, frozen=True, kw_only=True):
    """The file of a program's function by XLA's own operations, serialized like a program's."""

    what: ClassVar[str] = "a program"


class Program(Record, frozen=True):
    """One exported program.

    Attributes:
        file: its serialized ``jax.export`` module, relative to the artifact.
        sha256: digest of this file.
        inputs: input names in order; a component's name stands for its weights.
        donate: indices of donated inputs.
        avals: dtype and shape of inputs and outputs as text, ``float32[2,3]``; nested dicts for a pytree.
        role: when it runs: see ``wanrun.artifact.roles``.
        place: its place among the programs of its role, from 0. Programs that run one after the other do so
            in this order.
        plain: the same function by XLA's own operations, with the same inputs and outputs, for a program that
            is proven by it; a manifest leaves None out.
    """

    file: str
    sha256: str
    inputs: tuple[str, ...]
    donate: tuple[NotNegative, ...]
    avals: Mapping[str, Mapping[str, Any]]
    role: RoleName
    place: NotNegative = 0
    plain: PlainFile | None = None

    def __post_init__(self) -> None:
        plain_relative(self.file, "a program")
        if len(set(self.inputs)) < len(self.inputs):
            raise ValueError(f"the inputs of a program are not distinct: {self.inputs}")
        if len(set(self.donate)) < len(self.donate) or max(self.donate, default=-1) >= len(self.inputs):
            raise ValueError(f"donate of a program with {len(self.inputs)} inputs is {self.donate}")
        if self.avals.keys() != {"inputs", "outputs"}:
            raise ValueError(f"avals of a program are of {sorted(self.avals)}, not of inputs and outputs")
        _check_avals(self.avals, "avals")
        if (self.plain is None) == (ROLES[self.role].proven == "plain"):
            raise ValueError(
                f"a program of role {self.role} is stored {'with' if self.plain else 'without'} plain"
            )
        taken, returned = self.avals["inputs"].keys(), self.avals["outputs"].keys()
        if ROLES[self.role].makes and not (set(self.donated) == returned and returned <= taken):
            raise ValueError(
                f"a step returns {sorted(returned)}, donates {self.donated}, takes {sorted(taken)}"
            )

    @property
    def donated(self) -> tuple[str, ...]:
        """Names of donated arguments."""
        return tuple(self.inputs[index] for index in self.donate)

    def pieces(self, frames: int) -> int:
        """Returns how often it runs for a video of so many latent frames where any other one runs once."""
        if ROLES[self.role].when != "video" or not self.donate:
            return 1
        return num_pieces(frames, self.array("latents")[1][1], self.inputs)

    def array(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape of an input that is one array; raises ArtifactError if there is none."""
        text = self.avals.get("inputs", {}).get(name)
        if not isinstance(text, str):
            raise ArtifactError(
                "not_built",
                f"{self.file} takes no array {name}",
                expected=f"one of role {self.role}",
                found=text,
                remedy="build the artifact again",
            )
        return aval(text)


def num_pieces(frames: int, size: int, inputs: Collection[str]) -> int:
    """Returns how often a decoder that makes one piece of a video in a call is called for a video.

    Args:
        frames: latent frames of the video.
        size: those of a piece.
        inputs: names of its inputs: with ``first``, the first frame is a piece too, else another program's.
    """
    return -(-(frames - 1) // size) + ("first" in inputs)


def decodes_any_length(programs: Mapping[str, Program], decoder: str | None = None) -> bool:
    """Returns whether a decoder, the VAE's if None, makes videos of any number of frames.

    Such a decoder passes on a state from piece to piece. ``programs`` are those of a profile.
    """
    return any(one.donated for one in programs.values() if one.role == DECODERS[decoder or "full"][-1])


def with_role(programs: Mapping[str, Program], *roles: str) -> tuple[str, ...]:
    """Returns the names of the programs with these roles: role after role, each in the order of places."""
    found = [(roles.index(one.role), one.place, name) for name, one in programs.items() if one.role in roles]
    return tuple(name for *_, name in sorted(found))


Precision = Literal["high", "highest"]
"""A precision of float32 products that JAX knows by this name."""


class ProfileOptions(Record, frozen=True, kw_only=True):
    """A profile's build options: with its shape and the target, they determine its programs.

    Attributes:
        dtype: compute dtype of the text encoder and the transformer.
        vae_dtype: compute dtype of the VAE.
        vae_precision: JAX's precision of the VAE's float32 products on chips.
        scheduler_dtype: dtype of latents and solver history between steps.
        vae_decode_chunk: latent frames decoded at a time.
        vae_encode_chunk: latent frames encoded at a time.
        vae_tile: side in pixels of the tiles that the VAE works in; 0 for none, a manifest leaves 0 out.
        nag: whether steps can take a negative prompt without guidance: see ``wanrun.artifact.guiders``. A
            manifest leaves False out.
        loop: forms of the denoising loop: ``step``, ``scan``, ``both`` of these, ``stream``, or ``all``.
        max_steps: the most steps of the scan form.
        weights_dtype: storage dtype of the transformer.
        text_weights_dtype: storage dtype of the text encoder.
        vae_weights_dtype: storage dtype of the VAE.
        image_weights_dtype: storage dtype of the image encoder; None for a model without one.
        lora_rank: rank of the slots beside the transformer's weights; 0 for none, a manifest leaves 0 out.
        guiders: those besides ``cfg`` that steps can use; a manifest leaves an empty list out.
        video_to_video: whether steps can begin with a video; a manifest leaves false out.
    """

    dtype: Dtype
    vae_dtype: Dtype
    scheduler_dtype: Dtype
    vae_decode_chunk: AtLeastOne
    vae_encode_chunk: AtLeastOne
    loop: Literal["both", "all"] | FormName
    max_steps: AtLeastOne
    weights_dtype: Dtype
    text_weights_dtype: Dtype
    vae_weights_dtype: Dtype
    image_weights_dtype: Dtype | None = None
    vae_precision: Precision = "highest"
    lora_rank: NotNegative = 0
    guiders: tuple[GuiderName, ...] = ()
    vae_tile: NotNegative = 0
    video_to_video: bool = False
    nag: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the denoising loop, the preferred one first."""
        return forms_of(self.loop)


LATER_OPTIONS = tuple(
    field.name for field in msgspec.structs.fields(ProfileOptions) if field.default in ((), 0)
)
"""Options that came later: a manifest leaves them out where they are not used."""


class Profile(Record, frozen=True):
    """One static shape and the build options of its programs.

    Attributes:
        width: pixels.
        height: pixels.
        num_frames: frames of one video.
        num_videos: videos per prompt in one run.
        guidance: whether its steps can have classifier-free guidance: a second pass, for the negative prompt.
        index: position in the order of building; the first profile is the default.
        options: the build options.
        num_references: reference images; each is a latent frame in front of the video's.
    """

    width: AtLeastOne
    height: AtLeastOne
    num_frames: AtLeastOne
    num_videos: AtLeastOne
    guidance: bool
    index: NotNegative
    options: ProfileOptions
    num_references: NotNegative = 0

    @property
    def name(self) -> str:
        """Size, frames, videos, guidance and any reference images, as in ``832x480x81-b1-cfg``."""
        guidance = "cfg" if self.guidance else "nocfg"
        references = f"-r{self.num_references}" if self.num_references else ""
        return f"{self.width}x{self.height}x{self.num_frames}-b{self.num_videos}-{guidance}{references}"

    @property
    def num_prompts(self) -> int:
        """The prompts whose keys and values its programs take: the prompt, and a negative one."""
        return 2 if self.guidance or self.options.nag else 1

    @property
    def shape(self) -> dict[str, Any]:
        """Its shape, by the options that choose a profile; ``size`` is (width, height) in pixels."""
        names = ("num_frames", "num_videos", "guidance", "num_references")
        return {"size": (self.width, self.height), **{name: getattr(self, name) for name in names}}

    @property
    def compile_options(self) -> str:
        """The options by which ``wanbuild compile`` builds this shape, whatever its defaults are."""
        options = f"--size {self.width}x{self.height} --frames {self.num_frames}"
        options += " --guidance" if self.guidance else " --no-guidance"
        options += f" --num-videos {self.num_videos}" if self.num_videos > 1 else ""
        options += f" --lora-rank {self.options.lora_rank}" if self.options.lora_rank else ""
        options += "".join(f" --guider {name}" for name in self.options.guiders)
        options += " --nag" if self.options.nag else ""
        options += f" --vae-tile {self.options.vae_tile}" if self.options.vae_tile else ""
        options += " --video-to-video" if self.options.video_to_video else ""
        return options + (f" --reference-images {self.num_references}" if self.num_references else "")


class Kernels(Record, frozen=True, omit_defaults=True):
    """The implementations that suit a kind of machine; all of them compute the same functions.

    Attributes:
        attention: the form of the attention: ``cpu`` (blocks of queries), ``flash`` (Pallas kernels for
            TPUs), ``cudnn``, or ``wgmma`` and ``tcgen05`` (kernels in Mosaic GPU for NVIDIA GPUs of compute
            capability 9.0 and 10.0, which are compiled without them).
        convolution: the form of the VAE's convolutions.
        weight_bits: whether weights of ``BITS`` are passed, and sliced, as integers of the same bits.
        image_multiple: image tokens are padded to a multiple of this.
        attention_blocks: of ``flash`` the queries in a block, and queries and keys computed at once; of
            kernels in Mosaic GPU the queries in a tile, the keys in a block and the blocks on their way; else
            empty.
        float32_precision: JAX's precision of float32 matrix products and convolutions. A TPU's own rounds
            their operands to bfloat16, an NVIDIA GPU's to TF32.
        pieces_alike: whether the VAE's first frame is padded to a piece like all others, so that its layers
            are compiled once, for the time of one more piece.
        products: ``widened`` if layers and attention convert bfloat16 operands to float32 before they
            multiply, one layer's weights at a time: a CPU without bfloat16 instructions is faster. Products
            are the same, and attention's weights are not rounded. ``rounded`` if layers round the results of
            bfloat16 products before anything else is done to them: a GPU's library writes half the bytes.
        w8a8: whether a transformer's layers of 8-bit weights multiply in 8 bits, with the activations of each
            token rounded to the weights' dtype. Results differ from the other form's.
    """

    attention: str
    convolution: Literal["direct", "winograd"]
    weight_bits: bool
    image_multiple: AtLeastOne
    attention_blocks: tuple[AtLeastOne, ...] = ()
    float32_precision: Literal["default", "high", "highest"] = "default"
    pieces_alike: bool = False
    products: Literal["native", "widened", "rounded"] = "native"
    w8a8: bool = False

    def __post_init__(self) -> None:
        # msgspec leaves out a default by its identity, which a text that was pickled does not have.
        for name in ("float32_precision", "products"):
            force_setattr(self, name, sys.intern(getattr(self, name)))


class ProgramSet(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The programs for one platform, one choice of kernels and one mesh; several targets may share them.

    Attributes:
        platform: JAX's platform name.
        kernels: the implementations in the programs.
        mesh: devices by axis of the mesh that the programs are partitioned over; empty for one device. See
            ``wanrun.artifact.mesh``.
        rules: on a mesh, the axes that a logical axis of a parameter is cut along.
        jax: version of the JAX that exported the programs.
        programs: by profile and program name.
        exported: the days of exports in an artifact that has them; nothing reads or writes them.
        layers: where layers stream, the stacks of the transformer, each with the layers of the first one that
            its own follow.
    """

    platform: str
    kernels: Kernels
    mesh: Mapping[str, AtLeastOne]
    jax: str
    programs: Mapping[str, Mapping[str, Program]]
    rules: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    layers: Mapping[str, tuple[NotNegative, ...]] = msgspec.field(default_factory=dict)
    exported: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sizes(self.mesh)
        check_rules(self.rules)

    def skippable_layers(self, profile: str) -> int:
        """Returns how many layers the steps of a profile can skip some of; 0 if the profile is not here."""
        programs = self.programs.get(profile, {}).values()
        taking = next((one for one in programs if SKIPPED_LAYERS in one.inputs), None)
        if taking is not None:
            return taking.array(SKIPPED_LAYERS)[1][-1]
        return max(map(len, self.layers.values()), default=0) if programs else 0  # the host skips them

    @property
    def key(self) -> str:
        """The platform, and a digest of the facts that change a profile's programs: ``cpu-1a2b3c4d``."""
        facts = {"kernels": self.kernels, "mesh": self.mesh, "jax": self.jax}
        digest = sha256_of(canonical_json(msgspec.to_builtins({"platform": self.platform, **facts})))
        return f"{self.platform}-{digest[:8]}"
