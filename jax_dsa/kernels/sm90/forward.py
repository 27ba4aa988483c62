"""Forward of sparse attention on SM90: one CTA per query and block of 64 heads.

Maths, for the slots i that are valid (i < clip(topk_length, 0, K) and 0 <= indices[i] < T):

    s_i = q . kv[indices[i]]        m = max s_i         c = scale log2(e)
    p_i = 2 ** (c (s_i - m) + b)    l = sum p_i         O = sum p_i kv[indices[i], :512]
    lse = scale m + ln(l / 2 ** b)                      alpha = 1 / (1 + exp(sink - lse))
    out = alpha O / l

over tiles of 64 slots, with m running: when a tile raises it, l and O so far decay by
2 ** (c (m_old - m_new)). The subtraction comes before the multiplication, so that p = 2 ** b where
s = m however large s is. The bias b changes no result: with float16 it keeps small p above the
subnormal numbers, with bfloat16 it keeps O, a sum of up to 65536 rows, within float32.
A slot that is not valid has s = -inf, hence p = 0 exactly, and a row of zeros, because zero times
garbage may be NaN. A row without a valid slot has m = -inf, l = 0: lse = -inf, out = 0.

Timeline, tile t in buffer t % 2:

    producer    Q  kv 0  kv 1 | kv 2        | kv 3        |
    consumer 0  S0 softmax O0   S1 softmax O1  S2 softmax O2
    consumer 1    S0 softmax O0   S1 softmax O1  S2 ...

Both consumers compute all of S; each accumulates half of O's columns: nothing passes between them,
and the tensor core serves one while the other is in its softmax.

Roles (12 warps):

    warps   name        registers  task
    0-3     consumer 0  216        S, softmax, O[:, 0:256], lse
    4-7     consumer 1  216        S, softmax, O[:, 256:512]
    8-11    producer     72        16-byte cp.async of Q and of kv rows, validity of slots

Edges: what each barrier announces, who arrives, what becomes free.

    kv_full     the buffer and its validity may be read, and Q: 128 threads, each when all its
                copies so far have landed, and four warps for the validity they have stored.
    kv_empty    the buffer and its validity may be overwritten: eight consumer warps, when their
                wgmma are done.
"""

import dataclasses
import enum
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64

from jax_dsa.cubins import manifest
from jax_dsa.kernels.common import barriers, config, numbers, products, tiles
from jax_dsa.kernels.common.config import VALUE_DIM, Config
from jax_dsa.kernels.common.plan import ALIGNMENT, Part, Plan

HEADS = 64  # per CTA
KEYS = 64  # slots per tile
STAGES = 2  # tile buffers
GROUP = 128  # threads of a warpgroup
CONSUMERS = 2  # warpgroups
CONSUMER_WARPS = 4 * CONSUMERS
PRODUCER_WARPS = 4
THREADS = GROUP * (CONSUMERS + 1)
HALF = VALUE_DIM // CONSUMERS  # columns of O per consumer
S_REGISTERS = HEADS * KEYS // GROUP
O_REGISTERS = HEADS * HALF // GROUP
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 216, 72
BIAS = {"bfloat16": -16, "float16": 15}
HUGE = 3.0e38


class Barrier(enum.IntEnum):
    """Barrier numbers; those of a ring take one per stage."""

    KV_FULL = 0
    KV_EMPTY = KV_FULL + STAGES


ARRIVALS = STAGES * (GROUP + PRODUCER_WARPS,) + STAGES * (CONSUMER_WARPS,)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The kernel's parameters; shapes at ``Forward.kernel``."""

    q: cute.Pointer
    kv: cute.Pointer
    indices: cute.Pointer
    topk_length: cute.Pointer
    sink: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    S: Int32
    T: Int32
    K: Int32
    H: Int32
    sink_stride: Int32
    scale: Float32


@dataclasses.dataclass(frozen=True)
class Work:
    """What a CTA does: query of G * S, first head, number of slots that may be valid (negative: as
    0), tiles of them.
    """

    query: Int32
    head: Int32
    slots: Int32
    tiles: Int32


def mask(s, low, high) -> None:
    """s = -inf where the slot is not valid.

    Args:
      s: a thread's scores, in the order of an accumulator.
      low, high: validity of slots 0..31 and 32..63, shifted right by the thread's first column.
    """
    for i in range(S_REGISTERS):
        column = 8 * (i // 4) + i % 2
        word = low if column < 32 else high
        s[i] = numbers.choose((word & (1 << (column % 32))) != 0, s[i], -math.inf)


def softmax(s, o, top, total, c, bias: int) -> None:
    """One tile's step of the running softmax on the two rows of a thread.

    Args:
      s: scores; become p.
      o: the sums so far; decay.
      top, total: running maximum, and this thread's share of l, per row.
      c: scale log2(e).
    """
    for half in range(2):
        row = [i for i in range(S_REGISTERS) if i // 2 % 2 == half]
        highest = top[half]
        for i in row:
            highest = numbers.maximum(highest, s[i])
        highest = numbers.over_quad(highest, numbers.maximum)
        base = numbers.choose(highest == -math.inf, 0.0, highest)
        decay = numbers.exp2((top[half] - base) * c)
        top[half] = highest
        share = total[half] * decay
        for i in row:
            s[i] = numbers.exp2((s[i] - base) * c + float(bias))
            share = share + s[i]
        total[half] = share
        for i in range(O_REGISTERS):
            if i // 2 % 2 == half:
                o[i] = o[i] * decay


def finish(top, total, sink, scale, bias: int) -> tuple:
    """(lse, alpha / l) of a row from its maximum, its l and its sink."""
    some = total != 0.0
    lse = top * scale + numbers.log2(total * 2.0**-bias) * numbers.LN_2
    lse = numbers.choose(some, lse, -math.inf)
    alpha = numbers.reciprocal(1.0 + numbers.exp2((sink - lse) * numbers.LOG2_E))
    return lse, numbers.choose(some, alpha * numbers.reciprocal(total), 0.0)


def row_in_sectors(o, half: int, factor, lane, element):
    """A thread's part of row ``half`` of ``factor * o``, as 16-bit numbers in 8-byte words.

    Neighbouring lanes exchange words, so that a quad's four words make 32 bytes: word n of lane l
    holds columns 16 n + 8 (l % 2) + 4 (l % 4 // 2) ... + 3 of the consumer's half.
    """
    odd = lane % 2 == 1
    pair = cute.make_rmem_tensor(2, element)
    words = cute.make_rmem_tensor(HALF // 16, Uint64)
    packed = cute.recast_tensor(words, Uint32)
    for n in range(HALF // 16):
        two = []
        for block in (8 * n, 8 * n + 4):  # the accumulator's element of column block 2 n, 2 n + 1
            pair[0] = element(o[block + 2 * half] * factor)
            pair[1] = element(o[block + 2 * half + 1] * factor)
            two.append(cute.recast_tensor(pair, Uint32)[0])
        kept = Uint32(cutlass.select_(odd, two[1], two[0]))
        sent = Uint32(cutlass.select_(odd, two[0], two[1]))
        got = cute.arch.shuffle_sync_bfly(sent, 1)
        packed[2 * n] = Uint32(cutlass.select_(odd, got, kept))
        packed[2 * n + 1] = Uint32(cutlass.select_(odd, kept, got))
    return words


class Forward:
    """One compiled forward kernel; see the module for what it computes.

    Args:
      facts: head dimension and dtype.
    """

    op = "forward"
    parameters = config.parameters("q kv indices topk_length sink out lse", "S T K H sink_stride")
    grid = ("G*S", f"ceil(H/{HEADS})", "1")
    block = (THREADS, 1, 1)
    cluster = (1, 1, 1)
    zeroed = ()
    allowed_spills = ()
    roles = (
        manifest.Role("consumer 0", 0, 3),
        manifest.Role("consumer 1", 4, 7),
        manifest.Role("producer", 8, 11),
    )

    def __init__(self, facts: Config):
        self.config, self.facts = facts, facts.facts
        self.tile = KEYS * facts.head_dim  # elements of a buffer
        self.plan = Plan(
            Part("q", facts.element, HEADS * facts.head_dim, ALIGNMENT),
            Part("kv", facts.element, STAGES * self.tile, ALIGNMENT),
            Part("valid", Uint16, STAGES * PRODUCER_WARPS),
            Part("barriers", Int64, len(ARRIVALS)),
        )
        self.regions, self.dynamic_shared_bytes = self.plan.regions, self.plan.bytes

    def compile_arguments(self) -> tuple:
        """Stand-ins for ``__call__``."""
        types = dict.fromkeys(("q", "kv", "out"), self.config.element)
        types |= {"indices": Int32, "topk_length": Int32, "sink": Float32, "lse": Float32}
        return config.stand_ins(self.parameters, types)

    @cute.jit
    def produce(self, x: Operands, work: Work):
        """The producer's warps.

        Produces: kv buffers, their validity and, before the first, Q (kv_full).
        Consumes: kv_empty, whose first pass through the ring counts as announced.
        """
        shared = self.plan.pointers()
        marks, kv_tiles, valid_words = shared["barriers"], shared["kv"], shared["valid"]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - CONSUMER_WARPS
        lane = cute.arch.lane_idx()
        columns = self.config.head_dim
        own = tiles.own_slot(warp, lane)
        indices = x.indices + Int64(work.query) * x.K  # [K]
        rows = x.kv + Int64(work.query // x.S) * x.T * columns  # [T, D]
        if work.tiles > 0:  # else nobody would await these copies
            heads = x.q + (Int64(work.query) * x.H + work.head) * columns  # [H - head, D]
            tiles.copy_rows(shared["q"], heads, own, own < x.H - work.head, columns, warp, lane)
        for tile in cutlass.range(work.tiles, unroll=1):
            stage, parity = barriers.stage_and_parity(tile, STAGES)
            slot = tile * KEYS + own
            row = Int32(-1)
            if slot < work.slots:
                row = indices[slot]
            valid = (row >= 0) & (row < x.T)
            bits = cute.arch.vote_ballot_sync(valid)
            barriers.wait(marks + int(Barrier.KV_EMPTY) + stage, parity ^ 1)
            if lane == 0:
                valid_words[stage * PRODUCER_WARPS + warp] = Uint16(bits)
            full = marks + int(Barrier.KV_FULL) + stage
            barriers.arrive_warp(full, lane)  # lane 0 stored: its arrival alone would do, too
            tiles.copy_rows(kv_tiles + stage * self.tile, rows, row, valid, columns, warp, lane)
            barriers.arrive_copies(full)

    @cute.jit
    def consume(self, x: Operands, work: Work):
        """The warps of both consumers.

        Produces: out and lse in global memory.
        Consumes: Q, kv buffers and validity (kv_full); gives the buffers back (kv_empty).
        """
        shared = self.plan.pointers()
        marks, valid_words = shared["barriers"], cute.recast_ptr(shared["valid"], dtype=Uint32)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        first = lane % 4 * 2  # column of the thread's first score
        scores, sums = self.products()
        sQ = tiles.by_rows(shared["q"], self.config.head_dim)  # (64, D, 1)
        sK = tiles.by_rows(shared["kv"], self.config.head_dim, STAGES, self.tile)  # (64, D, 2)
        sV = tiles.by_columns(shared["kv"], VALUE_DIM, STAGES, self.tile)  # (512, 64, 2)
        sV = cute.local_tile(sV, (HALF, KEYS, STAGES), (warp // 4, 0, 0))  # (256, 64, 2)
        q, k = products.a_operand(scores, sQ), products.b_operand(scores, sK)
        v = products.b_operand(sums, sV)
        rS, rO = products.accumulator(scores, KEYS), products.accumulator(sums, HALF)
        rP = products.a_registers(sums, KEYS)
        s, o, p = products.flat(rS), products.flat(rO), products.flat(rP)  # (32), (128), (32)
        top, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        top.fill(-math.inf)
        for sum_ in (o, total):
            sum_.fill(0.0)
        c = numbers.maximum(x.scale * numbers.LOG2_E, Float32(numbers.SMALLEST))  # -inf c = -inf
        c = numbers.minimum(c, Float32(HUGE))  # 0 c = 0

        for tile in cutlass.range(work.tiles, unroll=1):
            stage, parity = barriers.stage_and_parity(tile, STAGES)
            barriers.wait(marks + int(Barrier.KV_FULL) + stage, parity)
            low = valid_words[2 * stage] >> first
            high = valid_words[2 * stage + 1] >> first
            barriers.before_async_reads()
            products.fence()
            at = (None, None, None, stage)
            products.issue(scores, rS, q[None, None, None, 0], k[at], fresh=True)
            products.commit()
            products.wait()
            mask(s, low, high)
            softmax(s, o, top, total, c, BIAS[self.config.dtype])
            p.store(s.load().to(self.config.element))
            products.fence()
            products.issue(sums, rO, rP, v[at], fresh=False)
            products.commit()
            products.wait()
            barriers.arrive_warp(marks + int(Barrier.KV_EMPTY) + stage, lane)
        self.store(x, work, o, top, total)

    @cute.jit
    def store(self, x: Operands, work: Work, o, top, total):
        """Scales a consumer's sums and writes them and, once, lse; rows of padded heads are not
        written.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        sinks = x.sink + Int64(work.query // x.S) * x.sink_stride  # [H]
        column = warp // 4 * HALF + lane % 2 * 8 + lane % 4 // 2 * 4
        for half in cutlass.range_constexpr(2):
            head = work.head + warp % 4 * 16 + lane // 4 + 8 * half
            written = head < x.H
            sink = Float32(0.0)
            if written:
                sink = sinks[head]
            total[half] = numbers.over_quad(total[half], lambda a, b: a + b)
            bias = BIAS[self.config.dtype]
            lse, factor = finish(top[half], total[half], sink, x.scale, bias)
            words = row_in_sectors(o, half, factor, lane, self.config.element)
            row = Int64(work.query) * x.H + head
            if written & (warp < 4) & (lane % 4 == 0):
                x.lse[row] = lse
            if written:
                target = cute.recast_ptr(x.out + row * VALUE_DIM + column, dtype=Uint64)
                for n in cutlass.range_constexpr(HALF // 16):
                    target[4 * n] = words[n]

    def products(self) -> tuple:
        """S = Q K^T (64 x 64) and O += P V (64 x 256, P in registers)."""
        element = self.config.element
        by_value = {"b": products.MN_MAJOR, "a_source": products.REGISTERS}
        return products.Product(element, KEYS), products.Product(element, HALF, **by_value)

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,  # [G, S, H, D]
        kv: cute.Pointer,  # [G, T, D]
        indices: cute.Pointer,  # [G, S, K]
        topk_length: cute.Pointer,  # [G, S]
        sink: cute.Pointer,  # [1 or G, H]
        out: cute.Pointer,  # [G, S, H, 512]
        lse: cute.Pointer,  # [G, S, H]
        S: Int32,
        T: Int32,
        K: Int32,
        H: Int32,
        sink_stride: Int32,
        scale: Float32,
    ):
        x = Operands(
            q, kv, indices, topk_length, sink, out, lse, S, T, K, H, sink_stride, scale
        )  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            barriers.start(self.plan.pointers()["barriers"], ARRIVALS)
        cute.arch.sync_threads()
        query, block, _ = cute.arch.block_idx()
        slots = cutlass.min(topk_length[query], K)
        count = cutlass.max((slots + KEYS - 1) // KEYS, 0)
        work = Work(query, block * HEADS, slots, count)
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(x, work)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(x, work)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv: cute.Pointer,
        indices: cute.Pointer,
        topk_length: cute.Pointer,
        sink: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        S: Int32,
        T: Int32,
        K: Int32,
        H: Int32,
        sink_stride: Int32,
        scale: Float32,
    ):
        launched = self.kernel(
            q, kv, indices, topk_length, sink, out, lse, S, T, K, H, sink_stride, scale
        )  # fmt: skip
        launched.launch(
            grid=(S, (H + HEADS - 1) // HEADS, 1),  # one group; the launcher has its own formulas
            block=self.block,
            smem=self.dynamic_shared_bytes,
            min_blocks_per_mp=1,
        )


KERNELS = tuple(
    Forward(Config(head_dim, dtype)) for head_dim in config.HEAD_DIMS for dtype in config.ELEMENTS
)
