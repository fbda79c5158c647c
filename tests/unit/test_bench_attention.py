"""``labkit bench attention`` without a GPU: the cases, the check, the record, the table, the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from labkit.bench import attention, report, report_attention
from labkit.bench.attention_cases import FORMATS, SDPA, Case, Pool, Step, checked, exact, sdpa_call
from labkit.bench.cli import bench_app
from labkit.bench.record import Entry, Record, read
from labkit.errors import InputError


def test_bytes_and_flops_of_a_case() -> None:
    case = Case("qwen2.5-3b", 3, 100)
    assert (case.shape, case.group) == ((16, 2, 128), 8)
    assert case.kv_bytes("fp16") == 2 * 3 * 2 * 100 * 256 and case.kv_bytes("int8") == 2 * 3 * 2 * 100 * 132
    assert case.flops == 4 * 3 * 16 * 128 * 100
    # Two queries: one sees 100 tokens, the one before it 99.
    assert Case("qwen2.5-3b", 1, 100, chunk=2).flops == 4 * 16 * 128 * 199


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_peer_and_the_check_agree(kind: str, chunk: int) -> None:
    case = Case("smollm2-135m", 2, 40, chunk)
    pool = Pool.new(case, kind, "cpu", 0)
    wanted = exact(pool)
    assert wanted.shape == (2, min(chunk, 2), 576)
    theirs = checked(case, sdpa_call(pool)())
    assert (theirs - wanted).abs().max() <= 0.01 * wanted.abs().max()
    ours = checked(case, Step.new(case, kind, "cpu").call(pool)())
    assert (ours - wanted).abs().max() <= 0.01 * wanted.abs().max()


def test_the_fused_call_is_the_plain_one() -> None:
    case = Case("smollm2-135m", 2, 33)
    one, other = (Pool.new(case, "int8", "cpu", 0) for _ in range(2))
    step = Step.new(case, "int8", "cpu")
    assert torch.equal(step.fused(one)(), step.apart(other))
    assert torch.equal(one.layer.keys, other.layer.keys)


def test_a_run_on_the_cpu_is_emulated(tmp_path: Path) -> None:
    options = attention.Options(("smollm2-135m",), context=(40, 9000), batch=(1, 64), plans=((0, 0), (1, 4)))
    lines: list[str] = []
    record = attention.run(options, "labkit bench attention", lines.append)
    assert record.kind == "emulated" and record.complete and record.parameters["shrunk"]
    found = [(e.m, e.k, e.format, e.contender) for e in record.entries]
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 and len(lines) == len(found)
    assert {e.m for e in record.entries} == {1, 2} and {e.k for e in record.entries} == {40, 150}
    for entry in record.entries:
        assert entry.status == "emulated" and entry.counts["faults"] == 0 and entry.counts["launches"] == 1
        assert entry.counts["bytes"] >= entry.weight_bytes
    assert any("no GPU" in note for note in record.notes)
    again = read(record.write(tmp_path / "a.json"))
    assert again.entries == record.entries and "emulated" in report.text(again)


def test_a_chunk_is_taken_in_tall_tiles_as_well() -> None:
    options = attention.Options(("smollm2-135m",), context=(60,), batch=(1,), chunk=(30,))
    record = attention.run(options, "", lambda line: None)
    found = {(e.contender, e.format): e for e in record.entries}
    assert set(found) == {(name, kind) for name in ("paged", "paged_tall") for kind in FORMATS}
    for kind in FORMATS:
        plain, tall = found["paged", kind], found["paged_tall", kind]
        assert tall.status == "emulated" and tall.error == plain.error, "the same bits have the same error"
        assert tall.counts["faults"] == 0 and tall.counts["bytes"] < plain.counts["bytes"]


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Step.call

    def broken(self: Step, pool: Pool, **options: Any) -> Any:
        call = right(self, pool, **options)
        return lambda: call() + 1

    monkeypatch.setattr(Step, "call", broken)
    options = attention.Options(("smollm2-135m",), context=(20,), batch=(1,), formats=("fp16",))
    record = attention.run(options, "", lambda line: None)
    assert [e.status for e in record.entries] == ["wrong"] and "allowed" in record.entries[0].note


def entry(contender: str, kind: str, us: float, batch: int = 64) -> Entry:
    case = Case("qwen2.5-3b", batch, 8192)
    nbytes = case.kv_bytes(kind)
    name = f"attention {case.model}"
    return Entry(name, contender, kind, batch, 1, 8192, 8, "timed", samples_us=[us], weight_bytes=nbytes)


def test_the_table_has_shares_and_ratios() -> None:
    entries = [entry("paged", "fp16", 140), entry("paged", "int8", 70), entry(SDPA, "fp16", 280)]
    record = Record("attention", "measured", "", "", {}, {}, {}, ceilings={"copy_gb_s": 4000.0})
    record.entries = [*entries, entry("paged 1/4", "fp16", 150)]
    (one,) = report_attention.tables(record)
    cells = dict(zip(one.headers, one.cells[0], strict=False))
    assert cells["fp16 / int8"] == "2.00" and cells["SDPA / paged"] == "2.00"
    assert cells["paged fp16"] == "140.0" and "96" in one.cells[0] and "paged 1/4 fp16" in one.headers
    assert "Other measurements" not in report.text(record) and "qwen2.5-3b" in report.markdown(record)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("gpt-9",)}, "model"),
        ({"context": ()}, "context"),
        ({"context": (0,)}, "context"),
        ({"batch": (-1,)}, "batch"),
        ({"chunk": (513,), "context": (512, 2048)}, "chunk"),
        ({"formats": ("fp8",)}, "formats"),
        ({"block_size": 12}, "block_size"),
        ({"samples": 3}, "samples"),
        ({"plans": ((1, 3),)}, "planned"),
    ],
)
def test_bad_options_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attention.Options(**changes)


def test_plans_in_words() -> None:
    assert attention.parse_plans("walk,1/4, 32/8") == ((0, 0), (1, 4), (32, 8))
    assert attention.parse_plans("") == ()
    for text in ("1", "1/", "x/4", "walk/4"):
        with pytest.raises(InputError, match="plans"):
            attention.parse_plans(text)


def test_the_command_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    line = ["attention", "--model", "smollm2-135m", "--context", "20", "--batch", "1", "--kv", "int8"]
    done = CliRunner().invoke(bench_app, [*line, "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "no GPU" in done.output and read(out).entries[0].format == "int8"
