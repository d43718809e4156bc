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
Trial = Callable[[], object]

#: Sides of the products timed on a GPU: below the least it is mostly idle, beyond the largest its rate no longer grows.
_SIDES = (256, 1024, 4096, 16384)


def trials(device: str) -> Iterator[Trial]:
    """Every call worth timing on a device of this kind, kinds in turn: when time runs out each kind has been seen.

    Tensors live until the next trial of their kind is asked for.
    """
    if device == "cpu":
        return _in_turn(
            matmuls(device, torch.float32, (64, 512, 2048), largest=2**29),
            convolutions(device, torch.float32, 4),
            attentions(device, torch.float32, 1),
            thin(device, torch.float32),
            recurrences(device, torch.float32),
            *(streams(device, torch.float32, size) for size in (2**24, 2**20, 2**16)),
            _halves(),
        )
    # Products in float16 go as fast as in bfloat16; what moves bytes has kernels of its own for some types.
    heavy = (
        kind
        for dtype in (torch.float32, torch.bfloat16)
        for kind in (
            matmuls(device, dtype, _SIDES, largest=2**40),
            convolutions(device, dtype, 1024, 32),
            bottlenecks(device, dtype, 256, 64),
            attentions(device, dtype, 32),
            recurrences(device, dtype),
        )
    )
    types = (torch.float32, torch.bfloat16, torch.float16)
    light = (streams(device, dtype, size) for dtype in types for size in (2**28, 2**24, 2**20))
    dealt = (kind(device, dtype) for dtype in types for kind in (rows, channels))
    return _in_turn(*heavy, *light, *dealt)


def _in_turn(*kinds: Iterator[Trial]) -> Iterator[Trial]:
    waiting = list(kinds)
    while waiting:
        for kind in list(waiting):
            try:
                trial = next(kind, None)
            except (
                RuntimeError,
                NotImplementedError,
            ):  # too large for this device, or not built for it: no more of this kind
                trial = None
            if trial is None:
                waiting.remove(kind)
            else:
                yield trial


def _halves() -> Iterator[Trial]:
    """Without instructions for it half precision is a hundred times slower on a CPU: small calls tell."""
    for dtype in (torch.bfloat16, torch.float16):
        a, x, w = (torch.ones(*shape, dtype=dtype) for shape in ((128, 128), (1, 16, 8, 8), (16, 16, 3, 3)))
        yield partial(torch.mm, a, a)
        yield partial(aten.convolution, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def heavy(device: str) -> Iterator[Trial]:
    """The trials that differ when float32 products may use tf32."""
    yield from matmuls(device, torch.float32, _SIDES, largest=2**40)
    yield from convolutions(device, torch.float32, 1024, 32)
    yield from bottlenecks(device, torch.float32, 256, 64)


def matmuls(device: str, dtype: torch.dtype, sizes: tuple[int, ...], *, largest: int) -> Iterator[Trial]:
    """Products of all shapes in the layouts of a linear layer: forward, gradient of the input, gradient of the weight."""
    made = _maker(device, dtype)
    # Largest first: they are what steps are made of.
    for m, n, k in sorted(product(sizes, repeat=3), key=math.prod, reverse=True):
        if m * n * k > largest:
            continue
        bias, x, w, g, y = made(n), made(m, k), made(n, k), made(k, m), made(k, n)
        yield partial(torch.addmm, bias, x, w.t())
        yield partial(torch.mm, x, w.t())
        yield partial(torch.mm, x, y)
        yield partial(torch.mm, g.t(), y)
    for lots, side, width in ((32, 128, 64), (32, 512, 64)):
        a, b, c = made(lots, side, width), made(lots, side, width), made(lots, side, side)
        yield partial(torch.bmm, a, b.transpose(1, 2))
        yield partial(torch.bmm, c, b)
        yield partial(torch.bmm, c.transpose(1, 2), b)


def thin(device: str, dtype: torch.dtype) -> Iterator[Trial]:
    """Products of few samples with a whole layer: their rate is that at which weights are read, and gradients written."""
    made = _maker(device, dtype)
    for few, n, k in product((8, 1), (2048, 512), (2048, 512)):
        bias, x, w, g, y = made(n), made(few, k), made(n, k), made(few, k), made(few, n)
        yield partial(torch.addmm, bias, x, w.t())
        yield partial(torch.mm, x, w.t())
        yield partial(torch.mm, y, w)
        yield partial(torch.mm, g.t(), y)


def recurrences(device: str, dtype: torch.dtype) -> Iterator[Trial]:
    """A recurrent layer's sixteen steps, forward and backward."""
    for samples, width in product((32, 8, 1), (256, 512)):
        layer = torch.nn.LSTM(width, width, device=device, dtype=dtype)
        x = torch.ones(16, samples, width, device=device, dtype=dtype, requires_grad=True)
        out = layer(x)[0]
        yield partial(layer, x)
        yield partial(torch.autograd.grad, out, (x, *layer.parameters()), out, retain_graph=True)


def convolutions(device: str, dtype: torch.dtype, *batches: int) -> Iterator[Trial]:
    """(channels in, out, kernel, side, stride, groups), forward and backward, at each number of samples."""
    same = (
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
    other = (
        (3, 32, 3, 32, 1, 1), (64, 128, 3, 32, 2, 1), (64, 128, 1, 32, 2, 1), (64, 64, 1, 32, 1, 1), (128, 256, 3, 16, 2, 1),
        (256, 512, 1, 8, 2, 1), (3, 64, 7, 112, 2, 1), (64, 64, 3, 16, 1, 64),
    )  # fmt: skip
    return _convolved(device, dtype, batches, (*other, *((c, c, 3, size, 1, 1) for c, size in same)))


def bottlenecks(device: str, dtype: torch.dtype, *batches: int) -> Iterator[Trial]:
    """Convolutions of large images, most of them over single pixels with many channels, which have rates of their own on a GPU."""
    stages = ((64, 56), (128, 28), (256, 14), (512, 7))
    same = [
        shape
        for c, side in stages
        for shape in ((c, 4 * c, 1, side, 1, 1), (4 * c, c, 1, side, 1, 1), (c, c, 3, side, 1, 1))
    ]
    down = [
        shape
        for c, side in stages[:-1]
        for shape in ((4 * c, 8 * c, 1, side, 2, 1), (4 * c, 2 * c, 1, side, 1, 1), (2 * c, 2 * c, 3, side, 2, 1))
    ]
    return _convolved(device, dtype, batches, ((3, 64, 7, 224, 2, 1), *same, *down))


def _convolved(
    device: str, dtype: torch.dtype, batches: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> Iterator[Trial]:
    made = _maker(device, dtype)
    for samples, (inner, outer, kernel, side, stride, groups) in product(batches, shapes):
        x, w = made(samples, inner, side, side), made(outer, inner // groups, kernel, kernel)
        pads = (kernel // 2, kernel // 2)
        options = ([stride, stride], pads, [1, 1], False, [0, 0], groups)
        y = aten.convolution(x, w, None, *options)
        # The first layer of a model needs no gradient of its input.
        mask = [inner > 3, True, False]
        yield partial(aten.convolution, x, w, None, *options)
        yield partial(aten.convolution_backward, y, x, w, None, *options, mask)


def attentions(device: str, dtype: torch.dtype, samples: int) -> Iterator[Trial]:
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


def streams(device: str, dtype: torch.dtype, size: int) -> Iterator[Trial]:
    """Operators that go by the bytes they move, at tensors of `size` bytes."""
    made = _maker(device, dtype)
    width = 512
    rows = max(size // (width * torch.empty((), dtype=dtype).element_size()), 1)
    x, y = made(rows, width), made(rows, width)
    scale, shift = made(width), made(width)
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
        yield from _layer_norms(x, y, scale, shift)
    yield from _images(x, y, scale, shift)
    yield from _lookups(x, device, rows, width)
    # On a CPU these are bound by arithmetic: their rate does not depend on the size, and large ones take long.
    if device == "cuda" or size <= 2**20:
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


def rows(device: str, dtype: torch.dtype) -> Iterator[Trial]:
    """What a GPU deals out row by row: its rate goes by the width of a row and their number."""
    made = _maker(device, dtype)
    for width, count in product((256, 1024, 4096), (256, 4096, 65536)):
        x, y, scale, shift = made(count, width), made(count, width), made(width), made(width)
        yield from _layer_norms(x, y, scale, shift)
    for width, count in product((16, 1024, 32768), (256, 4096, 32768)):
        x = made(count, width)
        yield from _losses(x, torch.arange(count, device=device) * 7919 % width)


def channels(device: str, dtype: torch.dtype) -> Iterator[Trial]:
    """Batch norms on a GPU: some of their kernels give each channel to one multiprocessor, so that few channels leave most of it idle."""
    made = _maker(device, dtype)
    for samples, spatial, width in product((32, 256), (7, 14, 28, 56), (64, 256, 1024)):
        image, other = made(samples, width, spatial, spatial), made(samples, width, spatial, spatial)
        yield from _batch_norms(image, other, made(width).float(), made(width).float())


def _layer_norms(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Iterator[Trial]:
    mean, rstd, width = x.float().mean(1, keepdim=True), x.float().mean(1, keepdim=True), x.shape[1]
    yield partial(aten.native_layer_norm, x, [width], scale, shift, 1e-5)
    yield partial(aten.native_layer_norm_backward, y, x, [width], mean, rstd, scale, shift, [True, True, True])


def _batch_norms(image: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Iterator[Trial]:
    if image.device.type == "cuda" and image.dtype is not torch.bfloat16:  # torch takes its own kernel for bf16
        saved = aten.cudnn_batch_norm(image, a, b, a.clone(), b.clone(), True, 0.1, 1e-5)
        yield partial(aten.cudnn_batch_norm, image, a, b, a, b, True, 0.1, 1e-5)
        yield partial(aten.cudnn_batch_norm_backward, image, other, a, a, b, saved[1], saved[2], 1e-5, saved[3])
    yield partial(aten.native_batch_norm, image, a, b, a, b, True, 0.1, 1e-5)
    yield partial(aten.native_batch_norm_backward, other, image, a, a, b, a, b, True, 1e-5, [True, True, True])


def _images(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor) -> Iterator[Trial]:
    side, channels = 16, 32
    images = max(x.numel() // (channels * side * side), 1)
    if images * channels * side * side != x.numel():
        return
    image, other = x.view(images, channels, side, side), y.view(images, channels, side, side)
    if x.device.type == "cpu":
        yield from _batch_norms(image, other, scale[:channels].float(), shift[:channels].float())
    pooled, where = aten.max_pool2d_with_indices(image, [2, 2], [2, 2])
    yield partial(aten.max_pool2d_with_indices, image, [2, 2], [2, 2])
    yield partial(aten.max_pool2d_with_indices_backward, pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, where)


def _lookups(x: Tensor, device: str, rows: int, width: int) -> Iterator[Trial]:
    table = x.new_ones(4096, width)
    ids = torch.arange(rows, device=device) * 7919 % 4096
    yield partial(aten.embedding, table, ids)
    yield partial(aten.embedding_dense_backward, x, ids, 4096, -1, False)
    if device == "cpu":
        yield from _losses(x, ids % width)


def _losses(x: Tensor, classes: Tensor) -> Iterator[Trial]:
    loss = aten.nll_loss_forward(x, classes, None, 1, -100)
    yield partial(aten.nll_loss_forward, x, classes, None, 1, -100)
    yield partial(aten.nll_loss_backward, loss[0], x, classes, None, 1, -100, loss[1])


def _maker(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    def made(*shape: int) -> Tensor:
        made = torch.empty(*shape, device=device, dtype=dtype)
        # Equal numbers draw less power than real ones, and a GPU then runs faster than it would in training.
        return made.normal_() if device == "cuda" else made.fill_(0.5)

    return made
