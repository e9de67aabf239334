from collections.abc import Iterator

import pytest

from tests.support.sqlite import without_waits_for_the_disk


@pytest.fixture(scope="package", autouse=True)
def _no_waits_for_the_disk() -> Iterator[None]:
    with without_waits_for_the_disk():
        yield
