"""Kernels of long rows that stay in registers, of one block or of several that share a row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product

from rtxarr.polygraph._index import Symbol
from rtxarr.polygraph._loops import Statement
from rtxarr.polygraph.codegen._keep import keep_plan
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._reductions import Reduction, reduction
from rtxarr.polygraph.codegen._rows import SLOT, Rows
from rtxarr.polygraph.codegen._text import Kernel
from rtxarr.polygraph.codegen._writer import FULL, Entry

_LONG = 1 << 15  # bytes of a row; of what is shorter, all lengths share a text
_BLOCK = 20 << 12  # bytes of a row that one block keeps
# Registers of a thread for what stays of a row, the best first, and how many threads a
# multiprocessor then has: where one block has a row, and where several share it.
_HELD = {32: (768, 1024), 40: (768, 768), 20: (1024, 1024)}
_BLOCKS = (2, 4, 8)  # of a cluster: as many as any GPU has that has clusters
_THREADS = (256, 512, 1024)  # of a block, at most
_FEW = 128  # threads: a row is shared by as many blocks as leave that many to each
_AHEAD = 6 << 20  # bytes of rows that are fetched into the cache ahead of those in registers


class Cluster(Rows):
    """A cluster of blocks for each row; each has a part of it, in registers.

    For a reduction, each warp sends what it has to every block of the cluster, which combines that
    in the order of blocks and warps. A value that is sent has a place of its own, and a block goes
    on when it has all: nothing reaches one that has ended. The text is for one number of threads,
    so that places are constants.
    """

    blocks = threads = 1

    def fits(self) -> bool:
        """Tell whether this keeps rows in registers."""
        loops = self.loops
        if self.dialect.name != "cuda" or loops.scans or not self.reductions or not self._packs():
            return False
        slots, self.keeps = keep_plan(loops, self.texts, self.strict)
        words = sum(max(size, 4) // 4 for size, _ in slots)
        size = loops.cols * words * 4
        packets = -(-loops.cols // self.lanes)
        found = []
        by = (1,) if size <= _BLOCK else _BLOCKS
        for held, blocks in product(_HELD, by if size >= _LONG else ()):
            at_once = _HELD[held][blocks > 1]
            batch = max(held // (words * self.lanes), 1)
            threads = -(-packets // (batch * blocks * 32)) * 32
            is_whole = threads * batch * blocks * self.lanes == loops.cols
            most = next((n for n in _THREADS if n >= threads), 0)
            if not most or (blocks == 1 and (not is_whole or most > 512)):
                continue
            if loops.rows * blocks * threads >= FULL // 2:
                # Exact quotients take registers, which fewer threads have more of.
                is_tight = self.strict and is_whole and blocks > 1
                rank = -held if is_tight else list(_HELD).index(held)
                fit = not is_whole, most, rank, threads < _FEW, -blocks
                found.append((fit, (most, blocks, batch, threads, max(at_once // most, 1))))
        if found:
            _, (self.most, self.blocks, self.batch, self.threads, self.at_once) = min(found)
            self.leader = "thread == 0 && rank == 0" if self.blocks > 1 else "thread == 0"
            self.in_registers = True
        return bool(found)

    def run(self) -> Kernel:
        loops = self.loops
        self.thread_lines()
        self.passes_by_packing()
        row_bytes = sum(s.dtype.itemsize for s in self._fetched()) * loops.cols
        arguments = [
            Argument("number", "Index", "rows", loops.rows),
            Argument("number", "Index", "cols", loops.cols),
            Argument("number", "Index", "ahead", _AHEAD // max(row_bytes, 1)),
        ]
        entry = Entry(
            "rows_cluster" if self.blocks > 1 else "rows_whole", self.out,
            (loops.rows * self.blocks, 1), (self.threads, 1), self.partial_bytes(), arguments,
            self.most, self.at_once, self.blocks,
        )  # fmt: skip
        return self.finish([entry])

    # ------------------------------------------------------------------------------- threads

    def thread_lines(self) -> None:
        out, d, of = self.out, self.dialect, self.blocks
        out(d.shared_memory)
        out(f"const Index thread = {d.thread_x}, threads = {self.threads};")
        out(f"const Index rank = {d.block_x} % {of}, row = {d.block_x} / {of}, r = row;")
        out("const bool live = true;")
        out(f"const Index begin = rank * {self.tile_size()}, end = cols;")
        if of > 1:
            out("SHARED u64* const boxes = (SHARED u64*)shared_memory;")
            with out.block("if (thread == 0)"):
                for number, size in enumerate(self._box_sizes()):
                    if size:
                        out(f"open_box(boxes + {number}, {size});")
                out("BOXES_OPEN();")
            out("CLUSTER_ARRIVE();")

    def passes_by_packing(self) -> None:
        """Write all passes, once: packets are dealt out also of arrays that do not pack.

        A text is for whole tiles or for rows that end in parts of them.
        """
        self.whole = self.threads * self.batch * self.blocks * self.lanes == self.loops.cols
        self.waited = False
        self.out("const Index step = 1;")
        self.all_passes()

    def first_element(self) -> str:
        return self.packet()

    def load_kept(self, loads: Sequence[Statement]) -> None:
        for test, self.packing in ("if (packed)", True), ("else", False):
            with self.out.block(test):
                super().load_kept(loads)
                if self.packing and self.whole:
                    self._fetch_ahead([s for s in self._fetched() if s in loads])
        self.packing = None

    def after_loads(self) -> AbstractContextManager[None]:
        return nullcontext()  # they are in branches

    def _fetch_ahead(self, fetched: Sequence[Statement]) -> None:
        """Ask for a row that is to come, so that it is in the cache by then."""
        if fetched:
            with self.out.block("if (ahead && thread == 0 && row + ahead < rows)"):
                self.out(f"const Index r = row + ahead, {self.counter} = begin;")
                for s in fetched:
                    place = self.texts.expr(s.args[1])
                    self.out(f"FETCH({s.args[0]} + ({place}), {self.tile_size()});")

    def _fetched(self) -> list[Statement]:
        """Return the loads whose part of a row lies in one piece."""
        return [
            s
            for s in self.loops.phases[0].body
            if s.name in self.keeps[0]
            and self.texts.hoisted(s)
            and self.packet_step(s.args[1]) == 1
            and all(type(atom) is Symbol for atom, _ in s.args[1].terms)
        ]

    # ------------------------------------------------------------------------------ exchanges

    def _box_sizes(self) -> list[str]:
        """Return the text of the bytes that a box gets in each pass."""
        warps = self._warps()
        return [
            " + ".join(f"sizeof(Sent<{reduction(a).type}>) * {warps}" for a in p.accumulators)
            for p in self.loops.phases
        ]

    def _boxes_bytes(self) -> int:
        return -(-8 * len(self.loops.phases) // SLOT) * SLOT

    def _warps(self) -> int:
        """Return how many warps a cluster has."""
        return self.blocks * self.threads // 32

    def sums_bytes(self) -> int:
        if self.blocks == 1:
            return super().sums_bytes()
        return self._boxes_bytes() + len(self.reductions) * SLOT * self._warps()

    def combine(self, reductions: Sequence[Reduction]) -> None:
        if self.blocks == 1:
            super().combine(reductions)
            return
        out, warps = self.out, self._warps()
        box = next(
            f"boxes + {i}"
            for i, p in enumerate(self.loops.phases)
            if [reduction(a) for a in p.accumulators] == reductions
        )
        self.across_lanes(reductions, "16")
        if not self.waited:
            out("CLUSTER_WAIT();  // until all blocks are there")
            self.waited = True
        with out.block():
            out("const Index lane = thread % 32;")
            for r in reductions:
                place = self._boxes_bytes() + self.reductions.index(r) * SLOT * warps
                sent = f"SHARED Sent<{r.type}>*"
                out(f"{sent} const {r.name}_of = ({sent})(shared_memory + {place});")
            with out.block(f"if (lane < {self.blocks})"):
                for r in reductions:
                    own = f"{r.name}_of + (rank * threads + thread) / 32"
                    out(f"send({own}, {r.running}, lane, {box});")
            out(f"wait_for_box({box});")
            for r in reductions:
                out(f"{r.running} = {r.empty};")
                for first in range(0, warps, 32):
                    test = f"if (lane < {warps - first}) " if warps - first < 32 else ""
                    other = f"{r.name}_of[{first} + lane].value"
                    out(f"{test}{r.running} = {r.combine(r.running, other)};")
        self.across_lanes(reductions, "16")
