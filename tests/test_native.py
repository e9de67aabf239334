"""Compiled libraries are loaded only from a folder that nobody else can write, and built again where they are damaged."""

import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.native import Library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library of one function, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n', encoding="utf-8")
    return Library("one", (source,))


def test_a_truncated_library_is_compiled_again(library: Library) -> None:
    path = library.locate()
    path.write_bytes(path.read_bytes()[:100])
    loaded = library.load("without it all is slow")
    assert loaded is not None
    assert loaded.one() == 1


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Warnings of the module."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("autotune.native"), Listener()
    logger.addHandler(listener)
    yield messages
    logger.removeHandler(listener)


@pytest.mark.parametrize("part", ["folder", "file"])
def test_a_library_that_others_may_write_is_not_loaded(part: str, library: Library, warned: list[str]) -> None:
    path = library.locate()
    (path.parent if part == "folder" else path).chmod(0o777)
    assert library.load("without it all is slow") is None
    assert "others may write it; run chmod go-w" in "".join(warned)


def test_a_read_only_home_is_not_blamed_on_the_compiler(
    library: Library, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert library.load("without it all is slow") is None
    assert "Set XDG_CACHE_HOME to a writable directory" in "".join(warned)
    assert "g++" not in "".join(warned)
