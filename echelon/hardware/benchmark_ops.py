"""What `measure` times: real operators as training calls them, at sizes from small to large.

A trial is only a call. Its price tag (FLOPs, bytes, shape) is read off by the same recorder that traces models, so that
measuring and tracing cannot disagree on what an operator moves.
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

#: Sides of the products timed on a GPU: below the least it is mostly idle, beyond the largest its rate no longer grows.
_MATMUL_SIDES = (256, 1024, 4096, 16384)


def iterate_benchmarks(device: str) -> Iterator[BenchmarkCall]:
    """Every call worth timing on a device of this kind, kinds in turn: when time runs out each kind has been seen.

    Tensors live until the next trial of their kind is asked for.
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
    # Products in float16 go as fast as in bfloat16; what moves bytes has kernels of its own for some types.
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
    types = (torch.float32, torch.bfloat16, torch.float16)
    memory_bound = (streaming_ops(device, dtype, size) for dtype in types for size in (2**28, 2**24, 2**20))
    shape_bound = (group(device, dtype) for dtype in types for group in (row_wise_ops, channel_wise_ops))
    return _interleave(*compute_bound, *memory_bound, *shape_bound)


def _interleave(*groups: Iterator[BenchmarkCall]) -> Iterator[BenchmarkCall]:
    remaining = list(groups)
    while remaining:
        for group in list(remaining):
            try:
                benchmark = next(group, None)
            except (
                RuntimeError,
                NotImplementedError,
            ):  # too large for this device, or not built for it: no more of this kind
                benchmark = None
            if benchmark is None:
                remaining.remove(group)
            else:
                yield benchmark


def _half_precision_ops() -> Iterator[BenchmarkCall]:
    """Without instructions for it half precision is a hundred times slower on a CPU: small calls tell."""
    for dtype in (torch.bfloat16, torch.float16):
        square, image, kernel = (
            torch.ones(*shape, dtype=dtype) for shape in ((128, 128), (1, 16, 8, 8), (16, 16, 3, 3))
        )
        yield partial(torch.mm, square, square)
        yield partial(aten.convolution, image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def iterate_tf32_benchmarks(device: str) -> Iterator[BenchmarkCall]:
    """The trials that differ when float32 products may use tf32."""
    yield from matmul_ops(device, torch.float32, _MATMUL_SIDES, largest=2**40)
    yield from convolution_ops(device, torch.float32, 1024, 32)
    yield from bottleneck_convolution_ops(device, torch.float32, 256, 64)


def matmul_ops(device: str, dtype: torch.dtype, sizes: tuple[int, ...], *, largest: int) -> Iterator[BenchmarkCall]:
    """Products of all shapes in the layouts of a linear layer: forward, gradient of the input, gradient of the weight."""
    make_tensor = _make_tensor_factory(device, dtype)
    # Largest first: they are what steps are made of.
    for m, n, k in sorted(product(sizes, repeat=3), key=math.prod, reverse=True):
        if m * n * k > largest:
            continue
        bias, inputs, weight, input_columns, output_weight = (
            make_tensor(n),
            make_tensor(m, k),
            make_tensor(n, k),
            make_tensor(k, m),
            make_tensor(k, n),
        )
        yield partial(torch.addmm, bias, inputs, weight.t())
        yield partial(torch.mm, inputs, weight.t())
        yield partial(torch.mm, inputs, output_weight)
        yield partial(torch.mm, input_columns.t(), output_weight)
    for num_matmuls, side, width in ((32, 128, 64), (32, 512, 64)):
        left, right, square = (
            make_tensor(num_matmuls, side, width),
            make_tensor(num_matmuls, side, width),
            make_tensor(num_matmuls, side, side),
        )
        yield partial(torch.bmm, left, right.transpose(1, 2))
        yield partial(torch.bmm, square, right)
        yield partial(torch.bmm, square.transpose(1, 2), right)


def small_batch_matmul_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """Products of few samples with a whole layer: their rate is that at which weights are read, and gradients written."""
    make_tensor = _make_tensor_factory(device, dtype)
    for num_samples, n, k in product((8, 1), (2048, 512), (2048, 512)):
        bias, inputs, weight, gradient, outputs = (
            make_tensor(n),
            make_tensor(num_samples, k),
            make_tensor(n, k),
            make_tensor(num_samples, k),
            make_tensor(num_samples, n),
        )
        yield partial(torch.addmm, bias, inputs, weight.t())
        yield partial(torch.mm, inputs, weight.t())
        yield partial(torch.mm, outputs, weight)
        yield partial(torch.mm, gradient.t(), outputs)


def recurrent_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """A recurrent layer's sixteen steps, forward and backward."""
    for samples, width in product((32, 8, 1), (256, 512)):
        layer = torch.nn.LSTM(width, width, device=device, dtype=dtype)
        x = torch.ones(16, samples, width, device=device, dtype=dtype, requires_grad=True)
        out = layer(x)[0]
        yield partial(layer, x)
        yield partial(torch.autograd.grad, out, (x, *layer.parameters()), out, retain_graph=True)


def convolution_ops(device: str, dtype: torch.dtype, *batches: int) -> Iterator[BenchmarkCall]:
    """(channels in, out, kernel, side, stride, groups), forward and backward, at each number of samples."""
    square_shapes = (
        (64, 32),
        (64, 16),
        (128, 8),
        (256, 4),
        (32, 32),
        (128, 16),
        (256, 8),
        (512, 4),
        (16, 32),
        (32, 16),
        (64, 8),
    )
    other_shapes = (
        (3, 32, 3, 32, 1, 1), (64, 128, 3, 32, 2, 1), (64, 128, 1, 32, 2, 1), (64, 64, 1, 32, 1, 1), (128, 256, 3, 16, 2, 1),
        (256, 512, 1, 8, 2, 1), (3, 64, 7, 112, 2, 1), (64, 64, 3, 16, 1, 64),
    )  # fmt: skip
    return _convolution_ops(
        device,
        dtype,
        batches,
        (*other_shapes, *((num_channels, num_channels, 3, size, 1, 1) for num_channels, size in square_shapes)),
    )


def bottleneck_convolution_ops(device: str, dtype: torch.dtype, *batches: int) -> Iterator[BenchmarkCall]:
    """Convolutions of large images, most of them over single pixels with many channels, which have rates of their own on a GPU."""
    stages = ((64, 56), (128, 28), (256, 14), (512, 7))
    stage_shapes = [
        shape
        for num_channels, side in stages
        for shape in (
            (num_channels, 4 * num_channels, 1, side, 1, 1),
            (4 * num_channels, num_channels, 1, side, 1, 1),
            (num_channels, num_channels, 3, side, 1, 1),
        )
    ]
    downsampling_shapes = [
        shape
        for num_channels, side in stages[:-1]
        for shape in (
            (4 * num_channels, 8 * num_channels, 1, side, 2, 1),
            (4 * num_channels, 2 * num_channels, 1, side, 1, 1),
            (2 * num_channels, 2 * num_channels, 3, side, 2, 1),
        )
    ]
    return _convolution_ops(device, dtype, batches, ((3, 64, 7, 224, 2, 1), *stage_shapes, *downsampling_shapes))


def _convolution_ops(
    device: str, dtype: torch.dtype, batches: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> Iterator[BenchmarkCall]:
    make_tensor = _make_tensor_factory(device, dtype)
    for samples, (in_channels, out_channels, kernel, side, stride, groups) in product(batches, shapes):
        inputs, weight = (
            make_tensor(samples, in_channels, side, side),
            make_tensor(out_channels, in_channels // groups, kernel, kernel),
        )
        padding = (kernel // 2, kernel // 2)
        options = ([stride, stride], padding, [1, 1], False, [0, 0], groups)
        output = aten.convolution(inputs, weight, None, *options)
        # The first layer of a model needs no gradient of its input.
        gradient_mask = [in_channels > 3, True, False]
        yield partial(aten.convolution, inputs, weight, None, *options)
        yield partial(aten.convolution_backward, output, inputs, weight, None, *options, gradient_mask)


def attention_ops(device: str, dtype: torch.dtype, samples: int) -> Iterator[BenchmarkCall]:
    """Causal attention through whatever kernel torch picks, forward and backward."""
    small = ((8, 128, 32), (8, 128, 64), (4, 512, 64), (2, 1024, 128))
    large = tuple((12, length, width) for length, width in product((4096, 1024, 128), (128, 64, 32)))
    for heads, length, width in small if device == "cpu" else large:
        q, k, v = (
            torch.empty(samples, length, heads, width, device=device, dtype=dtype)
            .normal_()
            .transpose(1, 2)
            .requires_grad_()
            for _ in range(3)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        yield partial(
            torch.nn.functional.scaled_dot_product_attention, q.detach(), k.detach(), v.detach(), is_causal=True
        )
        yield partial(torch.autograd.grad, out, (q, k, v), out, retain_graph=True)


def streaming_ops(device: str, dtype: torch.dtype, tensor_bytes: int) -> Iterator[BenchmarkCall]:
    """Operators that go by the bytes they move, at tensors of `tensor_bytes` bytes."""
    make_tensor = _make_tensor_factory(device, dtype)
    width = 512
    num_rows = max(tensor_bytes // (width * torch.empty((), dtype=dtype).element_size()), 1)
    x, y = make_tensor(num_rows, width), make_tensor(num_rows, width)
    scale, shift = make_tensor(width), make_tensor(width)
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
    yield from _embedding_ops(x, device, num_rows, width)
    # On a CPU these are bound by arithmetic: their rate does not depend on the size, and large ones take long.
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
    """What a GPU deals out row by row: its rate goes by the width of a row and their number."""
    make_tensor = _make_tensor_factory(device, dtype)
    for width, num_rows in product((256, 1024, 4096), (256, 4096, 65536)):
        x, y, scale, shift = (
            make_tensor(num_rows, width),
            make_tensor(num_rows, width),
            make_tensor(width),
            make_tensor(width),
        )
        yield from _layer_norm_ops(x, y, scale, shift)
    for width, num_rows in product((16, 1024, 32768), (256, 4096, 32768)):
        x = make_tensor(num_rows, width)
        yield from _loss_ops(x, torch.arange(num_rows, device=device) * 7919 % width)


def channel_wise_ops(device: str, dtype: torch.dtype) -> Iterator[BenchmarkCall]:
    """Batch norms on a GPU: some of their kernels give each channel to one multiprocessor, so that few channels leave most of it idle."""
    make_tensor = _make_tensor_factory(device, dtype)
    for samples, spatial, num_channels in product((32, 256), (7, 14, 28, 56), (64, 256, 1024)):
        image, other = (
            make_tensor(samples, num_channels, spatial, spatial),
            make_tensor(samples, num_channels, spatial, spatial),
        )
        yield from _batch_norm_ops(image, other, make_tensor(num_channels).float(), make_tensor(num_channels).float())


def _layer_norm_ops(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Iterator[BenchmarkCall]:
    mean, rstd, width = x.float().mean(1, keepdim=True), x.float().mean(1, keepdim=True), x.shape[1]
    yield partial(aten.native_layer_norm, x, [width], scale, shift, 1e-5)
    yield partial(aten.native_layer_norm_backward, y, x, [width], mean, rstd, scale, shift, [True, True, True])


def _batch_norm_ops(image: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor) -> Iterator[BenchmarkCall]:
    if image.device.type == "cuda" and image.dtype is not torch.bfloat16:  # torch takes its own kernel for bf16
        cudnn_outputs = aten.cudnn_batch_norm(image, weight, bias, weight.clone(), bias.clone(), True, 0.1, 1e-5)
        yield partial(aten.cudnn_batch_norm, image, weight, bias, weight, bias, True, 0.1, 1e-5)
        yield partial(
            aten.cudnn_batch_norm_backward,
            image,
            gradient,
            weight,
            weight,
            bias,
            cudnn_outputs[1],
            cudnn_outputs[2],
            1e-5,
            cudnn_outputs[3],
        )
    yield partial(aten.native_batch_norm, image, weight, bias, weight, bias, True, 0.1, 1e-5)
    yield partial(
        aten.native_batch_norm_backward,
        gradient,
        image,
        weight,
        weight,
        bias,
        weight,
        bias,
        True,
        1e-5,
        [True, True, True],
    )


def _image_ops(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Iterator[BenchmarkCall]:
    image_side, num_channels = 16, 32
    num_images = max(x.numel() // (num_channels * image_side * image_side), 1)
    if num_images * num_channels * image_side * image_side != x.numel():
        return
    image, gradient = (
        x.view(num_images, num_channels, image_side, image_side),
        y.view(num_images, num_channels, image_side, image_side),
    )
    if x.device.type == "cpu":
        yield from _batch_norm_ops(image, gradient, scale[:num_channels].float(), shift[:num_channels].float())
    pooled, max_indices = aten.max_pool2d_with_indices(image, [2, 2], [2, 2])
    yield partial(aten.max_pool2d_with_indices, image, [2, 2], [2, 2])
    yield partial(
        aten.max_pool2d_with_indices_backward, pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, max_indices
    )


def _embedding_ops(x: Tensor, device: str, num_rows: int, width: int) -> Iterator[BenchmarkCall]:
    table = x.new_ones(4096, width)
    ids = torch.arange(num_rows, device=device) * 7919 % 4096
    yield partial(aten.embedding, table, ids)
    yield partial(aten.embedding_dense_backward, x, ids, 4096, -1, False)
    if device == "cpu":
        yield from _loss_ops(x, ids % width)


def _loss_ops(x: Tensor, classes: Tensor) -> Iterator[BenchmarkCall]:
    loss = aten.nll_loss_forward(x, classes, None, 1, -100)
    yield partial(aten.nll_loss_forward, x, classes, None, 1, -100)
    yield partial(aten.nll_loss_backward, loss[0], x, classes, None, 1, -100, loss[1])


def _make_tensor_factory(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    def make_tensor(*shape: int) -> Tensor:
        tensor = torch.empty(*shape, device=device, dtype=dtype)
        # Equal numbers draw less power than real ones, and a GPU then runs faster than it would in training.
        return tensor.normal_() if device == "cuda" else tensor.fill_(0.5)

    return make_tensor
