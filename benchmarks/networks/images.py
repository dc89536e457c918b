"""Networks that see or make images, films and flow, each as it is commonly written."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import math

import numpy as np
import onnx
import torch
from convolutional import MBConv
from onnx import TensorProto, helper, numpy_helper
from seeded import seeded, settled
from structured import film, pair_of_frames, photograph
from torch import Tensor, nn
from torch.nn import functional
from transformers import SplitAttention, perceptron


def convolution(
    inner: int, outer: int, kernel: int = 3, stride: int = 1, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Make a convolution, its normalisation and an activation."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, padding, bias=False), nn.BatchNorm2d(outer), activation()
    )


def _pair(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(convolution(inner, outer), convolution(outer, outer))


class RepVGGBlock(nn.Module):
    """Three branches that add up, as the network is trained."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.wide = convolution(inner, outer, 3, stride, nn.Identity)
        self.narrow = convolution(inner, outer, 1, stride, nn.Identity)
        self.identity = nn.BatchNorm2d(inner) if stride == 1 and inner == outer else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x) + self.narrow(x)
        return torch.relu(y if self.identity is None else y + self.identity(x))


class RepVGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 32, 2), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1), (128, 256, 2)]
        self.blocks = nn.Sequential(*(RepVGGBlock(*width) for width in widths))
        self.head = nn.Linear(256, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class FusedMBConv(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            convolution(inner, 4 * inner, 3, stride, nn.SiLU), convolution(4 * inner, outer, 1, 1, nn.Identity)
        )
        self.residual = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts(x)
        return x + y if self.residual else y


class EfficientNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            convolution(3, 24, 3, 2, nn.SiLU),
            FusedMBConv(24, 24, 1),
            FusedMBConv(24, 48, 2),
            FusedMBConv(48, 48, 1),
            MBConv(48, 96, 3, 2),
            MBConv(96, 96, 3, 1),
            convolution(96, 384, 1, 1, nn.SiLU),
        )
        self.head = nn.Linear(384, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x).mean((2, 3)))


class Segmentation(nn.Module):
    """A U-Net with concatenated skips and bilinear resizing, which gives a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_pair(3, 16), _pair(16, 32), _pair(32, 64)])
        self.middle = _pair(64, 96)
        self.up = nn.ModuleList([_pair(96 + 64, 64), _pair(64 + 32, 32), _pair(32 + 16, 16)])
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skip], 1))
        return torch.sigmoid(self.head(x))


class Detector(nn.Module):
    """Boxes and scores of each place; `with_suppression` adds what keeps the best ones."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            convolution(3, 32, 3, 2), convolution(32, 64, 3, 2), convolution(64, 96, 3, 2), convolution(96, 96)
        )
        self.boxes, self.scores = nn.Conv2d(96, 4, 3, padding=1), nn.Conv2d(96, 3, 3, padding=1)
        y, x = torch.meshgrid(torch.arange(12) + 0.5, torch.arange(12) + 0.5, indexing="ij")
        self.register_buffer("centres", torch.stack([y, x], -1).view(1, -1, 2) / 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        offsets = self.boxes(x).flatten(2).transpose(1, 2)
        middle = self.centres + 0.05 * torch.tanh(offsets[..., :2])
        half = 0.1 * torch.exp(torch.clamp(0.5 * offsets[..., 2:], max=2.0))
        return torch.cat([middle - half, middle + half], -1), torch.sigmoid(self.scores(x).flatten(2))


def with_suppression(model: onnx.ModelProto) -> onnx.ModelProto:
    """Keep the best boxes only, each with its score and class."""
    graph = model.graph
    boxes, scores = (value.name for value in graph.output)
    constants = {"most": np.array([50]), "overlap": np.float32(0.4), "least": np.float32(0.6)}
    constants |= {"class_column": np.int64(1), "box_column": np.int64(2), "first": np.array([0])}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items())
    graph.node.extend(
        [
            helper.make_node("NonMaxSuppression", [boxes, scores, "most", "overlap", "least"], ["kept"]),
            helper.make_node("Gather", ["kept", "class_column"], ["kept_classes"], axis=1),
            helper.make_node("Gather", ["kept", "box_column"], ["kept_places"], axis=1),
            helper.make_node("GatherND", [scores, "kept"], ["kept_scores"]),
            helper.make_node("Squeeze", [boxes, "first"], ["all_boxes"]),
            helper.make_node("Gather", ["all_boxes", "kept_places"], ["kept_boxes"], axis=0),
        ]
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("kept_boxes", TensorProto.FLOAT, ["kept", 4]))
    graph.output.append(helper.make_tensor_value_info("kept_scores", TensorProto.FLOAT, ["kept"]))
    graph.output.append(helper.make_tensor_value_info("kept_classes", TensorProto.INT64, ["kept"]))
    return model


class CenterNet(nn.Module):
    """Peaks of a heat map, found by a pool, and the boxes that lie there."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(convolution(3, 32, 3, 2), convolution(32, 64, 3, 2), convolution(64, 64))
        self.heat, self.size = (nn.Sequential(convolution(64, 64), nn.Conv2d(64, wide, 1)) for wide in (5, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.trunk(x)
        heat = torch.sigmoid(self.heat(x))
        peaks = heat * (functional.max_pool2d(heat, 3, 1, 1) == heat).float()
        scores, places = torch.topk(peaks.flatten(1), 20)
        cells = peaks.shape[2] * peaks.shape[3]
        cell = places % cells
        sizes = self.size(x).flatten(2).gather(2, cell[:, None].expand(-1, 2, -1))
        corner = torch.stack([torch.div(cell, 24, rounding_mode="floor"), cell % 24], 1).float()
        return scores, torch.div(places, cells, rounding_mode="floor"), torch.cat([corner, sizes], 1)


class Deformable(nn.Module):
    """The image is turned by what a small network sees, then filtered at places that another one chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            convolution(3, 16, 5, 2),
            convolution(16, 16, 3, 2),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(256, 6),
            nn.Tanh(),
        )
        self.trunk = nn.Sequential(convolution(3, 32, 3, 2), convolution(32, 32))
        self.offsets, self.weights = nn.Conv2d(32, 18, 3, padding=1), nn.Conv2d(32 * 9, 64, 1)
        self.head = nn.Sequential(
            nn.BatchNorm2d(64),
            nn.ReLU(),
            convolution(64, 96, 3, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(96, 50),
        )
        for name, size in (("image_grid", 48), ("grid", 24)):
            steps = (torch.arange(size) * 2 + 1) / size - 1
            y, x = torch.meshgrid(steps, steps, indexing="ij")
            self.register_buffer(name, torch.stack([x, y], -1)[None])
        observed = torch.tensor([[x, y] for y in (-1, 0, 1) for x in (-1, 0, 1)], dtype=torch.float32) * 2 / 24
        self.register_buffer("taps", observed[None, :, None, None, :])

    def forward(self, x: Tensor) -> Tensor:
        turn = 0.3 * self.locate(x).view(-1, 2, 3) + torch.eye(2, 3)
        grid = self.image_grid.view(1, -1, 2) @ turn[:, :, :2].transpose(1, 2) + turn[:, None, :, 2]
        x = functional.grid_sample(x, grid.view(-1, 48, 48, 2), align_corners=False, padding_mode="border")
        x = self.trunk(x)
        moved = self.offsets(x).view(1, 9, 2, 24, 24).permute(0, 1, 3, 4, 2) * 0.05
        places = (self.grid[:, None] + self.observed_tensors + moved).reshape(1, 9 * 24, 24, 2)
        taken = functional.grid_sample(x, places, align_corners=False, padding_mode="zeros")
        taken = taken.view(1, 32, 9, 24, 24).flatten(1, 2)
        return self.head(self.weights(taken))


class ModulatedConvolution(nn.Module):
    """StyleGAN2's convolution: the weight is scaled by the style, then each filter to unit length."""

    def __init__(self, inner: int, outer: int, kernel: int, demodulate: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, outer, inner, kernel, kernel) / math.sqrt(inner * kernel**2))
        self.style, self.bias = nn.Linear(96, inner), nn.Parameter(torch.zeros(1, outer, 1, 1))
        self.demodulate = demodulate

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        weight = self.weight * (1 + self.style(style))[:, None, :, None, None]
        if self.demodulate:
            weight = weight * torch.rsqrt(weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        batch, outer, inner, height, width = weight.shape
        y = functional.conv2d(
            x.reshape(1, batch * inner, *x.shape[2:]),
            weight.view(batch * outer, inner, height, width),
            padding=height // 2,
            groups=batch,
        )
        return y.view(batch, outer, *y.shape[2:]) + self.bias


class StyleGAN2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(96, 96), nn.LeakyReLU(0.2))))
        self.constant = nn.Parameter(torch.randn(1, 96, 4, 4))
        self.layers = nn.ModuleList(
            [
                ModulatedConvolution(96, 96, 3),
                ModulatedConvolution(96, 64, 3),
                ModulatedConvolution(64, 48, 3),
                ModulatedConvolution(48, 32, 3),
            ]
        )
        self.colours = nn.ModuleList(ModulatedConvolution(width, 3, 1, demodulate=False) for width in (96, 64, 48, 32))
        self.nsr = nn.ParameterList(
            nn.Parameter(0.1 * torch.randn(1, 1, 4 * 2**level, 4 * 2**level)) for level in range(4)
        )

    def forward(self, z: Tensor) -> Tensor:
        style = self.mapping(z * torch.rsqrt(z.pow(2).mean(1, keepdim=True) + 1e-8))
        x, picture = self.constant, torch.zeros(1, 3, 4, 4)
        for level, (layer, colour, nsr) in enumerate(zip(self.layers, self.colours, self.nsr, strict=True)):
            if level:
                x = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
                picture = functional.interpolate(picture, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = functional.leaky_relu(layer(x, style) + nsr, 0.2) * math.sqrt(2)
            picture = picture + colour(x, style)
        return picture


class Video(nn.Module):
    """Space first, then time: R(2+1)D."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for inner, outer, stride in ((3, 24, 2), (24, 48, 2), (48, 64, 1), (64, 96, 2)):
            parts += [
                nn.Conv3d(inner, outer, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
                nn.BatchNorm3d(outer),
                nn.ReLU(),
            ]
            parts += [
                nn.Conv3d(outer, outer, (3, 1, 1), (stride if inner > 3 else 1, 1, 1), (1, 0, 0), bias=False),
                nn.BatchNorm3d(outer),
                nn.ReLU(),
            ]
        self.parts, self.pool, self.head = nn.Sequential(*parts), nn.AdaptiveAvgPool3d(1), nn.Linear(96, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.parts(x)).flatten(1))


class RegisterViT(nn.Module):
    """A vision transformer with registers beside the class token and a learned scale on each branch."""

    def __init__(self) -> None:
        super().__init__()
        width = 192
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token, self.registers = (nn.Parameter(0.5 * torch.randn(1, count, width)) for count in (1, 4))
        self.positions = nn.Parameter(0.3 * torch.randn(1, 37, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(7))
        self.attentions = nn.ModuleList(SplitAttention(width, 3) for _ in range(3))
        self.perceptrons = nn.ModuleList(perceptron(width, nn.GELU()) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(0.5 * torch.rand(width)) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token, x], 1) + self.positions
        x = torch.cat([x[:, :1], self.registers, x[:, 1:]], 1)
        for layer, (attention, inner) in enumerate(zip(self.attentions, self.perceptrons, strict=True)):
            x = x + self.scales[2 * layer] * attention(self.norms[2 * layer](x))
            x = x + self.scales[2 * layer + 1] * inner(self.norms[2 * layer + 1](x))
        x = self.norms[-1](x)
        return x[:, 0], x[:, 5:]


class ConvNeXtBlock(nn.Module):
    """A wide depthwise convolution, then two products with channels last, normalised by their response."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.shift = (nn.Parameter(0.2 * torch.randn(1, 1, 1, 4 * width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        response = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        y = self.scale * (y * (response / (response.mean(-1, keepdim=True) + 1e-6))) + self.shift + y
        return x + self.narrow(y).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 64, 4, 4), nn.Sequential(ConvNeXtBlock(64), ConvNeXtBlock(64))
        self.halve, self.second = nn.Conv2d(64, 128, 2, 2), nn.Sequential(ConvNeXtBlock(128), ConvNeXtBlock(128))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.halve(self.first(self.stem(x)))).mean((-2, -1))))


class SuperResolution(nn.Module):
    """Residual blocks without norms, then pixels out of channels, on top of the enlarged image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.PReLU(32), nn.Conv2d(32, 32, 3, padding=1))
            for _ in range(3)
        )
        self.tail = nn.Sequential(nn.Conv2d(32, 3 * 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        for block in self.blocks:
            y = y + 0.1 * block(y)
        larger = functional.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=False)
        return torch.clamp(larger + 0.1 * self.tail(y), 0.0, 1.0)


class VQVAE(nn.Module):
    """The nearest row of a codebook stands for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(convolution(3, 32, 3, 2), convolution(32, 64, 3, 2), nn.Conv2d(64, 24, 1))
        self.book = nn.Parameter(1.5 * torch.randn(256, 24))
        self.decode = nn.Sequential(
            convolution(24, 64), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.encode(x)
        batch, width, height, across = y.shape
        rows = y.permute(0, 2, 3, 1).reshape(-1, width)
        distance = rows.pow(2).sum(1, keepdim=True) - 2 * rows @ self.book.t() + self.book.pow(2).sum(1)
        nearest = torch.argmin(distance, 1)
        found = functional.embedding(nearest, self.book).view(batch, height, across, width).permute(0, 3, 1, 2)
        return self.decode(found), y, nearest.view(batch, height, across)


class Flow(nn.Module):
    """Flow between two frames: all pairs of places compared, looked up again and again by a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(convolution(3, 32, 3, 2), convolution(32, 48, 3, 2), nn.Conv2d(48, 48, 1))
        self.hidden = nn.Conv2d(48, 48, 1)
        self.gates = nn.ModuleList(nn.Conv2d(48 + 9 + 2, 48, 3, padding=1) for _ in range(3))
        self.change = nn.Sequential(nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 2, 3, padding=1))
        y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
        self.register_buffer("grid", torch.stack([x, y])[None])
        self.register_buffer("window", torch.tensor([[x, y] for y in (-1.0, 0, 1) for x in (-1.0, 0, 1)])[None, None])

    def forward(self, frames: Tensor) -> Tensor:
        first, second = self.features(frames[:, :3]), self.features(frames[:, 3:])
        pairs = (first.flatten(2).transpose(1, 2) @ second.flatten(2) / math.sqrt(48)).view(144, 1, 12, 12)
        hidden, flow = torch.tanh(self.hidden(first)), torch.zeros(1, 2, 12, 12)
        for _ in range(3):
            centre = (self.grid + flow).flatten(2).transpose(1, 2).view(144, 1, 1, 2)
            places = 2 * (centre + self.window) / 11 - 1
            taken = functional.grid_sample(pairs, places, align_corners=True).view(1, 12, 12, 9).permute(0, 3, 1, 2)
            known = torch.cat([taken, flow], 1)
            both = torch.cat([hidden, known], 1)
            update, reset = torch.sigmoid(self.gates[0](both)), torch.sigmoid(self.gates[1](both))
            new = torch.tanh(self.gates[2](torch.cat([reset * hidden, known], 1)))
            hidden = (1 - update) * hidden + update * new
            flow = flow + 0.3 * self.change(hidden)
        return 4 * functional.interpolate(flow, scale_factor=4.0, mode="bilinear", align_corners=True)


def repvgg() -> nn.Module:
    return settled(seeded(RepVGG, 21), photograph(3, 64))


def efficientnet_v2() -> nn.Module:
    return settled(seeded(EfficientNetV2, 22), photograph(3, 64))


def segmentation() -> nn.Module:
    return settled(seeded(Segmentation, 23), photograph(3, 64))


def detector() -> nn.Module:
    return settled(seeded(Detector, 24), photograph(3, 96))


def centernet() -> nn.Module:
    return settled(seeded(CenterNet, 25), photograph(3, 96))


def deformable() -> nn.Module:
    return settled(seeded(Deformable, 26), photograph(3, 48), runs=16, batch=1)


def stylegan2() -> nn.Module:
    return seeded(StyleGAN2, 27)


def video() -> nn.Module:
    return settled(seeded(Video, 28), film(3, 8, 48))


def register_vit() -> nn.Module:
    return seeded(RegisterViT, 29)


def convnext() -> nn.Module:
    return seeded(ConvNeXt, 30)


def super_resolution() -> nn.Module:
    return seeded(SuperResolution, 31)


def vqvae() -> nn.Module:
    return settled(seeded(VQVAE, 32), photograph(3, 48))


def flow() -> nn.Module:
    return settled(seeded(Flow, 33), pair_of_frames(3, 48), runs=16, batch=1)
