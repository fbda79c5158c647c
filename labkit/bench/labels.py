"""Contenders in words, for tables and pictures."""

from __future__ import annotations

LABELS = {
    "tensor_core": "tensor core",
    "seed_dispatch": "seed kernel",
    "gemv_single_row": "single-row GEMV",
    "gemv_small_batch": "small-batch GEMV",
    "gemv_batch_w3": "W3 batch tile",
    "gemm_tiled": "tiled GEMM",
    "dequant_matmul": "dequantise + cuBLAS",
    "dense_fp16": "dense FP16 cuBLAS",
    "dense_bf16": "dense BF16 cuBLAS",
    "tinygemm_w4": "tinygemm W4",
    "humming_w4": "humming W4",
    "humming_w3": "humming W3",
}

_FOREIGN = ("dense_", "tinygemm_", "humming_")


def label(contender: str) -> str:
    """A contender in words."""
    return LABELS.get(contender, contender)


def foreign(contender: str) -> bool:
    """It is none of labkit's own kernels: cuBLAS on a dense weight, or a kernel of another project."""
    return contender.startswith(_FOREIGN)
