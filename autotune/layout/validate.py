"""Whether a layout is one: written apart from every solver, so that a mistake there cannot hide itself here."""

from bisect import bisect_left, insort

from autotune.errors import PlanError
from autotune.layout.buffers import Buffers, Layout


def check_layout(buffers: Buffers, layout: Layout) -> None:
    """Raise PlanError, naming the buffers, where two that live at once share a byte, or one lies outside or askew.

    A sweep over births and deaths; those alive are kept by offset, so each is compared with its two neighbours alone.
    """
    if len(layout.offsets) != len(buffers):
        raise PlanError(f"the layout has {len(layout.offsets)} offsets for {len(buffers)} buffers")
    moments: list[tuple[int, int, int]] = []
    for item, (offset, size) in enumerate(zip(layout.offsets, buffers.sizes.tolist(), strict=True)):
        if not 0 <= offset <= layout.bytes - size:
            raise PlanError(f"buffer {item} lies at {offset} to {offset + size}, outside of the {layout.bytes} bytes")
        if offset % int(buffers.aligned[item]):
            raise PlanError(f"buffer {item} lies at {offset}, which is no multiple of {buffers.aligned[item]}")
        if size:
            moments += ((int(buffers.born[item]), 1, item), (int(buffers.died[item]), 0, item))
    alive: list[tuple[int, int, int]] = []  # offset, end, buffer
    for moment, birth, item in sorted(moments):
        mine = (layout.offsets[item], layout.offsets[item] + int(buffers.sizes[item]), item)
        at = bisect_left(alive, mine)
        if not birth:
            del alive[at]
            continue
        for other in alive[max(0, at - 1) : at + 1]:
            if mine[0] < other[1] and other[0] < mine[1]:
                raise PlanError(
                    f"buffers {other[2]} and {item} both live at {moment} and share the bytes "
                    f"{max(mine[0], other[0])} to {min(mine[1], other[1])}"
                )
        insort(alive, mine)
