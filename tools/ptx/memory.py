"""Global memory (the tensors of a launch, and nothing else) and the shared memory of blocks."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass

import numpy as np

from ptx.parse import SHARED_BASE

#: One number type a size, for whole accesses: 16 bytes travel as a complex number, unchanged.
WHOLE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class MemoryFault(Exception):
    """An access outside what may be accessed; the machine adds the instruction."""


@dataclass
class Segment:
    """The bytes of one tensor, or of several that share them."""

    name: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        # Whole accesses are aligned, so a view of any size begins at a multiple of 16.
        self.origin = self.start // 16 * 16
        size = -(-self.stop // 16) * 16 - self.origin
        raw = np.frombuffer((ctypes.c_char * size).from_address(self.origin), np.uint8)
        self.views = {size: raw.view(kind) for size, kind in WHOLE.items()}


class GlobalMemory:
    """What the tensors of a launch occupy, at their real addresses."""

    def __init__(self, spans: dict[str, tuple[int, int]]) -> None:
        self.segments: list[Segment] = []
        last: tuple[str, int, int] | None = None
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            if start == stop:
                continue
            if last and start < last[2]:
                last = f"{last[0]}, {name}", last[1], max(last[2], stop)
                continue
            if last:
                self.segments.append(Segment(*last))
            last = name, start, stop
        if last:
            self.segments.append(Segment(*last))
        self.starts = [segment.start for segment in self.segments]

    def _segment(self, first: int, last: int, size: int) -> Segment | None:
        index = bisect.bisect_right(self.starts, first) - 1
        if index < 0 or last + size > self.segments[index].stop:
            return None
        return self.segments[index]

    def _parts(self, addresses: np.ndarray, size: int):
        """(segment, which of the addresses lie in it); a fault where one lies in none."""
        first, last = int(addresses.min()), int(addresses.max())
        if (addresses & (size - 1)).any():
            wrong = int(addresses[(addresses & (size - 1)) != 0][0])
            raise MemoryFault(f"{size} bytes at {wrong:#x}: not aligned")
        segment = self._segment(first, last, size)
        if segment is not None:
            return [(segment, slice(None))]
        parts = []
        left = np.ones(len(addresses), bool)
        for segment in self.segments:
            inside = (addresses >= segment.start) & (addresses <= segment.stop - size)
            if inside.any():
                parts.append((segment, inside))
                left &= ~inside
        if left.any():
            raise MemoryFault(self._nearest(int(addresses[left][0]), size))
        return parts

    def _nearest(self, address: int, size: int) -> str:
        def distance(segment: Segment) -> int:
            return max(segment.start - address, address + size - segment.stop)

        where = "no tensor was passed"
        if self.segments:
            near = min(self.segments, key=distance)
            where = f"the nearest tensor is {near.name}, {near.stop - near.start} bytes"
            where += f" from {near.start:#x}, {address - near.start:+d} from its start"
        return f"{size} bytes at {address:#x} are in no tensor: {where}"

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        parts = self._parts(addresses, size)
        if len(parts) == 1:
            segment = parts[0][0]
            return segment.views[size].take((addresses - segment.origin) // size)
        found = np.empty(len(addresses), WHOLE[size])
        for segment, which in parts:
            found[which] = segment.views[size][(addresses[which] - segment.origin) // size]
        return found

    def store(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        for segment, which in self._parts(addresses, size):
            segment.views[size][(addresses[which] - segment.origin) // size] = values[which]


class SharedMemory:
    """The shared memory of several blocks, one after another; unwritten bytes are NaN patterns.

    Products (``wgmma``) read it through another proxy, for which what threads wrote is only there
    after a ``fence.proxy.async``: where ``fenced`` says so, they see the last fence's state.
    """

    def __init__(self, blocks: int, size: int, fenced: bool = False) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // 1024) * 1024
        self.raw = np.full(blocks * self.stride, 0xFF, np.uint8)
        self.views = {size: self.raw.view(kind) for size, kind in WHOLE.items()}
        self.proxy = self.raw.copy() if fenced else self.raw
        self.barriers: dict[int, list[int]] = {}  # place -> [threads, still to come, phases]

    def fence(self, blocks: np.ndarray) -> None:
        """What was written before is there for products of these blocks."""
        if self.proxy is not self.raw:
            rows = self.proxy.reshape(-1, self.stride), self.raw.reshape(-1, self.stride)
            rows[0][blocks] = rows[1][blocks]

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Byte offsets within a block, of addresses that are allowed."""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        if len(offsets) and (offsets.min() < 0 or offsets.max() + size > self.size):
            outside = offsets[(offsets < 0) | (offsets + size > self.size)]
            raise MemoryFault(
                f"{size} bytes at {int(outside[0])} of {self.size} bytes of shared memory"
            )
        if (offsets & (size - 1)).any():
            raise MemoryFault(f"{size} bytes of shared memory: not aligned")
        return offsets

    def load(self, blocks: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """``blocks``: where the memory of each thread's block begins, in bytes."""
        return self.views[size].take((self.places(addresses, size) + blocks) // size)

    def store(
        self, blocks: np.ndarray, addresses: np.ndarray, size: int, values: np.ndarray
    ) -> None:
        self.views[size][(self.places(addresses, size) + blocks) // size] = values

    # --- mbarrier objects ---

    def init(self, blocks: np.ndarray, addresses: np.ndarray, threads: np.ndarray) -> None:
        for place, count in zip(self.places(addresses, 8) + blocks, threads, strict=True):
            self.barriers[int(place)] = [int(count), int(count), 0]

    def inval(self, blocks: np.ndarray, addresses: np.ndarray) -> None:
        for place in self.places(addresses, 8) + blocks:
            self._barrier(place)
            del self.barriers[int(place)]

    def arrive(self, blocks: np.ndarray, addresses: np.ndarray) -> None:
        for place in self.places(addresses, 8) + blocks:
            barrier = self._barrier(place)
            barrier[1] -= 1
            if barrier[1] == 0:
                barrier[1:] = barrier[0], barrier[2] + 1

    def phases(self, blocks: np.ndarray, addresses: np.ndarray) -> np.ndarray:
        """How many phases are complete."""
        places, which = np.unique(self.places(addresses, 8) + blocks, return_inverse=True)
        return np.array([self._barrier(place)[2] for place in places])[which]

    def _barrier(self, place: int) -> list[int]:
        if int(place) not in self.barriers:
            raise MemoryFault(f"no mbarrier at {int(place) % self.stride} of shared memory")
        return self.barriers[int(place)]
