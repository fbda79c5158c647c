"""Device table and roofline arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import device
from labkit.errors import InputError

positive = st.floats(0.01, 1e6)


def test_every_figure_has_a_source() -> None:
    for known in device.devices().values():
        facts = {f.name for f in dataclasses.fields(known)} - {
            "key",
            "name",
            "capability",
            "sources",
            "origin",
        }
        assert facts == set(known.sources), known.key
        assert all(len(text) > 20 for text in known.sources.values())
        assert known.origin == "quoted"


def test_target_card_is_first_and_is_the_nominal_one() -> None:
    card = next(iter(device.devices().values()))
    assert card.name == "RTX 3050 Laptop 4GB"
    assert (card.capability, card.sms, card.bandwidth_gb_s, card.memory_gib) == ((8, 6), 16, 192.0, 4)
    assert (card.shared_kib_per_sm, card.shared_kib_per_block) == (100, 99)
    assert (card.warps_per_sm, card.blocks_per_sm, card.registers_per_sm) == (48, 16, 65536)


def test_allocation_rules_are_those_of_the_occupancy_calculator() -> None:
    for known in device.devices().values():
        rules = (known.register_granule, known.warp_granule, known.shared_granule)
        assert rules == (256, 4, 128), known.key
        assert (known.shared_reserved_per_block, known.threads_per_block) == (1024, 1024)
        assert known.registers_per_thread == 255 and known.registers_per_sm % known.warp_granule == 0
        # what one block may have is what the SM has less the reserved part
        assert (known.shared_kib_per_block + 1) == known.shared_kib_per_sm


def test_peaks_agree_with_sms_and_clock() -> None:
    for known in device.devices().values():
        cores = 64 if known.capability == (8, 0) else 128
        fp32 = known.sms * cores * 2 * known.clock_ghz / 1e3
        assert known.fp32_tflops == pytest.approx(fp32, rel=0.03), known.key
        if known.capability in ((8, 6), (8, 9), (12, 0)):
            tensor = known.sms * 256 * 2 * known.clock_ghz / 1e3
            assert known.tensor_tflops == pytest.approx(tensor, rel=0.03), known.key


def test_get_device_takes_key_or_name_in_any_case() -> None:
    assert device.get_device("RTX3090") is device.get_device("rtx 3090")
    with pytest.raises(InputError, match="rtx3050-laptop") as caught:
        device.get_device("gtx 970")
    assert "data/devices.json" in caught.value.fix


@pytest.mark.parametrize(
    ("bits", "group", "offset", "size"),
    [(4, 128, False, 0.515625), (3, 128, False, 0.390625), (4, 32, True, 0.625), (16, None, False, 2.0)],
)
def test_bytes_per_weight(bits: int, group: int | None, offset: bool, size: float) -> None:
    assert device.bytes_per_weight(bits, group, offset) == size


@pytest.mark.parametrize("bad", [(0, 32, False), (33, 32, False), (4, 0, False), (4, None, True)])
def test_bytes_per_weight_refuses(bad: tuple[int, int | None, bool]) -> None:
    with pytest.raises(InputError):
        device.bytes_per_weight(*bad)


def test_ceiling_of_the_article_s_model() -> None:
    # 3.0857 G weights at 0.515625 bytes over 192 GB/s
    assert device.decode_ceiling_tok_s(3.0857e9 * 0.515625, 192) == pytest.approx(120.67, abs=0.01)
    with pytest.raises(InputError, match="model_bytes"):
        device.decode_ceiling_tok_s(0, 192)


@given(positive, positive, st.floats(0.1, 4))
def test_ridge_is_where_reading_and_computing_take_the_same_time(
    tflops: float, gb_s: float, size: float
) -> None:
    m = device.ridge_m(tflops, gb_s, size)
    reading, computing = device.step_seconds(1e9, m, size, gb_s, tflops)
    assert reading == pytest.approx(computing, rel=1e-9)
    assert device.attainable_tflops(m, size, gb_s, tflops) == pytest.approx(tflops, rel=1e-9)


@given(st.integers(1, 1000), st.floats(0.1, 4), positive, positive)
def test_the_roof_never_exceeds_either_limit(m: int, size: float, gb_s: float, tflops: float) -> None:
    roof = device.attainable_tflops(m, size, gb_s, tflops)
    assert roof <= tflops
    assert roof <= device.intensity(m, size) * gb_s / 1e3 * (1 + 1e-12)


def test_time_calls_does_not_count_the_first_call() -> None:
    seen: list[int] = []
    seconds = device.time_calls(lambda: seen.append(1), repeats=4)
    assert len(seen) == 5 and len(seconds) == 4
    assert all(second >= 0 for second in seconds)
    with pytest.raises(InputError, match="repeats"):
        device.time_calls(lambda: None, repeats=0)


def test_measurements_say_what_they_are() -> None:
    copy = device.measure_copy(mib=1, repeats=3)
    assert (copy.unit, copy.origin, len(copy.seconds)) == ("GB/s", "measured", 3)
    assert copy.value > 0 and copy.spread >= 0 and "1 MiB" in copy.what
    matmul = device.measure_matmul(n=16, repeats=2)
    assert (matmul.unit, len(matmul.seconds)) == ("TFLOP/s", 2) and "16×16×16" in matmul.what


def test_spread_is_relative_to_the_median() -> None:
    made = device.Measurement(1.0, "GB/s", (1.0, 2.0, 4.0), "made up")
    assert made.spread == pytest.approx(1.5)


def test_page_faults_rise_when_new_memory_is_touched() -> None:
    before = device.page_faults()
    block = bytearray(64 << 20)
    block[::4096] = b"\x01" * len(block[::4096])
    assert device.page_faults() > before
