"""The four small classifiers that train.py trains; each takes pixels in 0..1 as float32 [batch, 1, 28, 28]."""

# torch is not installed where the types are checked, so its Module is Any there
# mypy: allow-subclassing-any

from __future__ import annotations

import torch  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn  # type: ignore[import-not-found,unused-ignore]

CLASSES = 10
PATCHES = 49
PIXEL_MEAN, PIXEL_DEVIATION = 0.2860, 0.3530


class Normalize(nn.Module):
    """Bring pixels to zero mean and unit deviation inside the model, so that its samples stay plain pixels."""

    def forward(self, image: Tensor) -> Tensor:
        return (image - PIXEL_MEAN) / PIXEL_DEVIATION


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Build a convolution without bias followed by batch normalization, padded to keep the size at stride 1."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, stride=stride)
        self.second = convolution(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, kernel=1, stride=stride)

    def forward(self, features: Tensor) -> Tensor:
        branch = self.second(torch.relu(self.first(features)))
        return torch.relu(branch + self.shortcut(features))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, filter depthwise, project linearly, add where the shape allows it."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, expansion: int = 4) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.branch = nn.Sequential(
            convolution(inputs, hidden, kernel=1),
            nn.ReLU6(),
            convolution(hidden, hidden, stride=stride, groups=hidden),
            nn.ReLU6(),
            convolution(hidden, outputs, kernel=1),
        )
        self.adds = inputs == outputs and stride == 1

    def forward(self, features: Tensor) -> Tensor:
        branch: Tensor = self.branch(features)
        return features + branch if self.adds else branch


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and a GELU feed-forward layer, each with its residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def attend(self, tokens: Tensor) -> Tensor:
        joined: Tensor = self.queries_keys_values(self.attention_norm(tokens))
        by_head = (-1, PATCHES, self.heads, self.width // self.heads)
        query, key, value = (part.reshape(by_head).transpose(1, 2) for part in joined.split(self.width, dim=-1))
        weights = torch.softmax(query @ key.transpose(-1, -2) * by_head[-1] ** -0.5, dim=-1)
        mixed: Tensor = self.attended((weights @ value).transpose(1, 2).reshape(-1, PATCHES, self.width))
        return mixed

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attend(tokens)
        return tokens + self.feed_forward(tokens)


class VisionTransformer(nn.Module):
    """A transformer over 49 patches of 4x4 pixels with a learned position for each, averaged at the end."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.width = width
        self.normalize = Normalize()
        self.patches = nn.Conv2d(1, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, PATCHES, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(self.normalize(image)).reshape(-1, self.width, PATCHES)
        tokens = patches.transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(dim=1))
        return logits


class RecurrentClassifier(nn.Module):
    """Two GRU layers that read the image row by row; the last state is classified."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.normalize = Normalize()
        self.gru = nn.GRU(28, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        states, _ = self.gru(self.normalize(image).squeeze(1))
        logits: Tensor = self.head(states[:, -1])
        return logits


def pooled_head(channels: int) -> nn.Sequential:
    """Average over the image and classify."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def residual_network() -> nn.Module:
    """Build five residual blocks, 24 to 96 channels wide."""
    return nn.Sequential(
        Normalize(),
        convolution(1, 24, stride=2),
        nn.ReLU(),
        ResidualBlock(24, 24),
        ResidualBlock(24, 48, stride=2),
        ResidualBlock(48, 48),
        ResidualBlock(48, 96, stride=2),
        ResidualBlock(96, 96),
        pooled_head(96),
    )


def mobile_network() -> nn.Module:
    """Build six inverted residual blocks, 24 to 64 channels wide, as in MobileNetV2."""
    return nn.Sequential(
        Normalize(),
        convolution(1, 24, stride=2),
        nn.ReLU6(),
        InvertedResidual(24, 24),
        InvertedResidual(24, 24),
        InvertedResidual(24, 40, stride=2),
        InvertedResidual(40, 40),
        InvertedResidual(40, 64),
        InvertedResidual(64, 64),
        convolution(64, 192, kernel=1),
        nn.ReLU6(),
        pooled_head(192),
    )
