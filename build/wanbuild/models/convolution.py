"""Convolutions of the VAE: one signature, and the fastest form for the target's platform.

``direct`` is one ``conv_general_dilated``, for which accelerators have units, or a matmul where there are few
inputs or outputs. ``winograd`` is for the CPU backend, whose convolutions already run at its matmul rate, so
only fewer multiplications help. Winograd's minimal filtering F(2,3) along time, height and width takes 64
products for 8 outputs, where the direct sum takes 216 (Lavin and Gray, arXiv:1509.09308). It needs only
additions and halves, so its rounding error is about that of the direct sum. Larger tiles multiply less but
lose digits: F(4,3) along one axis is 15 % faster and doubles the error.

Activations are (B, T, H, W, C), kernels (T, H, W, I, O) of any float dtype. Results have x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Algorithm = Literal["direct", "winograd"]

_NARROW = 16
"""Below this many channels a Winograd transform costs more than the products that it saves."""

_KERNEL_BYTES = 16 << 20
"""A larger transformed kernel does not stay in the caches; its transform then costs time in proportion."""

_FEW_POSITIONS = 512
"""Below this many outputs per channel, that cost exceeds the saving from fewer products."""

_BAND_BYTES = 16 << 20
"""Output bytes per band of rows: limits the transforms' memory while products stay large enough."""


def conv3x3x3(x: jax.Array, kernel: jax.Array, algorithm: Algorithm) -> jax.Array:
    """Convolves x (B, T + 2, H, W, I) with a kernel (3, 3, 3, I, O) to (B, T, H, W, O).

    The first two frames are history; the padding in space is zeros.
    """
    if kernel.shape[-1] < _NARROW:
        return _few_outputs(x, kernel)
    if kernel.shape[-2] < _NARROW:
        return _few_inputs(x, kernel)
    if algorithm == "direct":
        return _direct(x, kernel)
    B, frames, H, W = x.shape[0], x.shape[1] - 2, *x.shape[2:4]
    long = 4**3 * 4 * kernel.shape[-2] * kernel.shape[-1] > _KERNEL_BYTES
    if long and B * frames * H * W < _FEW_POSITIONS:
        return _direct(x.astype(jnp.float32), _late(kernel, x)).astype(x.dtype)
    # An odd number of frames is padded to even; the extra output is cut off.
    x = jnp.pad(x, ((0, 0), (0, frames % 2), (0, 0), (0, 0), (0, 0)))
    return _winograd(x, kernel)[:, :frames]


def conv3x3(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves every frame of x (B, T, H, W, I) with (3, 3, I, O) to (B, T, H / stride, W / stride, O).

    The padding is zeros: on all sides for stride 1, below and right for stride 2.
    """
    B, T, H, W, _ = x.shape
    padding = [(1, 1), (1, 1)] if stride == 1 else [(0, 1), (0, 1)]
    y = lax.conv_general_dilated(
        x.reshape(B * T, H, W, -1),
        kernel.astype(x.dtype),
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(B, T, *y.shape[1:])


def upsample_conv3x3(x: jax.Array, kernel: jax.Array, algorithm: Algorithm) -> jax.Array:
    """Upsamples height and width by two (nearest), then convolves 3x3 with zero padding in space.

    x is (B, T, H, W, I), the kernel (3, 3, I, O), and the result (B, T, 2H, 2W, O).
    """
    if algorithm == "winograd":
        return _upsample_minimal(x, kernel)
    return _upsample_phases(x, kernel)


def taps(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves along time only with a kernel (K, I, O), as one matmul over taps and channels.

    x has history in front: (B, T + K - 1, H, W, I) for stride 1, and one frame, (B, T + 1, H, W, I), for
    stride 2. The result is (B, T / stride, H, W, O).
    """
    size = kernel.shape[0]
    out = (x.shape[1] - size) // stride + 1
    windows = [lax.slice_in_dim(x, k, k + (out - 1) * stride + 1, stride, 1) for k in range(size)]
    return _dot(jnp.concatenate(windows, -1), kernel.reshape(-1, kernel.shape[-1])).astype(x.dtype)


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """(..., I) by (I, O), accumulated and returned in float32."""
    return lax.dot_general(
        x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _direct(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (1, 1, 1),
        [(0, 0), (1, 1), (1, 1)],
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )


def _few_outputs(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves 3x3x3 with few outputs: one matmul for every tap's product, then a sum of 27 shifts."""
    # On a CPU it runs at twice the rate of a convolution that fills 3 lanes of 16. A TPU's compiler estimates
    # a fifth of the cycles, and takes half a second instead of 34.
    T, H, W, out = x.shape[1] - 2, x.shape[2], x.shape[3], kernel.shape[-1]
    y = _dot(x, jnp.moveaxis(kernel, 3, 0).reshape(x.shape[-1], -1))
    y = jnp.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    products = [
        y[:, t : t + T, h : h + H, w : w + W, ((t * 3 + h) * 3 + w) * out :][..., :out]
        for t in range(3)
        for h in range(3)
        for w in range(3)
    ]
    return sum(products[1:], products[0]).astype(x.dtype)


def _few_inputs(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """3x3x3 convolution with few inputs: one 3x3 convolution with the time taps stacked in channels."""
    T = x.shape[1] - 2
    x = jnp.concatenate([x[:, k : k + T] for k in range(3)], -1)
    return conv3x3(x, jnp.concatenate(list(kernel), axis=-2))


# F(2,3): the two outputs y of three taps g over four inputs d are y = A ((G g) * (B d)).


def _points(x: jax.Array, axis: int) -> list[jax.Array]:
    """Returns B d along one axis: four arrays, each with (size - 2) / 2 entries along it."""
    count = (x.shape[axis] - 2) // 2
    d = [lax.slice_in_dim(x, k, k + 2 * count - 1, 2, axis) for k in range(4)]
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _outputs(m: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns A m: the even and the odd outputs."""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _awaiting(x: jax.Array) -> jax.Array:
    """Returns a float32 one that depends on x."""
    # The CPU backend first runs operations without pending inputs, so all layers' kernels would be converted
    # or transformed at once and held (5.3 GB for the published 2.2 decoder). A barrier does not prevent that.
    return jnp.where(jnp.isnan(x[0, -1, 0, 0, 0]), jnp.nan, 1.0).astype(jnp.float32)


def _late(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the kernel in float32; a conversion waits for x."""
    if kernel.dtype == jnp.float32:
        return kernel
    # The barrier keeps XLA from converting the kernels before a loop over pieces.
    kernel, one = lax.optimization_barrier((kernel, _awaiting(x).astype(kernel.dtype)))
    return (kernel * one).astype(jnp.float32)


def _transformed(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """Returns G g in time, height and width, after x: (3, 3, 3, I, O) to (4, 4, 4, I, O) in float32."""
    # One matmul reads the kernel once and takes half the time of three passes of sums. Its factors are powers
    # of two, so only the sums round.
    g = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
    factors = np.kron(np.kron(g, g), g) * _awaiting(x)  # (64, 27)
    y = lax.dot_general(factors, _late(kernel, x).reshape(27, -1), (((1,), (0,)), ((), ())))
    return y.reshape(4, 4, 4, *kernel.shape[3:])


def _winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """F(2,3) in time, height and width: (B, T + 2, H, W, I), T even, to (B, T, H, W, O)."""
    kernel, x = lax.optimization_barrier((kernel, x))
    kernel = _transformed(kernel, x)

    def band(x: jax.Array) -> jax.Array:
        # A loop over the four points in time needs the memory of one point and compiles in a third of the
        # time of an unrolled loop, at the same speed.
        products = lax.map(lambda a: _plane(*a), (jnp.stack(_points(x, 1)), kernel))
        y = jnp.stack(_outputs(list(products)), 2)
        return y.reshape(y.shape[0], -1, *y.shape[3:])

    return _in_bands(band, x, (x.shape[1] - 2, kernel.shape[-1]), unit=2, scale=1)


def _plane(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """(B, T, H + 2, W + 2, I) to (B, T, H, W, O) with a transformed kernel (4, 4, I, O)."""
    B, T, H, W = (n - k for n, k in zip(x.shape, (0, 0, 2, 2), strict=False))
    rows = [
        _outputs([_dot(d, kernel[i, j]) for j, d in enumerate(_points(row, 3))])
        for i, row in enumerate(_points(x, 2))
    ]
    columns = [_outputs(column) for column in zip(*rows, strict=True)]  # [odd in W][odd in H]
    y = jnp.stack([jnp.stack(pair, 4) for pair in zip(*columns, strict=True)], 3)
    return y.reshape(B, T, H, W, -1)


def _upsample_phases(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Upsamples and convolves as one 2x2 convolution with the four outputs of a pixel as channels."""
    # Along one axis, the outputs at input i read i-1, i with the taps g0, g1 + g2, and i, i+1 with g0 + g1,
    # g2. So 4 outputs take 16 products, where the direct sum takes 36 and an input of four times the size.
    B, T, H, W, _ = x.shape
    kernel, out = kernel.astype(jnp.float32), kernel.shape[-1]

    def pairs(g: jax.Array) -> jax.Array:
        """Returns the two taps of both outputs: (3, ...) to (2 outputs, 2 taps, ...)."""
        return jnp.stack([jnp.stack([g[0], g[1] + g[2]]), jnp.stack([g[0] + g[1], g[2]])])

    # (column output, column tap, row output, row tap, I, O) to (row tap, column tap, I, row output, ...)
    phases = pairs(jnp.moveaxis(pairs(kernel), 2, 0)).transpose(3, 1, 4, 2, 0, 5)
    y = lax.conv_general_dilated(
        x.reshape(B * T, H, W, -1),
        phases.reshape(2, 2, -1, 4 * out).astype(x.dtype),
        (1, 1),
        [(1, 1), (1, 1)],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ).reshape(B, T, H + 1, W + 1, 2, 2, out)
    rows = [jnp.stack([y[:, :, i : i + H, j : j + W, i, j] for j in range(2)], 4) for i in range(2)]
    return jnp.stack(rows, 3).reshape(B, T, 2 * H, 2 * W, out)


def _upsample_minimal(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Upsamples and convolves with 9 products for 4 outputs, where the direct sum takes 36."""
    # Along one axis, the two outputs at input i read i-1, i, i and i, i, i+1. With s the sum of the three
    # taps, they are s x[i] + g0 (x[i-1] - x[i]) and s x[i] + g2 (x[i+1] - x[i]).
    kernel = kernel.astype(jnp.float32)
    by_row = [kernel[0], kernel[0] + kernel[1] + kernel[2], kernel[2]]
    kernels = [[g[0], g[0] + g[1] + g[2], g[2]] for g in by_row]

    def points(x: jax.Array, axis: int) -> list[jax.Array]:
        size = x.shape[axis] - 2
        before, here, after = (lax.slice_in_dim(x, k, k + size, 1, axis) for k in range(3))
        return [before - here, here, after - here]

    def band(x: jax.Array) -> jax.Array:
        rows = []
        for i, row in enumerate(points(x, 2)):
            m = [_dot(d, kernels[i][j]) for j, d in enumerate(points(row, 3))]
            rows.append((m[1] + m[0], m[1] + m[2]))
        pairs = [jnp.stack([rows[1][w] + rows[h][w] for w in range(2)], 4) for h in (0, 2)]
        y = jnp.stack(pairs, 3)
        return y.reshape(*y.shape[:2], y.shape[2] * 2, -1, y.shape[-1])

    return _in_bands(band, x, (x.shape[1], kernel.shape[-1]), unit=1, scale=2)


def _in_bands(
    band: Callable[[jax.Array], jax.Array], x: jax.Array, out: tuple[int, int], unit: int, scale: int
) -> jax.Array:
    """Applies a 3x3 neighbourhood function to bands of rows: its memory does not grow with height."""
    # x (B, ·, H, W, I) gives (B, T, scale · H, scale · W, O), with out = (T, O); a band (B, ·, rows + 2, W +
    # 2, I) gives (B, T, scale · rows, scale · W, O) in float32; rows and W are multiples of `unit`. The
    # arithmetic is in float32 for any dtype of x: the CPU has bfloat16 arithmetic only in products, and
    # rounding each transformed value would lose more digits than bfloat16 storage does.
    B, _, H, W, channels = x.shape
    row_bytes = 4 * B * out[0] * W * max(channels, out[1] * scale**2)
    rows = _band_rows(H, unit, max(unit, _BAND_BYTES // row_bytes))
    bands = -(-H // rows)
    width = -(-W // unit) * unit
    anything = x[0, -1, 0, 0, 0]
    x = jnp.pad(x, ((0, 0), (0, 0), (1, bands * rows - H + 1), (1, width - W + 1), (0, 0)))

    def step(i: jax.Array | int, y: jax.Array) -> jax.Array:
        piece = lax.dynamic_slice_in_dim(x, i * rows, rows + 2, 2).astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(y, band(piece).astype(y.dtype), i * rows * scale, 2)

    if bands == 1:
        y = band(x.astype(jnp.float32)).astype(x.dtype)
    else:
        # Every value is overwritten. XLA would create zeros for all layers before it runs the first, and hold
        # them until they are used: 1.7 GB at 256x448.
        y = jnp.full((B, out[0], bands * rows * scale, width * scale, out[1]), anything)
        y = lax.fori_loop(0, bands, step, y)
    return y[:, :, : H * scale, : W * scale]


def _band_rows(height: int, unit: int, limit: int) -> int:
    """Returns rows per band: a multiple of unit, at most limit, and a divisor of height unless too few."""
    padded = -(-height // unit) * unit
    rows = next(n for n in range(min(limit, padded) // unit * unit, 0, -unit) if padded % n == 0)
    even = -(-padded // (unit * -(-padded // limit))) * unit
    return rows if 2 * rows >= min(limit, padded) else even
