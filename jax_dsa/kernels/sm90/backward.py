"""Gradients of sparse attention on SM90: one CTA per query and block of 64 heads.

Maths, over the valid slots i of a query (v = the first 512 columns of k; alpha, beta: ``vjp.py``):

    E_i = exp(scale q.k_i - lse)    P_i = alpha E_i    dS_i = scale E_i (alpha dout.v_i + beta)
    dq  = sum_i dS_i k_i            dkv[row i] += dS_i^T q + [P_i^T dout, 0]     (sums over heads)

P and dS are rounded to 16 bits, the operands of the second line's products; all sums are float32.
Invalid slots have rows of zeros and exact zeros in P and dS, and reach no row of dkv; padded heads
have rows of zeros in q and dout, and E = 0 since their lse is taken as +inf.

float16: dS may pass 65504 where the loss is scaled, and P and dS may vanish. Both are multiplied by
one power of two per query and block, ``mult``, which keeps the largest of them near 2**13; it is
lowered (and the sums of dq with it) when a tile brings a larger one, and undone in float32.

Timeline of a tile of 64 slots; | stands for the two barriers around the writes of P and dS:

    gather       k0 ...... waits              k1 ........................ waits
    compute 0    waits     S0 dP0 | dq  dkv0: product, adds, product, adds ...  S1 dP1 | ...
    compute 1    waits     S0 dP0 | dq  dkv0: product, adds, product, adds ...  S1 dP1 | ...

The adds to dkv are the longest part, and the next gather runs beside them. While one warpgroup
adds, the other's products may run.

Roles, by warp:

    compute 0    0-3    q to shared memory, statistics; S and dP of slots 0..31; dq of columns
                        0..255 and 512..543, for the whole row in registers; dkv of columns 0..255
    compute 1    4-7    dout to shared memory; S and dP of slots 32..63; dq of columns 256..511 and
                        544..575; dkv of columns 256..575
    gather       8-11   indices, validity, rows of kv

Edges in shared memory, each a barrier of the generation that it orders:

    what               last access              signal                          next access
    k                  gather: cp.async         kv_full (copies arrive)         compute: S, dP, dq
    k                  compute: dq, awaited     kv_empty (a warp arrives)       gather: cp.async
    rows               gather: stores           kv_full (threads arrive)        compute: mask, adds
    rows, two stages   compute: adds            p_ds_full, then kv_empty, of    gather: stores
                                                the next tile
    q, dout            compute: cp.async        operands_loaded                 compute: S, dP, dkv
    statistics         compute 0: stores        operands_loaded                 compute: P, dS
    p, ds              compute: dkv, awaited    p_ds_free                       compute: stores
    p, ds              compute: stores          p_ds_full                       compute: dq, dkv
    peaks (float16)    compute: stores          p_ds_free                       compute: loads
    peaks (float16)    compute: loads           p_ds_full                       compute: stores
"""

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import arith

from jax_dsa.cubins import manifest
from jax_dsa.kernels.common import barriers, config, drain, plan, products, tiles
from jax_dsa.kernels.common.config import VALUE_DIM, Config
from jax_dsa.kernels.common.numbers import LOG2_E, choose, exp2, multiply

HEADS = 64  # of a CTA
KEYS = 64  # of a tile
HALF = KEYS // 2  # slots whose S and dP one warpgroup computes
PANEL = tiles.PANEL  # columns
OWN_PANELS = VALUE_DIM // PANEL // 2  # of dQ and dKV, per warpgroup; the tail comes on top
COMPUTE, GATHER_THREADS, THREADS = 256, 128, 384
COMPUTE_REGISTERS, GATHER_REGISTERS = 240, 24
PEAK_TARGET, PEAK_LIMIT = 13, 2.0**15  # float16: exponent to aim at, value not to pass
FIRST_MULT = 2.0**100  # float16, before any peak: larger than any that a peak can ask for


class Named(enum.IntEnum):
    """Named barriers, all of the 256 compute threads."""

    OPERANDS_LOADED = 1  # q and dout may be read
    P_DS_FREE = 2  # all products with the last tile's P and dS are done: they may be overwritten
    P_DS_FULL = 3  # P and dS of this tile may be read


class Mbarrier(enum.IntEnum):
    """Their place in the part "barriers"."""

    KV_FULL = 0  # k and rows of a tile may be read
    KV_EMPTY = 1  # all products with k are done: it may be overwritten


ARRIVALS = (2 * GATHER_THREADS, COMPUTE // 32)  # of a phase: for rows and for copies; warps
POINTERS = "q kv indices topk_length lse alpha beta dout dq dkv"


@dataclasses.dataclass(frozen=True)
class Query:
    """The part of the operands that one CTA works on; pointers at its first element.

    Attributes:
      q, dout, dq, lse, alpha, beta: of the block's first head; kv, dkv: of the group's row 0;
      indices: of the query; heads: in this block and the blocks after it; keys: T; length: slots
      that count; tiles: of 64 slots; scale: float32.
    """

    q: cute.Pointer
    kv: cute.Pointer
    indices: cute.Pointer
    lse: cute.Pointer
    alpha: cute.Pointer
    beta: cute.Pointer
    dout: cute.Pointer
    dq: cute.Pointer
    dkv: cute.Pointer
    heads: Int32
    keys: Int32
    length: Int32
    tiles: Int32
    scale: Float32


@dataclasses.dataclass(frozen=True)
class Place:
    """Which compute thread this is: warpgroup 0 or 1 (a compile-time fact), warp and lane of it."""

    half: int
    warp: Int32
    lane: Int32

    @property
    def thread(self):
        return self.warp * 32 + self.lane

    @property
    def head(self):
        """Of accumulator elements with i = 0; those with i = 1 lie 8 below."""
        return self.warp * 16 + self.lane // 4


@dataclasses.dataclass(frozen=True)
class Statistics:
    """lse, alpha, beta of one head; alpha and beta times the scale are what dS takes."""

    lse: Float32
    alpha: Float32
    scaled_alpha: Float32
    scaled_beta: Float32


@cute.jit
def write_statistics(x: Query, target, at: cutlass.Constexpr):
    """lse, alpha and beta of the block's heads, 64 of each, by the threads 0..63 of a warpgroup.

    A padded head and an empty row (lse = -inf) get +inf, 0, 0: then E = 0.
    """
    head = at.thread
    if head < HEADS:
        lse, alpha, beta = Float32(float("inf")), Float32(0.0), Float32(0.0)
        if head < x.heads:
            if x.lse[head] != -Float32(float("inf")):
                lse, alpha, beta = x.lse[head], x.alpha[head], x.beta[head]
        target[head] = lse
        target[HEADS + head] = alpha
        target[2 * HEADS + head] = beta


def read_statistics(x: Query, source, head) -> Statistics:
    alpha, beta = source[HEADS + head], source[2 * HEADS + head]
    return Statistics(source[head], alpha, alpha * x.scale, beta * x.scale)


class Mult:
    """float16: the power of two by which P and dS are multiplied, and its inverse.

    In registers that hold across the loop over tiles. bfloat16: none, P and dS are as they are.
    """

    def __init__(self):
        self.pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        self.pair[0], self.pair[1] = Float32(FIRST_MULT), Float32(1 / FIRST_MULT)

    value = property(lambda self: self.pair[0])
    inverse = property(lambda self: self.pair[1])

    def lower(self, peak: Float32) -> Float32:
        """Puts ``peak`` times the mult into [2**13, 2**14); the new mult over the old."""
        exponent = (_bits(peak) >> 23) & 255
        old = self.inverse
        self.pair[0] = _power(PEAK_TARGET + 2 * 127 - exponent)
        self.pair[1] = _power(exponent - PEAK_TARGET)
        return self.value * old


def _bits(x: Float32) -> Int32:
    return Int32(arith.bitcast(Int32.mlir_type, x.ir_value()))


def _power(biased: Int32) -> Float32:
    """2 ** (biased - 127)."""
    return Float32(arith.bitcast(Float32.mlir_type, (biased << 23).ir_value()))


def _meet(name: Named) -> None:
    cute.arch.barrier(barrier_id=int(name), number_of_threads=COMPUTE)


def _panel(pointer, first: int, count: int = 1):
    """Columns ``64 first ...`` of a tile as an MN-major operand (64 count, 64 rows)."""
    start = pointer + first * tiles.PANEL_ELEMENTS
    return tiles.by_columns(start, count * PANEL)[None, None, 0]


class Logits:
    """The products S = q k^T and dP = dout v^T of this warpgroup's slots, 64 heads x 32 slots."""

    def __init__(self, kernel, shared, at: Place):
        self.product = products.Product(kernel.element, HALF)
        self.operands = []  # (A, B) of S and of dP
        for name, columns in kernel.operands:
            heads = tiles.by_rows(shared[name], columns)[None, None, 0]
            slots = self.slots(shared["k"], columns, at.half)
            a = products.a_operand(self.product, heads)
            self.operands.append((a, products.b_operand(self.product, slots)))

    @staticmethod
    def slots(k, columns: int, half: int):
        tile = tiles.by_rows(k, columns)[None, None, 0]
        return cute.local_tile(tile, (HALF, columns), (half, 0))

    def start(self) -> tuple:
        """Issues both, one group each; returns the accumulators."""
        s, dp = (products.accumulator(self.product, HALF) for _ in self.operands)
        products.fence()
        for result, (a, b) in zip((s, dp), self.operands, strict=True):
            products.issue(self.product, result, a, b, fresh=True)
            products.commit()
        return products.flat(s), products.flat(dp)


class QuerySums:
    """dq of this warpgroup's columns, in registers over all tiles.

    Attributes:
      parts: (product, accumulator, dS, k, first column).
    """

    def __init__(self, kernel, shared, at: Place):
        self.parts = []
        own = at.half * OWN_PANELS
        self._add(kernel, shared, _panel(shared["k"], own, OWN_PANELS), own * PANEL)
        if kernel.tail:
            tail = _panel(shared["k"], 2 * OWN_PANELS)
            # Half a line: the swizzle goes by address, so a product may start inside the pattern.
            half = cute.local_tile(tail, (PANEL // 2, KEYS), (at.half, 0))
            self._add(kernel, shared, half, VALUE_DIM + at.half * PANEL // 2)

    def _add(self, kernel, shared, k, column: int) -> None:
        columns = cute.size(k, mode=[0])
        product = products.Product(kernel.element, columns, b=products.MN_MAJOR)
        sums = products.accumulator(product, columns)
        sums.fill(0.0)
        ds = products.a_operand(product, tiles.by_rows(shared["ds"], KEYS)[None, None, 0])
        self.parts.append((product, sums, ds, products.b_operand(product, k), column))

    def start(self) -> None:
        """Issues dq += dS k, one group."""
        products.fence()
        for product, sums, ds, k, _ in self.parts:
            products.issue(product, sums, ds, k, fresh=False)
        products.commit()

    def multiply(self, factor: Float32) -> None:
        for _, sums, *_ in self.parts:
            sums.store(sums.load() * factor)


class RowSums:
    """A tile's rows of dkv, dS^T q + P^T dout, 64 columns at a time."""

    def __init__(self, kernel, shared, at: Place):
        major = products.MN_MAJOR
        self.kernel, self.shared, self.at = kernel, shared, at
        self.product = products.Product(kernel.element, PANEL, major, major)
        self.ds, self.p = (
            products.a_operand(self.product, _panel(shared[name], 0)) for name in ("ds", "p")
        )
        own = range(at.half * OWN_PANELS, (at.half + 1) * OWN_PANELS)
        self.panels = [*own, *([2 * OWN_PANELS] if kernel.tail and at.half == 1 else [])]

    def add_to(self, dkv, numbers, mult: Mult) -> None:
        """Computes the panels and adds them to rows ``numbers`` of dkv, one after the other."""
        at = self.at
        for panel in self.panels:
            sums = products.accumulator(self.product, PANEL)
            if panel != self.panels[0]:  # the fence of dq serves: no register was touched since
                products.fence()
            self._issue(sums, self.ds, "q", panel, fresh=True)
            if panel * PANEL < VALUE_DIM:
                self._issue(sums, self.p, "dout", panel, fresh=False)
            products.commit()
            # Read for each panel anew: eight registers less across all of them.
            rows = drain.Rows(dkv, self.kernel.columns, numbers, at.warp, at.lane)
            products.wait()
            values = [products.flat(sums)[n] for n in range(PANEL // 2)]
            if self.kernel.scaled:
                values = [value * mult.inverse for value in values]
            drain.add(values, rows, panel, at.lane)

    def _issue(self, sums, a, name: str, panel: int, fresh: bool) -> None:
        b = products.b_operand(self.product, _panel(self.shared[name], panel))
        products.issue(self.product, sums, a, b, fresh)


class Work:
    """What one compute thread keeps over all tiles."""

    def __init__(self, kernel, x: Query, shared, at: Place):
        self.x, self.shared, self.at = x, shared, at
        self.mult, self.logits = Mult(), Logits(kernel, shared, at)
        self.query_sums, self.row_sums = QuerySums(kernel, shared, at), RowSums(kernel, shared, at)


class Backward:
    """One kernel; attributes are what the builder writes into the manifest.

    Args:
      configuration: head_dim and dtype.
    """

    op = "backward"
    parameters = config.parameters(POINTERS, "S T K H")
    grid = ("G*S", f"ceil(H/{HEADS})", "1")
    block, cluster = (THREADS, 1, 1), (1, 1, 1)
    zeroed = ("dkv",)
    allowed_spills = ()
    roles = (
        manifest.Role("compute 0", 0, 3),
        manifest.Role("compute 1", 4, 7),
        manifest.Role("gather", 8, 11),
    )

    def __init__(self, configuration: Config):
        self.config, self.facts = configuration, configuration.facts
        self.element, self.columns = configuration.element, configuration.head_dim
        self.tail = self.columns > VALUE_DIM
        self.scaled = configuration.dtype == "float16"
        self.operands = (("q", self.columns), ("dout", VALUE_DIM))
        e, part = self.element, plan.Part
        self.plan = plan.Plan(
            part("q", e, HEADS * self.columns, plan.ALIGNMENT),
            part("dout", e, HEADS * VALUE_DIM, plan.ALIGNMENT),
            part("k", e, KEYS * self.columns, plan.ALIGNMENT),
            part("p", e, HEADS * KEYS, plan.ALIGNMENT),
            part("ds", e, HEADS * KEYS, plan.ALIGNMENT),
            part("statistics", Float32, 3 * HEADS),  # lse, alpha, beta
            part("rows", Int32, 2 * KEYS),  # per stage and slot: row of kv, -1 if invalid
            part("peaks", Float32, COMPUTE // 32),  # per warp: largest of |dS| and P
            part("barriers", Int64, len(Mbarrier)),
        )
        self.dynamic_shared_bytes, self.regions = self.plan.bytes, self.plan.regions

    def compile_arguments(self) -> tuple:
        """Stand-ins for ``cute.compile``."""
        elements = dict.fromkeys(("q", "kv", "dout", "dq"), self.element)
        elements |= dict.fromkeys(("lse", "alpha", "beta", "dkv"), Float32)
        elements |= dict.fromkeys(("indices", "topk_length"), Int32)
        return config.stand_ins(self.parameters, elements)

    # -- gather -----------------------------------------------------------------------------------
    @cute.jit
    def gather(self, x: Query, shared, warp, lane):
        """Description: brings the rows of kv that a tile's slots name, zeros for invalid slots.
        Produces: k, rows (kv_full). Consumes: k free (kv_empty).
        """
        cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
        own, k, rows = tiles.own_slot(warp, lane), shared["k"], shared["rows"]
        full, empty = (shared["barriers"] + int(b) for b in Mbarrier)
        for tile in cutlass.range(x.tiles, unroll=1):
            slot = tile * KEYS + own
            index = x.indices[cutlass.min(slot, x.length - 1)]  # no branch: the warp stays whole
            valid = (slot < x.length) & (index >= 0) & (index < x.keys)
            barriers.wait(empty, (tile & 1) ^ 1)
            if lane < tiles.ROWS_PER_WARP:
                rows[tile % 2 * KEYS + own] = Int32(cutlass.select_(valid, index, -1))
            cute.arch.mbarrier_arrive(full)  # for the stores: the copies do not speak for them
            tiles.copy_rows(k, x.kv, index, Int32(valid), self.columns, warp, lane)
            barriers.arrive_copies(full)

    # -- compute ----------------------------------------------------------------------------------
    @cute.jit
    def compute(self, x: Query, shared, at: cutlass.Constexpr):
        """Description: everything but the gather, for one half of the slots and columns.
        Produces: p, ds, dq, dkv; k free (kv_empty). Consumes: k, rows (kv_full).
        """
        cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
        self.load_operand(x, shared, at)
        work = Work(self, x, shared, at)
        for tile in cutlass.range(x.tiles, unroll=1):
            self.compute_tile(work, tile)
        self.store_dq(work)

    def compute_tile(self, work: Work, tile) -> None:
        """Description: one tile, from its k to its rows of dkv."""
        x, shared, at = work.x, work.shared, work.at
        full, empty = (shared["barriers"] + int(b) for b in Mbarrier)
        numbers = cute.make_tensor(shared["rows"] + tile % 2 * KEYS, cute.make_layout(KEYS))
        barriers.wait(full, tile & 1)
        barriers.before_async_reads()  # of k; in the first tile of q and dout, too
        p, ds = self.weights(work, numbers)
        if self.scaled:
            self.agree_on_mult(work, p, ds)
        else:
            _meet(Named.P_DS_FREE)
        for name, values in (("p", p), ("ds", ds)):
            self.store_weights(shared[name], at, values)
        barriers.before_async_reads()
        _meet(Named.P_DS_FULL)
        work.query_sums.start()
        products.wait()
        _release_k(empty, at.lane)
        work.row_sums.add_to(x.dkv, numbers, work.mult)

    @cute.jit
    def load_operand(self, x: Query, shared, at: cutlass.Constexpr):
        """Description: q (compute 0) and dout (compute 1), rows of zeros for padded heads.
        Produces: operands_loaded.
        """
        name, columns = self.operands[at.half]
        head = tiles.own_slot(at.warp, at.lane)
        here = Int32(head < x.heads)
        source = getattr(x, name)
        tiles.copy_rows(shared[name], source, head, here, columns, at.warp, at.lane)
        if cutlass.const_expr(at.half == 0):
            write_statistics(x, shared["statistics"], at)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        _meet(Named.OPERANDS_LOADED)

    def weights(self, work: Work, numbers) -> tuple:
        """P and dS of the thread's 16 elements, float32; element 4 j + 2 i + c is head i of two,
        slot 8 j + 2 (lane % 4) + c of the half.
        """
        x, at = work.x, work.at
        s, dp = work.logits.start()
        first = at.half * HALF + at.lane % 4 * 2
        slots = [8 * j + c for j in range(HALF // 8) for c in (0, 1)]
        valid = {slot: numbers[first + slot] >= 0 for slot in slots}
        p, ds = (cute.make_rmem_tensor(cute.make_layout(HALF // 2), Float32) for _ in "pd")
        heads = [read_statistics(x, work.shared["statistics"], at.head + down) for down in (0, 8)]
        products.wait(1)
        for n in range(HALF // 2):
            i, here = n // 2 % 2, valid[8 * (n // 4) + n % 2]
            e = exp2((multiply(s[n], x.scale) - heads[i].lse) * LOG2_E)
            p[n] = choose(here, e, Float32(0.0))
        products.wait()
        for n in range(HALF // 2):
            i, here = n // 2 % 2, valid[8 * (n // 4) + n % 2]
            value = p[n] * (heads[i].scaled_alpha * dp[n] + heads[i].scaled_beta)
            ds[n] = choose(here, value, Float32(0.0))  # 0 times a dout of NaN is no 0
            p[n] = heads[i].alpha * p[n]
        return p, ds

    @cute.jit
    def agree_on_mult(self, work: cutlass.Constexpr, p, ds):
        """Description: float16: multiplies P and dS by the mult, lowered if this tile asks for it.
        Consumes: p, ds free (p_ds_free). The mult is the same in all compute threads.
        """
        at, mult = work.at, work.mult
        peak = Float32(0.0)
        for n in cutlass.range_constexpr(HALF // 2):
            peak = cute.arch.fmax(peak, cute.arch.fmax(_magnitude(ds[n]), p[n]))
        for distance in (1, 2, 4, 8, 16):
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, distance))
        peaks = cute.make_tensor(work.shared["peaks"], cute.make_layout(COMPUTE // 32))
        if at.lane == 0:
            peaks[at.half * 4 + at.warp] = peak
        _meet(Named.P_DS_FREE)
        for n in cutlass.range_constexpr(COMPUTE // 32):
            peak = cute.arch.fmax(peak, peaks[n])
        _lower_mult(work, peak, peak * mult.value > PEAK_LIMIT)
        for values in (p, ds):
            values.store(values.load() * mult.value)

    def store_weights(self, target, at: Place, values) -> None:
        """Rounds 16 elements and writes them as pairs of slots to a tile (64 heads, 64 slots)."""
        rounded = cute.make_rmem_tensor(values.layout, self.element)
        rounded.store(values.load().to(self.element))
        pairs = cute.recast_tensor(rounded, Int32)
        words = cute.recast_ptr(target, dtype=Int32)
        line = at.lane // 4  # = row % 8, for the swizzle
        base = at.head * (PANEL // 2) + ((at.half * 4) ^ line) * 4 + at.lane % 4
        for j in range(HALF // 8):
            for i in (0, 1):
                words[(base ^ (4 * j)) + i * (8 * PANEL // 2)] = pairs[2 * j + i]

    def store_dq(self, work: Work) -> None:
        """Description: rounds the sums and writes the rows of heads that exist."""
        x, at = work.x, work.at
        for _, accumulator, _, _, column in work.query_sums.parts:
            if self.scaled:
                accumulator.store(accumulator.load() * work.mult.inverse)
            rounded = cute.make_rmem_tensor(accumulator.layout, self.element)
            rounded.store(accumulator.load().to(self.element))
            pairs = products.flat(cute.recast_tensor(rounded, Int32))
            for i in (0, 1):
                head = at.head + 8 * i
                start = x.dq + (head * self.columns + column + at.lane % 4 * 2)
                _store_row(cute.recast_ptr(start, dtype=Int32), pairs, i, head < x.heads)

    # -- the kernel -------------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        indices: cute.Pointer,
        topk_length: cute.Pointer,
        lse: cute.Pointer,
        alpha: cute.Pointer,
        beta: cute.Pointer,
        dout: cute.Pointer,
        dq: cute.Pointer,
        dkv: cute.Pointer,
        S: Int32,
        T: Int32,
        K: Int32,
        H: Int32,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        query, block, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        shared = self.plan.pointers()
        if warp == 0:
            barriers.start(shared["barriers"], ARRIVALS)
        cute.arch.sync_threads()
        # Int64: every operand may have more than 2**31 elements.
        head, group = Int64(query) * H + block * HEADS, Int64(query // S) * T * self.columns
        length = cutlass.min(cutlass.max(topk_length[query], 0), K)
        x = Query(
            q=q + head * self.columns, dq=dq + head * self.columns, dout=dout + head * VALUE_DIM,
            lse=lse + head, alpha=alpha + head, beta=beta + head,
            kv=kv + group, dkv=dkv + group, indices=indices + Int64(query) * K,
            heads=H - block * HEADS, keys=T, length=length, tiles=(length + KEYS - 1) // KEYS,
            scale=scale,
        )  # fmt: skip
        if warp >= 8:
            self.gather(x, shared, warp - 8, lane)
        elif warp >= 4:
            self.compute(x, shared, Place(1, warp - 4, lane))
        else:
            self.compute(x, shared, Place(0, warp, lane))

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        indices: cute.Pointer,
        topk_length: cute.Pointer,
        lse: cute.Pointer,
        alpha: cute.Pointer,
        beta: cute.Pointer,
        dout: cute.Pointer,
        dq: cute.Pointer,
        dkv: cute.Pointer,
        S: Int32,
        T: Int32,
        K: Int32,
        H: Int32,
        scale: Float32,
    ):
        """Launches one group: for compilation; the bridge launches by the manifest."""
        operands = (q, kv, indices, topk_length, lse, alpha, beta, dout, dq, dkv, S, T, K, H, scale)
        self.kernel(*operands).launch(
            grid=(S, cute.ceil_div(H, HEADS), 1),
            block=self.block,
            smem=self.dynamic_shared_bytes,
            min_blocks_per_mp=1,  # lets ptxas honour setmaxnreg
        )


@cute.jit
def _lower_mult(work: cutlass.Constexpr, peak, asked):
    if asked:
        _lower(work, peak)


def _lower(work, peak):
    work.query_sums.multiply(work.mult.lower(peak))


@cute.jit
def _release_k(empty, lane):
    """One arrival a warp: the wait before it was the whole warp's, and p_ds_full has collected all
    threads' reads of the last tile's rows.
    """
    if lane == 0:
        cute.arch.mbarrier_arrive(empty)


def _magnitude(x: Float32) -> Float32:
    return cute.arch.fmax(x, -x)


@cute.jit
def _store_row(target, pairs, i: cutlass.Constexpr, here):
    if here:
        for j in cutlass.range_constexpr(cute.size(pairs) // 2):
            target[4 * j] = pairs[2 * j + i]


KERNELS = tuple(
    Backward(Config(head_dim, dtype)) for head_dim in config.HEAD_DIMS for dtype in config.ELEMENTS
)
