"""Initial noise in NumPy: the values of ``torch.randn`` with a seeded CPU generator, without torch.

The generator is MT19937. Normals come from the Box-Muller transform in one of two arrangements, which
``torch.Tensor.normal_`` chooses by size. Logarithm, sine and cosine are computed here with additions,
multiplications, divisions and square roots in float64, which IEEE 754 rounds alike on every machine;
NumPy's ``log`` and ``cos`` use another implementation per instruction set. So a seed gives the same bits
everywhere. The largest difference from torch is one float32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wanrun.errors import UsageError, quoted
from wanrun.files import sha256_of

_BLOCK = 16  # torch transforms 8 pairs at a time, and draws values one by one below this size
_CHUNK_BLOCKS = 2048  # 128 kB per float64 temporary, to stay in the L2 cache
_TWO_PI_32 = np.float32(2 * np.pi)
_HALF_PI = np.pi / 2

# Taylor coefficients, highest power first. For |r| <= pi/4 the first omitted term is below 2e-15.
_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(7, -1, -1))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(8, -1, -1))
# log m = 2 s (1 + s²/3 + s⁴/5 + ...), s = (m-1)/(m+1); |s| <= 0.1716, first omitted term below 1e-15.
_ATANH = tuple(1 / (2 * k + 1) for k in range(8, -1, -1))


def check_seed(seed: int) -> None:
    """Raises UsageError unless the seed is 0 to 2**64 - 1."""
    if not 0 <= seed < 2**64:
        raise UsageError(
            "out_of_range", "the seed is out of range", expected="0 to 2**64 - 1", found=quoted(seed)
        )


def clip_seed(seed: int, clip: int) -> int:
    """Returns the seed of a clip of a video with a seed, from 0: the first clip's is the video's own.

    A later one's is the first four bytes, the lowest last, of the sha256 of ``SEED/CLIP`` in decimal digits:
    videos with seeds in a row have no clips in common.
    """
    return seed if not clip else int(sha256_of(f"{seed}/{clip}".encode())[:8], 16)


class Noise:
    """A sequence of standard normal arrays from a seed, the same on every machine.

    Each array is within 1e-6 of the corresponding ``torch.randn(shape, generator=generator)``, with
    ``generator = torch.Generator("cpu").manual_seed(seed)``, which diffusers' ``randn_tensor`` draws. (For an
    odd number of values below 16, torch keeps one value for the next call; this class does not.)

    Args:
        seed: 0 to 2**64 - 1. As in torch, only the low 32 bits reach the generator.

    Raises:
        UsageError: if the seed is out of range.
    """

    def __init__(self, seed: int) -> None:
        check_seed(seed)
        self._generator = np.random.RandomState(seed % 2**32)

    def __call__(self, shape: Sequence[int]) -> np.ndarray:
        """Returns the next float32 array of this shape, for latents (B, C, T, H, W)."""
        size = math.prod(shape)
        flat = _small(self._generator, size) if size < _BLOCK else _blocks(self._generator, size)
        return flat.reshape(tuple(shape))

    def uniform(self, count: int) -> np.ndarray:
        """Returns the next numbers of [0, 1), float32 (count,): those of ``torch.rand``."""
        return ((_draws(self._generator, count) & np.uint32(2**24 - 1)) * 2.0**-24).astype(np.float32)


def initial_noise(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Returns the first array of ``Noise(seed)``; arguments and errors are the same."""
    return Noise(seed)(shape)


def _draws(generator: np.random.RandomState, count: int) -> np.ndarray:
    """Returns the generator's next ``count`` 32-bit outputs; ``bytes`` gives the lowest byte first."""
    return np.frombuffer(generator.bytes(4 * count), dtype="<u4")


def _blocks(generator: np.random.RandomState, size: int) -> np.ndarray:
    """Draws 16 or more values: single precision uniforms, 8 pairs to a block of 16."""
    # If the size is not a multiple of 16, the last 16 values are drawn again.
    noise = np.empty(size, np.float32)
    whole = size - size % _BLOCK
    uniforms = _draws(generator, size)[:whole].reshape(-1, _BLOCK)
    blocks = noise[:whole].reshape(-1, _BLOCK)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        _transform_blocks(uniforms[start : start + _CHUNK_BLOCKS], blocks[start : start + _CHUNK_BLOCKS])
    if whole != size:
        _transform_blocks(_draws(generator, _BLOCK)[None], noise[-_BLOCK:][None])
    return noise


def _transform_blocks(draws: np.ndarray, out: np.ndarray) -> None:
    """Fills out (blocks, 16) from draws (blocks, 16): radii from the first 8, angles from the last 8."""
    uniforms = (draws & np.uint32(2**24 - 1)) * 2.0**-24
    half = _BLOCK // 2
    # torch computes in float32. Rounding the angle in the same way matters most (up to 1e-6 in a value).
    radius = np.sqrt(-2 * _log(1.0 - uniforms[:, :half]).astype(np.float32))
    angle = (uniforms[:, half:].astype(np.float32) * _TWO_PI_32).astype(np.float64)
    sine, cosine = _sin_cos(angle)
    np.multiply(radius, cosine.astype(np.float32), out=out[:, :half])
    np.multiply(radius, sine.astype(np.float32), out=out[:, half:])


def _small(generator: np.random.RandomState, size: int) -> np.ndarray:
    """Draws fewer than 16 values: double precision pairs, angle before radius, cosine before sine."""
    pairs = (size + 1) // 2
    words = _draws(generator, 4 * pairs).astype(np.uint64).reshape(pairs, 2, 2)
    uniforms = ((words[..., 0] << np.uint64(32) | words[..., 1]) & np.uint64(2**53 - 1)) * 2.0**-53
    radius = np.sqrt(-2.0 * _log(1.0 - uniforms[:, 1]))
    sine, cosine = _sin_cos(2 * np.pi * uniforms[:, 0])
    return np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)[:size].astype(np.float32)


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    """Evaluates a polynomial by Horner's rule; coefficients have the highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += coefficient
    return result


def _log(x: np.ndarray) -> np.ndarray:
    """Returns the logarithm of float64 values in (0, 1]; within 1e-15 relative to max(1, |log x|)."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)  # moves the mantissa into [sqrt(1/2), sqrt(2))
    mantissa = np.where(low, mantissa * 2, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    return (exponent - low) * math.log(2) + 2 * s * _polynomial(_ATANH, s * s)


def _sin_cos(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns sine and cosine of float64 values in [0, 2 pi]; within 1e-15."""
    quadrant = np.rint(x * (1 / _HALF_PI))
    r = x - quadrant * _HALF_PI
    square = r * r
    sine, cosine = r * _polynomial(_SIN, square), _polynomial(_COS, square)
    turn = quadrant.astype(np.int8) & 3
    swap = (turn & 1).astype(bool)
    rotated_sine, rotated_cosine = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    np.negative(rotated_sine, out=rotated_sine, where=turn >= 2)
    np.negative(rotated_cosine, out=rotated_cosine, where=(turn == 1) | (turn == 2))
    return rotated_sine, rotated_cosine
