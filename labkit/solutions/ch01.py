"""Reference solutions of chapter 01."""

from __future__ import annotations

import numpy as np


def weight_bytes(bits, group, offset):
    """The code, and the group's FP16 scale (and offset) shared by its weights."""
    shared = 0 if group is None else (4 if offset else 2) / group
    return bits / 8 + shared


def ceiling(weights, bytes_a_weight, bandwidth_gb_s):
    """Every weight is read once for one token."""
    return bandwidth_gb_s * 1e9 / (weights * bytes_a_weight)


# The row is the outer loop: one read serves all tokens.
def batched_rows(weights, x):
    """Y[m, n] = X[m] · W[n], each row of W read once."""
    y = np.empty((x.shape[0], weights.shape[0]), dtype=np.float32)
    for n in range(weights.shape[0]):
        y[:, n] = x @ weights.row(n)
    return y


# One weight: bytes / bandwidth seconds to read, 2 · M / peak seconds to compute.
def ridge(tflops, bandwidth_gb_s, bytes_a_weight):
    """M where the two times are equal."""
    return tflops * 1e12 * bytes_a_weight / (2 * bandwidth_gb_s * 1e9)


def tiled_gb_s(row, bits):
    """Bytes of the weights over the time of the call."""
    nbytes = row["n"] * row["k"] * (bits / 8 + 2 / 128)
    return nbytes / (row["tiled_ms"] / 1e3) / 1e9
