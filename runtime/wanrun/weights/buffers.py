"""The memory block that a component is restored into, touched ahead of the reads.

First touch of fresh memory costs more than reading into it, because the kernel clears every page. It is half
of a restore's time, and a thread does it while jax is being imported and the other cores are idle.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import ml_dtypes
import numpy as np

from wanrun.artifact.layout import ALIGNMENT, BITS, EIGHT_BITS, ArrayLayout
from wanrun.artifact.manifest import Component
from wanrun.errors import ArtifactError
from wanrun.units import in_bytes

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float32": np.dtype(np.float32),
        "float16": np.dtype("f2"),
        **{
            one.dtype: np.dtype(one.dtype) for one in EIGHT_BITS.values()
        },  # ml_dtypes adds the floats to NumPy's
    }
)

TOUCHED_BYTES = 2 * 2**20
"""Bytes touched at a time, one huge page: the kernel meanwhile holds a lock that loading a library needs."""

HUGE_BYTES_PER_SECOND = 1.2e9
"""Below this rate of first touch, huge pages are turned off. With free memory the rate is 8 GB/s. In a
virtual machine that has returned its free memory to the host, a huge page costs 2 to 10 ms, and small pages
are several times faster (docs/notes/runtime.md, "Start")."""

MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23
"""linux/mman.h; MADV_POPULATE_WRITE since Linux 5.14."""


class Memory:
    """Memory for every parameter of a component, each at a 64-byte boundary.

    The CPU backend aliases aligned arrays, so there is no second host copy. By path, ``rows`` are those of
    parameters that are not held whole, in rising order; a row after the last is padding, and stays zero.
    Raises ArtifactError if there is not enough memory.
    """

    def __init__(
        self, component: Component, rows: Mapping[str, Sequence[int]] = MappingProxyType({})
    ) -> None:
        self._offsets: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        total = 0
        for path, parameter in sorted(component.parameters.items()):
            self._offsets[path] = total
            self._rows[path] = len(rows[path]) if path in rows else parameter.layout.rows
            total += -(-self._rows[path] * parameter.layout.row_bytes // ALIGNMENT) * ALIGNMENT
        # Private: first touch of a shared mapping, the default, costs twice as much.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            self._block = mmap.mmap(-1, max(total, 1), **flags)
        except (OSError, OverflowError) as error:
            raise ArtifactError(
                "out_of_memory",
                f"the weights in {component.folder} do not fit into memory",
                expected=in_bytes(total),
                found=str(error),
                remedy="use a machine with more memory",
            ) from None
        self._stop = threading.Event()

    def view(self, path: str, layout: ArrayLayout) -> memoryview:
        """Returns the bytes of the rows that are held of a parameter."""
        start = self._offsets[path]
        return memoryview(self._block)[start : start + self._rows[path] * layout.row_bytes]

    def array(self, path: str, layout: ArrayLayout, bits: bool) -> np.ndarray:
        """Returns the rows that are held, one behind the other along axis 0, as an array.

        If ``bits`` is set, floats of ``BITS`` become integers of the same bits.
        """
        dtype = np.dtype(BITS[layout.dtype]) if bits and layout.dtype in BITS else DTYPES[layout.dtype]
        shape = self._rows[path] * layout.row_shape[0], *layout.shape[1:]
        return np.frombuffer(self._block, dtype, math.prod(shape), self._offsets[path]).reshape(shape)

    def touch(self) -> None:
        """Touches every page, in the order of the parameters, until ``stop``; changes no content.

        It uses huge pages as long as they are fast. Where the system cannot touch pages without writing, it
        does nothing, and the reads touch the pages.
        """
        madvise = _madvise()
        if madvise is None:
            return
        address, size = ctypes.addressof(ctypes.c_char.from_buffer(self._block)), len(self._block)
        huge = madvise(address, size, MADV_HUGEPAGE) == 0
        for begin in range(0, size, TOUCHED_BYTES):
            length, started = min(TOUCHED_BYTES, size - begin), time.perf_counter()
            if self._stop.is_set() or madvise(address + begin, length, MADV_POPULATE_WRITE) != 0:
                return
            if huge and time.perf_counter() - started > length / HUGE_BYTES_PER_SECOND:
                huge = False
                madvise(address + begin, size - begin, MADV_NOHUGEPAGE)

    def touch_ahead(self) -> None:
        """Starts a thread that touches the pages."""
        threading.Thread(target=self.touch, name="touch", daemon=True).start()

    def stop(self) -> None:
        """Ends ``touch`` early."""
        self._stop.set()


def _madvise() -> Callable[[int, int, int], int] | None:
    """Returns the C library's madvise, or None; unlike that of ``mmap`` it releases the GIL."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):  # another operating system
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise  # type: ignore[no-any-return]
