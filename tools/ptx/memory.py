"""Global memory (the tensors of a launch, and nothing else) and the shared memory of blocks."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.parse import SHARED_BASE

#: A number type for accesses of each size; complex128 holds 16 bytes without changing them.
WHOLE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class MemoryFault(Exception):
    """An access that is not allowed; the machine adds the instruction to the message."""


#: The time ``seen`` of a store that was not released to other blocks yet.
NEVER = np.iinfo(np.int64).max
_SEVERAL = 63  # the number of a warp, if several have read a byte


class Stores:
    """The stores of this launch to each byte of a segment, and which blocks see them.

    Memory itself holds the value that the last block to store there sees. Other blocks see ``old``
    until the time ``seen``, and later until they acquire. A thread that reads the value of a strong
    store, and acquires, sees all stores until the time that the store ``carried``.
    """

    def __init__(self, size: int) -> None:
        self.owner = np.zeros(size, np.int32)  # the number of the last block to store, or 0
        self.old = np.zeros(size, np.uint8)
        self.seen = np.zeros(size, np.int64)
        self.carried = np.zeros(size, np.int64)

    def rows(self, name: str, size: int, places: np.ndarray) -> np.ndarray:
        """[accesses, bytes]"""
        return getattr(self, name).reshape(-1, size)[places]

    def put(self, name: str, size: int, places: np.ndarray, values: Any) -> None:
        getattr(self, name).reshape(-1, size)[places] = values


@dataclass
class Segment:
    """The bytes of one tensor, or of several that overlap."""

    name: str
    start: int
    stop: int
    stores: Stores | None = None

    def __post_init__(self) -> None:
        # Whole accesses are aligned, so a view of any size begins at a multiple of 16.
        self.origin = self.start // 16 * 16
        size = -(-self.stop // 16) * 16 - self.origin
        raw = np.frombuffer((ctypes.c_char * size).from_address(self.origin), np.uint8)
        self.views = {size: raw.view(kind) for size, kind in WHOLE.items()}


class GlobalMemory:
    """The memory of a launch's tensors, at their real addresses.

    Between blocks it is as weak as the PTX memory model allows. A block sees its own stores at
    once. Other blocks must see a store when the block has released it and they have acquired since,
    or when the launch is over. In the order "late" they see it not before, in "early" at once, and
    in "random" some loads see some stores at once. A thread releases its own stores and those that
    a barrier orders before. The release takes effect with a strong store or an atomic: a thread
    that reads its value may acquire. Atomics and strong accesses go to the memory that all blocks
    share.

    Not modelled: an acquire also shows stores that third blocks released before.
    """

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
        self.start("early", np.random.default_rng(0))

    def start(self, order: str, random: np.random.Generator) -> None:
        """Begin a launch: all blocks see all earlier stores."""
        self.order, self.random = order, random
        self.now = 0
        self.unreleased: list[tuple] = []  # (stores, size, places, lanes' blocks, threads, clocks)

    def _segment(self, first: int, last: int, size: int) -> Segment | None:
        index = bisect.bisect_right(self.starts, first) - 1
        if index < 0 or last + size > self.segments[index].stop:
            return None
        return self.segments[index]

    def _parts(self, addresses: np.ndarray, size: int):
        """(segment, mask of the addresses in it). An address in no segment is a fault."""
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

    def load(
        self, addresses: np.ndarray, size: int, group: Any, which: Any, how: str = "weak"
    ) -> np.ndarray:
        """The values that the threads ``which`` load. ``how``: "weak", "strong" or "constant"."""
        parts = self._parts(addresses, size)
        if len(parts) == 1 and parts[0][0].stores is None:
            segment = parts[0][0]
            return segment.views[size].take((addresses - segment.origin) // size)
        found = np.empty(len(addresses), WHOLE[size])
        lanes = np.arange(group.lanes)[which]
        for segment, inside in parts:
            places = (addresses[inside] - segment.origin) // size
            values = segment.views[size].take(places)
            if segment.stores is not None:
                self._hide(segment.stores, size, places, values, group, lanes[inside], how)
            found[inside] = values
        return found

    def _hide(
        self,
        stores: Stores,
        size: int,
        places: np.ndarray,
        values: np.ndarray,
        group: Any,
        lanes: np.ndarray,
        how: str,
    ) -> None:
        """Replace values that the threads do not see yet by the older ones."""
        if how == "strong":
            carried = stores.rows("carried", size, places).max(1)
            group.observed[lanes] = np.maximum(group.observed[lanes], carried)
        owner = stores.rows("owner", size, places)
        if how == "constant":  # the constant cache does not see even the block's own stores
            hidden = owner != 0
        else:
            hidden = (owner != 0) & (owner != group.number[lanes][:, None])
        if not hidden.any():
            return
        seen = stores.rows("seen", size, places)
        if how == "strong":
            hidden &= seen == NEVER
        else:
            hidden &= seen > group.acquired[lanes][:, None]
            if self.order == "random":
                stale = self.random.integers(0, 2, group.blocks).astype(bool)[group.block[lanes]]
                hidden &= (seen == NEVER) | stale[:, None]
        old = stores.rows("old", size, places)
        np.copyto(values.view(np.uint8).reshape(-1, size), old, where=hidden)

    def store(
        self,
        addresses: np.ndarray,
        size: int,
        values: np.ndarray,
        group: Any,
        which: Any,
        how: str = "weak",
        released: int = 0,
    ) -> None:
        """``how``: "weak", "strong" or "atomic". ``released``: time of a release by the store."""
        lanes = None
        for segment, inside in self._parts(addresses, size):
            places = (addresses[inside] - segment.origin) // size
            view = segment.views[size]
            if self.order != "early":
                lanes = np.arange(group.lanes)[which] if lanes is None else lanes
                if segment.stores is None:
                    segment.stores = Stores(len(segment.views[1]))
                before = view.take(places).view(np.uint8).reshape(-1, size)
                to = segment.stores, size, places, before
                self._note(*to, group, lanes[inside], how, released)
            view[places] = values[inside]

    def _note(
        self,
        stores: Stores,
        size: int,
        places: np.ndarray,
        before: np.ndarray,
        group: Any,
        lanes: np.ndarray,
        how: str,
        released: int,
    ) -> None:
        numbers = group.number[lanes][:, None]
        mine = stores.rows("owner", size, places) == numbers
        hidden = mine & (stores.rows("seen", size, places) == NEVER)
        old = np.where(hidden, stores.rows("old", size, places), before)
        stores.put("old", size, places, old)
        stores.put("owner", size, places, numbers)
        if how != "weak":
            carried = np.maximum(group.released[lanes], released)[:, None]
            if how == "atomic":  # an atomic also passes on the release of the last store
                carried = np.maximum(carried, stores.rows("carried", size, places))
            stores.put("carried", size, places, carried)
            self.now += 1
            return stores.put("seen", size, places, self.now)
        stores.put("carried", size, places, 0)
        seen = np.full(len(lanes), NEVER)
        if self.order == "random":
            seen[self.random.integers(0, 2, group.blocks).astype(bool)[group.block[lanes]]] = 0
        stores.put("seen", size, places, seen[:, None])
        if group.releases:
            threads = group.warp[lanes] * 32 + group.lane[lanes]
            who = group.block[lanes], threads, group.clock[lanes]
            self.unreleased.append((stores, size, places, numbers, *who))

    def release(self, group: Any, which: Any) -> int:
        """Release the stores of these threads, and those of other threads before a barrier that
        these have passed. Returns the time of the release."""
        self.now += 1
        blocks = group.block[which]
        threads = np.zeros((group.blocks, 1024), bool)
        threads[blocks, group.warp[which] * 32 + group.lane[which]] = True
        clocks = np.full(group.blocks, -1, np.int64)
        np.maximum.at(clocks, blocks, NEVER if group.has_phases else group.clock[which])
        left = []
        for stores, size, places, numbers, block, thread, clock in self.unreleased:
            due = threads[block, thread] | (clock < clocks[block])
            at = places[due]
            shown = stores.rows("owner", size, at) == numbers[due]
            seen = stores.rows("seen", size, at)
            stores.put("seen", size, at, np.where(shown & (seen == NEVER), self.now, seen))
            if not due.all():
                kept = ~due
                who = numbers[kept], block[kept], thread[kept], clock[kept]
                left.append((stores, size, places[kept], *who))
        self.unreleased = left
        return self.now


class SharedMemory:
    """The shared memory of several blocks, one after another; unwritten bytes are NaN patterns.

    Products (``wgmma``) read it through another proxy, which sees threads' stores only after a
    ``fence.proxy.async``: if ``fenced``, products read the contents at the last fence.

    ``watched``: it is an error if a warp reads what another one wrote, or writes what another one
    read, with no barrier of the block in between. The error is found in any order of the warps, and
    also if the value is not used.
    """

    def __init__(self, blocks: int, size: int, fenced: bool = False, watched: bool = False) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // 1024) * 1024
        self.raw = np.full(blocks * self.stride, 0xFF, np.uint8)
        self.views = {size: self.raw.view(kind) for size, kind in WHOLE.items()}
        self.proxy = self.raw.copy() if fenced else self.raw
        self.barriers: dict[int, list[int]] = {}  # place -> [threads, still to come, phases]
        # Each byte's last access: 64 times the barriers that the warp had passed, plus its number.
        self.watched = watched
        self.readers, self.writers = np.zeros((2, len(self.raw) * watched), np.int64)

    def watch(self, places: np.ndarray, size: int, group: Any, lanes: Any, writes: bool) -> None:
        """Check accesses of these lanes; ``places`` include the start of their block."""
        if not self.watched:
            return
        warps, passed = group.warp[lanes], group.passed[lanes]
        for warp in np.unique(warps):
            mine = np.flatnonzero(warps == warp)
            rows = places[mine] // size
            since = 64 * passed[mine][:, None]
            tags = since + warp
            readers, writers = (
                tags_of.reshape(-1, size) for tags_of in (self.readers, self.writers)
            )
            last = (readers if writes else writers)[rows]
            if ((last >= since) & (last != tags)).any():
                at = int(places[mine][((last >= since) & (last != tags)).any(1)][0])
                done = "writes what another one read" if writes else "reads what another one wrote"
                raise MemoryFault(
                    f"warp {warp} {done}, with no barrier in between: {size} bytes at"
                    f" {at % self.stride} of shared memory"
                )
            if writes:
                writers[rows] = tags
            else:
                last = readers[rows]
                readers[rows] = np.where((last >= since) & (last != tags), since + _SEVERAL, tags)

    def fence(self, blocks: np.ndarray) -> None:
        """Show all earlier stores to the products of these blocks."""
        if self.proxy is not self.raw:
            rows = self.proxy.reshape(-1, self.stride), self.raw.reshape(-1, self.stride)
            rows[0][blocks] = rows[1][blocks]

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The byte offsets of addresses within a block; a fault if one is outside or unaligned."""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        if len(offsets) and (offsets.min() < 0 or offsets.max() + size > self.size):
            outside = offsets[(offsets < 0) | (offsets + size > self.size)]
            raise MemoryFault(
                f"{size} bytes at {int(outside[0])} of {self.size} bytes of shared memory"
            )
        if (offsets & (size - 1)).any():
            raise MemoryFault(f"{size} bytes of shared memory: not aligned")
        return offsets

    def load(self, addresses: np.ndarray, size: int, group: Any, which: Any) -> np.ndarray:
        places = self.places(addresses, size) + group.block_start[which]
        self.watch(places, size, group, which, writes=False)
        return self.views[size].take(places // size)

    def store(
        self, addresses: np.ndarray, size: int, values: np.ndarray, group: Any, which: Any
    ) -> None:
        places = self.places(addresses, size) + group.block_start[which]
        self.watch(places, size, group, which, writes=True)
        self.views[size][places // size] = values

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
        """The number of complete phases of each barrier."""
        places, which = np.unique(self.places(addresses, 8) + blocks, return_inverse=True)
        return np.array([self._barrier(place)[2] for place in places])[which]

    def _barrier(self, place: int) -> list[int]:
        if int(place) not in self.barriers:
            raise MemoryFault(f"no mbarrier at {int(place) % self.stride} of shared memory")
        return self.barriers[int(place)]
