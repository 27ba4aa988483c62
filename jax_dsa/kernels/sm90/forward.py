"""Forward of sparse attention on SM90."""

import enum
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from jax_dsa.cubins import manifest
from jax_dsa.kernels.common import barriers, config, numbers, products
from jax_dsa.kernels.common.config import VALUE_DIM, Config
from jax_dsa.kernels.common.plan import Part, Plan
from jax_dsa.kernels.common.tiles import by_columns, by_rows, copy_rows, own_slot

HEADS = 64  # per CTA
KEYS = 64  # per tile
STAGES = 2
GROUP = 128  # threads of a warpgroup
CONSUMERS = 2  # warpgroups
HALF = VALUE_DIM // CONSUMERS  # output columns of a consumer warpgroup
THREADS = (CONSUMERS + 1) * GROUP
CONSUMER_WARPS = CONSUMERS * 4
PRODUCER_WARPS = 4
REGISTERS = {"consumer": 216, "producer": 72}
SHIFT = {"bfloat16": -16.0, "float16": 15.0}
SCORES = HEADS * KEYS // GROUP  # registers of S a thread holds


class Barrier(enum.IntEnum):
    Q_FULL = 0
    KV_FULL = 1
    KV_EMPTY = KV_FULL + STAGES


ARRIVALS = (GROUP,) + STAGES * (GROUP + PRODUCER_WARPS,) + STAGES * (CONSUMER_WARPS,)


def mask(s, low, high):
    for i in range(SCORES):
        column = 8 * (i // 4) + i % 2
        word = low if column < 32 else high
        s[i] = numbers.choose((word & (1 << (column % 32))) != 0, s[i], -math.inf)


def softmax(s, o, top, total, c, shift):
    for h in range(2):
        mine = [i for i in range(SCORES) if i // 2 % 2 == h]
        new = top[h]
        for i in mine:
            new = numbers.maximum(new, s[i])
        new = numbers.over_quad(new, numbers.maximum)
        base = numbers.choose(new == -math.inf, 0.0, new)
        decay = numbers.exp2((top[h] - base) * c)
        top[h] = new
        part = total[h] * decay
        for i in mine:
            s[i] = numbers.exp2((s[i] - base) * c + shift)
            part = part + s[i]
        total[h] = part
        for i in range(HALF * HEADS // GROUP):
            if i // 2 % 2 == h:
                o[i] = o[i] * decay


def finish(top, total, extra, scale, shift):
    some = total != 0.0
    one = top * scale + (numbers.log2(total) - shift) * Float32(numbers.LN_2)
    one = numbers.choose(some, one, -math.inf)
    alpha = numbers.reciprocal(1.0 + numbers.exp2((extra - one) * Float32(numbers.LOG2_E)))
    return one, numbers.choose(some, alpha * numbers.reciprocal(total), 0.0)


def store_row(o, target, h, factor, element):
    target = cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(HALF // 2))
    pair = cute.make_rmem_tensor(2, element)
    for j in range(HALF // 8):
        pair[0] = element(o[4 * j + 2 * h] * factor)
        pair[1] = element(o[4 * j + 2 * h + 1] * factor)
        target[4 * j] = cute.recast_tensor(pair, Uint32)[0]


class Forward:
    op = "forward"
    parameters = config.parameters("q kv indices topk_length sink out lse", "S T K H sink_stride")
    grid = ("G*S", "ceil(H/64)", "1")
    block = (THREADS, 1, 1)
    cluster = (1, 1, 1)
    zeroed = ()
    roles = (
        manifest.Role("consumer 0", 0, 3),
        manifest.Role("consumer 1", 4, 7),
        manifest.Role("producer", 8, 11),
    )
    allowed_spills = ()

    def __init__(self, facts: Config):
        self.config, self.facts = facts, facts.facts
        self.tile = KEYS * facts.head_dim
        element = facts.element
        self.plan = Plan(
            Part("q", element, HEADS * facts.head_dim, 1024),
            Part("kv", element, STAGES * self.tile, 1024),
            Part("valid", Uint16, STAGES * PRODUCER_WARPS, 8),
            Part("barriers", Int64, len(ARRIVALS), 8),
        )
        self.regions, self.dynamic_shared_bytes = self.plan.regions, self.plan.bytes

    def compile_arguments(self) -> tuple:
        of = self.config.element
        elements = {
            "q": of,
            "kv": of,
            "out": of,
            "indices": Int32,
            "topk_length": Int32,
            "sink": Float32,
            "lse": Float32,
        }
        return config.stand_ins(self.parameters, elements)

    @cute.jit
    def produce(self, shared, q, kv, indices, query, head, used, tiles, S, T, K, H):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - CONSUMER_WARPS
        lane = cute.arch.lane_idx()
        own = own_slot(warp, lane)
        D = self.config.head_dim
        full = shared["barriers"] + int(Barrier.KV_FULL)
        empty = shared["barriers"] + int(Barrier.KV_EMPTY)
        validity, buffers = shared["valid"], shared["kv"]
        mine = indices + Int64(query) * K
        rows = kv + Int64(query // S) * T * D
        if tiles > 0:
            here = Int32(own < H - head)
            copy_rows(shared["q"], q + (Int64(query) * H + head) * D, own, here, D, warp, lane)
            barriers.arrive_copies(shared["barriers"] + int(Barrier.Q_FULL))
        for tile in cutlass.range(tiles, unroll=1):
            stage, parity = barriers.stage_and_parity(tile, STAGES)
            slot = tile * KEYS + own
            row = Int32(-1)
            if slot < used:
                row = mine[slot]
            valid = (row >= 0) & (row < T)
            bits = cute.arch.vote_ballot_sync(valid)
            barriers.wait(empty + stage, parity ^ 1)
            if lane == 0:
                validity[stage * PRODUCER_WARPS + warp] = Uint16(bits)
            barriers.arrive_warp(full + stage, lane)
            copy_rows(buffers + stage * self.tile, rows, row, Int32(valid), D, warp, lane)
            barriers.arrive_copies(full + stage)

    @cute.jit
    def consume(self, shared, out, lse, sink, query, head, tiles, S, H, sink_stride, scale):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        half = warp // 4
        lane = cute.arch.lane_idx()
        D, element = self.config.head_dim, self.config.element
        shift = SHIFT[self.config.dtype]
        full = shared["barriers"] + int(Barrier.KV_FULL)
        empty = shared["barriers"] + int(Barrier.KV_EMPTY)
        scores = products.Product(element, KEYS)
        values = products.Product(element, HALF, b=products.MN_MAJOR, a_source=products.REGISTERS)
        sQ = by_rows(shared["q"], D)
        sK = by_rows(shared["kv"], D, STAGES, self.tile)
        sV = by_columns(shared["kv"], VALUE_DIM, STAGES, self.tile)
        q = products.a_operand(scores, sQ)
        k = products.b_operand(scores, sK)
        v = products.b_operand(values, cute.local_tile(sV, (HALF, KEYS, STAGES), (half, 0, 0)))
        s_acc = products.accumulator(scores, KEYS)
        o_acc = products.accumulator(values, HALF)
        p_frag = products.a_registers(values, KEYS)
        s, o, p = products.flat(s_acc), products.flat(o_acc), products.flat(p_frag)
        o.fill(0.0)
        top = cute.make_rmem_tensor(2, Float32)
        total = cute.make_rmem_tensor(2, Float32)
        top.fill(-math.inf)
        total.fill(0.0)
        c = numbers.maximum(scale * Float32(numbers.LOG2_E), Float32(numbers.SMALLEST))
        valid = cute.recast_ptr(shared["valid"], dtype=Uint32)
        first = (lane % 4) * 2
        if tiles > 0:
            barriers.wait(shared["barriers"] + int(Barrier.Q_FULL), 0)
        for tile in cutlass.range(tiles, unroll=1):
            stage, parity = barriers.stage_and_parity(tile, STAGES)
            barriers.wait(full + stage, parity)
            low = valid[stage * 2] >> first
            high = valid[stage * 2 + 1] >> first
            barriers.before_async_reads()
            products.fence()
            products.issue(
                scores, s_acc, q[None, None, None, 0], k[None, None, None, stage], fresh=True
            )
            products.commit()
            products.wait()
            mask(s, low, high)
            softmax(s, o, top, total, c, shift)
            p.store(s.load().to(element))
            products.fence()
            products.issue(values, o_acc, p_frag, v[None, None, None, stage], fresh=False)
            products.commit()
            products.wait()
            barriers.arrive_warp(empty + stage, lane)
        for h in cutlass.range_constexpr(2):
            row = head + (warp % 4) * 16 + lane // 4 + 8 * h
            total[h] = numbers.over_quad(total[h], lambda x, y: x + y)
            if row < H:
                extra = sink[Int64(query // S) * sink_stride + row]
                logsum, factor = finish(top[h], total[h], extra, scale, shift)
                place = Int64(query) * H + row
                if (half == 0) & (lane % 4 == 0):
                    lse[place] = logsum
                target = out + place * VALUE_DIM + half * HALF + first
                store_row(o, target, h, factor, element)

    @cute.kernel
    def kernel(
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
        shared = self.plan.pointers()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            barriers.start(shared["barriers"], ARRIVALS)
        cute.arch.sync_threads()
        query, block, _ = cute.arch.block_idx()
        head = block * HEADS
        used = cutlass.min(topk_length[query], K)
        tiles = cutlass.max((used + KEYS - 1) // KEYS, 0)
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS["producer"])
            self.produce(shared, q, kv, indices, query, head, used, tiles, S, T, K, H)
        else:
            cute.arch.setmaxregister_increase(REGISTERS["consumer"])
            self.consume(shared, out, lse, sink, query, head, tiles, S, H, sink_stride, scale)

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
        )
        launched.launch(
            grid=(S, (H + HEADS - 1) // HEADS, 1),
            block=self.block,
            smem=self.dynamic_shared_bytes,
            min_blocks_per_mp=1,
        )


KERNELS = tuple(Forward(Config(d, t)) for d in config.HEAD_DIMS for t in config.ELEMENTS)
