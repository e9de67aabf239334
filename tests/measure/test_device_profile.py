import dataclasses
import json
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.ir.costs import StoreCost
from autotune.measure.device.profile import DeviceProfile, find, profile_path, read, spread, write
from autotune.records.device import Device

DEVICE = Device("cpu", "Intel(R) Xeon(R) CPU @ 2.20GHz", 2**34, 2, "2.13.0+cpu", "Linux 6.1")
PROFILE = DeviceProfile(
    DEVICE,
    {"float32": 1e11},
    {"memory": 8e9},
    (1.0, 1.0, 1.1),
    {"ssd": StoreCost(2e9, 1e9, 1.5e9, 0.5e9, 1e-4)},
    {"ssd": 0.05},
    made=1.0,
)


def test_a_profile_is_found_again_under_another_spelling_driver_and_torch(tmp_path: Path) -> None:
    write(profile_path(tmp_path, DEVICE), PROFILE)
    later = dataclasses.replace(DEVICE, silicon="Intel Xeon Processor", torch="2.14.0", driver="Linux 7.0")
    assert find(tmp_path, later) == PROFILE
    assert find(tmp_path, dataclasses.replace(DEVICE, cores=4)) is None
    assert find(tmp_path, dataclasses.replace(DEVICE, silicon="AMD EPYC")) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "truncated or not JSON"),
        (lambda text: text.replace('"schema": 1', '"schema": 7'), "schema 7; this version reads 1"),
        (lambda text: text.replace("matmul_flops", "matmul_flop"), "matmul_flops: missing"),
        (lambda text: text.replace('"float32": 100000000000.0', '"float32": "fast"'), "valid number"),
        (lambda text: "[]", "schema 'list'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_its_name_and_fault(tmp_path: Path, change, said: str) -> None:
    write(tmp_path / "one.json", PROFILE)
    text = (tmp_path / "one.json").read_text()
    assert json.loads(text)["schema"] == 1
    (tmp_path / "one.json").write_text(change(text))
    with pytest.raises(ConfigError, match=said) as refused:
        read(tmp_path / "one.json")
    assert str(refused.value).startswith(f"{tmp_path}/one.json: ")


def test_a_profile_that_cannot_be_written_or_read_comes_with_the_next_move(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write the profile .*-o"):
        write(tmp_path / "file" / "one.json", PROFILE)
    with pytest.raises(ConfigError, match="autotune device probe"):
        read(tmp_path / "nothing.json")


def test_the_spread_sees_one_slow_sample_in_five_and_no_single_one_in_a_hundred() -> None:
    assert spread((2.0,) * 7) == spread((3.0,)) == spread(()) == 0
    assert spread((1.0, 1.0, 1.0, 1.0, 1.5) * 4) == 0.5
    assert spread((1.0,) * 99 + (9.0,)) == 0
    assert spread([10 * sample for sample in (1.0, 1.1, 1.2, 1.3)]) == pytest.approx(spread((1.0, 1.1, 1.2, 1.3)))
