"""What this process holds on the GPU: everything that the device itself counts, less what torch's allocator could give.

The allocator takes memory in segments of 2 and 20 MB. One small tensor keeps a whole segment from being given back, so
that on a small model the segments would be counted and not what is in them. What CUDA graphs hold is counted whole: a
graph writes to its pool whenever it is replayed, whatever is free in there between two replays.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# what the device counts beyond torch's own: CUDA's context, loaded kernels, graphs, libraries' workspaces
SHARED_POOL = (0, 0)


def held_on_device(*, used_on_device: int, segments: Iterable[Mapping[str, Any]]) -> int:
    """Return the device's own count less what is free in segments that no CUDA graph uses.

    `segments` is torch.cuda.memory_snapshot().
    """
    return used_on_device - sum(
        int(segment["total_size"]) - int(segment["active_size"])
        for segment in segments
        if tuple(segment.get("segment_pool_id", SHARED_POOL)) == SHARED_POOL
    )
