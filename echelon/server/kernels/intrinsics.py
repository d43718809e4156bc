"""What numba has no words for: asking the cache for a line, views that are not counted, sums in eight lanes, bits of floats; the hash of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from echelon.server.kernels.jit_cache import cached_njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_intrinsic: Any = intrinsic

_inlined = cached_njit(forceinline=True)


@_intrinsic
def prefetch_line(typing, array, index):
    """Asks the cache for the line of array[index], which is not waited for."""

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
    """The array without its owner: slices of it are not counted, which for a row would cost more than its arithmetic."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), build


@_intrinsic
def copy_elements(typing, target, target_start, source, source_start, count):
    """`count` elements from source[start] to to[at], by the machine's best loop."""

    def build(context, builder, signature, args):
        target_array = context.make_array(signature.args[0])(context, builder, args[0])
        source_array = context.make_array(signature.args[2])(context, builder, args[2])
        item_size = signature.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(
            builder,
            builder.gep(target_array.data, [args[1]]),
            builder.gep(source_array.data, [args[3]]),
            args[4],
            item_size,
        )
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), build


@_intrinsic
def sum_squares_by_eight(typing, array, count):
    """The sum of squares of the first 8 * count elements: lane j adds each eighth element from j on, then lanes pair up."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        lanes = ir.VectorType(context.get_data_type(signature.args[0].dtype), 8)
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        with cgutils.for_range(builder, args[1]) as loop:
            address = builder.gep(view.data, [builder.mul(loop.index, ir.IntType(64)(8))])
            x = builder.load(builder.bitcast(address, lanes.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), builder.fmul(x, x)), total)
        x = builder.load(total)
        lane_sums = [builder.extract_element(x, ir.IntType(32)(j)) for j in range(8)]
        while len(lane_sums) > 1:
            lane_sums = [
                builder.fadd(lane_sums[j], lane_sums[j + len(lane_sums) // 2]) for j in range(len(lane_sums) // 2)
            ]
        return lane_sums[0]

    return array.dtype(array, types.int64), build


def _load_eight_floats(context, builder, array_type, view, index):
    """Elements 8 * index .. of an array as eight float32."""
    lanes = ir.VectorType(context.get_data_type(array_type.dtype), 8)
    address = builder.gep(view.data, [builder.mul(index, ir.IntType(64)(8))])
    x = builder.load(builder.bitcast(address, lanes.as_pointer()), align=array_type.dtype.bitwidth // 8)
    return x if array_type.dtype == types.float32 else builder.fptrunc(x, ir.VectorType(ir.FloatType(), 8))


@_intrinsic
def max_abs_bits(typing, array, count):
    """The largest magnitude of the first 8 * count elements, as float32's bits: what is not finite is the largest."""

    def build(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        lanes = ir.VectorType(ir.IntType(32), 8)
        largest = cgutils.alloca_once_value(builder, ir.Constant(lanes, None))
        mask = ir.Constant(lanes, [0x7FFFFFFF] * 8)
        with cgutils.for_range(builder, args[1]) as loop:
            x = builder.bitcast(_load_eight_floats(context, builder, signature.args[0], view, loop.index), lanes)
            x, previous = builder.and_(x, mask), builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", x, previous), x, previous), largest)
        x = builder.load(largest)
        lane_maxima = [builder.extract_element(x, ir.IntType(32)(j)) for j in range(8)]
        while len(lane_maxima) > 1:
            pairs = [(lane_maxima[j], lane_maxima[j + len(lane_maxima) // 2]) for j in range(len(lane_maxima) // 2)]
            lane_maxima = [builder.select(builder.icmp_unsigned(">", b, c), b, c) for b, c in pairs]
        return lane_maxima[0]

    return types.uint32(array, types.int64), build


@_intrinsic
def round_stochastically(typing, values, inverse_scale, draws, out, count):
    """floor(values * rate + draw) of the first 8 * count elements; a draw of 16 bits stands for the middle of its interval."""

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


@_inlined
def mix64(x):
    x = (x ^ (x >> np.uint64(30))) * _MIX_MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


@_inlined
def integer_power(base, exponent):
    """base ** times, the same on every machine."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
