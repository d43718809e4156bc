"""What numba cannot express: prefetches, views without reference counts, sums in eight lanes, bits of floats; and the hash of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from echelon.server.kernels.jit_cache import inlined

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_intrinsic: Any = intrinsic


@_intrinsic
def prefetch_line(typing, array, index):
    """Prefetch the cache line of array[index]."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        byte_pointer = ir.IntType(8).as_pointer()
        address = builder.bitcast(builder.gep(view.data, [args[1]]), byte_pointer)
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(prefetch, [address, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


@_intrinsic
def borrow(typing, array):
    """The array without its owner: its slices have no reference counts, which would cost more than a row's arithmetic."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), build


@_intrinsic
def copy_elements(typing, target, target_start, source, source_start, count):
    """Copy `count` elements, as memcpy does."""

    def build(context, builder, signature, args):
        target_array = context.make_array(signature.args[0])(context, builder, args[0])
        source_array = context.make_array(signature.args[2])(context, builder, args[2])
        target_pointer = builder.gep(target_array.data, [args[1]])
        source_pointer = builder.gep(source_array.data, [args[3]])
        cgutils.raw_memcpy(builder, target_pointer, source_pointer, args[4], signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), build


@_intrinsic
def sum_squares_by_eight(typing, array, count):
    """The sum of squares of the first 8 * count elements: lane j adds every eighth element from j on, then lanes are added in pairs."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        lanes = ir.VectorType(context.get_data_type(signature.args[0].dtype), 8)
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        with cgutils.for_range(builder, args[1]) as loop:
            address = builder.gep(view.data, [builder.mul(loop.index, ir.IntType(64)(8))])
            x = builder.load(builder.bitcast(address, lanes.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), builder.fmul(x, x)), total)
        return _reduce_lanes(builder, builder.load(total), builder.fadd)

    return array.dtype(array, types.int64), build


def _reduce_lanes(builder, vector, combine):
    """Combine eight lanes pairwise: 0 with 4, 1 with 5, ..., then their results."""
    lanes = [builder.extract_element(vector, ir.IntType(32)(j)) for j in range(8)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [combine(lanes[j], lanes[j + half]) for j in range(half)]
    return lanes[0]


def _load_eight_floats(context, builder, array_type, view, index):
    """Elements 8 * index .. of an array as eight float32."""
    lanes = ir.VectorType(context.get_data_type(array_type.dtype), 8)
    address = builder.gep(view.data, [builder.mul(index, ir.IntType(64)(8))])
    x = builder.load(builder.bitcast(address, lanes.as_pointer()), align=array_type.dtype.bitwidth // 8)
    return x if array_type.dtype == types.float32 else builder.fptrunc(x, ir.VectorType(ir.FloatType(), 8))


@_intrinsic
def max_abs_bits(typing, array, count):
    """The largest magnitude of the first 8 * count elements, as the bits of a float32: non-finite values compare largest."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])

        def larger(x, y):
            return builder.select(builder.icmp_unsigned(">", x, y), x, y)

        lanes = ir.VectorType(ir.IntType(32), 8)
        largest = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        mask = ir.Constant(lanes, [0x7FFFFFFF] * 8)
        with cgutils.for_range(builder, args[1]) as loop:
            x = builder.bitcast(_load_eight_floats(context, builder, signature.args[0], view, loop.index), lanes)
            builder.store(larger(builder.and_(x, mask), builder.load(largest)), largest)
        return _reduce_lanes(builder, builder.load(largest), larger)

    return types.uint32(array, types.int64), build


@_intrinsic
def round_stochastically(typing, values, inverse_scale, draws, out, count):
    """floor(values * inverse_scale + draw) of the first 8 * count elements; a 16-bit draw is the middle of its interval."""

    def build(context, builder, signature, args):
        values_type, _, draws_type, out_type, _ = signature.args
        view = context.make_array(values_type)(context, builder, args[0])
        draws_view = context.make_array(draws_type)(context, builder, args[2])
        target = context.make_array(out_type)(context, builder, args[3])
        lanes, eight = ir.VectorType(ir.FloatType(), 8), ir.IntType(64)(8)
        inverse_scales = ir.Constant(lanes, ir.Undefined)
        for j in range(8):
            inverse_scales = builder.insert_element(inverse_scales, args[1], ir.IntType(32)(j))
        floor_type = ir.FunctionType(lanes, [lanes])
        floor = cgutils.get_or_insert_function(builder.module, floor_type, "llvm.floor.v8f32")
        out_lanes = ir.VectorType(context.get_data_type(out_type.dtype), 8)
        draw_lanes = ir.VectorType(ir.IntType(16), 8)
        with cgutils.for_range(builder, args[4]) as loop:
            x = builder.fmul(_load_eight_floats(context, builder, values_type, view, loop.index), inverse_scales)
            offset = builder.mul(loop.index, eight)
            u = builder.load(builder.bitcast(builder.gep(draws_view.data, [offset]), draw_lanes.as_pointer()), align=2)
            u = builder.fadd(builder.uitofp(u, lanes), ir.Constant(lanes, [0.5] * 8))
            u = builder.fmul(u, ir.Constant(lanes, [1.52587890625e-05] * 8))
            rounded = builder.fptosi(builder.call(floor, [builder.fadd(x, u)]), ir.VectorType(ir.IntType(32), 8))
            address = builder.bitcast(builder.gep(target.data, [offset]), out_lanes.as_pointer())
            builder.store(builder.trunc(rounded, out_lanes), address, align=out_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(values, types.float32, draws, out, types.int64), build


@_intrinsic
def float_to_bits(typing, value):
    """The 32 bits of a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@_intrinsic
def bits_to_float(typing, bits):
    """The float32 of 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@inlined
def mix64(x):
    x = (x ^ (x >> np.uint64(30))) * _MIX_MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


@inlined
def integer_power(base, exponent):
    """base ** exponent, the same on every machine."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
