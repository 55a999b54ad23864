"""Kernels of rows so long that a multiprocessor holds one or few: the next are on their way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rtxarr.polygraph._loops import Loops, Phase, Statement
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._keep import keep_plan
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._rows import Rows
from rtxarr.polygraph.codegen._text import Kernel, loaded_names
from rtxarr.polygraph.codegen._writer import Entry

_THREADS = 512
_CHUNK = 4  # packets of a thread that are copied and waited for together
_BLOCKS = 132  # as many as a large GPU has multiprocessors


class Ring(Rows):
    """Blocks that take rows in turn, through a ring in shared memory.

    The ring has room for a row and the beginning of the next ones. A thread copies packets there
    that it alone reads, asynchronously, and puts what stays on chip in their place; in the last
    pass that reads it, it asks for packets of the next rows instead.
    """

    def __init__(self, loops: Loops, dialect: Dialect, strict: bool, shared_limit: int) -> None:
        super().__init__(loops, dialect, strict, shared_limit)
        self.batch = _CHUNK
        self.source: Any = self._source()
        self.chunk = _CHUNK * _THREADS * self.lanes  # elements
        size = self.chunk * self.source.dtype.itemsize if self.source else 1
        self.chunks = (shared_limit - self.partial_bytes()) // size
        self.last = max((i for i, keeps in enumerate(self.keeps) if keeps), default=0)

    def _source(self) -> Statement | None:
        """Return the load that the ring holds; None if other values stay on chip beside it."""
        slots, self.keeps = keep_plan(self.loops, self.texts, self.strict)
        if len(slots) != 1 or slots[0][0] not in (4, 8):
            return None
        for s in self.loops.phases[0].body:
            if (
                self.texts.hoisted(s)
                and self.packet_step(s.args[1]) == 1
                and not list(loaded_names(s.args[1]))
                and s.dtype == self.texts.buffers[s.args[0]].dtype == slots[0][1]
            ):
                return s
        return None

    def fits(self) -> bool:
        """Tell whether a multiprocessor holds one row, and the ring holds more."""
        if self.dialect.name != "cuda" or self.source is None or self.loops.rows <= _BLOCKS:
            return False
        cols = self.loops.cols
        is_long = 2 * cols * self.source.dtype.itemsize >= self.shared_limit
        return is_long and self.chunks > -(-cols // self.chunk)

    def run(self) -> Kernel:
        loops, out = self.loops, self.out
        self.thread_lines()
        with out.block(f"for (int i = 0; i < {self.chunks}; ++i)"):
            self.ask()
        with out.block("for (Index row = first_row; row < rows; row += n_blocks)"):
            out("const bool live = true;")
            out("const Index r = row;")
            if sum(bool(p.accumulators) for p in loops.phases) == 1:
                out("BARRIER();")  # all have read what the row before gave
            self.all_passes()
            out("held_first = held;")
        each = -(-loops.rows // _BLOCKS)
        arguments = [
            Argument("number", "Index", "rows", loops.rows),
            Argument("number", "Index", "cols", loops.cols),
        ]
        shared = self.partial_bytes() + self.chunks * self.chunk * self.source.dtype.itemsize
        entry = Entry(
            "rows_ring", out, (-(-loops.rows // each), 1), (_THREADS, 1), shared, arguments,
            _THREADS, 1,
        )  # fmt: skip
        return self.finish([entry])

    def thread_lines(self) -> None:
        out, d = self.out, self.dialect
        element = self.kept_type(self.source.dtype)
        out(d.shared_memory)
        out(f"const Index thread = {d.thread_x}, threads = {_THREADS};")
        out(f"const Index first_row = {d.block_x}, n_blocks = gridDim.x;")
        out("const Index step = 1, begin = 0, end = cols;")
        out(
            f"SHARED {element}* const ring = (SHARED {element}*)(shared_memory + "
            f"{self.partial_bytes()}) + thread * {self.lanes};"
        )
        out("// What to ask for next, and chunks of the ring: for that, of the row, of the tile.")
        out("Index asked_row = first_row, asked = 0, free_chunk = 0, held_first = 0, held = 0;")

    def ask(self) -> None:
        """Copy a chunk of a row, if there is one."""
        out, c = self.out, self.counter
        buffer, place, _ = self.source.args
        self._note_packet(self.source)
        at = f"{self._slot('free_chunk')}, {buffer} + ({self.texts.expr(place)})"
        with out.block("if (asked_row < rows)"):
            out("const Index r = asked_row;")
            for _ in self._both("asked"):
                with out.unrolled("j", _CHUNK):
                    out(f"const Index {c} = asked + (j * threads + thread) * {self.lanes};")
                    if self.whole:
                        out(f"#ask_packet<{self.lanes}>({at});")
                    else:
                        out(f"#ask_each<{self.lanes}>({at}, cols - {c});")
            out(f"if (++free_chunk == {self.chunks}) free_chunk = 0;")
            out(f"asked += {self.chunk};")
            out("if (asked >= cols) { asked = 0; asked_row += n_blocks; }")
        out("COPIES_END();")

    def _both(self, first: str) -> Iterator[None]:
        """Write what follows twice: for whole chunks of arrays that pack, and for others."""
        with self.out.block(f"if (packed && {first} + {self.chunk} <= cols)"):
            self.packing, self.whole = True, True
            yield
        with self.out.block("else"):
            self.packing, self.whole = None, False
            yield

    def body(self, number: int, phase: Phase) -> None:
        """Go over the chunks of a row.

        Every chunk that is waited for ends a group of no copies, so that as many groups are behind
        the one that it waits for each time.
        """
        if not self.start(phase):
            return
        out, place = self.out, self._slot("held")
        kept = {name for name, (_, made, _) in self.keeps[number].items() if made != number}
        if number == 0:
            kept.add(self.source.name)
        keep = self.keeps[number].keys() - kept
        reads, first = [a.of for a in phase.accumulators], self.packet()
        out("held = held_first;")
        with out.block(f"for (Index tile = 0; tile < cols; tile += {self.chunk})"):
            if number == 0:
                out(f"COPIES_WAIT({self.chunks - 1});")
                out("COPIES_END();")
            for _ in self._both("tile"):
                self.tile(
                    phase.body, "end", first, extra=self.sums(phase), reads=reads,
                    kept=dict.fromkeys(sorted(kept), place),
                    keep=dict.fromkeys(sorted(keep), place),
                )  # fmt: skip
            out(f"if (++held == {self.chunks}) held = 0;")
            if number == self.last:
                self.ask()

    def _slot(self, chunk: str) -> str:
        return f"ring + ({chunk} * {_CHUNK} + j) * {_THREADS * self.lanes}"

    def first_element(self) -> str:
        return self.packet()
