"""Frames on a stream: they arrive whole and in order, whatever surrounds them and however the stream is cut."""

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.fleet import command, framing
from autotune.fleet.channel import FarEndLostError
from autotune.fleet.framing import FrameReader, to_frame
from autotune.fleet.messages import ConditionsCall

JSON = st.recursive(
    st.text(max_size=9) | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
)
NOISE = st.binary(max_size=30).map(lambda data: data.replace(framing.SEPARATOR, b""))


@settings(max_examples=40)
@given(st.lists(st.tuples(NOISE, JSON), max_size=6), NOISE, st.data())
def test_frames_survive_any_noise_between_them_and_any_cut_of_the_stream(
    parts: list[tuple[bytes, object]], end: bytes, data: st.DataObject
):
    texts = [json.dumps(document).encode() for _, document in parts]
    stream = b"".join(noise + to_frame(text) for (noise, _), text in zip(parts, texts, strict=True)) + end
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader, frames = FrameReader(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames += reader.feed(stream[start:stop])
    assert frames == texts
    assert reader.noise == b"".join([*(noise for noise, _ in parts), end])[-framing.MAX_NOISE_BYTES :]


def test_a_frame_left_unfinished_is_dropped_where_the_next_begins():
    assert FrameReader().feed(framing.SEPARATOR + b'{"half"' + to_frame(b"{}")) == [b"{}"]


def test_the_line_end_of_a_terminal_is_no_part_of_a_frame():
    assert FrameReader().feed(framing.SEPARATOR + b"{}\r\n") == [b"{}"]


def test_a_large_frame_costs_time_in_proportion_to_its_size(monkeypatch: pytest.MonkeyPatch):
    """Counted by the bytes that the reader copies: each part once, and the frame once."""
    reader, parts = FrameReader(), [b"x" * 1000] * 1000
    reader.feed(framing.SEPARATOR)
    for part in parts:
        reader.feed(part)
    assert sum(map(len, reader._parts)) == 10**6
    assert len(reader.feed(b"\n")[0]) == 10**6
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 5000)
    with pytest.raises(ValueError, match="a frame exceeds 5000 bytes"):
        FrameReader().feed(framing.SEPARATOR + b"x" * 5001)
    assert math.isfinite(framing.MAX_FRAME_BYTES)


def receive(script: str, log: Path) -> bytes:
    """Return the first frame of a command."""
    channel = command.CommandChannel([sys.executable, "-c", script], log)
    try:
        return channel._receive()
    finally:
        channel.close()


def test_a_command_that_waits_for_a_device_is_reported_and_one_that_answers_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes: list[str] = []
    for script, seconds in (("import time; time.sleep(0.5)", 0.05), ("pass", 30.0)):
        monkeypatch.setattr(command, "NOTE_SECONDS", seconds)
        channel = command.CommandChannel([sys.executable, "-c", script], tmp_path / "log")
        with pytest.raises(FarEndLostError):
            channel.ask(ConditionsCall(), notes.append)
        channel.close()
    assert notes == [
        f"waiting for the command {sys.executable!r} to reach a device; its errors are in {tmp_path / 'log'}"
    ]


def test_a_large_reply_that_arrives_in_parts_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "START_SECONDS", 1.0)
    monkeypatch.setattr(command, "CLOSE_SECONDS", 0.1)
    parts = ["\x1e[1", *[", 1"] * 6, "]\n"]
    script = (
        f"import sys, time\nfor part in {parts!r}:\n    sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.3)"
    )
    assert json.loads(receive(script, tmp_path / "log")) == [1] * 7
    noise = "import time\nwhile True:\n    print('still booting', flush=True); time.sleep(0.3)"
    with pytest.raises(FarEndLostError, match="no sign of life for 1 s"):
        receive(noise, tmp_path / "log")
