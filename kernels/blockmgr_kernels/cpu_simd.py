"""Vector building blocks of the numba implementation, written as LLVM instructions on raw addresses.

numba compiles scalar loops and hopes that LLVM finds the vectors. It does not find register tiles, which are what
matrix products live on, so the five inner loops are spelled out here: explicit vectors of LANES floats, accumulators
that stay in registers, fused multiply-add. LLVM maps the vectors to whatever the machine has.

All functions take and return 64-bit integers (byte addresses, byte strides, counts): pages of any dtype and any
stride, in pools beyond 2**31 elements, without views. Each one's work on a lane doesn't depend on the other lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WIDE = bool(llvm.get_host_cpu_features().get("avx512f", False))
LANES = 16 if _WIDE else 8
# Vectors of query lanes in the largest tile; with as many tokens again, accumulators and operands fill the registers.
TILE_VECTORS = 4 if _WIDE else 2
TILE = LANES * TILE_VECTORS
# Tokens per score tile, by number of query vectors.
TOKENS = {1: 8, 2: 8, 3: 4, 4: 4} if _WIDE else {1: 6, 2: 4}
PREFETCH_LEVEL = 2
ROWS = 4  # queries per tile of the functions that keep head elements in lanes

_F, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_PTR = ir.PointerType()
_VEC, _IVEC = ir.VectorType(_F, LANES), ir.VectorType(_I32, LANES)

# Page dtypes, as the kernels' `kind` argument.
FLOAT32, FLOAT16, BFLOAT16, FLOAT8, INT8 = range(5)
ITEM_BYTES = (4, 2, 2, 1, 1)


class _Emit:
    """The handful of instruction idioms that everything below is made of."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def number(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def splat(self, value: float) -> Any:
        return ir.Constant(_VEC, [ir.Constant(_F, float(np.float32(value)))] * LANES)

    def isplat(self, value: int) -> Any:
        return ir.Constant(_IVEC, [ir.Constant(_I32, value)] * LANES)

    def at(self, address: Any, offset: Any = 0) -> Any:
        """Pointer to address + offset bytes."""
        pointer = address if address.type == _PTR else self.b.inttoptr(address, _PTR)
        if isinstance(offset, int):
            offset = self.number(offset)
        return self.b.gep(pointer, [offset], source_etype=_I8)

    def load(self, pointer: Any, kind: Any = _VEC, align: int = 4) -> Any:
        return self.b.load(pointer, typ=kind, align=align)

    def load_wide(self, pointer: Any, kind: int) -> Any:
        """LANES elements of a float32 or bfloat16 page as floats."""
        if kind == FLOAT32:
            return self.load(pointer)
        short = self.load(pointer, ir.VectorType(_I16, LANES), 2)
        return self.b.bitcast(self.b.shl(self.b.zext(short, _IVEC), self.isplat(16)), _VEC)

    def store(self, value: Any, pointer: Any, align: int = 4) -> None:
        self.b.store(value, pointer, align=align)

    def broadcast(self, pointer: Any) -> Any:
        return self.spread(self.load(pointer, _F))

    def spread(self, scalar: Any) -> Any:
        one = self.b.insert_element(ir.Constant(_VEC, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(_VEC, ir.Undefined), self.isplat(0))

    def call(self, name: str, *args: Any) -> Any:
        kind = f"v{LANES}f32" if args[0].type == _VEC else "f32"
        signature = ir.FunctionType(args[0].type, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, f"llvm.{name}.{kind}"), args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("fma", a, b, c)

    def max(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def variable(self, value: Any) -> Any:
        """A register that changes: LLVM promotes it from the stack."""
        slot = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, slot)
        return slot

    def prefetch(self, pointer: Any) -> None:
        """Bring a line towards the second-level cache; the hardware drops it when it is busy."""
        signature = ir.FunctionType(ir.VoidType(), [_PTR, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.b.module, signature, "llvm.prefetch.p0")
        self.b.call(function, [pointer, *(ir.Constant(_I32, value) for value in (0, PREFETCH_LEVEL, 1))])

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 0 (and small positive x): 2 ulp; 0 below -126, -inf included."""
        clamped = self.max(x, self.splat(-127.0))
        whole = self.call("rint", clamped)
        fraction = self.b.fsub(clamped, whole)
        value = self.splat(_EXP2[-1])
        for coefficient in _EXP2[-2::-1]:
            value = self.fma(value, fraction, self.splat(coefficient))
        exponent = self.b.shl(self.b.fptosi(whole, _IVEC), self.isplat(23))
        scaled = self.b.bitcast(self.b.add(self.b.bitcast(value, _IVEC), exponent), _VEC)
        return self.b.select(self.b.fcmp_ordered("<", x, self.splat(-126.0)), self.splat(0.0), scaled)


def _exp2_coefficients() -> list[float]:
    """Chebyshev interpolation of 2**x on [-1/2, 1/2], degree 6: relative error 2e-9."""
    fit = np.polynomial.chebyshev.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5])
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef]


_EXP2 = _exp2_coefficients()


def _primitive(arguments: int, emit: Callable[..., None]) -> Any:
    """An intrinsic of `arguments` 64-bit integers that returns nothing; `emit(e, *args)` writes its body."""
    signature = types.void(*([types.int64] * arguments))

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        emit(_Emit(builder), *args)
        return context.get_dummy_value()

    names = ", ".join(f"a{i}" for i in range(arguments))
    scope: dict[str, Any] = {"signature": signature, "generate": generate}
    exec(f"def primitive(typing, {names}):\n    return signature, generate\n", scope)
    return intrinsic(scope["primitive"])


def _scores_lanes(vectors: int, tokens: int) -> Any:
    """(queries, query_stride, key_addresses, scores, score_stride, dim): queries in lanes.

    scores[t, lane] = sum over d of keys[t][d] * queries[d, lane], for `tokens` tokens and `vectors` * LANES lanes.
    """

    def emit(e: _Emit, queries: Any, stride: Any, keys: Any, scores: Any, score_stride: Any, dim: Any) -> None:
        rows = [e.at(e.load(e.at(keys, 8 * t), _I64, 8)) for t in range(tokens)]
        sums = [[e.variable(e.splat(0.0)) for _ in range(vectors)] for _ in range(tokens)]
        with cgutils.for_range(e.b, dim) as loop:
            line = e.at(queries, e.b.mul(loop.index, stride))
            lanes = [e.load(e.at(line, 4 * LANES * v)) for v in range(vectors)]
            offset = e.b.mul(loop.index, e.number(4))
            for t in range(tokens):
                key = e.broadcast(e.at(rows[t], offset))
                for v in range(vectors):
                    e.b.store(e.fma(key, lanes[v], e.b.load(sums[t][v])), sums[t][v])
        for t in range(tokens):
            line = e.at(scores, e.b.mul(e.number(t), score_stride))
            for v in range(vectors):
                e.store(e.b.load(sums[t][v]), e.at(line, 4 * LANES * v))

    return _primitive(6, emit)


def _scores_rows(queries_count: int, kind: int) -> Any:
    """(queries, query_stride, key_addresses, scores, dim, ahead_addresses, item): head elements in lanes.

    scores[t, q] = keys[t] . queries[q] for 4 tokens, 4 queries; dim a multiple of LANES, keys of `kind`. On the way
    the rows at `ahead_addresses`, elements of `item` bytes, are prefetched line by line: asked for all at once, the
    hardware drops most of them, and its own prefetcher doesn't follow rows that lie a page apart.
    """

    def emit(e: _Emit, queries: Any, stride: Any, keys: Any, scores: Any, dim: Any, ahead: Any, item: Any) -> None:
        coming = [e.at(e.load(e.at(ahead, 8 * t), _I64, 8)) for t in range(4)]
        rows = [e.at(e.load(e.at(keys, 8 * t), _I64, 8)) for t in range(4)]
        lines = [e.at(queries, e.b.mul(e.number(q), stride)) for q in range(queries_count)]
        sums = [[e.variable(e.splat(0.0)) for _ in range(queries_count)] for _ in range(4)]
        with cgutils.for_range(e.b, e.b.udiv(dim, e.number(LANES))) as loop:
            offset = e.b.mul(loop.index, e.number(4 * LANES))
            query = [e.load(e.at(line, offset)) for line in lines]
            for row in coming:
                e.prefetch(e.at(row, e.b.mul(loop.index, e.b.mul(item, e.number(LANES)))))
            for t in range(4):
                key = e.load_wide(e.at(rows[t], e.b.mul(loop.index, e.number(ITEM_BYTES[kind] * LANES))), kind)
                for q in range(queries_count):
                    e.b.store(e.fma(key, query[q], e.b.load(sums[t][q])), sums[t][q])
        zero = e.splat(0.0)
        flat = [e.b.load(sums[t][q]) if q < queries_count else zero for t in range(4) for q in range(ROWS)]
        for index, vector in enumerate(_reduce(e, flat)):
            e.store(vector, e.at(scores, 4 * LANES * index))

    return _primitive(7, emit)


def _reduce(e: _Emit, vectors: list[Any]) -> list[Any]:
    """Horizontal sums of all vectors, packed in order into vectors: a transposing tree of half-and-half additions."""
    segment = LANES
    while segment > 1 and len(vectors) > 1:
        half = segment // 2
        low = [s + i for s in range(0, 2 * LANES, segment) for i in range(half)]
        masks = [ir.Constant(_IVEC, [ir.Constant(_I32, i + shift) for i in low]) for shift in (0, half)]
        vectors = [
            e.b.fadd(e.b.shuffle_vector(a, b, masks[0]), e.b.shuffle_vector(a, b, masks[1]))
            for a, b in zip(vectors[::2], vectors[1::2])
        ]
        segment = half
    return vectors


def _softmax(folded: bool) -> Any:
    """(scores, score_stride, lines, maximum, total, alpha, phases): one step of the online softmax, in base 2.

    For LANES lanes: raises `maximum` by the new scores, replaces scores by 2**(score - maximum), rescales `total` by
    `alpha` = 2**(old maximum - new) and adds the new terms. Folded: lane i belongs to query i % ROWS, all phases of
    a query are kept equal. (Milakov and Gimelshein, arXiv 1805.02867.)
    """

    def fold(e: _Emit, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        step = ROWS
        while folded and step < LANES:
            turned = ir.Constant(_IVEC, [ir.Constant(_I32, (i + step) % LANES) for i in range(LANES)])
            value = combine(value, e.b.shuffle_vector(value, value, turned))
            step *= 2
        return value

    def emit(e: _Emit, scores: Any, stride: Any, lines: Any, maximum: Any, total: Any, alpha: Any) -> None:
        old = e.load(e.at(maximum))
        high = e.variable(old)
        with cgutils.for_range(e.b, lines) as loop:
            e.b.store(e.max(e.load(e.at(scores, e.b.mul(loop.index, stride))), e.b.load(high)), high)
        new = fold(e, e.b.load(high), e.max)
        base = e.b.select(e.b.fcmp_ordered("==", new, e.splat(-math.inf)), e.splat(0.0), new)
        rescale = e.exp2(e.b.fsub(old, base))
        added = e.variable(e.splat(0.0))
        with cgutils.for_range(e.b, lines) as loop:
            place = e.at(scores, e.b.mul(loop.index, stride))
            term = e.exp2(e.b.fsub(e.load(place), base))
            e.store(term, place)
            e.b.store(e.b.fadd(e.b.load(added), term), added)
        terms = fold(e, e.b.load(added), e.b.fadd)
        e.store(new, e.at(maximum))
        e.store(e.fma(e.load(e.at(total)), rescale, terms), e.at(total))
        e.store(rescale, e.at(alpha))

    return _primitive(6, emit)


def _values(vectors: int, prefetching: bool, kind: int = FLOAT32) -> Any:
    """(weights, weight_stride, value_addresses, offset, tokens, accumulators, alpha, ahead_addresses, item).

    For ROWS queries and vectors * LANES head elements from `offset` (bytes of floats): acc[q] = acc[q] * alpha[q] +
    sum over t of weights[t, q] * values[t]; accumulators are the addresses of the queries' rows. Rows ahead as in
    scores_rows.
    """

    def emit(
        e: _Emit,
        weights: Any,
        stride: Any,
        values: Any,
        offset: Any,
        tokens: Any,
        rows: Any,
        alpha: Any,
        ahead: Any,
        item: Any,
    ) -> None:
        places = [e.at(e.load(e.at(rows, 8 * q), _I64, 8), offset) for q in range(ROWS)]
        sums = []
        for q in range(ROWS):
            factor = e.broadcast(e.at(alpha, 4 * q))
            loaded = [e.load(e.at(places[q], 4 * LANES * v)) for v in range(vectors)]
            sums.append([e.variable(e.b.fmul(vector, factor)) for vector in loaded])
        step = e.b.mul(item, e.number(LANES))
        coming_at = e.b.mul(e.b.udiv(offset, e.number(4)), item)
        value_at = e.b.mul(e.b.udiv(offset, e.number(4)), e.number(ITEM_BYTES[kind]))
        with cgutils.for_range(e.b, tokens) as loop:
            place = e.b.mul(loop.index, e.number(8))
            row = e.at(e.load(e.at(values, place), _I64, 8), value_at)
            value = [e.load_wide(e.at(row, ITEM_BYTES[kind] * LANES * v), kind) for v in range(vectors)]
            if prefetching:
                coming = e.at(e.load(e.at(ahead, place), _I64, 8), coming_at)
                for v in range(vectors):
                    e.prefetch(e.at(coming, e.b.mul(step, e.number(v))))
            line = e.at(weights, e.b.mul(loop.index, stride))
            for q in range(ROWS):
                weight = e.broadcast(e.at(line, 4 * q))
                for v in range(vectors):
                    e.b.store(e.fma(weight, value[v], e.b.load(sums[q][v])), sums[q][v])
        for q in range(ROWS):
            for v in range(vectors):
                e.store(e.b.load(sums[q][v]), e.at(places[q], 4 * LANES * v))

    return _primitive(9, emit)


def _soft_cap() -> Any:
    """(scores, count, cap): scores (in base 2, count a multiple of LANES) become cap * tanh(score / cap)."""

    def emit(e: _Emit, scores: Any, count: Any, cap: Any) -> None:
        size = e.spread(e.load(e.at(cap), _F))  # in base 2: soft_cap * log2(e)
        rate = e.b.fdiv(e.splat(-2 * math.log2(math.e)), size)
        with cgutils.for_range(e.b, e.b.udiv(count, e.number(LANES))) as loop:
            place = e.at(scores, e.b.mul(loop.index, e.number(4 * LANES)))
            score = e.load(place)
            # tanh(y) = (1 - u) / (1 + u), u = exp(-2 |y|), with y's sign
            sized = e.call("fabs", score)
            u = e.exp2(e.b.fmul(sized, rate))
            tanh = e.b.fdiv(e.b.fsub(e.splat(1.0), u), e.b.fadd(e.splat(1.0), u))
            e.store(e.call("copysign", e.b.fmul(tanh, size), score), place)

    return _primitive(3, emit)


def _widen(kind: int) -> Any:
    """(source, target, count): count elements of dtype `kind`, one behind the other, as float32."""

    def convert(e: _Emit, raw: Any, wide: Any, floats: Any) -> Any:
        if kind == FLOAT32:
            return e.b.bitcast(raw, floats)
        if kind == INT8:
            return e.b.sitofp(raw, floats)
        if kind == BFLOAT16:
            return e.b.bitcast(e.b.shl(e.b.zext(raw, wide), _like(wide, 16)), floats)
        halves = _resize(floats, ir.HalfType())
        if kind == FLOAT16:
            return e.b.fpext(e.b.bitcast(raw, halves), floats)
        # e4m3: sign and magnitude moved into the places of a float16, whose exponent is biased by 8 more.
        short = _resize(wide, _I16)
        byte = e.b.zext(raw, short)
        sign = e.b.shl(e.b.and_(byte, _like(short, 0x80)), _like(short, 8))
        size = e.b.and_(byte, _like(short, 0x7F))
        half = e.b.bitcast(e.b.or_(sign, e.b.shl(size, _like(short, 7))), halves)
        value = e.b.fmul(e.b.fpext(half, floats), _like(floats, 256.0))
        return e.b.select(e.b.icmp_unsigned("==", size, _like(short, 0x7F)), _like(floats, math.nan), value)

    def emit(e: _Emit, source: Any, target: Any, count: Any) -> None:
        item, raw = ITEM_BYTES[kind], ir.IntType(8 * ITEM_BYTES[kind])
        full = e.b.udiv(count, e.number(LANES))
        with cgutils.for_range(e.b, full) as loop:
            vector = e.load(e.at(source, e.b.mul(loop.index, e.number(item * LANES))), ir.VectorType(raw, LANES), item)
            e.store(convert(e, vector, _IVEC, _VEC), e.at(target, e.b.mul(loop.index, e.number(4 * LANES))))
        done = e.b.mul(full, e.number(LANES))
        with cgutils.for_range(e.b, e.b.sub(count, done)) as loop:
            index = e.b.add(done, loop.index)
            scalar = e.load(e.at(source, e.b.mul(index, e.number(item))), raw, item)
            e.store(convert(e, scalar, _I32, _F), e.at(target, e.b.mul(index, e.number(4))))

    return _primitive(3, emit)


def _fetch() -> Any:
    """(addresses, rows, size): prefetch `size` bytes from each of `rows` addresses."""

    def emit(e: _Emit, addresses: Any, rows: Any, size: Any) -> None:
        lines = e.b.udiv(e.b.add(size, e.number(63)), e.number(64))
        with cgutils.for_range(e.b, rows) as row:
            start = e.at(e.load(e.at(addresses, e.b.mul(row.index, e.number(8))), _I64, 8))
            with cgutils.for_range(e.b, lines) as line:
                e.prefetch(e.at(start, e.b.mul(line.index, e.number(64))))

    return _primitive(3, emit)


def _move() -> Any:
    """(source, target, size): copy `size` bytes."""

    def emit(e: _Emit, source: Any, target: Any, size: Any) -> None:
        cgutils.raw_memcpy(e.b, e.at(target), e.at(source), size, 1)

    return _primitive(3, emit)


def _like(shape: Any, value: float) -> Any:
    """A constant of a scalar or vector type."""
    if isinstance(shape, ir.VectorType):
        return ir.Constant(shape, [ir.Constant(shape.element, value)] * shape.count)
    return ir.Constant(shape, value)


def _resize(shape: Any, element: Any) -> Any:
    """`element`, or a vector of it as long as `shape`."""
    return ir.VectorType(element, shape.count) if isinstance(shape, ir.VectorType) else element


@intrinsic  # type: ignore[untyped-decorator]
def load_float(typing: Any, address: Any) -> Any:
    """The float32 at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        emit = _Emit(builder)
        return emit.load(emit.at(args[0]), _F)

    return types.float32(types.int64), generate


scores_lanes = {vectors: _scores_lanes(vectors, TOKENS[vectors]) for vectors in range(1, TILE_VECTORS + 1)}
scores_lanes_one = {vectors: _scores_lanes(vectors, 1) for vectors in range(1, TILE_VECTORS + 1)}
scores_rows = {count: _scores_rows(count, FLOAT32) for count in range(1, ROWS + 1)}
scores_rows_half = {count: _scores_rows(count, BFLOAT16) for count in range(1, ROWS + 1)}
softmax_lanes, softmax_rows = _softmax(False), _softmax(True)
values_by = {vectors: _values(vectors, False) for vectors in range(1, 5)}
values_few = {vectors: _values(vectors, True) for vectors in range(1, 5)}
values_few_half = {vectors: _values(vectors, True, BFLOAT16) for vectors in range(1, 5)}
soft_cap = _soft_cap()
fetch = _fetch()
move = _move()
widen_by = {kind: _widen(kind) for kind in range(5)}
