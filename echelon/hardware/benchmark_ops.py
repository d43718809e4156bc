"""What `measure` times: real operators as training calls them, at sizes from small to large.

A benchmark is only a call. Its FLOPs, bytes and shape come from the recorder that traces models, so that measuring and tracing cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

aten = torch.ops.aten
BenchmarkCall = Callable[[], object]

#: Matrix sides timed on a GPU: below the smallest it is mostly idle, above the largest its rate no longer grows.
_MATMUL_SIDES = (256, 1024, 4096, 16384)


def iterate_benchmarks(device: str) -> Iterator[BenchmarkCall]:
    """Every call worth timing on a device of this kind, one of each kind in turn: when time runs out, every kind has been seen.

    A call's tensors live until the next call of its kind is requested.
    """
    if device == "cpu":
        return _interleave(
            matmul_ops(device, torch.float32, (64, 512, 2048), largest=2**29),
            convolution_ops(device, torch.float32, 4),
            attention_ops(device, torch.float32, 1),
            small_batch_matmul_ops(device, torch.float32),
            recurrent_ops(device, torch.float32),
            *(streaming_ops(device, torch.float32, size) for size in (2**24, 2**20, 2**16)),
            _half_precision_ops(),
        )
    # Matrix products run as fast in float16 as in bfloat16; memory-bound kernels differ by dtype.
    compute_bound = (
        group
        for dtype in (torch.float32, torch.bfloat16)
        for group in (
            matmul_ops(device, dtype, _MATMUL_SIDES, largest=2**40),
            convolution_ops(device, dtype, 1024, 32),
            bottleneck_convolution_ops(device, dtype, 256, 64),
            attention_ops(device, dtype, 32),
            recurrent_ops(device, dtype),
        )
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    memory_bound = (streaming_ops(device, dtype, size) for dtype in dtypes for size in (2**28, 2**24, 2**20))
    shape_bound = (group(device, dtype) for dtype in dtypes for group in (row_wise_ops, channel_wise_ops))
    return _interleave(*compute_bound, *memory_bound, *shape_bound)


def _interleave(*groups: Iterator[BenchmarkCall]) -> Iterator[BenchmarkCall]:
    remaining = list(groups)
    while remaining:
        for group in list(remaining):
            try:
                benchmark = next(group, None)
            except (RuntimeError, NotImplementedError):  # too large for this device or not built for it: skip the rest
                benchmark = None
            if benchmark is None:
                remaining.remove(group)
            else:
                yield benchmark


def _half_precision_ops() -> Iterator[BenchmarkCall]:
    """Small calls: without half-precision instructions a CPU is a hundred times slower."""
    shapes = ((128, 128), (1, 16, 8, 8), (16, 16, 3, 3))
    for dtype in (torch.bfloat16, torch.float16):
        square, image, kernel = (torch.ones(*shape, dtype=dtype) for shape in shapes)
        yield partial(torch.mm, square, square)
        yield partial(aten.convolution, image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def iterate_tf32_benchmarks(device: str) -> Iterator[BenchmarkCall]:
    """The calls that get faster when float32 products may use tf32."""
    yield from matmul_ops(device, torch.float32, _MATMUL_SIDES, largest=2**40)
    yield from convolution_ops(device, torch.float32, 1024, 32)
    yield from bottleneck_convolution_ops(device, torch.float32, 256, 64)


def matmul_ops(device: str, dtype: torch.dtype, sizes: tuple[int, ...], *, largest: int) -> Iterator[BenchmarkCall]:
    """Matrix products in the layouts of a linear layer: forward, input gradient, weight gradient."""
    make = _tensor_maker(device, dtype)
    # Largest first: they dominate a step.
    for m, n, k in sorted(product(sizes, repeat=3), key=math.prod, reverse=True):
        if m * n * k > largest:
            continue
        bias, x, weight, x_columns, out_weight = make(n), make(m, k), make(n, k), make(k, m), make(k, n)
        yield partial(torch.addmm, bias, x, weight.t())
        yield partial(torch.mm, x, weight.t())
        yield partial(torch.mm, x, out_weight)
        yield partial(torch.mm, x_columns.t(), out_weight)
    for batch, side, width in ((32, 128, 64), (32, 512, 64)):
        left, right, square = make(batch, side, width), make(batch, side, width), make(batch, side, side)
        yield partial(torch.bmm, left, right.transpose(1, 2))
        yield partial(torch.bmm, square, right)
        yield partial(torch.bmm, square.transpose(1, 2), right)


def small_batch_matmul_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """Products of few samples with a large weight: bound by reading weights and writing gradients."""
    make = _tensor_maker(device, dtype)
    for samples, n, k in product((8, 1), (2048, 512), (2048, 512)):
        bias, x, weight, gradient, out = make(n), make(samples, k), make(n, k), make(samples, k), make(samples, n)
        yield partial(torch.addmm, bias, x, weight.t())
        yield partial(torch.mm, x, weight.t())
        yield partial(torch.mm, out, weight)
        yield partial(torch.mm, gradient.t(), out)


def recurrent_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """Sixteen time steps of an LSTM, forward and backward."""
    for samples, width in product((32, 8, 1), (256, 512)):
        layer = torch.nn.LSTM(width, width, device=device, dtype=dtype)
        x = torch.ones(16, samples, width, device=device, dtype=dtype, requires_grad=True)
        out = layer(x)[0]
        yield partial(layer, x)
        yield partial(torch.autograd.grad, out, (x, *layer.parameters()), out, retain_graph=True)


def convolution_ops(device: str, dtype: torch.dtype, *batches: int) -> Iterator[BenchmarkCall]:
    """Convolutions of small images."""
    shapes = [
        (3, 32, 3, 32, 1, 1), (64, 128, 3, 32, 2, 1), (64, 128, 1, 32, 2, 1), (64, 64, 1, 32, 1, 1), (128, 256, 3, 16, 2, 1),
        (256, 512, 1, 8, 2, 1), (3, 64, 7, 112, 2, 1), (64, 64, 3, 16, 1, 64),
    ]  # fmt: skip
    squares = ((64, 32), (64, 16), (128, 8), (256, 4), (32, 32), (128, 16), (256, 8), (512, 4), (16, 32), (32, 16))
    shapes += [(channels, channels, 3, side, 1, 1) for channels, side in (*squares, (64, 8))]
    return _convolution_ops(device, dtype, batches, shapes)


def bottleneck_convolution_ops(device: str, dtype: torch.dtype, *batches: int) -> Iterator[BenchmarkCall]:
    """Convolutions of large images, most of them pointwise over many channels, which have rates of their own on a GPU."""
    stages = ((64, 56), (128, 28), (256, 14), (512, 7))
    shapes = [(3, 64, 7, 224, 2, 1)]
    for c, side in stages:
        shapes += [(c, 4 * c, 1, side, 1, 1), (4 * c, c, 1, side, 1, 1), (c, c, 3, side, 1, 1)]
    for c, side in stages[:-1]:
        shapes += [(4 * c, 8 * c, 1, side, 2, 1), (4 * c, 2 * c, 1, side, 1, 1), (2 * c, 2 * c, 3, side, 2, 1)]
    return _convolution_ops(device, dtype, batches, shapes)


def _convolution_ops(
    device: str, dtype: torch.dtype, batches: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> Iterator[BenchmarkCall]:
    """`shapes`: (input channels, output channels, kernel, side, stride, groups), each forward and backward at every batch size."""
    make = _tensor_maker(device, dtype)
    for samples, (in_channels, out_channels, kernel, side, stride, groups) in product(batches, shapes):
        x, weight = make(samples, in_channels, side, side), make(out_channels, in_channels // groups, kernel, kernel)
        options = ([stride, stride], [kernel // 2, kernel // 2], [1, 1], False, [0, 0], groups)
        out = aten.convolution(x, weight, None, *options)
        gradient_mask = [in_channels > 3, True, False]  # a model's first layer needs no input gradient
        yield partial(aten.convolution, x, weight, None, *options)
        yield partial(aten.convolution_backward, out, x, weight, None, *options, gradient_mask)


def attention_ops(device: str, dtype: torch.dtype, samples: int) -> Iterator[BenchmarkCall]:
    """Causal attention with the kernel that torch picks, forward and backward."""
    attention = torch.nn.functional.scaled_dot_product_attention
    small = ((8, 128, 32), (8, 128, 64), (4, 512, 64), (2, 1024, 128))
    large = tuple((12, length, width) for length, width in product((4096, 1024, 128), (128, 64, 32)))
    for heads, length, width in small if device == "cpu" else large:
        qkv = [torch.empty(samples, length, heads, width, device=device, dtype=dtype).normal_() for _ in range(3)]
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv)
        out = attention(q, k, v, is_causal=True)
        yield partial(attention, q.detach(), k.detach(), v.detach(), is_causal=True)
        yield partial(torch.autograd.grad, out, (q, k, v), out, retain_graph=True)


def streaming_ops(device: str, dtype: torch.dtype, tensor_bytes: int) -> Iterator[BenchmarkCall]:
    """Memory-bound operators on tensors of `tensor_bytes` bytes."""
    make = _tensor_maker(device, dtype)
    width = 512
    rows = max(tensor_bytes // (width * dtype.itemsize), 1)
    x, y = make(rows, width), make(rows, width)
    scale, shift = make(width), make(width)
    yield partial(torch.add, x, y)
    yield partial(torch.mul, x, y)
    yield partial(x.copy_, y)
    yield partial(x.add_, y)
    yield partial(x.clone)
    yield partial(x.t().clone, memory_format=torch.contiguous_format)
    yield partial(torch.cat, (x, y))
    yield partial(torch.relu, x)
    yield partial(aten.threshold_backward, x, y, 0)
    yield partial(x.sum, 0, keepdim=True)
    yield partial(x.mean, 1)
    yield partial(aten.mse_loss, x, y)
    yield partial(aten.mse_loss_backward, x[0, 0], x, y, 1)
    yield partial(aten._softmax, x, 1, False)
    yield partial(aten._softmax_backward_data, x, y, 1, dtype)
    yield partial(aten._log_softmax, x, 1, False)
    yield partial(aten._log_softmax_backward_data, x, y, 1, dtype)
    if device == "cpu":
        yield from _layer_norm_ops(x, y, scale, shift)
    yield from _image_ops(x, y, scale, shift)
    table, ids = x.new_ones(4096, width), torch.arange(rows, device=device) * 7919 % 4096
    yield partial(aten.embedding, table, ids)
    yield partial(aten.embedding_dense_backward, x, ids, 4096, -1, False)
    if device == "cpu":
        yield from _loss_ops(x, ids % width)
    # On a CPU these are compute-bound: their rate does not depend on the size, and large ones take long.
    if device == "cuda" or tensor_bytes <= 2**20:
        yield partial(aten.gelu, x)
        yield partial(aten.gelu_backward, x, y)
        yield partial(aten.silu, x)
        yield partial(aten.silu_backward, x, y)
        yield partial(torch.tanh, x)
        yield partial(torch.exp, x)
        yield partial(x.bernoulli, 0.5)
        yield partial(aten.native_dropout, x, 0.1, True)
    if dtype is not torch.float32 and device == "cuda":
        yield partial(x.to, torch.float32)
        yield partial(x.to(torch.float32).to, dtype)


def row_wise_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """Operators that a GPU parallelizes over rows: their rate depends on the number and the width of rows."""
    make = _tensor_maker(device, dtype)
    for width, rows in product((256, 1024, 4096), (256, 4096, 65536)):
        yield from _layer_norm_ops(make(rows, width), make(rows, width), make(width), make(width))
    for width, rows in product((16, 1024, 32768), (256, 4096, 32768)):
        yield from _loss_ops(make(rows, width), torch.arange(rows, device=device) * 7919 % width)


def channel_wise_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """Batch norms on a GPU: some kernels give each channel to one multiprocessor, so that few channels leave most of it idle."""
    make = _tensor_maker(device, dtype)
    for samples, side, channels in product((32, 256), (7, 14, 28, 56), (64, 256, 1024)):
        image, gradient = make(samples, channels, side, side), make(samples, channels, side, side)
        yield from _batch_norm_ops(image, gradient, make(channels).float(), make(channels).float())


def _layer_norm_ops(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Iterator[BenchmarkCall]:
    mean, rstd, width = x.float().mean(1, keepdim=True), x.float().mean(1, keepdim=True), x.shape[1]
    yield partial(aten.native_layer_norm, x, [width], scale, shift, 1e-5)
    yield partial(aten.native_layer_norm_backward, y, x, [width], mean, rstd, scale, shift, [True, True, True])


def _batch_norm_ops(image: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor) -> Iterator[BenchmarkCall]:
    if image.device.type == "cuda" and image.dtype is not torch.bfloat16:  # torch uses its own kernel for bf16
        _, mean, variance, reserve = aten.cudnn_batch_norm(
            image, weight, bias, weight.clone(), bias.clone(), True, 0.1, 1e-5
        )
        yield partial(aten.cudnn_batch_norm, image, weight, bias, weight, bias, True, 0.1, 1e-5)
        backward = aten.cudnn_batch_norm_backward
        yield partial(backward, image, gradient, weight, weight, bias, mean, variance, 1e-5, reserve)
    yield partial(aten.native_batch_norm, image, weight, bias, weight, bias, True, 0.1, 1e-5)
    statistics = (weight, weight, bias, weight, bias)
    yield partial(aten.native_batch_norm_backward, gradient, image, *statistics, True, 1e-5, [True, True, True])


def _image_ops(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Iterator[BenchmarkCall]:
    channels, side = 32, 16
    if x.numel() % (channels * side * side):
        return
    image, gradient = x.view(-1, channels, side, side), y.view(-1, channels, side, side)
    if x.device.type == "cpu":
        yield from _batch_norm_ops(image, gradient, scale[:channels].float(), shift[:channels].float())
    pooled, indices = aten.max_pool2d_with_indices(image, [2, 2], [2, 2])
    yield partial(aten.max_pool2d_with_indices, image, [2, 2], [2, 2])
    options = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    yield partial(aten.max_pool2d_with_indices_backward, pooled, image, *options, indices)


def _loss_ops(x: Tensor, classes: Tensor) -> Iterator[BenchmarkCall]:
    loss = aten.nll_loss_forward(x, classes, None, 1, -100)
    yield partial(aten.nll_loss_forward, x, classes, None, 1, -100)
    yield partial(aten.nll_loss_backward, loss[0], x, classes, None, 1, -100, loss[1])


def _tensor_maker(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    def make(*shape: int) -> Tensor:
        tensor = torch.empty(*shape, device=device, dtype=dtype)
        # Constant values draw less power than real ones, and a GPU then runs faster than it would in training.
        return tensor.normal_() if device == "cuda" else tensor.fill_(0.5)

    return make
