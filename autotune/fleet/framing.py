"""Frame messages on a stream that others may write to: JSON text sequences (RFC 7464).

Each frame is a record separator, one JSON text and a line feed. JSON contains neither byte, so a banner of ssh, or a line
of a job scheduler, cannot be confused with a frame.
"""

from dataclasses import dataclass, field

SEPARATOR = b"\x1e"
MAX_FRAME_BYTES = 1 << 30
"""Maximum size of a frame; a prepared workload of a large model takes some MiB."""
MAX_NOISE_BYTES = 4096
"""Number of last bytes outside of frames that are kept for messages."""


def to_frame(text: bytes) -> bytes:
    r"""Return the frame of a JSON text.

    >>> to_frame(b"{}")
    b'\x1e{}\n'
    """
    return SEPARATOR + text + b"\n"


@dataclass(slots=True)
class FrameReader:
    r"""Splits a stream into frames, whatever the sizes of the parts in which it arrives.

    >>> reader = FrameReader()
    >>> reader.feed(b"Welcome to node 7\n\x1e{"), reader.feed(b"}\n")
    ([], [b'{}'])
    >>> reader.noise
    b'Welcome to node 7\n'
    """

    noise: bytes = b""
    """Last bytes that were outside of frames."""
    is_inside: bool = False
    """True while a frame has begun and not ended."""
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that these bytes complete; ValueError for a frame of more than `MAX_FRAME_BYTES`."""
        frames = []
        while data:
            if not self.is_inside:
                noise, separator, data = data.partition(SEPARATOR)
                self.noise = (self.noise + noise)[-MAX_NOISE_BYTES:]
                self.is_inside = bool(separator)
                continue
            part, end, data = data.partition(b"\n")
            self._parts.append(part)
            self._size += len(part)
            if self._size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame exceeds {MAX_FRAME_BYTES} bytes")
            if end:
                # a frame that a lost writer left unfinished ends where the next one begins
                frames.append(b"".join(self._parts).rpartition(SEPARATOR)[2].rstrip(b"\r"))
                self._parts, self._size, self.is_inside = [], 0, False
        return frames
