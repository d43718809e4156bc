"""Images: residual, plain, U-shaped, depthwise, without convolutions, in windows, and through changing shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, sgd, train, whole


def _images(size: int, classes: int, channels: int = 3, seed: int = 30) -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, channels, size, size, seed=seed), whole(classes, SAMPLES, seed=seed + 1))


def _classify(output: Tensor, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1])


class Bottleneck(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, planes * 4, 1, bias=False), nn.BatchNorm2d(planes * 4)
        self.relu, self.downsample = nn.ReLU(inplace=True), downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's, narrow: bottlenecks, in-place ReLU, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inplanes = 8
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = self._make_layer(8, 2), self._make_layer(16, 4, stride=2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(64, 10)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = nn.Sequential(
            nn.Conv2d(self.inplanes, planes * 4, 1, stride, bias=False), nn.BatchNorm2d(planes * 4)
        )
        layers = [Bottleneck(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * 4
        return nn.Sequential(*layers, *(Bottleneck(self.inplanes, planes) for _ in range(1, blocks)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet() -> Job:
    return train(name="resnet", model=ResNet, data=_images(16, 10), loss=_classify, optimizer=sgd)


class Vgg(nn.Module):
    """Features, then a classifier that knows how many of them there are."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for v in (8, "M", 16, "M", 32, 32, "M"):
            if isinstance(v, str):
                layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
            else:
                layers += [nn.Conv2d(channels, v, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                channels = v
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(32 * 2 * 2, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(),
            nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).view(-1, 128))


def vgg() -> Job:
    return train(name="vgg", model=Vgg, data=_images(16, 10, seed=32), loss=_classify, clip_norm=1.0)


def channels_last() -> Job:
    """As PyTorch advises for convolutions: parameters keep their channels last in memory."""

    def model() -> nn.Module:
        net = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(True), nn.MaxPool2d(2),
            nn.Conv2d(24, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 96), nn.ReLU(True), nn.Linear(96, 10),
        )  # fmt: skip
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    return train(name="channels-last", model=model, data=_images(16, 10, seed=46), loss=_classify)


def _double_conv(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """What each level of the way down saw is joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = _double_conv(1, 8), _double_conv(8, 16), _double_conv(16, 32)
        self.up1, self.conv1 = nn.ConvTranspose2d(32, 16, 2, stride=2), _double_conv(32, 16)
        self.up2, self.conv2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), _double_conv(24, 8)
        self.outc = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        y = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        y = self.up2(y)
        y = F.pad(y, [0, x1.size(3) - y.size(3), 0, x1.size(2) - y.size(2)])
        return self.outc(self.conv2(torch.cat([x1, y], dim=1)))


def unet() -> Job:
    return train(
        name="unet",
        model=UNet,
        data=TensorDataset(numbers(SAMPLES, 1, 13, 13, seed=34), whole(3, SAMPLES, 13, 13, seed=35)),
        loss=_classify,
    )


class ConvNextBlock(nn.Module):
    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim), nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma, self.drop = nn.Parameter(0.1 * torch.ones(dim)), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = (self.gamma * self.pwconv2(self.act(self.pwconv1(y)))).permute(0, 3, 1, 2)
        if self.training:  # stochastic depth, a coin for each sample
            y = y * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.drop).div_(1 - self.drop)
        return x + y


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, kernel_size=2, stride=2)
        self.stage1, self.down = nn.Sequential(ConvNextBlock(16, 0.0), ConvNextBlock(16, 0.1)), nn.Conv2d(16, 32, 2, 2)
        self.stage2, self.norm = nn.Sequential(ConvNextBlock(32, 0.1), ConvNextBlock(32, 0.2)), nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stage2(self.down(self.stage1(self.stem(x)))).mean([-2, -1])))


def convnext() -> Job:
    return train(name="convnext", model=ConvNext, data=_images(16, 10, seed=36), loss=_classify, clip_norm=5.0)


class MbConv(nn.Module):
    """Expand, depthwise, squeeze and excite, project."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        hidden = inner * 6
        self.expand = nn.Sequential(
            nn.Conv2d(inner, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.SiLU(inplace=True),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(hidden, inner // 2, 1),
            nn.SiLU(inplace=True),
            nn.Conv2d(inner // 2, hidden, 1),
        )
        self.project = nn.Sequential(nn.Conv2d(hidden, outer, 1, bias=False), nn.BatchNorm2d(outer, momentum=0.01))
        self.skip = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * torch.sigmoid(self.squeeze(y)))
        return x + y if self.skip else y


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True))
        self.blocks = nn.ModuleList(
            [MbConv(8, 12, 1), MbConv(12, 12, 1), MbConv(12, 20, 2), MbConv(20, 20, 1), MbConv(20, 24, 1)]
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def efficientnet() -> Job:
    return train(
        name="efficientnet",
        model=EfficientNet,
        data=_images(16, 7, seed=38),
        loss=_classify,
        optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, eps=1e-3),
    )


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(48), nn.LayerNorm(48)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 48, 4, stride=4), nn.Sequential(*[MixerBlock() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).reshape(-1, 48, 16).permute(0, 2, 1)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


def mixer() -> Job:
    return train(name="mixer", model=Mixer, data=_images(16, 10, seed=40), loss=_classify, clip_norm=1.0)


class WindowBlock(nn.Module):
    """Attention inside windows of 4 x 4 with relative positions, every second time shifted by half a window."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.qkv, self.proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.mlp = nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(49, 4))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + 3
        self.relative_position_index: Tensor
        self.register_buffer("relative_position_index", apart[..., 0] * 7 + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(16, 16, 4)
        attn = (q * 8**-0.5 @ k.transpose(-2, -1)) + bias.permute(2, 0, 1).unsqueeze(0)
        y = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Its blocks are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Conv2d(3, 32, 2, 2),
            nn.ModuleList([WindowBlock(0), WindowBlock(2), WindowBlock(0)]),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((1, 2)))


def swin() -> Job:
    return train(name="swin", model=Swin, data=_images(16, 10, seed=42), loss=_classify)


class Shapes(nn.Module):
    """Image, then vector, then series, then vector: every part sees another number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 6, 5), nn.MaxPool2d(2)
        self.series, self.norm = nn.Conv1d(12, 24, 3, padding=1), nn.GroupNorm(4, 24)
        self.fc1, self.fc2 = nn.Linear(24 * 18, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu_(self.conv(x)))  # 6 x 6 x 6
        x = x.view(x.size(0), -1).view(-1, 12, 18)
        x = F.leaky_relu(self.norm(self.series(x)), 0.1, inplace=True)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def shapes() -> Job:
    return train(name="shapes", model=Shapes, data=_images(16, 5, channels=1, seed=44), loss=_classify, optimizer=sgd)
