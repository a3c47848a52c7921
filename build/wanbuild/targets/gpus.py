"""NVIDIA's GPUs as targets, as data: a new one is one row, with the source of its figures.

Peaks are those of dense matrices with sums in float32, which GeForce cards have at half of the rate, or in
32-bit integers. Multiprocessors, sizes of caches and clocks (the boost clock) are of the same documents.
Memory is what the driver leaves to programs, where error correction takes a part. Links between cards
without NVLink go over PCI Express: at half of its rate where cards do not read each other's memory.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from wanbuild.targets.chip import CUDNN, GIB, GIGA, KIB, MIB, TERA, Chip, GpuFacts

_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": "False"})
"""Matrix products go to cuBLAS, which chooses its kernel by shape when it runs. XLA's own kernels have to be
tuned on the GPU: without one, XLA takes tiles of 16 x 8."""

_HOPPER = MappingProxyType({"attention": "wgmma", "attention_blocks": (64, 128, 2)})
"""The fastest of the blocks that were timed on an H200 (benchmarks/RESULTS.md); sums fit the registers."""

_BLACKWELL = MappingProxyType({"attention": "tcgen05", "attention_blocks": (128, 128, 2)})
"""Scores and sums of two tiles fill tensor memory, two stages shared memory; others were never timed."""


def _gpu(name: str, device_kind: str, **others: Any) -> Chip:
    """Returns an NVIDIA GPU; ``others`` are fields of ``Chip``."""
    return Chip(name, "cuda", device_kind, matrix_unit=16, kernels=CUDNN, options=_CUBLAS, **others)


GPUS = (
    # "NVIDIA A100 Tensor Core GPU Architecture" (white paper) and the data sheet of the A100 80GB.
    _gpu(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * GIB,
        bf16=312 * TERA,
        int8=624 * TERA,
        float32=19.5 * TERA,
        bandwidth=2039 * GIGA,
        link=300 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 0), 108, 64, 2048, shared=164 * KIB, cache=40 * MIB, clock=1.41),
    ),
    # Data sheet "NVIDIA L40S".
    _gpu(
        "l40s",
        "NVIDIA L40S",
        memory_bytes=45 * GIB,
        bf16=362 * TERA,
        fp8=733 * TERA,
        int8=733 * TERA,
        float32=91.6 * TERA,
        bandwidth=864 * GIGA,
        link=25 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 142, 128, 1536, shared=100 * KIB, cache=96 * MIB, clock=2.52),
    ),
    # "NVIDIA H100 Tensor Core GPU Architecture" (white paper) and the data sheet of the H100 SXM.
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GIB,
        bf16=989 * TERA,
        fp8=1979 * TERA,
        int8=1979 * TERA,
        float32=67 * TERA,
        bandwidth=3350 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((9, 0), 132, 128, 2048, shared=228 * KIB, cache=50 * MIB, clock=1.98),
        mosaic=_HOPPER,
    ),
    # Data sheet "NVIDIA H200": a H100 with other memory.
    _gpu(
        "h200",
        "NVIDIA H200",
        memory_bytes=140 * GIB,
        bf16=989 * TERA,
        fp8=1979 * TERA,
        int8=1979 * TERA,
        float32=67 * TERA,
        bandwidth=4800 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((9, 0), 132, 128, 2048, shared=228 * KIB, cache=50 * MIB, clock=1.98),
        mosaic=_HOPPER,
    ),
    # Data sheet "NVIDIA Blackwell".
    _gpu(
        "b200",
        "NVIDIA B200",
        memory_bytes=179 * GIB,
        bf16=2250 * TERA,
        fp8=4500 * TERA,
        int8=4500 * TERA,
        float32=75 * TERA,
        bandwidth=7700 * GIGA,
        link=900 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((10, 0), 148, 128, 2048, shared=228 * KIB, cache=126 * MIB, clock=1.965),
        mosaic=_BLACKWELL,
    ),
    # NVIDIA has no public data sheet of it: as resellers print it; 78 multiprocessors and 95 GiB as
    # drivers show them. Its products are held back by more than its clock says.
    _gpu(
        "h20",
        "NVIDIA H20",
        memory_bytes=95 * GIB,
        bf16=148 * TERA,
        fp8=296 * TERA,
        int8=296 * TERA,
        float32=44 * TERA,
        bandwidth=4000 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((9, 0), 78, 128, 2048, shared=228 * KIB, cache=60 * MIB, clock=1.98),
        mosaic=_HOPPER,
    ),
    # Data sheet "NVIDIA L4", whose figures are those of sparse matrices, twice these; the same white
    # paper as the RTX 4090. Its 72 W may hold it below them.
    _gpu(
        "l4",
        "NVIDIA L4",
        memory_bytes=22 * GIB,
        bf16=121 * TERA,
        fp8=242 * TERA,
        int8=242 * TERA,
        float32=30.3 * TERA,
        bandwidth=300 * GIGA,
        link=25 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 58, 128, 1536, shared=100 * KIB, cache=48 * MIB, clock=2.04),
    ),
    # Data sheet "NVIDIA A10G" (of Amazon's G5), as 80 multiprocessors of the RTX 3090's at 1.71 GHz
    # compute.
    _gpu(
        "a10g",
        "NVIDIA A10G",
        memory_bytes=22 * GIB,
        bf16=70 * TERA,
        int8=140 * TERA,
        float32=35 * TERA,
        bandwidth=600 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 6), 80, 128, 1536, shared=100 * KIB, cache=6 * MIB, clock=1.71),
    ),
    # "NVIDIA RTX PRO Blackwell GPU Architecture" (white paper) and the data sheet of the Workstation
    # Edition, whose 4000 TOPS are of sparse FP4: eight times bfloat16's. The Server Edition has 1597
    # GB/s, the Max-Q Edition 88 % of the peaks.
    _gpu(
        "rtxpro6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        memory_bytes=95 * GIB,
        bf16=503.8 * TERA,
        fp8=1007.6 * TERA,
        int8=1007.6 * TERA,
        float32=126 * TERA,
        bandwidth=1792 * GIGA,
        link=50 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((12, 0), 188, 128, 1536, shared=100 * KIB, cache=128 * MIB, clock=2.617),
        also=(
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        ),
    ),
    # "NVIDIA RTX Blackwell GPU Architecture" (white paper), appendix A.
    _gpu(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        memory_bytes=32 * GIB,
        bf16=209.5 * TERA,
        fp8=419 * TERA,
        int8=838 * TERA,
        float32=104.8 * TERA,
        bandwidth=1792 * GIGA,
        link=25 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((12, 0), 170, 128, 1536, shared=100 * KIB, cache=96 * MIB, clock=2.407),
    ),
    # The same; peaks are computed: those of the RTX 5090, by multiprocessors and clock.
    _gpu(
        "rtx5080",
        "NVIDIA GeForce RTX 5080",
        memory_bytes=16 * GIB,
        bf16=112.6 * TERA,
        fp8=225 * TERA,
        int8=450 * TERA,
        float32=56.3 * TERA,
        bandwidth=960 * GIGA,
        link=25 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((12, 0), 84, 128, 1536, shared=100 * KIB, cache=64 * MIB, clock=2.617),
    ),
    # "NVIDIA Ada GPU Architecture" (white paper, version 2.1), appendix A.
    _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        memory_bytes=24 * GIB,
        bf16=165 * TERA,
        fp8=330 * TERA,
        int8=660 * TERA,
        float32=82.6 * TERA,
        bandwidth=1008 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 128, 128, 1536, shared=100 * KIB, cache=72 * MIB, clock=2.52),
    ),
    # Peaks of these two are computed: those of the RTX 4090, by multiprocessors and clock.
    _gpu(
        "rtx4080",
        "NVIDIA GeForce RTX 4080",
        memory_bytes=16 * GIB,
        bf16=97.5 * TERA,
        fp8=195 * TERA,
        int8=390 * TERA,
        float32=48.7 * TERA,
        bandwidth=717 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 76, 128, 1536, shared=100 * KIB, cache=64 * MIB, clock=2.51),
    ),
    _gpu(
        "rtx4070ti",
        "NVIDIA GeForce RTX 4070 Ti",
        memory_bytes=12 * GIB,
        bf16=80.2 * TERA,
        fp8=160 * TERA,
        int8=321 * TERA,
        float32=40.1 * TERA,
        bandwidth=504 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 60, 128, 1536, shared=100 * KIB, cache=48 * MIB, clock=2.61),
    ),
    # Peaks are computed likewise. Eight lanes of PCI Express.
    _gpu(
        "rtx4060ti-16gb",
        "NVIDIA GeForce RTX 4060 Ti",
        memory_bytes=16 * GIB,
        bf16=44.1 * TERA,
        fp8=88.2 * TERA,
        int8=176.5 * TERA,
        float32=22.1 * TERA,
        bandwidth=288 * GIGA,
        link=6 * GIGA,
        host_link=12.5 * GIGA,
        gpu=GpuFacts((8, 9), 34, 128, 1536, shared=100 * KIB, cache=32 * MIB, clock=2.535),
    ),
    # "NVIDIA Ampere GA102 GPU Architecture" (white paper).
    _gpu(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        memory_bytes=24 * GIB,
        bf16=71 * TERA,
        int8=284 * TERA,
        float32=35.6 * TERA,
        bandwidth=936 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 6), 82, 128, 1536, shared=100 * KIB, cache=6 * MIB, clock=1.695),
    ),
)
"""NVIDIA's GPUs: those of data centres, then cards."""
