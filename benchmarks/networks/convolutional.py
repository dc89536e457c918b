"""Networks of convolutions, as they are commonly written."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import math
from itertools import pairwise

import torch
from seeded import image, seeded, settled
from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride > 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 48, 7, 2, 3, bias=False), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [48, 48, 96, 192]
        blocks = []
        for inner, outer in pairwise(widths):
            blocks += [ResidualBlock(inner, outer, 1 if inner == outer else 2), ResidualBlock(outer, outer, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(192, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int, inner: int, activation: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)
        self.activation, self.gate = activation, gate

    def forward(self, x: Tensor) -> Tensor:
        scale = functional.adaptive_avg_pool2d(x, 1)
        return self.gate(self.expand(self.activation(self.reduce(scale)))) * x


class InvertedResidual(nn.Module):
    """Expand, filter each channel, squeeze and excite, project."""

    def __init__(self, inner: int, outer: int, stride: int, excited: bool, activation: type[nn.Module]) -> None:
        super().__init__()
        wide = 4 * inner
        parts = [nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), activation()]
        parts += [nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False), nn.BatchNorm2d(wide), activation()]
        if excited:
            parts.append(SqueezeExcitation(wide, wide // 4, nn.ReLU(), nn.Hardsigmoid()))
        self.parts = nn.Sequential(*parts, nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts(x)
        return x + y if self.residual else y


class MobileNetV3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.blocks = nn.Sequential(
            InvertedResidual(16, 24, 2, False, nn.ReLU),
            InvertedResidual(24, 24, 1, False, nn.ReLU),
            InvertedResidual(24, 48, 2, True, nn.Hardswish),
            InvertedResidual(48, 48, 1, True, nn.Hardswish),
            InvertedResidual(48, 96, 2, True, nn.Hardswish),
            InvertedResidual(96, 96, 1, True, nn.Hardswish),
        )
        self.last = nn.Sequential(nn.Conv2d(96, 384, 1, bias=False), nn.BatchNorm2d(384), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(384, 512), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(512, 100))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(x)))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class SamePaddedConv(nn.Conv2d):
    """A convolution that pads as TensorFlow does: ceil(size / stride) places come out, odd padding lies behind."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for axis in (3, 2):
            size, kernel, stride = x.shape[axis], self.kernel_size[axis - 2], self.stride[axis - 2]
            needed = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            pads += [needed // 2, needed - needed // 2]
        if any(pads):
            x = functional.pad(x, pads)
        return functional.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)


class MBConv(nn.Module):
    def __init__(self, inner: int, outer: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.expand = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        depthwise = SamePaddedConv(wide, wide, kernel, stride, groups=wide, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.SiLU())
        self.excite = SqueezeExcitation(wide, inner // 4, nn.SiLU(), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.excite(self.depthwise(self.expand(x))))
        return x + y if self.residual else y


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = SamePaddedConv(3, 24, 3, 2, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(24), nn.SiLU())
        self.blocks = nn.Sequential(
            MBConv(24, 24, 3, 1),
            MBConv(24, 40, 5, 2),
            MBConv(40, 40, 5, 1),
            MBConv(40, 80, 3, 2),
            MBConv(80, 80, 3, 1),
            MBConv(80, 128, 5, 2),
        )
        self.last = nn.Sequential(nn.Conv2d(128, 512, 1, bias=False), nn.BatchNorm2d(512), nn.SiLU())
        self.head = nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(x)))
        return self.head(x.mean((2, 3)))


class GroupNormBlock(nn.Module):
    """The residual block of diffusion models: norm, SiLU, convolution, with the time added between."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(8, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.second_norm, self.second = nn.GroupNorm(8, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(functional.silu(self.first_norm(x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + 0.5 * self.second(functional.silu(self.second_norm(y)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, time = 32, 96
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.halve1 = GroupNormBlock(width, width, time), nn.Conv2d(width, width, 3, 2, 1)
        self.down2, self.halve2 = GroupNormBlock(width, 2 * width, time), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.middle = GroupNormBlock(2 * width, 4 * width, time)
        self.double2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = GroupNormBlock(4 * width, 2 * width, time)
        self.double1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up1 = GroupNormBlock(2 * width, width, time)
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1000.0) * torch.arange(self.width // 2) / (self.width // 2))
        angles = time[:, None] * rates[None]
        embedded = self.time(torch.cat([torch.sin(angles), torch.cos(angles)], 1))
        first = self.down1(self.stem(x), embedded)
        second = self.down2(self.halve1(first), embedded)
        y = self.middle(self.halve2(second), embedded)
        y = self.up2(torch.cat([self.double2(y), second], 1), embedded)
        y = self.double1(functional.interpolate(y, scale_factor=2.0, mode="nearest"))
        y = self.up1(torch.cat([y, first], 1), embedded)
        return self.head(functional.silu(self.norm(y)))


def resnet() -> nn.Module:
    return settled(seeded(ResNet, 1), image(3, 64))


def mobilenet() -> nn.Module:
    return settled(seeded(MobileNetV3, 2), image(3, 64))


def efficientnet() -> nn.Module:
    return settled(seeded(EfficientNet, 3), image(3, 64))


def unet() -> nn.Module:
    return seeded(UNet, 4)
