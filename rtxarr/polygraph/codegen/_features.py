"""Kernels over the edges of rows with many features: a thread takes a packet of them.

What belongs to an edge alone, such as where it comes from, is read once and not for each feature;
what all features of a packet share, such as the weight of an attention head, is computed once where
packets are whole. The loads of several edges are under way before the first is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from rtxarr.polygraph._index import Expr, names_in
from rtxarr.polygraph._loops import Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._across import FOUND, Segments
from rtxarr.polygraph.codegen._reductions import Reduction, reduction
from rtxarr.polygraph.codegen._text import loaded_names
from rtxarr.polygraph.codegen._writer import Writer, sources_of

EDGES = 4  # of a tile
_HUB_WARPS = 16
_SLOT = 8  # bytes of a value, at most


class Features(Segments):
    counter = "f"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        texts, loops = self.texts, self.loops
        self.by_feature: set[str] = set()  # names whose values differ between features
        for s in loops.before:
            self._classify(s)
        for phase in loops.phases:
            for s in phase.body:
                self._classify(s)
            self.by_feature |= {a.name for a in phase.accumulators if a.of in self.by_feature}
            for s in phase.after:
                self._classify(s)
        # For the features of one edge, what belongs to the edge does not change.
        texts.of_row |= {s.name for s in self._statements()} - self.by_feature
        self.lanes = Writer._lanes(self)
        self.by_packet: set[str] = set()  # of those names, what is the same in a whole packet
        for s in loops.before:
            self._classify_packet(s)
        for phase in loops.phases:
            for s in phase.body:
                self._classify_packet(s)
            self.by_packet |= {a.name for a in phase.accumulators if a.of in self.by_packet}
            for s in phase.after:
                self._classify_packet(s)

    def _classify(self, s: Statement) -> None:
        own = any("f" in names_in(a) for a in s.args if isinstance(a, Expr))
        if s.op != "store" and (own or self.by_feature.intersection(sources_of(s))):
            self.by_feature.add(s.name)

    def _classify_packet(self, s: Statement) -> None:
        if s.name in self.by_feature:
            places = [a for a in s.args if isinstance(a, Expr)]
            values = self.by_feature.intersection(sources_of(s))
            if values <= self.by_packet and all(self.packet_step(e) == 0 for e in places):
                self.by_packet.add(s.name)

    def packet_step(self, place: Expr) -> int | None:
        return self.texts.step(place, "f")

    def tile_size(self) -> str:
        return f"along * {EDGES}"

    def edges_of_tile(self) -> int:
        return EDGES

    def lanes_of_thread(self) -> int:
        return self.lanes

    def partial_bytes(self) -> int:
        return FOUND + _HUB_WARPS * 32 * self.lanes * _SLOT

    # ------------------------------------------------------------------------------ features

    def feature_lines(self) -> None:
        out, d = self.out, self.dialect
        out(
            f"const Index first = (Index){d.block_y} * width * {self.lanes} "
            f"+ (packed ? x * {self.lanes} : x);"
        )
        out("const Index apart = packed ? 1 : width;")
        out("const Index feature = first;")

    def _lane_lines(self) -> None:
        self.out("const Index at = first + k * apart;")
        self.out("const bool inside = at < features;")
        self.out("const Index f = inside ? at : features - 1;")

    def _bound(self, names: Sequence[str], where: dict[str, str]) -> None:
        """Name the values of this lane and edge that ``names`` are."""
        for name in dict.fromkeys(names):
            if name in where:
                self.out(f"const {self._type(name)} {name} = {where[name]};")

    def _type(self, name: str) -> str:
        return ops.value(self.texts.dtypes[name])

    def _of_row(self) -> dict[str, str]:
        """Return where the values of rows that differ between features lie."""
        of_row = {s.name for s in self.loops.before}
        for phase in self.loops.phases:
            of_row |= {a.name for a in phase.accumulators} | {s.name for s in phase.after}
        return {name: f"{name}_f[k]" for name in of_row & self.by_feature}

    # ---------------------------------------------------------------------------------- rows

    def row_statements(self, statements: Sequence[Statement], *, stores: str = "live") -> None:
        out, where = self.out, self._of_row()
        for s in statements:
            if s.op != "store" and s.name not in self.by_feature:
                out(self.texts.let(s))
        varying = [s for s in statements if s.op != "store" and s.name in self.by_feature]
        kept = [s for s in statements if s.op == "store"]
        for s in varying:
            out(f"{self._type(s.name)} {s.name}_f[{self.lanes}];")
        if varying:
            with out.unrolled("k", self.lanes):
                self._lane_lines()
                names = [n for s in varying for n in sources_of(s)]
                own = {s.name for s in varying}
                self._bound([n for n in names if n not in own], where)
                for s in varying:
                    out(self.texts.let(s))
                    out(f"{s.name}_f[k] = {s.name};")
        for s in kept:
            self._store_row(s, where, stores)

    def _store_row(self, s: Statement, where: dict[str, str], stores: str) -> None:
        buffer, place, name = s.args
        out, texts = self.out, self.texts
        value = where.get(name, name)
        with out.block(f"if ({self.leader} && {stores})"):
            packs = self.packet_step(place) == 1
            if packs:
                self._note_packet(s)
                with out.block("if (packed)"):
                    out(f"{self._type(name)} packet[{self.lanes}];")
                    with out.unrolled("k", self.lanes):
                        out(f"packet[k] = {value};")
                    out("const Index f = first;")
                    to = f"{buffer} + ({texts.expr(place)})"
                    out(f"#store_packet<{self.lanes}>({to}, packet, features - first);")
            with out.block("else") if packs else out.block(), out.unrolled("k", self.lanes):
                self._lane_lines()
                element = ops.stored(s.dtype)
                out(f"if (inside) {buffer}[{texts.expr(place)}] = #Store<{element}>::of({value});")

    # --------------------------------------------------------------------------------- edges

    def body(self, number: int, phase: Phase) -> None:
        out = self.out
        reductions = [reduction(a) for a in phase.accumulators]
        for r in reductions:
            if self._is_wide(r):
                out(f"{r.type} {r.running}[{self.lanes}];")
                with out.unrolled("k", self.lanes):
                    out(f"{r.running}[k] = {r.empty};")
            else:
                out(f"{r.type} {r.running} = {r.empty};")
        if not phase.body and not reductions:
            return
        shared = self.by_packet.intersection(s.name for s in phase.body)
        for s in phase.body:
            if s.name in shared:
                for place in (a for a in s.args if isinstance(a, Expr)):
                    self.packed &= self.texts.packs(place, "f", self.lanes)
        with out.block(f"for (Index tile = begin; tile < end; tile += along * {EDGES})"):
            if shared:
                with out.block("if (packed)"):
                    self._tile(phase.body, reductions, shared)
                with out.block("else"):
                    self._tile(phase.body, reductions, set())
            else:
                self._tile(phase.body, reductions, set())

    def _is_wide(self, r: Reduction) -> bool:
        return r.name in self.by_feature

    def _edge_lines(self) -> None:
        self.out("const Index place = tile + j * along + y;")
        self.out("const bool valid = place < end;")
        self.out("const Index c = valid ? place : end - 1;")

    def _tile(
        self, body: Sequence[Statement], reductions: Sequence[Reduction], shared: set[str]
    ) -> None:
        """Write one tile: values of edges, loads of features, then the features of each edge.

        ``shared`` has the names that are computed once for a packet.
        """
        out = self.out
        of_edges = [s for s in body if s.op != "store" and s.name not in self.by_feature]
        known = {s.name for s in of_edges} | {s.name for s in self.loops.before}
        known -= self.by_feature
        loads = [s for s in body if s.op == "load" and s.name in self.by_feature]
        loads = [s for s in loads if s.args[2] is None and known.issuperset(sources_of(s))]
        edge = {s.name: f"{s.name}_e[j]" for s in of_edges}
        lane = self._of_row() | {s.name: f"{s.name}_at[j][k]" for s in loads}
        once = {n: place.replace("[k]", "[0]") for n, place in lane.items()}
        for s in of_edges:
            out(f"{self._type(s.name)} {s.name}_e[{EDGES}];")
        for s in loads:
            out(f"{self._type(s.name)} {s.name}_at[{EDGES}][{self.lanes}];")
        if of_edges:
            with out.unrolled("j", EDGES):
                self._edge_lines()
                for s in of_edges:
                    out(self.texts.let(s))
                    out(f"{s.name}_e[j] = {s.name};")
        if loads:
            with out.unrolled("j", EDGES):
                self._edge_lines()
                self._bound([n for s in loads for n in loaded_names(s.args[1])], edge)
                for s in loads:
                    self._load(s)
        with out.unrolled("j", EDGES):
            self._edge_lines()
            of_packet = [s for s in body if s.name in shared]
            if of_packet:
                out("const Index f = first;")
                names = [n for s in of_packet for n in (s.name, *sources_of(s))]
                own = {s.name for s in of_packet if s not in loads}
                self._bound([n for n in names if n not in own], edge | once)
                for s in of_packet:
                    if s not in loads:
                        out(self.texts.let(s))
            bound = {n for s in of_packet for n in (s.name, *sources_of(s))}
            inner = [s for s in body if s.op == "store" or s.name in self.by_feature - shared]
            own = {s.name for s in inner} - {s.name for s in loads}
            names = [n for s in inner if s not in loads for n in (*sources_of(s), *_stored(s))]
            names += [r.accumulator.of for r in reductions]
            names = [n for n in names if n not in own and n not in bound]
            self._bound(names, edge)
            for r in reductions:
                if not self._is_wide(r):
                    total = r.combine(r.running, r.accumulator.of)
                    out(f"if (valid) {r.running} = {total};")
            with out.unrolled("k", self.lanes):
                self._lane_lines()
                self._bound(names, lane)
                for s in inner:
                    if s.op == "store":
                        out(f"if (valid && inside) {self.texts.store(s)}")
                    elif s not in loads:
                        out(self.texts.let(s))
                for r in reductions:
                    if self._is_wide(r):
                        a = f"{r.running}[k]"
                        out(f"if (valid) {a} = {r.combine(a, r.accumulator.of)};")

    def _load(self, s: Statement) -> None:
        """Read one value, or a packet, of edge ``j``."""
        buffer, place, _ = s.args
        out, texts, target = self.out, self.texts, f"{s.name}_at[j]"
        step = self.packet_step(place)
        if step is not None:
            self._note_packet(s)
            with out.block("if (packed)"):
                out("const Index f = first;")
                if step == 1:
                    at = f"{buffer} + ({texts.expr(place)})"
                    out(f"#load_packet<{self.lanes}>({target}, {at}, features - first);")
                else:
                    out(f"const {self._type(s.name)} same = {texts.value_of(s)};")
                    with out.unrolled("k", self.lanes):
                        out(f"{target}[k] = same;")
        with out.block("else") if step is not None else out.block(), out.unrolled("k", self.lanes):
            self._lane_lines()
            out(f"{target}[k] = {texts.value_of(s)};")

    # ----------------------------------------------------------------------------- combining

    def totals(self, phase: Phase, *, results: bool = True) -> None:
        for r in (reduction(a) for a in phase.accumulators):
            if self._is_wide(r):
                self._combine_wide(r)
                self.out(f"{self._type(r.name)} {r.name}_f[{self.lanes}];")
                with self.out.unrolled("k", self.lanes):
                    self.out(f"const {r.type} {r.running}_k = {r.running}[k];")
                    self.out(r.result().replace(r.running, f"{r.running}_k"))
                    self.out(f"{r.name}_f[k] = {r.name};")
            else:
                self.combine([r])
                self.out(r.result())

    def _combine_wide(self, r: Reduction) -> None:
        out, lanes = self.out, self.lanes
        group = "width * along"
        lines = f"for (int to = width; to < ({group} < 32 ? {group} : 32); to *= 2)"
        with out.block(lines), out.unrolled("k", lanes):
            a = f"{r.running}[k]"
            out(f"{a} = {r.combine(a, f'#shuffled({a}, to)')};")
        with out.block(f"if ({group} > 32)"):
            out("const Index warps = width * along / 32;")
            out(
                f"SHARED {r.type}* const of = "
                f"(SHARED {r.type}*)(shared_memory + {FOUND}) + x * {lanes};"
            )
            with out.block("if (thread % 32 < width)"), out.unrolled("k", lanes):
                out(f"of[thread / 32 * width * {lanes} + k] = {r.running}[k];")
            out("BARRIER();")
            with out.unrolled("k", lanes):
                out(f"{r.running}[k] = of[k];")
            with out.block("for (Index warp = 1; warp < warps; ++warp)"), out.unrolled("k", lanes):
                a, b = f"{r.running}[k]", f"of[warp * width * {lanes} + k]"
                out(f"{a} = {r.combine(a, b)};")
            out("BARRIER();")  # the next one takes the same place

    def combine(self, reductions: Sequence[Reduction]) -> None:
        super().combine(reductions)
        with self.out.block("if (width * along > 32)"):
            self.out("BARRIER();")


def _stored(s: Statement) -> list[str]:
    return [s.args[2]] if s.op == "store" else []
