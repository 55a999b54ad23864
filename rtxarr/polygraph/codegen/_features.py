"""Kernels over the edges of rows with many features: a thread takes a packet of them.

What does not differ between features, such as where an edge comes from, or is the same for a share
of them, such as the weight of an attention head, is computed once: for that, the lanes of a row are
dealt out anew, over edges and shares instead of edges and packets. Lanes with features then ask
those lanes. What one pass computes of edges and another needs stays on chip, of a row's first
edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rtxarr.polygraph._index import Div, Expr, Loaded, Symbol, names_in
from rtxarr.polygraph._loops import Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._keep import keep_plan
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._reductions import Reduction, reduction
from rtxarr.polygraph.codegen._segments import THREADS, WARPS, Segments
from rtxarr.polygraph.codegen._text import loaded_names, sources_of
from rtxarr.polygraph.codegen._writer import Entry, Writer, power_of_two, wanted

EDGES = 4  # whose features a thread reads at once
_KEPT = 8  # values of a thread that stay on chip
_ROOM = 24 << 10  # bytes of a block for them
# Threads that read and add up in so few registers leave room for four blocks on a multiprocessor.
_REGISTERS, _MIN_BLOCKS = 24, 4

EDGE, SHARE, FEATURE = range(3)  # what a value belongs to, beside its edge or row


class Features(Segments):
    counter = "f"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.lanes = Writer._lanes(self)
        self.kind_of: dict[str, int] = {}
        self.share = self._classify()  # features of a share, or 0
        self.texts.of_row |= {name for name, kind in self.kind_of.items() if kind != FEATURE}
        values = [s.name for s in self._statements() if s.op != "store"]
        values += [a.of for p in self.loops.phases for a in p.accumulators]
        # Whether lanes are dealt out over edges, too.
        self.by_edges = not all(map(self._wide, values))
        width, _ = self.widths()
        # The edges that a lane with features has of those that a team takes together. Where they
        # are few, it reads those of several lots at once.
        self.per_lot = width // self._shares() if self.by_edges else EDGES
        self.across_lots = self.per_lot < EDGES
        self.one_lane = width == 1  # a lane has the same edges in both roles
        self.batch = EDGES if self.share or self.across_lots else EDGES // 2  # lots at once
        self.whole = True  # the text being written is for whole packets
        self.fetched: set[str] = set()  # values of shares that lanes with features have
        self._plan_kept()

    # ------------------------------------------------------------------------------ classes

    def _classify(self) -> int:
        """Fill ``kind_of``; return how many features a share has."""
        same: dict[str, int] = {}  # 0, or n if the value is one for n features

        def note(s: Statement) -> None:
            places = [_sameness(a) for a in s.args if isinstance(a, Expr)]
            same[s.name] = math.gcd(*places, *(same.get(n, 0) for n in sources_of(s)))

        for s in self.loops.before:
            note(s)
        for phase in self.loops.phases:
            for s in phase.body:
                if s.op != "store":
                    note(s)
            same |= {a.name: same.get(a.of, 0) for a in phase.accumulators}
            for s in phase.after:
                if s.op != "store":
                    note(s)
        shares = sorted({n for n in same.values() if n > 1})
        share = math.gcd(*shares) if shares else 0
        if shares and share < self.lanes:
            share = next((n for n in shares if n >= self.lanes), 0)
        for name, n in same.items():
            is_share = n > 1 and share and n % share == 0
            self.kind_of[name] = EDGE if n == 0 else SHARE if is_share else FEATURE
        return share

    def _wide(self, name: str) -> bool:
        return self.kind_of[name] == FEATURE

    # -------------------------------------------------------------------------------- sizes

    def features_of_thread(self) -> int:
        return self.lanes

    def edges_of_thread(self) -> int:
        return EDGES

    def widths(self) -> tuple[int, int]:
        width, _ = super().widths()
        return width, max(self._shares() // width, 1)

    def _shares(self) -> int:
        """Return the shares that the lanes of a row have, as a power of two."""
        if not self.share:
            return 1
        slab = super().widths()[0] * self.lanes
        whole = slab % self.share == 0 or self.loops.features <= slab
        count = -(-min(slab, self.loops.features) // self.share)
        return power_of_two(count if whole else count + 1)

    def sizes(self) -> dict[str, int]:
        return {
            "share_bits": self._shares().bit_length() - 1,
            "kept_at": super().shared_bytes(),
        }

    def partial_bytes(self) -> int:
        size = max((r.accumulator.dtype.itemsize for r in self.reductions), default=1)
        lanes = max(self.widths()[0] * self.lanes, self._shares())
        return WARPS * lanes * max(2 * size, 8)  # one reduction at a time

    def shared_bytes(self) -> int:
        return super().shared_bytes() + self.kept_bytes

    def _plan_kept(self) -> None:
        """Decide which values of edges and shares stay on chip, and where."""
        slots, keeps = keep_plan(self.loops, self.texts, self.strict)
        keeps = [{n: k for n, k in keep.items() if not self._wide(n)} for keep in keeps]
        self.prefetched = self._prefetched_loads()
        for s in self.prefetched:
            for number, phase in enumerate(self.loops.phases):
                if number == 0 or s in phase.body:
                    keeps[number][s.name] = (len(slots), 0, number)
            slots = [*slots, (s.dtype.itemsize, s.dtype)]
        used = sorted({slot for keep in keeps for slot, *_ in keep.values()})
        size = sum(slots[slot][0] for slot in used)
        self.n_kept = max(self.batch, _KEPT if self.share else _KEPT // 2)
        self.kept_bytes = size * self.n_kept * THREADS
        if self.kept_bytes > _ROOM:
            self.kept_bytes, self.prefetched, used, keeps = 0, [], [], [{} for _ in keeps]
        self.keeps = keeps
        self.kept_slots = {slot: slots[slot] for slot in used}

    def _prefetched_loads(self) -> list[Statement]:
        """Return what later passes read of edges, that the first one may: waiting is shared."""
        first, *later = self.loops.phases
        known = {s.name for s in first.body}
        if not any(s.op == "load" and not self._wide(s.name) for s in first.body):
            return []
        found = {s.name: s for phase in later for s in phase.body if s.op == "load"}
        return [
            s
            for name, s in found.items()
            if name not in known and not self._wide(name) and not sources_of(s)
        ]

    def at_once(self, features: bool) -> int:
        """Return how many lots there are to a step of a pass."""
        if not self.whole:
            return 1
        if features and self.across_lots:
            return EDGES // self.per_lot
        return min(self.batch, EDGES // 2) if features else self.batch

    def kernel(self, name: str, e: Entry, arguments: Sequence[Argument]) -> str:
        if self._registers() <= _REGISTERS:
            e.min_blocks = _MIN_BLOCKS  # else the compiler lets reads wait for one another
        return super().kernel(name, e, arguments)

    def _registers(self) -> int:
        """Return the registers for what a thread reads and adds up."""
        loads = [s.dtype for s in self._statements() if s.op == "load" and self._wide(s.name)]
        sums = [a.dtype for p in self.loops.phases for a in p.accumulators if self._wide(a.of)]
        words = [EDGES * -(-dtype.itemsize // 4) for dtype in loads]
        return self.lanes * sum([*words, *(-(-dtype.itemsize // 4) for dtype in sums)])

    # ------------------------------------------------------------------------------ threads

    def feature_lines(self) -> None:
        out, d, lanes = self.out, self.dialect, self.lanes
        out(f"const Index slab = (Index){d.block_y} * width * {lanes};")
        out(f"const Index feature = slab + (packed ? x * {lanes} : x);")
        out("const Index member = thread & (team - 1), home = (thread & 31) - member;")
        out(f"const Index warp = is_hub ? thread / 32 : 0, warps = is_hub ? {WARPS} : 1;")
        out("const Index y_team = member >> width_bits, edges_at_once = team >> width_bits;")
        if self.by_edges:
            out("const Index edges = team >> share_bits;")  # that a team takes together
            out("const Index own_edge = warp * edges + (member >> share_bits);")
        else:
            out(f"const Index edges = edges_at_once * {EDGES};")
        if self.share:
            divisor, n = self.texts.divisor(self.share), self.texts.number(self.share)
            out(f"const Index share_0 = quotient(slab, {divisor});")
            out("const Index own_share = share_0 + (member & (((Index)1 << share_bits) - 1));")
            out(f"const Index f_of_share = own_share * {n};")
            out("const Index f = f_of_share < features ? f_of_share : features - 1;")
        offset = 0
        for slot, (size, dtype) in self.kept_slots.items():
            element = self.kept_type(dtype)
            place = f"shared_memory + kept_at + {offset}"
            out(f"SHARED {element}* const kept{slot} = (SHARED {element}*)({place}) + thread;")
            offset += size * self.n_kept * THREADS

    def row_lines(self) -> None:
        super().row_lines()
        out = self.out
        out("const Index last = count ? begin + count - 1 : 0;")
        out("Index longest = end - begin;")  # of the rows of a warp, whose lanes stay together
        with out.block("for (int apart = team; apart < 32; apart *= 2)"):
            out("longest = #maximum(longest, #shuffled(longest, apart));")

    def all_passes(self) -> None:
        """Write the passes for whole packets, and for features that lie apart."""
        self.packed &= self.loops.features % self.lanes == 0 and self.share % self.lanes == 0
        for whole in (True, False):
            self.whole = whole
            self.fetched = set()
            with self.out.block("if (packed)" if whole else "else"):
                self._own_lines()
                self._passes()

    def _passes(self) -> None:
        """Write the passes; what is only copied is asked for before the first, stored after it."""
        at_once, loads, later = self._parts_of_before()
        self.row_statements(at_once)
        for s in loads:
            self.out(f"{self._type(s.name)} {s.name}_f[{self.lanes}] = {{}};")
            self._load_packet(s, f"{s.name}_f", {}, "if (y == 0 && live)")
        for number, phase in enumerate(self.loops.phases):
            self.body(number, phase)
            if number == 0:
                self.row_statements(later)
            self.totals(phase)
            self.row_statements(phase.after)
        if not self.loops.phases:
            self.row_statements(later)

    def _parts_of_before(self) -> tuple[list[Statement], list[Statement], list[Statement]]:
        """Part what comes before the passes: what they need, loads for stores alone, and these."""
        needed = {a.of for p in self.loops.phases for a in p.accumulators}
        for phase in self.loops.phases:
            needed |= {n for s in (*phase.body, *phase.after) for n in sources_of(s)}
        at_once: list[Statement] = []
        loads: list[Statement] = []
        later: list[Statement] = []
        for s in reversed(self.loops.before):
            if s.op != "store" and (s.name in needed or s.op == "scalar"):
                needed.update(sources_of(s))
                at_once.insert(0, s)
            elif self.whole and s.op == "load" and self._is_packet(s) and not sources_of(s):
                loads.insert(0, s)
            else:
                later.insert(0, s)
        return at_once, loads, later

    def _own_lines(self) -> None:
        """Name the features of a thread, and the lanes that have their shares."""
        out, lanes = self.out, self.lanes
        share = f"quotient(at, {self.texts.divisor(self.share)}) - share_0" if self.share else "0"
        if self.whole:
            out("const Index at = feature < features ? feature : 0;")
            out(f"const Index own = home + {share};")
        else:
            out(f"Index own[{lanes}];")
            with out.unrolled("k", lanes):
                self._feature_of_lane("at")
                out(f"own[k] = home + {share};")

    def _feature_of_lane(self, name: str = "f") -> None:
        if self.whole:
            self.out(f"const Index {name} = at + k;")
        else:
            self.out("const bool inside = feature + k * width < features;")
            self.out(f"const Index {name} = inside ? feature + k * width : features - 1;")

    @contextmanager
    def _each_feature(self) -> Iterator[None]:
        with self.out.unrolled("k", self.lanes):
            self._feature_of_lane()
            yield

    # ---------------------------------------------------------------------------------- rows

    def _of_row(self) -> set[str]:
        found = {s.name for s in self.loops.before}
        for phase in self.loops.phases:
            found |= {a.name for a in phase.accumulators} | {s.name for s in phase.after}
        return found

    def _fetch_shares(self, names: Iterable[str]) -> None:
        """Give lanes with features the row's values of their shares."""
        for name in dict.fromkeys(names):
            if self.kind_of[name] == SHARE and name not in self.fetched:
                self.fetched.add(name)
                if self.whole:
                    self.out(f"const {self._type(name)} {name}_own = #from_lane({name}, own);")
                else:
                    self.out(f"{self._type(name)} {name}_own[{self.lanes}];")
                    with self.out.unrolled("k", self.lanes):
                        self.out(f"{name}_own[k] = #from_lane({name}, own[k]);")

    def _row_value(self, name: str) -> str:
        """Return the text of a row's value for a lane with features, in its feature ``k``."""
        if self._wide(name):
            return f"{name}_f[k]"
        if self.kind_of[name] == SHARE:
            return f"{name}_own" if self.whole else f"{name}_own[k]"
        return name

    def row_statements(self, statements: Sequence[Statement], *, stores: str = "live") -> None:
        out = self.out
        kept = [s for s in statements if s.op == "store"]
        varying = [s for s in statements if s.op != "store" and self._wide(s.name)]
        for s in statements:
            if s.op != "store" and not self._wide(s.name):
                out(self.texts.let(s))
        if not varying and not kept:
            return
        own = {s.name for s in varying}
        names = [n for s in (*varying, *kept) for n in sources_of(s) if n not in own]
        self._fetch_shares(names)
        where = {n: self._row_value(n) for n in names}
        in_packets = [s for s in varying if self._is_packet(s) and own.isdisjoint(sources_of(s))]
        for s in varying:
            out(f"{self._type(s.name)} {s.name}_f[{self.lanes}];")
            if s in in_packets:
                self._load_packet(s, f"{s.name}_f", where)
        if varying:
            with self._each_feature():
                self._bind([n for s in varying for n in sources_of(s)], where)
                for s in varying:
                    if s in in_packets:
                        out(f"const {self._type(s.name)} {s.name} = {s.name}_f[k];")
                    else:
                        out(self.texts.let(s))
                        out(f"{s.name}_f[k] = {s.name};")
        for s in kept:
            self._store(s, "y == 0 && live", where | {n: f"{n}_f[k]" for n in own})

    def _is_packet(self, s: Statement) -> bool:
        """Tell whether a load or store moves a whole packet, in the text for these."""
        if s.op not in ("load", "store") or (s.op == "load" and s.args[2] is not None):
            return False
        if self.packet_step(s.args[1]) != 1:
            return False
        self._note_packet(s)
        return self.whole

    def packet_step(self, place: Expr) -> int | None:
        return self.texts.step(place, "f")

    def _load_packet(
        self, s: Statement, target: str, where: dict[str, str], test: str = ""
    ) -> None:
        buffer, place, _ = s.args
        with self.out.block(test):
            self._bind(loaded_names(place), where)
            self.out("const Index f = at;")
            place_text = f"{buffer} + ({self.texts.expr(place)})"
            self.out(f"#load_packet<{self.lanes}>({target}, {place_text}, {self.lanes});")

    def _store(self, s: Statement, test: str, where: dict[str, str]) -> None:
        """Write a value of each feature, a packet at once where that can be."""
        buffer, place, name = s.args
        out = self.out
        value = where.get(name, name)
        with out.block(f"if ({test})"):
            if self._is_packet(s):
                out(f"{self._type(name)} packet[{self.lanes}];")
                with out.unrolled("k", self.lanes):
                    out(f"packet[k] = {value};")
                out("const Index f = at;")
                to = f"{buffer} + ({self.texts.expr(place)})"
                out(f"#store_packet<{self.lanes}>({to}, packet, {self.lanes});")
            else:
                with self._each_feature():
                    test = "" if self.whole else "if (inside) "
                    element = ops.stored(s.dtype)
                    to = f"{buffer}[{self.texts.expr(place)}]"
                    out(f"{test}{to} = #Store<{element}>::of({value});")

    # --------------------------------------------------------------------------------- edges

    def body(self, number: int, phase: Phase) -> None:
        out = self.out
        reductions = [reduction(a) for a in phase.accumulators]
        narrow = [r for r in reductions if not self._wide(r.accumulator.of)]
        wide = [r for r in reductions if self._wide(r.accumulator.of)]
        for r in narrow:
            out(f"{r.type} {r.running} = {r.empty};")
        for r in wide:
            out(f"{r.type} {r.running}[{self.lanes}];")
            with out.unrolled("k", self.lanes):
                out(f"{r.running}[k] = {r.empty};")
        if not phase.body and not reductions:
            return
        of_edges = [s for s in phase.body if s.op != "store" and not self._wide(s.name)]
        of_features = [s for s in phase.body if s not in of_edges]
        of_edges += self.prefetched if number == 0 else []
        exchanged = {n for s in of_features for n in sources_of(s)} & {s.name for s in of_edges}
        if of_features or wide:
            used = [n for s in of_features for n in sources_of(s)]
            used += [r.accumulator.of for r in wide]
            rows = self._of_row()
            self._fetch_shares(n for n in used if n in rows)
        by_lots = of_edges or narrow or self.across_lots
        batch = self.at_once(bool(of_features or wide)) if by_lots else 1
        with out.block(f"for (Index lot = 0; lot * edges * warps < longest; lot += {batch})"):
            if of_edges or narrow:
                self._edges(number, of_edges, narrow, sorted(exchanged), batch)
            if (of_features or wide) and self.across_lots:
                self._features(of_features, wide, exchanged, batch * self.per_lot)
            elif of_features or wide:
                with out.unrolled("i", batch):
                    self._features(
                        of_features, wide, exchanged, EDGES if self.whole else EDGES // 2
                    )

    def _edges(
        self,
        number: int,
        body: list[Statement],
        narrow: list[Reduction],
        exchanged: list[str],
        batch: int,
    ) -> None:
        """Let lanes compute what belongs to edges and shares, ``batch`` edges each."""
        out = self.out
        keeps = self.keeps[number]
        kept = {n: slot for n, (slot, made, _) in keeps.items() if made != number}
        keep = {n: slot for n, (slot, made, _) in keeps.items() if made == number}
        for name in exchanged:
            out(f"{self._type(name)} {name}_e[{batch}];")
        reads = {*exchanged, *keep, *(r.accumulator.of for r in narrow)}

        def each(held: dict[str, int]) -> None:
            """Compute by stages: what is read in one, for all edges, is used in the next."""
            some = wanted(body, held, reads)
            stages = _stages(some, held)
            last = max(stages.values(), default=0)
            used = dict.fromkeys((*keep, *(r.accumulator.of for r in narrow)), last)
            for s in some:
                for n in sources_of(s) if s.name not in held else ():
                    used[n] = max(used.get(n, 0), stages[s.name])
            apart = {s.name for s in some if used.get(s.name, 0) > stages[s.name]}
            for name in sorted(apart):
                out(f"{self._type(name)} {name}_i[{batch}];")
            for stage in range(last + 1):
                with out.unrolled("i", batch):
                    out("const Index place = begin + (lot + i) * edges * warps + own_edge;")
                    out("const bool valid = place < end;")
                    out("const Index c = valid ? place : last;")
                    own = [s for s in some if stages[s.name] == stage]
                    names = [n for s in own if s.name not in held for n in sources_of(s)]
                    if stage == last:
                        names += [*keep, *(r.accumulator.of for r in narrow)]
                    before = [n for n in names if n in apart and stages[n] < stage]
                    self._bind(before, {n: f"{n}_i[i]" for n in before})
                    for s in own:
                        if s.name in held:
                            where = f"kept{held[s.name]}[(lot + i) * {THREADS}]"
                            out(f"const {self._type(s.name)} {s.name} = #value({where});")
                        else:
                            out(self.texts.let(s))
                        if s.name in apart:
                            out(f"{s.name}_i[i] = {s.name};")
                        if s.name in exchanged:
                            out(f"{s.name}_e[i] = {s.name};")
                    if stage == last:
                        finish()

        def finish() -> None:
            for name, slot in keep.items():
                element = self.kept_type(self.texts.dtypes[name])
                where = f"kept{slot}[(lot + i) * {THREADS}]"
                stored = f"{where} = #Store<{element}>::of({name});"
                out(f"if (lot + i < {self.n_kept}) {stored}")
            for r in narrow:
                total = r.combine(r.running, r.element("c"))
                out(f"if (valid) {r.running} = {total};")

        if kept:
            with out.block(f"if (lot + {batch} <= {self.n_kept})"):
                each(kept)
            with out.block("else"):
                each({})
        else:
            each({})

    def _features(
        self, body: list[Statement], wide: list[Reduction], exchanged: set[str], n_edges: int
    ) -> None:
        """Go over the edges of lot ``i``, or of all lots at once, for all features of each."""
        out, lanes = self.out, self.lanes
        rows = self._of_row()
        where = {n: self._row_value(n) for s in body for n in sources_of(s) if n in rows}
        sums = {r.accumulator.of for r in wide} & rows
        where |= {n: self._row_value(n) for n in sums}
        known = exchanged | rows
        loads = [s for s in body if s.op == "load" and s.args[2] is None]
        loads = [s for s in loads if all(n in known and not self._wide(n) for n in sources_of(s))]
        if not self.whole:  # a lane's features have several shares
            shares = {n for n in (*exchanged, *where) if self.kind_of[n] == SHARE}
            loads = [s for s in loads if shares.isdisjoint(sources_of(s))]
        others = [s for s in body if s not in loads]
        used = dict.fromkeys(n for s in body for n in sources_of(s) if n in exchanged)
        apart = [n for n in used if not self.whole and self.kind_of[n] == SHARE]
        per_edge = [n for n in used if n not in apart]
        of_edge = {n: f"{n}_j[j]" for n in per_edge}
        with self._edges_of_lot(n_edges):
            for n in per_edge:
                out(f"{self._type(n)} {n}_j[{n_edges}];")
            for s in loads:
                out(f"{self._type(s.name)} {s.name}_at[{n_edges}][{lanes}];")
            if per_edge:
                with out.unrolled("j", n_edges):
                    self._edge_lines()
                    for n in per_edge:
                        out(f"{n}_j[j] = {self._from_edge_lane(n)};")
            if loads:
                with out.unrolled("j", n_edges):
                    self._edge_lines()
                    for s in loads:
                        self._load(s, where | of_edge)
            with out.unrolled("j", n_edges):
                self._edge_lines()
                self._values(others, loads, wide, where | of_edge, apart)

    @contextmanager
    def _edges_of_lot(self, n_edges: int) -> Iterator[None]:
        out = self.out
        if self.across_lots:
            yield
            return
        out("const Index base = ((lot + i) * warps + warp) * edges, others = longest - base;")
        out("const Index left = end - begin - base < edges ? end - begin - base : edges;")
        out("const Index steps = others < edges ? others : edges;")
        with out.block(f"for (Index e = 0; e < steps; e += edges_at_once * {n_edges})"):
            yield

    def _values(
        self,
        body: list[Statement],
        loads: list[Statement],
        wide: list[Reduction],
        where: dict[str, str],
        apart: list[str],
    ) -> None:
        """Compute the values of all features of edge ``j``, add them up and store them."""
        out = self.out
        stores = [s for s in body if s.op == "store"]
        in_packets = [s for s in stores if self._is_packet(s)]
        for s in in_packets:
            out(f"{self._type(s.args[2])} {s.args[0]}_at[{self.lanes}];")
        with self._each_feature():
            for n in apart:
                out(f"const {self._type(n)} {n} = {self._from_edge_lane(n)};")
            own = {s.name for s in body if s.op != "store"}
            names = [n for s in body for n in sources_of(s)] + [r.accumulator.of for r in wide]
            read = {s.name: f"{s.name}_at[j][k]" for s in loads}
            self._bind([n for n in names if n not in own and n not in apart], where | read)
            for s in body:
                if s.op != "store":
                    out(self.texts.let(s))
                elif s in in_packets:
                    out(f"{s.args[0]}_at[k] = {s.args[2]};")
                else:
                    test = "valid && live" if self.whole else "valid && live && inside"
                    out(f"if ({test}) {self.texts.store(s)}")
            for r in wide:
                total = r.combine(f"{r.running}[k]", r.element("c"))
                out(f"if (valid) {r.running}[k] = {total};")
        for s in in_packets:
            self._store(s, "valid && live", {s.args[2]: f"{s.args[0]}_at[k]"})

    def _edge_lines(self) -> None:
        out = self.out
        if self.across_lots:
            out(f"const Index slot = j % {self.per_lot} * edges_at_once + y_team;")
            lot = f"((lot + j / {self.per_lot}) * warps + warp)"
            out(f"const Index place = begin + {lot} * edges + slot;")
            out("const bool valid = place < end;")
            out("const Index c = valid ? place : last;")
        else:
            out("const Index slot = e + j * edges_at_once + y_team;")
            out("const bool valid = slot < left;")
            out("const Index c = valid ? begin + base + slot : last;")
        if self.by_edges:
            out("const Index from = slot << share_bits;")

    def _from_edge_lane(self, name: str) -> str:
        """Return the text for an edge's value that another lane has."""
        value = f"{name}_e[j / {self.per_lot}]" if self.across_lots else f"{name}_e[i]"
        if self.one_lane:
            return value
        if self.whole:
            return f"#from_lane({value}, own + from)"
        lane = "own[k]" if self.kind_of[name] == SHARE else "home"
        return f"#from_lane({value}, {lane} + from)"

    def _load(self, s: Statement, where: dict[str, str]) -> None:
        """Read the features of edge ``j``."""
        out, target = self.out, f"{s.name}_at[j]"
        if self._is_packet(s):
            self._load_packet(s, target, where)
        else:
            with self._each_feature():
                self._bind(sources_of(s), where)
                out(f"{target}[k] = {self.texts.value_of(s)};")

    # ----------------------------------------------------------------------------- combining

    def totals(self, phase: Phase) -> None:
        out = self.out
        for r in (reduction(a) for a in phase.accumulators):
            if not self._wide(r.accumulator.of):
                shares = "((Index)1 << share_bits)"
                self._combine(r, shares, f"(member & ({shares} - 1))", 1)
                out(r.result(r.running))
                continue
            self._combine(r, "width", "x", self.lanes)
            out(f"{self._type(r.name)} {r.name}_f[{self.lanes}];")
            with out.unrolled("k", self.lanes):
                out(f"const {r.type} {r.running}_k = {r.running}[k];")
                out(r.result(f"{r.running}_k"))
                out(f"{r.name}_f[k] = {r.name};")

    def _combine(self, r: Reduction, width: str, x: str, lanes: int) -> None:
        """Combine a team's values by shuffles; then a hub's teams, in order."""
        out = self.out
        a = r.running if lanes == 1 else f"{r.running}[k]"

        @contextmanager
        def each():
            if lanes == 1:
                yield
            else:
                with out.unrolled("k", lanes):
                    yield

        with out.block(f"for (int apart = {width}; apart < team; apart *= 2)"), each():
            out(f"{a} = {r.combine(a, f'#shuffled({a}, apart)')};")
        with out.block("if (is_hub)"):
            at = "0" if lanes == 1 else "k"
            out(f"SHARED {r.type}* const of = (SHARED {r.type}*)shared_memory + {x} * {lanes};")
            with out.block(f"if (member < {width})"), each():
                out(f"of[warp * {width} * {lanes} + {at}] = {a};")
            out("BARRIER();")
            with each():
                out(f"{a} = of[{at}];")
            with out.block(f"for (Index other = 1; other < {WARPS}; ++other)"), each():
                out(f"{a} = {r.combine(a, f'of[other * {width} * {lanes} + {at}]')};")
            out("BARRIER();")  # the next one takes the same place


def _stages(body: Sequence[Statement], held: Iterable[str]) -> dict[str, int]:
    """Return for each statement how many reads come before it, one after the other."""
    stages: dict[str, int] = {}
    reads = {s.name for s in body if s.op == "load"} | set(held)
    for s in body:
        sources = [] if s.name in held else sources_of(s)
        found = [stages[n] + (n in reads) for n in sources if n in stages]
        stages[s.name] = max(found, default=0)
    return stages


def _sameness(e: Expr) -> int:
    """Return ``n`` if ``e`` depends on the feature by ``f // n`` alone; 0 if not at all."""
    if "f" not in names_in(e):
        return 0
    found = 0
    for atom, _ in e.terms:
        if isinstance(atom, Loaded):
            continue
        if isinstance(atom, Symbol):
            found = math.gcd(found, int(atom.name == "f"))
            continue
        inner = atom.numerator
        if isinstance(atom, Div) and inner.offset == 0 and len(inner.terms) == 1:
            ((symbol, factor),) = inner.terms
            if isinstance(symbol, Symbol) and symbol.name == "f" and factor == 1:
                found = math.gcd(found, atom.divisor)
                continue
        found = math.gcd(found, _sameness(inner))
    return found
