"""The compiled inner loops of a server's store: index, rows, rules, initialisers, narrow numbers.

All njit code is in this file, because numba's cache of a function is renewed by a change of its own file only. Nothing here
depends on the machine's libm, on fused multiply-adds or on the order in which a vector unit would add: replicas on unlike
machines stay byte-equal. Sums over a row are in eight lanes, in this order everywhere.

A row is `words` 64-bit words: id, lsn, then weights, scale and state where the layout says. The same memory is passed as
several views: `ri` int64, `rc` the arithmetic's float, `r4` float32, `r2` int16, `r1` int8. Row 0 is scratch. The index of a
shard is a power of two of uint64 slots: the hash's low 32 bits above the row's number; 0 is empty; linear probing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from echelon.errors import EchelonError

try:
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from echelon.server.compiled import compiling
except ImportError as error:
    raise EchelonError(
        "echelon.server: the parameter server's loops are compiled by numba, which is not installed; "
        "pip install 'echelon[server]'"
    ) from error

SGD, MOMENTUM, ADAGRAD, ROWWISE, ADAM, LAMB = range(6)
ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)
#: How weights lie in a row: as the arithmetic's float, or narrower.
NATIVE, F4, F2, I2, I1 = range(5)
#: Places in a layout: see rows.Layout.
WORDS, STORED, DIM, W_AT, SCALE_AT, S_AT, STATE = range(7)
#: Places in a rule's scalars.
LR, DECAY, KEEP, MU, UNDAMPED, B1, B1C, B2, B2C, EPS, FIRST, WIDTH = range(12)
#: Places in a rule's switches; STEP: 0 where each row counts its own.
KIND, NESTEROV, SPARSE, COUNT_AT, STEP = range(5)
#: How many rows ahead an update fetches.
AHEAD = 6
#: Ids whose slots and rows are fetched ahead of their use: tight loops over so many, because a wrong guess in one stage of a loop over
#: all stages would throw away the work of the others.
BATCH = 32

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_LOW = np.uint64(0xFFFFFFFF)
_intrinsic: Any = intrinsic

_compiled = compiling()
_inlined = compiling(forceinline=True)


@_intrinsic
def _fetch(typing, array, index):
    """Asks the cache for the line of array[index], which is not waited for."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(view.data, [args[1]]), byte)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


@_intrinsic
def _bare(typing, array):
    """The array without its owner: slices of it are not counted, which for a row would cost more than its arithmetic."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), build


@_intrinsic
def _copy(typing, to, at, source, start, count):
    """`count` elements from source[start] to to[at], by the machine's best loop."""

    def build(context, builder, signature, args):
        a = context.make_array(signature.args[0])(context, builder, args[0])
        b = context.make_array(signature.args[2])(context, builder, args[2])
        size = signature.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, builder.gep(a.data, [args[1]]), builder.gep(b.data, [args[3]]), args[4], size)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), build


@_intrinsic
def _eights(typing, array, count):
    """The sum of squares of the first 8 * count elements: lane j adds each eighth element from j on, then lanes pair up."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        lanes = ir.VectorType(context.get_data_type(signature.args[0].dtype), 8)
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        with cgutils.for_range(builder, args[1]) as loop:
            place = builder.gep(view.data, [builder.mul(loop.index, ir.IntType(64)(8))])
            x = builder.load(builder.bitcast(place, lanes.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), builder.fmul(x, x)), total)
        x = builder.load(total)
        a = [builder.extract_element(x, ir.IntType(32)(j)) for j in range(8)]
        while len(a) > 1:
            a = [builder.fadd(a[j], a[j + len(a) // 2]) for j in range(len(a) // 2)]
        return a[0]

    return array.dtype(array, types.int64), build


def _floats(context, builder, kind, view, index):
    """Elements 8 * index .. of an array as eight float32."""
    lanes = ir.VectorType(context.get_data_type(kind.dtype), 8)
    place = builder.gep(view.data, [builder.mul(index, ir.IntType(64)(8))])
    x = builder.load(builder.bitcast(place, lanes.as_pointer()), align=kind.dtype.bitwidth // 8)
    return x if kind.dtype == types.float32 else builder.fptrunc(x, ir.VectorType(ir.FloatType(), 8))


@_intrinsic
def _peak(typing, array, count):
    """The largest magnitude of the first 8 * count elements, as float32's bits: what is not finite is the largest."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        lanes = ir.VectorType(ir.IntType(32), 8)
        most = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        mask = ir.Constant(lanes, [0x7FFFFFFF] * 8)
        with cgutils.for_range(builder, args[1]) as loop:
            x = builder.bitcast(_floats(context, builder, signature.args[0], view, loop.index), lanes)
            x, old = builder.and_(x, mask), builder.load(most)
            builder.store(builder.select(builder.icmp_unsigned(">", x, old), x, old), most)
        x = builder.load(most)
        a = [builder.extract_element(x, ir.IntType(32)(j)) for j in range(8)]
        while len(a) > 1:
            pairs = [(a[j], a[j + len(a) // 2]) for j in range(len(a) // 2)]
            a = [builder.select(builder.icmp_unsigned(">", b, c), b, c) for b, c in pairs]
        return a[0]

    return types.uint32(array, types.int64), build


@_intrinsic
def _steps(typing, values, rate, draws, out, count):
    """floor(values * rate + draw) of the first 8 * count elements; a draw of 16 bits stands for the middle of its interval."""

    def build(context, builder, signature, args):
        kind, _, noise, to, _ = signature.args
        view = context.make_array(kind)(context, builder, args[0])
        random = context.make_array(noise)(context, builder, args[2])
        target = context.make_array(to)(context, builder, args[3])
        lanes, eight = ir.VectorType(ir.FloatType(), 8), ir.IntType(64)(8)
        step = ir.Constant(lanes, ir.Undefined)
        for j in range(8):
            step = builder.insert_element(step, args[1], ir.IntType(32)(j))
        down = ir.FunctionType(lanes, [lanes])
        floor = cgutils.get_or_insert_function(builder.module, down, "llvm.floor.v8f32")
        small = ir.VectorType(context.get_data_type(to.dtype), 8)
        shorts = ir.VectorType(ir.IntType(16), 8)
        with cgutils.for_range(builder, args[4]) as loop:
            x = builder.fmul(_floats(context, builder, kind, view, loop.index), step)
            at = builder.mul(loop.index, eight)
            u = builder.load(builder.bitcast(builder.gep(random.data, [at]), shorts.as_pointer()), align=2)
            u = builder.fadd(builder.uitofp(u, lanes), ir.Constant(lanes, [0.5] * 8))
            u = builder.fmul(u, ir.Constant(lanes, [1.52587890625e-05] * 8))
            whole = builder.fptosi(builder.call(floor, [builder.fadd(x, u)]), ir.VectorType(ir.IntType(32), 8))
            place = builder.bitcast(builder.gep(target.data, [at]), small.as_pointer())
            builder.store(builder.trunc(whole, small), place, align=to.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(values, types.float32, draws, out, types.int64), build


@_intrinsic
def _bits(typing, value):
    """The 32 bits of a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@_intrinsic
def _float(typing, bits):
    """The float32 of 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@_inlined
def mix64(x):
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


# First values


@_compiled
def _log(x):
    """The logarithm of 0 < x < 1, by IEEE operations only."""
    exponent = 0
    while x < 0.7071067811865476:
        x *= 2.0
        exponent -= 1
    s = (x - 1.0) / (x + 1.0)
    square = s * s
    total = 0.0
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    return 2.0 * s * total + exponent * 0.6931471805599453


@_compiled
def quantile(p):
    """Where the normal distribution reaches p, 0 < p < 1: Wichura's AS 241, to 1e-15."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        top = (
            (2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r + 6.7265770927008700853e4
        ) * r + 4.5921953931549871457e4
        top = (((top * r + 1.3731693765509461125e4) * r + 1.9715909503065514427e3) * r + 1.3314166789178437745e2) * r
        low = (
            (5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r + 3.9307895800092710610e4
        ) * r + 2.1213794301586595867e4
        low = (((low * r + 5.3941960214247511077e3) * r + 6.8718700749205790830e2) * r + 4.2313330701600911252e1) * r
        return q * (top + 3.3871328727963666080) / (low + 1.0)
    r = math.sqrt(-_log(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        top = ((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1) * r
        top = ((top + 1.27045825245236838258) * r + 3.64784832476320460504) * r + 5.76949722146069140550
        top = (top * r + 4.63033784615654529590) * r + 1.42343711074968357734
        low = ((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2) * r
        low = ((low + 1.48103976427480074590e-1) * r + 6.89767334985100004550e-1) * r + 1.67638483018380384940
        low = (low * r + 2.05319162663775882187) * r + 1.0
    else:
        r -= 5.0
        top = ((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3) * r
        top = ((top + 2.65321895265761230930e-2) * r + 2.96560571828504891230e-1) * r + 1.78482653991729133580
        top = (top * r + 5.46378491116411436990) * r + 6.65790464350110377720
        low = ((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5) * r
        low = ((low + 7.86869131145613259100e-4) * r + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1
        low = (low * r + 5.99832206555887937690e-1) * r + 1.0
    return -top / low if q < 0 else top / low


@_inlined
def _chance(key, j):
    """The j-th number of a key, in the middle of one of 2**53 equal parts of 0..1."""
    x = mix64(key + np.uint64(j + 1) * _GOLDEN)
    return (np.float64(np.int64(x >> np.uint64(11))) + 0.5) * 1.1102230246251565e-16


@_compiled
def initial(kind, value, scale, seed, name, out):
    """A row's first values into `out`."""
    if kind <= CONSTANT:
        for j in range(out.shape[0]):
            out[j] = value
        return
    key = mix64(seed + np.uint64(name))
    if kind == UNIFORM:
        for j in range(out.shape[0]):
            out[j] = value + scale * (2.0 * _chance(key, j) - 1.0)
    else:
        for j in range(out.shape[0]):
            out[j] = value + scale * quantile(_chance(key, j))


# Narrow numbers: up or down by draws of 16 bits. With all draws in the middle that is to the nearest; random ones make updates that
# are smaller than a step count in the mean.


@_inlined
def _half(x, draw):
    """A float32 as the bits of a float16, up or down by the draw; finite values beyond its range become its largest."""
    b = np.int64(_bits(x))
    a = b & 0x7FFFFFFF
    if a < 0x38800000:
        h = np.int64(np.float64(_float(np.uint32(a))) * 16777216.0 + (draw + 0.5) * 1.52587890625e-05)
    elif a < 0x7F800000:
        h = min((a - 0x38000000 + (draw >> 3)) >> 13, np.int64(0x7BFF))
    else:
        h = np.int64(0x7C00 if a == 0x7F800000 else 0x7E00)
    return np.int16(h | ((b >> 16) & 0x8000))


@_inlined
def _whole(h16):
    """The float32 of a float16's bits."""
    h = np.uint32(np.uint16(h16))
    em = h & np.uint32(0x7FFF)
    small = np.float32(np.int32(em)) * np.float32(5.9604644775390625e-08)
    bits = (em << np.uint32(13)) + (np.uint32(0x70000000) if em >= np.uint32(0x7C00) else np.uint32(0x38000000))
    bits = _bits(small) if em < np.uint32(0x400) else bits
    return _float(bits | ((h & np.uint32(0x8000)) << np.uint32(16)))


@_inlined
def _scale(values, most):
    """What one step of an integer row stands for; nan where a value is not finite.

    A little (2**-21) more than needed, so that the largest value is within the integers' range however it is rounded. A row
    so small that the scale has no inverse is zeros.
    """
    n = values.shape[0]
    bits = np.int64(_peak(values, n >> 3))
    for j in range(n & ~7, n):
        bits = max(bits, np.int64(_bits(np.float32(values[j]))) & 0x7FFFFFFF)
    peak = _float(np.uint32(bits))
    scale = peak / most * np.float32(1.000000476837158)
    scale = scale if scale > np.float32(1e-37) or scale != scale else np.float32(0)
    return scale if scale < math.inf else np.float32(math.nan)


@_inlined
def _noise(key, draws):
    """Sixteen random bits per column into `draws`, four columns from one hash."""
    n = draws.shape[0]
    for q in range((n + 3) >> 2):
        x = mix64(key + np.uint64(q + 1) * _GOLDEN)
        for j in range(4 * q, min(4 * q + 4, n)):
            draws[j] = np.uint16(x)
            x >>= np.uint64(16)


@_inlined
def _integers(values, scale, draws, out):
    """Integer steps of `scale`, by the draws; a draw of 32768 gives the nearest."""
    n = values.shape[0]
    if not scale > np.float32(0):
        for j in range(n):
            out[j] = 0
        return
    rate = np.float32(1) / scale
    _steps(values, rate, draws, out, n >> 3)
    for j in range(n & ~7, n):
        u = (np.float32(draws[j]) + np.float32(0.5)) * np.float32(1.52587890625e-05)
        out[j] = np.int32(np.floor(np.float32(values[j]) * rate + u))


@_inlined
def _halves(values, draws, out):
    """Float16's bits, by the draws: the 13 bits that are cut off carry where they and the draw's are together more than one."""
    for j in range(values.shape[0]):
        out[j] = _half(np.float32(values[j]), np.int64(draws[j]))


@_compiled
def _encode(values, draws, layout, row, r4, r2, r1):
    """Weights into a row that holds them narrower than `values`."""
    stored, dim, words = layout[STORED], layout[DIM], layout[WORDS]
    at = layout[W_AT]
    if stored == F4:
        w4 = r4[row * words * 2 + at : row * words * 2 + at + dim]
        for j in range(dim):
            w4[j] = np.float32(values[j])
    elif stored == F2:
        _halves(values, draws, r2[row * words * 4 + at : row * words * 4 + at + dim])
    elif stored == I2:
        scale = _scale(values, np.float32(32767))
        r4[row * words * 2 + layout[SCALE_AT]] = scale
        _integers(values, scale, draws, r2[row * words * 4 + at : row * words * 4 + at + dim])
    else:
        scale = _scale(values, np.float32(127))
        r4[row * words * 2 + layout[SCALE_AT]] = scale
        _integers(values, scale, draws, r1[row * words * 8 + at : row * words * 8 + at + dim])


@_compiled
def _decode(layout, row, rc, r4, r2, r1, out):
    """A row's weights into `out`."""
    stored, dim, words = layout[STORED], layout[DIM], layout[WORDS]
    at = layout[W_AT]
    if stored == NATIVE:
        start = row * words * (8 // rc.itemsize) + at
        w = rc[start : start + dim]
        for j in range(dim):
            out[j] = w[j]
    elif stored == F4:
        w4 = r4[row * words * 2 + at : row * words * 2 + at + dim]
        for j in range(dim):
            out[j] = w4[j]
    elif stored == F2:
        w2 = r2[row * words * 4 + at : row * words * 4 + at + dim]
        for j in range(dim):
            out[j] = _whole(w2[j])
    elif stored == I2:
        scale = r4[row * words * 2 + layout[SCALE_AT]]
        w2 = r2[row * words * 4 + at : row * words * 4 + at + dim]
        for j in range(dim):
            out[j] = np.float32(w2[j]) * scale
    else:
        scale = r4[row * words * 2 + layout[SCALE_AT]]
        w1 = r1[row * words * 8 + at : row * words * 8 + at + dim]
        for j in range(dim):
            out[j] = np.float32(w1[j]) * scale


@_compiled
def narrow_integers(values, most, draws, out, scales):
    values, out, draws = _bare(values), _bare(out), _bare(draws)
    for i in range(values.shape[0]):
        scale = _scale(values[i], most)
        scales[i] = scale
        _integers(values[i], scale, draws, out[i])


@_compiled
def widen_integers(values, scales, out):
    values, out = _bare(values), _bare(out)
    for i in range(values.shape[0]):
        scale, v, o = scales[i], values[i], out[i]
        for j in range(v.shape[0]):
            o[j] = np.float32(v[j]) * scale


# Rules


@_inlined
def _squares(x):
    """The sum of squares, in eight lanes."""
    n = x.shape[0]
    total = _eights(x, n >> 3)
    for j in range(n & ~7, n):
        total += x[j] * x[j]
    return total


@_inlined
def _power(base, times):
    """base ** times, the same on every machine."""
    total = 1.0
    while times > 0:
        if times & 1:
            total *= base
        base *= base
        times >>= 1
    return total


@_inlined
def _count(switches, state):
    """Which update of this row or block this is, from 1; its own count goes on where it keeps one."""
    at = switches[COUNT_AT]
    times = switches[STEP]
    if at >= 0:
        state[at] += 1
        if times == 0:
            times = np.int64(state[at])
    return times


@_inlined
def _lamb(c, p, switches, w, g, state, u, pair):
    """LAMB's direction before the trust ratio, into `u`."""
    n = w.shape[0]
    times = _count(switches, state)
    m, v = state[:n], state[n : 2 * n]
    pair[0] = 1.0 / (1.0 - _power(p[B1], times))
    pair[1] = 1.0 / math.sqrt(1.0 - _power(p[B2], times))
    k1, k2 = pair[0], pair[1]
    b1, b1c, b2, b2c, eps, decay = c[B1], c[B1C], c[B2], c[B2C], c[EPS], c[DECAY]
    for j in range(n):
        m[j] = b1 * m[j] + b1c * g[j]
        v[j] = b2 * v[j] + b2c * g[j] * g[j]
        u[j] = (m[j] * k1) / (math.sqrt(v[j]) * k2 + eps) + decay * w[j]


@_inlined
def _step(c, p, switches, w, g, state, scratch):
    """One update of `w` by the gradient `g`. `c`: the rule's scalars in the arithmetic's float, `p`: in float64."""
    n = w.shape[0]
    kind = switches[KIND]
    lr, decay = c[LR], c[DECAY]
    if kind == SGD:
        for j in range(n):
            w[j] -= lr * (g[j] + decay * w[j])
    elif kind == MOMENTUM:
        mu, undamped = c[MU], c[UNDAMPED]
        if switches[COUNT_AT] >= 0 and _count(switches, state) == 1:
            undamped = c[WIDTH] / c[WIDTH]
        m = state[:n]
        if switches[NESTEROV]:
            for j in range(n):
                d = g[j] + decay * w[j]
                m[j] = mu * m[j] + undamped * d
                w[j] -= lr * (d + mu * m[j])
        else:
            for j in range(n):
                m[j] = mu * m[j] + undamped * (g[j] + decay * w[j])
                w[j] -= lr * m[j]
    elif kind == ADAGRAD:
        eps = c[EPS]
        v = state[:n]
        if decay == 0:
            for j in range(n):
                d = g[j]
                v[j] += d * d
                w[j] -= lr * d / (math.sqrt(v[j]) + eps)
        else:
            for j in range(n):
                d = g[j] + decay * w[j]
                v[j] += d * d
                w[j] -= lr * d / (math.sqrt(v[j]) + eps)
    elif kind == ROWWISE:
        u = g
        if decay != 0:
            u = scratch[:n]
            for j in range(n):
                u[j] = g[j] + decay * w[j]
        state[0] += _squares(u) / c[WIDTH]
        rate = lr / (math.sqrt(state[0]) + c[EPS])
        for j in range(n):
            w[j] -= rate * u[j]
    elif kind == ADAM:
        times = _count(switches, state)
        m, v = state[:n], state[n : 2 * n]
        b1, b1c, b2, b2c = c[B1], c[B1C], c[B2], c[B2C]
        root = math.sqrt(1.0 - _power(p[B2], times))
        scratch[0] = p[LR] * root / (1.0 - _power(p[B1], times))
        scratch[1] = p[EPS] if switches[SPARSE] else p[EPS] * root
        rate, eps = scratch[0], scratch[1]
        keep = c[KEEP]
        for j in range(n):
            d = g[j] + decay * w[j]
            m[j] = b1 * m[j] + b1c * d
            v[j] = b2 * v[j] + b2c * d * d
            w[j] = keep * w[j] - rate * m[j] / (math.sqrt(v[j]) + eps)
    else:
        u = scratch[:n]
        _lamb(c, p, switches, w, g, state, u, scratch[n:])
        a, b = _squares(w), _squares(u)
        rate = lr * (math.sqrt(a) / math.sqrt(b)) if a > 0 and b > 0 else lr
        for j in range(n):
            w[j] -= rate * u[j]


@_compiled
def dense_step(c, p, switches, w, g, state, scratch):
    _step(c, p, switches, w, g, state, scratch)


@_compiled
def dense_lamb(c, p, switches, w, g, state, u, pair):
    """LAMB's direction of one block, and what the block adds to the norms of weights and direction."""
    _lamb(c, p, switches, w, g, state, u, pair)
    return np.float64(_squares(w)), np.float64(_squares(u))


# The index


@_inlined
def _aim(index, starts, masks, shift, ids, first, shard, low, known):
    """Hashes a batch of ids and asks for the slots of those whose row is not known; `shard` and `low` hold two batches, in turns."""
    for i in range(first, min(first + BATCH, ids.shape[0])):
        h = mix64(np.uint64(ids[i]))
        s = np.int64(h >> shift) if shift < 64 else 0
        tag = np.int64(h & _LOW)
        shard[i & (2 * BATCH - 1)] = s
        low[i & (2 * BATCH - 1)] = tag
        if known[i] == 0:
            _fetch(index, starts[s] + (tag & masks[s]))


@_inlined
def _seek(index, starts, masks, ri, words, lines, first, size, shard, low, known):
    """Of a batch that was aimed at: the row that is likely each id's own (0: none), whose lines are asked for."""
    for i in range(first, first + size):
        k = i & (2 * BATCH - 1)
        row = known[i]
        if row == 0:
            start, mask = starts[shard[k]], masks[shard[k]]
            tag = np.uint64(low[k])
            at = low[k] & mask
            while True:
                slot = index[start + at]
                if slot == 0:
                    break
                if slot >> np.uint64(32) == tag:
                    row = np.int64(slot & _LOW)
                    break
                at = (at + 1) & mask
            known[i] = row
        for j in range(0, lines, 8):
            _fetch(ri, row * words + j)


@_inlined
def _sure(index, starts, masks, ri, words, ids, i, shard, low, known):
    """The row that is an id's own: the one found, or one behind it where another id has the same 32 bits, which is rare."""
    row = known[i]
    if row != 0 and ri[row * words] != ids[i]:
        s, tag = shard[i & (2 * BATCH - 1)], low[i & (2 * BATCH - 1)]
        row = _probe(index, starts[s], masks[s], tag & masks[s], np.uint64(tag), ri, words, ids[i])
        known[i] = row
    return row


@_compiled
def find(index, starts, masks, shift, ri, words, ids, where, ring, missing):
    """The row of each id into `where` (zeros), 0 if there is none; how many there are none of, and per shard in `missing`."""
    index, starts, masks, ri, ids, where = (
        _bare(index),
        _bare(starts),
        _bare(masks),
        _bare(ri),
        _bare(ids),
        _bare(where),
    )
    n = ids.shape[0]
    shard, low = _bare(ring[0]), _bare(ring[1])
    absent = 0
    _aim(index, starts, masks, shift, ids, 0, shard, low, where)
    for first in range(0, n, BATCH):
        size = min(BATCH, n - first)
        _aim(index, starts, masks, shift, ids, first + BATCH, shard, low, where)
        _seek(index, starts, masks, ri, words, 1, first, size, shard, low, where)
        for i in range(first, first + size):
            if _sure(index, starts, masks, ri, words, ids, i, shard, low, where) == 0:
                absent += 1
                missing[shard[i & (2 * BATCH - 1)]] += 1
    return absent


@_compiled
def _probe(index, start, mask, at, tag, ri, words, wanted):
    while True:
        at &= mask
        slot = index[start + at]
        if slot == 0:
            return 0
        if slot >> np.uint64(32) == tag:
            row = np.int64(slot & _LOW)
            if ri[row * words] == wanted:
                return row
        at += 1


@_inlined
def _insert(index, start, mask, tag, row):
    at = np.int64(tag) & mask
    while index[start + at] != 0:
        at = (at + 1) & mask
    index[start + at] = (tag << np.uint64(32)) | np.uint64(row)


@_compiled
def move(index, start, mask, to, to_mask):
    """A shard's slots into a larger region, which is empty; the old one is left as it was."""
    for at in range(start, start + mask + 1):
        slot = index[at]
        if slot != 0:
            _insert(index, to, to_mask, slot >> np.uint64(32), slot & _LOW)


@_inlined
def _take(ri, words, free):
    """A row that is not in use. free: the first of the chain of rows given back, the first never used, the chain's length."""
    row = free[0]
    if row != 0:
        free[0] = ri[row * words]
        free[2] -= 1
    else:
        row = free[1]
        free[1] += 1
    return row


@_compiled
def remove(index, starts, masks, used, shift, ri, words, free, ids):
    """Takes ids out of the index and their rows back, those that are here; what follows in a probe's way moves up: no tombs."""
    for wanted in ids:
        h = mix64(np.uint64(wanted))
        s = np.int64(h >> shift) if shift < 64 else 0
        start, mask, tag = starts[s], masks[s], h & _LOW
        at = np.int64(tag) & mask
        while True:
            slot = index[start + at]
            if slot == 0 or (slot >> np.uint64(32) == tag and ri[np.int64(slot & _LOW) * words] == wanted):
                break
            at = (at + 1) & mask
        if slot == 0:
            continue
        row = np.int64(slot & _LOW)
        for k in range(row * words, row * words + words):
            ri[k] = 0
        ri[row * words] = free[0]
        free[0] = row
        free[2] += 1
        used[s] -= 1
        hole = at
        while True:
            at = (at + 1) & mask
            slot = index[start + at]
            if slot == 0:
                break
            home = np.int64(slot >> np.uint64(32)) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                index[start + hole] = slot
                hole = at
        index[start + hole] = 0


@_compiled
def walk(index, start, mask, ri, words, free, clear, rows):
    """The rows of a shard into `rows`; with `clear` they are given back and the shard is left empty."""
    n = 0
    for at in range(start, start + mask + 1):
        slot = index[at]
        if slot != 0:
            rows[n] = np.int64(slot & _LOW)
            n += 1
            if clear:
                index[at] = 0
    if clear:
        for i in range(n):
            row = rows[i]
            if i + AHEAD < n:
                _fetch(ri, rows[i + AHEAD] * words)
            for k in range(row * words, row * words + words):
                ri[k] = 0
            ri[row * words] = free[0]
            free[0] = row
        free[2] += n
    return n


@_compiled
def written(index, start, mask, ri, words, since, ids, lsns):
    """Ids and log numbers of a shard's rows that were written after `since`; how many."""
    index, ri = _bare(index), _bare(ri)
    n = 0
    for at in range(start, start + mask + 1):
        if at + 32 <= start + mask:
            _fetch(ri, np.int64(index[at + 32] & _LOW) * words)
        slot = index[at]
        if slot != 0:
            row = np.int64(slot & _LOW) * words
            if ri[row + 1] > since:
                ids[n] = ri[row]
                lsns[n] = ri[row + 1]
                n += 1
    return n


@_compiled
def column(ri, words, rows, at, out):
    """The word `at` of each row: 0 its id, 1 its lsn."""
    n = rows.shape[0]
    for i in range(n):
        if i + 16 < n:
            _fetch(ri, rows[i + 16] * words + at)
        out[i] = ri[rows[i] * words + at]


@_compiled
def copy_out(ri, words, rows, out):
    """Whole rows as they lie."""
    n = rows.shape[0]
    for i in range(n):
        if i + AHEAD < n:
            for k in range(0, words, 8):
                _fetch(ri, rows[i + AHEAD] * words + k)
        _copy(out, i * words, ri, rows[i] * words, words)


@_compiled
def copy_in(index, starts, masks, used, shift, ri, words, free, source):
    """Rows that `copy_out` gave, whose ids are not here yet, into the table; the index must have room."""
    for i in range(source.shape[0] // words):
        h = mix64(np.uint64(source[i * words]))
        s = np.int64(h >> shift) if shift < 64 else 0
        row = _take(ri, words, free)
        _copy(ri, row * words, source, i * words, words)
        _insert(index, starts[s], masks[s], h & _LOW, np.uint64(row))
        used[s] += 1


# Rows


@_compiled
def read(index, starts, masks, shift, ids, known, ring, layout, ri, rc, r4, r2, r1, init, scalars, seed, nearest, out):
    """The weights of each id into `out`; of a row that is not there, those it would be created with.

    known: the row of each id or 0, as far as known; filled in. ring: room for those under way (2, 2 * BATCH).
    """
    index, starts, masks, ids, layout = _bare(index), _bare(starts), _bare(masks), _bare(ids), _bare(layout)
    ri, rc, r4, r2, r1, out = _bare(ri), _bare(rc), _bare(r4), _bare(r2), _bare(r1), _bare(out)
    nearest, known = _bare(nearest), _bare(known)
    n = ids.shape[0]
    dim, words, stored = layout[DIM], layout[WORDS], layout[STORED]
    per = 8 // rc.itemsize
    lines = layout[S_AT] // per
    flat = out.reshape(-1)
    shard, low = _bare(ring[0]), _bare(ring[1])
    _aim(index, starts, masks, shift, ids, 0, shard, low, known)
    for first in range(0, n, BATCH):
        size = min(BATCH, n - first)
        _aim(index, starts, masks, shift, ids, first + BATCH, shard, low, known)
        _seek(index, starts, masks, ri, words, lines, first, size, shard, low, known)
        for i in range(first, first + size):
            row = _sure(index, starts, masks, ri, words, ids, i, shard, low, known)
            if row == 0:
                initial(init, scalars[0], scalars[1], seed, ids[i], out[i])
                if stored != NATIVE:
                    _encode(out[i], nearest, layout, 0, r4, r2, r1)
                    _decode(layout, 0, rc, r4, r2, r1, out[i])
            elif stored == NATIVE:
                _copy(flat, i * dim, rc, row * words * per + layout[W_AT], dim)
            else:
                _decode(layout, row, rc, r4, r2, r1, out[i])


@_compiled
def update(
    index, starts, masks, shift, ids, known, ring, values, lsns, layout, ri, rc, c, p, switches, scratch, absent
):
    """Rows that are there (and hold weights as the arithmetic's float) updated by their gradients. Ids are unique.

    known, ring: as in `read`. The places of ids that have no row go into `absent`; how many.
    """
    index, starts, masks, ri, ids, known = (
        _bare(index),
        _bare(starts),
        _bare(masks),
        _bare(ri),
        _bare(ids),
        _bare(known),
    )
    rc, values, lsns, scratch = _bare(rc), _bare(values), _bare(lsns), _bare(scratch)
    c, p, switches, layout = _bare(c), _bare(p), _bare(switches), _bare(layout)
    n = ids.shape[0]
    dim, words = layout[DIM], layout[WORDS]
    per = 8 // rc.itemsize
    shard, low = _bare(ring[0]), _bare(ring[1])
    missing = 0
    _aim(index, starts, masks, shift, ids, 0, shard, low, known)
    for first in range(0, n, BATCH):
        size = min(BATCH, n - first)
        _aim(index, starts, masks, shift, ids, first + BATCH, shard, low, known)
        _seek(index, starts, masks, ri, words, words, first, size, shard, low, known)
        for i in range(first, first + size):
            row = _sure(index, starts, masks, ri, words, ids, i, shard, low, known)
            if row == 0:
                absent[missing] = i
                missing += 1
                continue
            ri[row * words + 1] = lsns[shard[i & (2 * BATCH - 1)]]
            at = row * words * per
            w = rc[at + layout[W_AT] : at + layout[W_AT] + dim]
            state = rc[at + layout[S_AT] : at + layout[S_AT] + layout[STATE]]
            _step(c, p, switches, w, values[i], state, scratch)
    return missing


@_compiled
def apply(
    index, starts, masks, used, shift, free, ids, where, values, lsns, layout, ri, rc, r4, r2, r1, init, scalars, seed,
    c, p, switches, scratch, nearest, draws, setting,
):  # fmt: skip
    """Each row updated by its gradient, or set to its value (`setting`: 1); those that are not there are made. Ids are unique."""
    rc, r4, r2, r1, values, scratch = _bare(rc), _bare(r4), _bare(r2), _bare(r1), _bare(values), _bare(scratch)
    c, p, switches, layout = _bare(c), _bare(p), _bare(switches), _bare(layout)
    index, starts, masks, ri, free = _bare(index), _bare(starts), _bare(masks), _bare(ri), _bare(free)
    nearest, draws = _bare(nearest), _bare(draws)
    n = ids.shape[0]
    dim, words, stored = layout[DIM], layout[WORDS], layout[STORED]
    per = 8 // rc.itemsize
    first = c[FIRST]
    own = scratch[:dim]
    more = scratch[dim:]
    for i in range(n):
        if i + AHEAD < n:
            row = where[i + AHEAD]
            for k in range(0, words, 8):
                _fetch(ri, row * words + k)
        row = where[i]
        own_id = ids[i]
        h = mix64(np.uint64(own_id))
        s = np.int64(h >> shift) if shift < 64 else 0
        made = row == 0
        if made:
            row = _take(ri, words, free)
            _insert(index, starts[s], masks[s], h & _LOW, np.uint64(row))
            used[s] += 1
            ri[row * words] = own_id
        ri[row * words + 1] = lsns[s]
        at = row * words * per + layout[S_AT]
        state = rc[at : at + layout[STATE]]
        if made or setting:
            for j in range(layout[STATE]):
                state[j] = first
            if switches[COUNT_AT] >= 0:
                state[switches[COUNT_AT]] = 0
        w = own
        if stored == NATIVE:
            at = row * words * per + layout[W_AT]
            w = rc[at : at + dim]
        if setting:
            for j in range(dim):
                w[j] = values[i, j]
        elif made:
            initial(init, scalars[0], scalars[1], seed, own_id, w)
        if stored != NATIVE:
            if made or setting:
                _encode(w, nearest, layout, row, r4, r2, r1)
            _decode(layout, row, rc, r4, r2, r1, w)
        if not setting:
            _step(c, p, switches, w, values[i], state, more)
            if stored != NATIVE:
                _noise(mix64(mix64(np.uint64(own_id) ^ _GOLDEN) + np.uint64(lsns[s])), draws)
                _encode(w, draws, layout, row, r4, r2, r1)


# Duplicates


@_compiled
def unique(ids, table):
    """Whether no id is there twice. table: int32 zeros, a power of two of at least twice as many; left dirty."""
    mask = table.shape[0] - 1
    for i in range(ids.shape[0]):
        at = np.int64(mix64(np.uint64(ids[i])) & np.uint64(mask))
        while table[at] != 0:
            if ids[table[at] - 1] == ids[i]:
                return False
            at = (at + 1) & mask
        table[at] = i + 1
    return True


@_compiled
def group(ids, table, shift, routes, distinct, bounds, place):
    """The distinct ids in the order of their shard's route (in a route: as they first come), and where each id went.

    bounds: zeros, routes + 2, filled with where each route starts; shards of no route (65535) are the last one.
    """
    n = ids.shape[0]
    mask = table.shape[0] - 1
    found = 0
    parts = bounds.shape[0] - 1
    chosen = np.empty(n, np.int32)
    for i in range(n):
        own_id = ids[i]
        h = mix64(np.uint64(own_id))
        at = np.int64(h & np.uint64(mask))
        while True:
            u = table[at]
            if u == 0:
                s = np.int64(h >> shift) if shift < 64 else 0
                route = min(np.int64(routes[s]), parts - 1)
                chosen[found] = route
                bounds[route + 1] += 1
                distinct[found] = own_id
                found += 1
                table[at] = found
                place[i] = found - 1
                break
            if distinct[u - 1] == own_id:
                place[i] = u - 1
                break
            at = (at + 1) & mask
    for r in range(parts):
        bounds[r + 1] += bounds[r]
    if bounds[1] == found:
        return found
    nexts = bounds[:parts].copy()
    old = distinct[:found].copy()
    for u in range(found):
        r = chosen[u]
        to = nexts[r]
        nexts[r] += 1
        distinct[to] = old[u]
        chosen[u] = to
    for i in range(n):
        place[i] = chosen[place[i]]
    return found


@_compiled
def add_up(values, place, out):
    """The sum of the values of each place, in the order in which they come."""
    values, out = _bare(values), _bare(out)
    fresh = np.ones(out.shape[0], np.uint8)
    for i in range(values.shape[0]):
        at = place[i]
        v, o = values[i], out[at]
        if fresh[at]:
            fresh[at] = 0
            _copy(o, 0, v, 0, v.shape[0])
        else:
            for j in range(v.shape[0]):
                o[j] += v[j]
