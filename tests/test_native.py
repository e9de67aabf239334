"""Compiled libraries are loaded only from a folder that nobody else can write, and built again where they are damaged."""

import errno
import logging
import os
import shutil
import stat
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


def test_a_library_that_others_could_write_is_compiled_again(library: Library) -> None:
    path = library.locate()
    path.write_text("of another user")
    path.chmod(0o777)
    assert library.load("without it all is slow") is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_the_folder_of_libraries_is_taken_from_other_users(library: Library) -> None:
    folder = library.locate().parent
    folder.chmod(0o777)
    assert library.load("without it all is slow") is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_folder_of_another_user_is_not_used(
    library: Library, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library.locate()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert library.load("without it all is slow") is None
    assert "belongs to another user; set XDG_CACHE_HOME" in "".join(warned)


def test_a_umask_that_lets_the_group_write_does_not_keep_the_library_from_later_processes(library: Library) -> None:
    before = os.umask(0o002)
    try:
        first = library.locate()
        written = first.stat().st_mtime_ns
        assert library.locate() == first
    finally:
        os.umask(before)
    assert first.stat().st_mtime_ns == written


def test_a_read_only_home_is_not_blamed_on_the_compiler(
    library: Library, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert library.load("without it all is slow") is None
    assert "Set XDG_CACHE_HOME to a writable directory" in "".join(warned)
    assert "g++" not in "".join(warned)
