"""What numba has no words for: asking the cache for a line, views that are not counted, sums in eight lanes, bits of floats; the hash of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from echelon.server.kernels.jit_cache import compiling

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_intrinsic: Any = intrinsic

_inlined = compiling(forceinline=True)


@_intrinsic
def fetch(typing, array, index):
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
def bare(typing, array):
    """The array without its owner: slices of it are not counted, which for a row would cost more than its arithmetic."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), build


@_intrinsic
def copy(typing, to, at, source, start, count):
    """`count` elements from source[start] to to[at], by the machine's best loop."""

    def build(context, builder, signature, args):
        a = context.make_array(signature.args[0])(context, builder, args[0])
        b = context.make_array(signature.args[2])(context, builder, args[2])
        size = signature.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, builder.gep(a.data, [args[1]]), builder.gep(b.data, [args[3]]), args[4], size)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), build


@_intrinsic
def squares_by_eight(typing, array, count):
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
def peak_of(typing, array, count):
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
def steps_of(typing, values, rate, draws, out, count):
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
def bits_of(typing, value):
    """The 32 bits of a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@_intrinsic
def float_of(typing, bits):
    """The float32 of 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@_inlined
def mix64(x):
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


@_inlined
def power(base, times):
    """base ** times, the same on every machine."""
    total = 1.0
    while times > 0:
        if times & 1:
            total *= base
        base *= base
        times >>= 1
    return total
