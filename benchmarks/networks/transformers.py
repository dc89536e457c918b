"""Transformers of images, text and speech, as they are commonly written."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import math

import torch
from seeded import seeded
from torch import Tensor, nn
from torch.nn import functional


class SplitAttention(nn.Module):
    """Queries, keys and values out of one product, as in vision transformers; a bias for each pair of places."""

    def __init__(self, width: int, heads: int, places: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.pairs = nn.Parameter(0.2 * torch.randn(1, heads, places, places)) if places else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if self.pairs is None:
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.pairs
            if mask is not None:
                windows = mask.shape[0]
                scores = scores.view(batch // windows, windows, self.heads, length, length) + mask[None, :, None]
                scores = scores.view(-1, self.heads, length, length)
            y = torch.softmax(scores, -1) @ v
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))


def perceptron(width: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = 192
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(0.5 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.5 * torch.randn(1, 65, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(7))
        self.attentions = nn.ModuleList(SplitAttention(width, 3) for _ in range(3))
        self.perceptrons = nn.ModuleList(perceptron(width, nn.GELU()) for _ in range(3))
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer, (attention, inner) in enumerate(zip(self.attentions, self.perceptrons, strict=True)):
            x = x + attention(self.norms[2 * layer](x))
            x = x + inner(self.norms[2 * layer + 1](x))
        return self.head(self.norms[-1](x)[:, 0])


def windows_of(x: Tensor, size: int) -> Tensor:
    batch, height, wide, width = x.shape
    x = x.view(batch, height // size, size, wide // size, size, width)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, width)


def image_of(windows: Tensor, size: int, height: int) -> Tensor:
    rows = height // size
    x = windows.view(-1, rows, rows, size, size, windows.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, height, windows.shape[-1])


class ShiftedWindowBlock(nn.Module):
    def __init__(self, width: int, height: int, shift: int) -> None:
        super().__init__()
        self.size, self.height, self.shift = 4, height, shift
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SplitAttention(width, width // 32, self.size**2)
        self.perceptron = perceptron(width, nn.GELU())
        regions = torch.zeros(1, height, height, 1)
        for row, rows in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
            for column, columns in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
                regions[:, rows, columns] = 3 * row + column
        flat = windows_of(regions, self.size)[..., 0]
        self.register_buffer("mask", (flat[:, :, None] != flat[:, None]).float() * -100.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.first_norm(x).view(batch, self.height, self.height, width)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attention(windows_of(y, self.size), self.mask if self.shift else None)
        y = image_of(y, self.size, self.height)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y.reshape(batch, length, width)
        return x + self.perceptron(self.second_norm(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 96, 4, 4), nn.LayerNorm(96)
        self.first = nn.Sequential(ShiftedWindowBlock(96, 16, 0), ShiftedWindowBlock(96, 16, 2))
        self.merged_norm, self.merge = nn.LayerNorm(384), nn.Linear(384, 192, bias=False)
        self.second = nn.Sequential(ShiftedWindowBlock(192, 8, 0), ShiftedWindowBlock(192, 8, 2))
        self.last_norm, self.head = nn.LayerNorm(192), nn.Linear(192, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(self.patches(x).flatten(2).transpose(1, 2)))
        x = x.view(-1, 16, 16, 96)
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        x = self.merge(self.merged_norm(torch.cat(corners, -1).view(-1, 64, 384)))
        return self.head(self.last_norm(self.second(x)).mean(1))


class Attention(nn.Module):
    """Queries of one sequence to keys and values of the same or of another, each out of a product of its own."""

    def __init__(self, width: int, heads: int, key_bias: bool = True) -> None:
        super().__init__()
        self.heads, self.width = heads, width // heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=key_bias)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.width).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.width)
        if mask is not None:
            scores = scores + mask
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).contiguous()
        return self.o(y.view(y.shape[0], y.shape[1], self.heads * self.width))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = 192
        self.words, self.places, self.kinds = nn.Embedding(1000, width), nn.Embedding(64, width), nn.Embedding(2, width)
        self.register_buffer("position_ids", torch.arange(64)[None])
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.attentions = nn.ModuleList(Attention(width, 3) for _ in range(3))
        self.attention_norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(3))
        self.perceptrons = nn.ModuleList(perceptron(width, nn.GELU()) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(3))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, ids: Tensor, mask: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.kinds(kinds) + self.places(self.position_ids[:, : ids.shape[1]])
        x = self.norm(x)
        hidden = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer, attention in enumerate(self.attentions):
            x = self.attention_norms[layer](x + attention(x, x, hidden))
            x = self.norms[layer](x + self.perceptrons[layer](x))
        return x, self.head(torch.tanh(self.pooler(x[:, 0])))


class TransposedLinear(nn.Module):
    """GPT-2's product: the weight as (in, out), the data as a matrix."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(math.sqrt(2 / (inner + outer)) * torch.randn(inner, outer))
        self.bias = nn.Parameter(torch.zeros(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view((*x.shape[:-1], self.weight.shape[1]))


class NewGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = TransposedLinear(width, 3 * width), TransposedLinear(width, width)
        self.wide, self.narrow = TransposedLinear(width, 4 * width), TransposedLinear(4 * width, width)
        self.activation = NewGelu()
        self.register_buffer("causal", torch.tril(torch.ones(64, 64, dtype=torch.bool))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        length, split = x.shape[1], (x.shape[0], x.shape[1], self.heads, self.width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.first_norm(x)).split(self.width, dim=2))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.width // self.heads)
        lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
        scores = torch.where(self.causal[:, :, :length, :length], scores, lowest)
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(x.shape)
        x = x + self.projection(y)
        return x + self.narrow(self.activation(self.wide(self.second_norm(x))))


class GPT2(nn.Module):
    """Logits by the table of words itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(3000, 192), nn.Embedding(64, 192)
        self.blocks = nn.Sequential(*(CausalBlock(192, 3) for _ in range(3)))
        self.norm = nn.LayerNorm(192)
        self.head = nn.Linear(192, 3000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)[None])
        return self.head(self.norm(self.blocks(x)))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


class GroupedQueryBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = heads, groups, width // heads
        self.first_norm, self.second_norm = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.head_width, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 512, bias=False) for _ in range(2))
        self.down = nn.Linear(512, width, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_width).transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        batch, groups, length, width = x.shape
        x = x[:, :, None].expand(batch, groups, self.heads // groups, length, width)
        return x.reshape(batch, self.heads, length, width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        y = self.first_norm(x)
        q = rotated(self.split(self.q(y), self.heads), cosine, sine)
        k = self.repeated(rotated(self.split(self.k(y), self.groups), cosine, sine))
        v = self.repeated(self.split(self.v(y), self.groups))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_width) + mask
        y = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.second_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 192)
        self.blocks = nn.ModuleList(GroupedQueryBlock(192, 6, 2) for _ in range(3))
        self.norm, self.head = RMSNorm(192), nn.Linear(192, 2000, bias=False)
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, 32, 2) / 32))

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.words(ids), ids.shape[1]
        places = torch.arange(length, device=ids.device)[None]
        angles = (self.rates[None, :, None].float() @ places[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cosine, sine = angles.cos(), angles.sin()
        mask = torch.full((length, length), torch.finfo(x.dtype).min)
        mask = torch.triu(mask, diagonal=1)[None, None]
        for block in self.blocks:
            x = block(x, cosine, sine, mask)
        return self.head(self.norm(x))


class SpeechLayer(nn.Module):
    def __init__(self, width: int, crossed: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 3, key_bias=False)
        self.crossed = crossed
        if crossed:
            self.cross_norm, self.cross = nn.LayerNorm(width), Attention(width, 3, key_bias=False)
        self.last_norm, self.perceptron = nn.LayerNorm(width), perceptron(width, nn.GELU())

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, mask)
        if self.crossed:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.perceptron(self.last_norm(x))


class WhisperEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(80, 192, 3, padding=1), nn.Conv1d(192, 192, 3, 2, 1)
        self.positions = nn.Parameter(0.3 * torch.randn(100, 192))
        self.layers = nn.Sequential(*(SpeechLayer(192, crossed=False) for _ in range(3)))
        self.norm = nn.LayerNorm(192)

    def forward(self, mel: Tensor) -> Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(mel))))
        return self.norm(self.layers(x.permute(0, 2, 1) + self.positions))


class WhisperDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(2000, 192), nn.Parameter(0.3 * torch.randn(64, 192))
        self.layers = nn.ModuleList(SpeechLayer(192, crossed=True) for _ in range(3))
        self.norm = nn.LayerNorm(192)
        self.register_buffer("mask", torch.full((64, 64), -1e9).triu_(1))

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        length = ids.shape[-1]
        x = self.words(ids) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, memory, self.mask[:length, :length])
        return self.norm(x) @ torch.transpose(self.words.weight, 0, 1)


class Tagger(nn.Module):
    """Two layers of LSTM, each in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 128)
        self.cells = nn.LSTM(128, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.log_softmax(self.head(self.cells(self.words(ids))[0]), -1)


def vit() -> nn.Module:
    return seeded(ViT, 5)


def swin() -> nn.Module:
    return seeded(Swin, 6)


def bert() -> nn.Module:
    return seeded(Bert, 7)


def gpt2() -> nn.Module:
    return seeded(GPT2, 8)


def llama() -> nn.Module:
    return seeded(Llama, 9)


def whisper_encoder() -> nn.Module:
    return seeded(WhisperEncoder, 10)


def whisper_decoder() -> nn.Module:
    return seeded(WhisperDecoder, 11)


def tagger() -> nn.Module:
    return seeded(Tagger, 12)
