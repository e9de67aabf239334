from dataclasses import replace

import pytest

from autotune.measure.device.diff import PLANS_STAY_VALID, TUNE_AGAIN, Difference, differences
from autotune.measure.device.profile import DeviceProfile
from tests.measure.test_device_profile import PROFILE

QUIET = replace(PROFILE, noise_seconds=(1.0,) * 8, store_spread={"ssd": 0.0})


def by_name(first: DeviceProfile, second: DeviceProfile) -> dict[str, Difference]:
    return {one.what: one for one in differences(first, second)}


def with_store(profile: DeviceProfile, **rates: float) -> DeviceProfile:
    return replace(profile, stores={"ssd": replace(profile.stores["ssd"], **rates)})


def test_a_profile_does_not_differ_from_itself() -> None:
    assert differences(PROFILE, PROFILE) == []


def test_a_store_three_times_slower_asks_for_tuning_anew_and_one_a_tenth_slower_does_not() -> None:
    far = by_name(QUIET, with_store(QUIET, write_bytes_per_second=2e9 / 3))["store ssd write"]
    assert (far.ratio, far.told_apart, far.meaning) == (pytest.approx(1 / 3), True, TUNE_AGAIN)
    near = by_name(QUIET, with_store(QUIET, write_bytes_per_second=1.8e9))["store ssd write"]
    assert (near.told_apart, near.meaning) == (True, "")


def test_what_noise_explains_is_not_told_apart() -> None:
    slower = replace(QUIET, matmul_flops={"float32": 0.5e11})
    assert by_name(QUIET, slower)["matmul float32"].told_apart
    assert by_name(QUIET, slower)["matmul float32"].meaning == PLANS_STAY_VALID
    noisy = (1.0, 1.0, 1.0, 1.0, 1.6) * 4  # 0.6 on either side are more than twice as slow
    both = by_name(replace(QUIET, noise_seconds=noisy), replace(slower, noise_seconds=noisy))
    assert (both["matmul float32"].told_apart, both["matmul float32"].meaning) == (False, "")


def test_a_stores_own_spread_counts_for_the_store_alone() -> None:
    restless = replace(with_store(QUIET, read_bytes_per_second=0.6e9), store_spread={"ssd": 0.8})
    found = by_name(QUIET, replace(restless, matmul_flops={"float32": 0.6e11}))
    assert not found["store ssd read"].told_apart
    assert found["matmul float32"].told_apart


def test_a_spelling_is_no_other_silicon_and_a_few_pages_are_no_other_memory() -> None:
    device = replace(QUIET.device, silicon="Intel Xeon Processor", memory_bytes=2**34 - 2**20)
    found = by_name(QUIET, replace(QUIET, device=device))
    assert found["silicon"].meaning == ""
    assert not found["memory"].told_apart
    other = replace(device, silicon="AMD EPYC", memory_bytes=2**33, kind="cuda", cores=4, torch="2.14.0")
    found = by_name(QUIET, replace(QUIET, device=other))
    assert "--seed-from" in found["silicon"].meaning
    assert "in bytes is to be checked" in found["memory"].meaning
    assert (found["cores"].ratio, found["kind"].second, found["torch"].second) == (2.0, "cuda", "2.14.0")


def test_a_store_or_a_dtype_that_one_of_them_lacks_is_told() -> None:
    without = replace(QUIET, stores={}, store_spread={}, matmul_flops={"float32": 1e11, "bfloat16": 4e11})
    found = by_name(QUIET, without)
    assert found["store ssd"].meaning == "plans that offload to it cannot run there"
    assert "recompute" in by_name(without, QUIET)["store ssd"].meaning
    assert (found["matmul bfloat16"].first, found["matmul bfloat16"].second) == ("-", 4e11)
    assert (found["matmul bfloat16"].ratio, found["matmul bfloat16"].told_apart) == (None, True)


def test_a_store_that_lies_in_memory_on_one_of_them_is_told() -> None:
    found = by_name(QUIET, with_store(QUIET, holds_memory=True))["store ssd lies"]
    assert (found.first, found.second, found.meaning) == ("on a disk", "in memory", "in memory it frees nothing")
