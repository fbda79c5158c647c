"""A GGUF source is read a weight at a time: what is resident does not grow with the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import wide_model, write_gguf

# RssAnon leaves out pages of the mapped file, which the system takes back when it needs them.
MEASURE = """
import json, sys
import torch
from labkit.models.quantize_checkpoint import quantize_checkpoint
torch.set_num_threads(1)
def resident():
    for line in open("/proc/self/status", encoding="utf-8"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
seen = [resident()]
result = quantize_checkpoint(sys.argv[1], sys.argv[2], bits=sys.argv[3], shard_bytes=4 << 20,
                             progress=lambda step: seen.append(resident()))
print(json.dumps({"growth": max(seen) - seen[0], "read": result.bytes_read, "weights": result.weights}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads RssAnon")
@pytest.mark.parametrize("bits", ["keep", "w3"])
def test_resident_memory_does_not_follow_the_file(tmp_path: Path, bits: str) -> None:
    config, parts = wide_model(layers=8)
    every = {name: tensor for part in parts for name, tensor in part.items()}
    source = write_gguf(tmp_path / "m.gguf", config, every, kind="Q8_0")
    largest = max(tensor.nbytes for tensor in every.values())
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out"), bits],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    measured = json.loads(run.stdout)
    print(f"measured: {measured}, largest tensor {largest} bytes")
    assert measured["read"] > 60 << 20 and measured["weights"] == len(every)
    # A reader that loads the file first grows by 120 MB and more (measured); allowed here are the
    # float32 temporaries of one weight and a shard on its way to the disk.
    assert measured["growth"] < 6 * largest + (8 << 20)
