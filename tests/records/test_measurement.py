import dataclasses

import pytest

from autotune.errors import ConfigError
from autotune.records.budget import Budget
from autotune.records.device import Device
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome


def test_a_percentage_is_a_share_of_the_baselines_step_bytes():
    budget = Budget.parse("45.5%")
    assert (budget.share, budget.nbytes) == (0.455, None)
    assert budget.step_bytes(floor_bytes=300, baseline_step_bytes=1000) == 455


def test_absolute_bytes_are_the_whole_process_floor_included():
    budget = Budget.parse("1KiB")
    assert (budget.share, budget.nbytes) == (None, 1024)
    assert budget.step_bytes(floor_bytes=300, baseline_step_bytes=1000) == 724
    assert budget.step_bytes(floor_bytes=2000, baseline_step_bytes=1000) < 0


@pytest.mark.parametrize("text", ["65%", " 65 % ", "6GiB", "123456B", "1000%"])
def test_a_budget_keeps_the_users_words(text: str):
    assert Budget.parse(text).text == text.strip()


@pytest.mark.parametrize("text", ["", "65", "65 XB", "abc", "-5%", "%", "1e2%", "nan%", "５５"])
def test_an_unreadable_budget_is_refused(text: str):
    with pytest.raises(ConfigError, match="65%"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["0%", "0.0%", "1001%", "0B", "0.0MiB"])
def test_a_budget_of_nothing_or_beyond_reason_is_refused(text: str):
    with pytest.raises(ConfigError, match=f"budget '{text}'"):
        Budget.parse(text)


def test_a_device_of_an_earlier_version_has_no_environment_and_one_with_it_keeps_it():
    device = Device("cpu", "Xeon", 2**34, 2, "2.13.0")
    earlier = {key: value for key, value in to_json(device).items() if key != "environment"}
    assert from_json(Device, earlier, where="") == device
    threaded = dataclasses.replace(device, environment={"OMP_NUM_THREADS": "4"})
    assert from_json(Device, to_json(threaded), where="") == threaded != device
    assert hash(threaded) == hash(device)


def test_a_devices_key_is_fit_for_a_file_name():
    device = Device("cpu", "Intel(R) Xeon(R) @ 2.10GHz", 2**34, 2, "2.13.0")
    assert device.key == "cpu-intel-xeon-2"
    assert dataclasses.replace(device, torch="2.12.0", memory_bytes=1).key == device.key


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon Processor", "INTEL XEON 2.10GHz"), "intel-xeon"),
        (("AMD EPYC 7763 64-Core Processor", "AMD EPYC(TM) 7763"), "amd-epyc-7763"),
        (("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100 80GB HBM2e"), "a100-80gb"),
        (("NVIDIA A100-SXM4-40GB",), "a100-40gb"),
        (("Intel(R) Core(TM) i7-10750H CPU @ 2.60GHz",), "intel-core-i7-10750h"),
        (("CPU",), "cpu"),
    ],
)
def test_one_silicon_has_one_key_however_its_name_is_spelt(names: tuple[str, ...], key: str):
    assert {Device("cpu", name, 2**34, 2, "2.13.0").key for name in names} == {f"cpu-{key}-2"}


def test_step_bytes_are_those_above_the_floor():
    seen = Measurement(Outcome.OK, peak_bytes=1300, charged_bytes=1500, floor_bytes=300)
    assert (seen.step_peak_bytes, seen.step_charged_bytes) == (1000, 1200)
    assert Measurement(Outcome.OK, peak_bytes=1300).step_peak_bytes is None
    assert Measurement(Outcome.OK, floor_bytes=300).step_charged_bytes is None


def test_the_time_ratio_is_the_median_of_the_turns_and_null_where_the_baseline_did_not_run():
    # the machine slows down by a half after the second turn
    seen = Measurement(Outcome.OK, step_seconds=(2.2, 2.2, 3.3, 3.3), baseline_seconds=(2.0, 2.0, 3.0, 3.0))
    assert seen.time_ratio == pytest.approx(1.1)
    drifting = Measurement(Outcome.OK, step_seconds=(2.0, 2.0, 3.0), baseline_seconds=(2.0, 3.0, 3.0))
    assert drifting.time_ratio == 1.0
    fewer = Measurement(Outcome.OK, step_seconds=(3.0, 2.0, 100.0), baseline_seconds=(1.0, 2.0))
    assert (fewer.median_seconds, fewer.time_ratio) == (3.0, 2.0)
    assert Measurement(Outcome.OK, step_seconds=(1.0,)).time_ratio is None
    assert Measurement(Outcome.CRASHED).median_seconds is None
