"""Check layouts. Written apart from every solver, so that a defect in a solver cannot hide itself here."""

from bisect import bisect_left, insort

from autotune.errors import PlanError
from autotune.layout.buffers import Buffers, Layout


def check_layout(buffers: Buffers, layout: Layout) -> None:
    """Check that no two buffers share a byte while both are live, and that all are aligned and inside the block.

    The check sweeps over births and deaths. Live buffers are sorted by offset, so two comparisons per birth suffice.

    Raises:
        PlanError: The layout breaks a rule; the message names the buffers.
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
        interval = (layout.offsets[item], layout.offsets[item] + int(buffers.sizes[item]), item)
        index = bisect_left(alive, interval)
        if not birth:
            del alive[index]
            continue
        for other in alive[max(0, index - 1) : index + 1]:
            if interval[0] < other[1] and other[0] < interval[1]:
                raise PlanError(
                    f"buffers {other[2]} and {item} both live at {moment} and share the bytes "
                    f"{max(interval[0], other[0])} to {min(interval[1], other[1])}"
                )
        insort(alive, interval)
