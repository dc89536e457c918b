"""Networks of speech, text and series, each as it is commonly written."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import math

import torch
from seeded import seeded, settled
from structured import sound, spectrogram
from torch import Tensor, nn
from torch.nn import functional
from transformers import Attention, RMSNorm, perceptron, rotated


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a gated depthwise convolution, half a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.first, self.second = perceptron(width, nn.SiLU()), perceptron(width, nn.SiLU())
        self.attention = Attention(width, 4)
        self.wide, self.narrow = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width, bias=False)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.attention(y, y)
        y = functional.glu(self.wide(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + self.narrow(functional.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)
        x = x + 0.5 * self.second(self.norms[3](x))
        return self.norms[4](x)


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)
        self.enter = nn.Linear(32 * 20, 128)
        self.blocks = nn.Sequential(ConformerBlock(128), ConformerBlock(128))
        self.head = nn.Linear(128, 64)

    def forward(self, mel: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(mel[:, None]))))
        batch, width, bands, frames = x.shape
        x = self.enter(x.permute(0, 3, 1, 2).reshape(batch, frames, width * bands))
        return torch.log_softmax(self.head(self.blocks(x)), -1)


class LoopedCells(nn.Module):
    """A cell that runs once a step in a loop of the graph's own, and what it has said so far."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(40, 96), nn.LSTMCell(96, 96), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[1], 96)
        state = torch.zeros(x.shape[1], 96)
        said = torch.zeros(0, x.shape[1], 24)
        for step in range(x.shape[0]):
            hidden, state = self.cell(torch.relu(self.enter(x[step])), (hidden, state))
            said = torch.cat([said, self.head(hidden)[None]])
        return said


class WaveNet(nn.Module):
    """Gated causal convolutions, each twice as far apart as the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 32, 1)
        self.apart = [1, 2, 4, 8, 16, 32]
        self.filters = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=apart) for apart in self.apart)
        self.residuals = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in self.apart)
        self.skips = nn.ModuleList(nn.Conv1d(32, 48, 1) for _ in self.apart)
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(48, 48, 1), nn.ReLU(), nn.Conv1d(48, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.enter(x[:, None]), torch.zeros(1)
        for apart, both, residual, skip in zip(self.apart, self.filters, self.residuals, self.skips, strict=True):
            signal, gate = both(functional.pad(x, (apart, 0))).chunk(2, 1)
            y = torch.tanh(signal) * torch.sigmoid(gate)
            x, skips = (x + residual(y)) * math.sqrt(0.5), skips + skip(y)
        return self.head(skips)


class SelectiveScan(nn.Module):
    """Mamba's block: a state that what comes in decides how fast to forget."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(2 * width, width),
        )
        self.short = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.select, self.rate = nn.Linear(2 * width, 12 + 2 * states), nn.Linear(12, 2 * width)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(2 * width, 1))
        self.direct = nn.Parameter(torch.ones(2 * width))
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        y = functional.silu(self.short(y.transpose(1, 2))[..., :length].transpose(1, 2))
        rate, into, out = torch.split(self.select(y), [12, self.states, self.states], -1)
        rate = functional.softplus(self.rate(rate) - 2.0)
        decay = torch.exp(rate[..., None] * -torch.exp(self.log_decay))
        added = (rate * y)[..., None] * into[:, :, None]
        state, seen = torch.zeros_like(added[:, 0]), []
        for step in range(length):
            state = decay[:, step] * state + added[:, step]
            seen.append((state * out[:, step, None]).sum(-1))
        y = torch.stack(seen, 1) + y * self.direct
        return x + self.leave(y * functional.silu(gate))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(1000, 96), nn.Sequential(SelectiveScan(96, 8), SelectiveScan(96, 8))
        self.norm = nn.LayerNorm(96)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.blocks(self.words(ids))) @ self.words.weight.t()


class Keywords(nn.Module):
    """Sound in, a spectrum by convolution, its logarithm, recurrent cells, one word out."""

    def __init__(self) -> None:
        super().__init__()
        when = torch.arange(256.0)
        angles = 2 * math.pi * torch.arange(129.0)[:, None] * when / 256
        window = torch.hann_window(256)
        self.register_buffer("waves", torch.cat([torch.cos(angles) * window, torch.sin(angles) * window])[:, None])
        bands = torch.clamp(1 - (torch.arange(129.0)[None] / 3.2 - torch.arange(40.0)[:, None]).abs(), min=0)
        self.register_buffer("bands", bands)
        self.norm, self.cells = nn.BatchNorm1d(40), nn.GRU(40, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, 12)

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = functional.conv1d(x[:, None], self.waves, stride=128).chunk(2, 1)
        energy = torch.log(self.bands @ (real**2 + imaginary**2) + 1e-5)
        return self.head(self.cells(self.norm(energy).transpose(1, 2))[0][:, -1])


class ProbSparseAttention(nn.Module):
    """Informer's attention: only the queries whose scores stand out are answered, the rest get the mean."""

    def __init__(self, width: int, heads: int, most: int) -> None:
        super().__init__()
        self.heads, self.most = heads, most
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("sampled", torch.randperm(48)[:16])

    def split(self, x: Tensor) -> Tensor:
        return x.view(1, x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        sampled = q @ k[:, :, self.sampled].transpose(-1, -2)
        stands_out = sampled.amax(-1) - sampled.mean(-1)
        top = torch.topk(stands_out, self.most)[1][..., None].expand(-1, -1, -1, q.shape[-1])
        scores = q.gather(2, top) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mean = v.mean(2, keepdim=True).expand(-1, -1, x.shape[1], -1)
        answered = mean.scatter(2, top, torch.softmax(scores, -1) @ v)
        return self.o(answered.transpose(1, 2).reshape(x.shape))


class Informer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(4, 96, 3, padding=1, padding_mode="circular")
        self.attentions = nn.ModuleList(ProbSparseAttention(96, 4, 20) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(4))
        self.perceptrons = nn.ModuleList(perceptron(96, nn.GELU()) for _ in range(2))
        self.head = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.transpose(1, 2)).transpose(1, 2)
        for layer, (attention, inner) in enumerate(zip(self.attentions, self.perceptrons, strict=True)):
            x = self.norms[2 * layer](x + attention(x))
            x = self.norms[2 * layer + 1](x + inner(x))
        return self.head(x)


class SoftCappedBlock(nn.Module):
    """Gemma's block: scores pass a tanh, every other layer sees a window, norms stand before and behind."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(4))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 384, bias=False),
            nn.Linear(width, 384, bias=False),
            nn.Linear(384, width, bias=False),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, x.shape[2] // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y, length = self.norms[0](x), x.shape[1]
        q, k, v = (
            rotated(self.split(self.q(y)), cosine, sine),
            rotated(self.split(self.k(y)), cosine, sine),
            self.split(self.v(y)),
        )
        scores = 50.0 * torch.tanh(2 * q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) / 50.0)
        apart = torch.arange(length)[:, None] - torch.arange(length)[None]
        scores = scores.masked_fill((apart < 0) | (apart >= self.window), -2.3819763e38)
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.norms[1](self.o(y))
        y = self.norms[2](x)
        return x + self.norms[3](self.down(functional.gelu(self.gate(y), approximate="tanh") * self.up(y)))


class SoftCapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1500, 128)
        self.blocks = nn.ModuleList(SoftCappedBlock(128, 4, window) for window in (8, 4096))
        self.norm = RMSNorm(128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) * math.sqrt(128)
        angles = torch.arange(ids.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 32, 2) / 32)
        angles = torch.cat([angles, angles], -1)[None, None]
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return 30.0 * torch.tanh(self.norm(x) @ self.words.weight.t() / 30.0)


class CachedAttention(nn.Module):
    """Rotated queries and keys, and the keys and values of what came before."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.width, bias=False) for _ in range(2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.width).transpose(1, 2)

    def forward(self, x: Tensor, past_keys: Tensor, past_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = past_keys.shape[2] + torch.arange(x.shape[1])
        angles = places[:, None] * 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        angles = torch.cat([angles, angles], -1)
        q = rotated(self.split(self.q(x), self.heads), angles.cos(), angles.sin())
        k = torch.cat([past_keys, rotated(self.split(self.k(x), self.groups), angles.cos(), angles.sin())], 2)
        v = torch.cat([past_values, self.split(self.v(x), self.groups)], 2)
        many = self.heads // self.groups
        scores = q @ k.repeat_interleave(many, 1).transpose(-1, -2) / math.sqrt(self.width)
        scores = scores.masked_fill(torch.arange(k.shape[2])[None] > places[:, None], float("-inf"))
        y = torch.softmax(scores, -1) @ v.repeat_interleave(many, 1)
        return self.o(y.transpose(1, 2).reshape(x.shape)), k, v


class Gated(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, wide, bias=False),
            nn.Linear(width, wide, bias=False),
            nn.Linear(wide, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class GatheredExperts(nn.Module):
    """Two experts a word, whose weights are taken out of stacked ones."""

    def __init__(self, width: int, wide: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, wide) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, wide, width) / math.sqrt(wide))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chances, experts = torch.topk(torch.softmax(2 * self.router(rows), -1), 2)
        chances = chances / chances.sum(-1, keepdim=True)
        y = torch.einsum("nd,nkdw->nkw", rows, self.up[experts])
        y = torch.einsum("nkw,nkwd->nkd", functional.gelu(y), self.down[experts])
        return (chances[..., None] * y).sum(1).view(x.shape)


class RoutedExperts(nn.Module):
    """Two experts a word, each given the rows that chose it."""

    def __init__(self, width: int, wide: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Gated(width, wide) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chances, chosen = torch.topk(torch.softmax(2 * self.router(rows), -1), 2)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, choice = torch.nonzero(chosen == number, as_tuple=True)
            found = found.index_add(0, row, expert(rows[row]) * chances[row, choice][:, None])
        return found.view(x.shape)


class CachedDecoder(nn.Module):
    def __init__(self, inner: type[nn.Module], *sizes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(1500, 128)
        self.attentions = nn.ModuleList(CachedAttention(128, 4, 2) for _ in range(2))
        self.inner = nn.ModuleList(inner(128, *sizes) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(128) for _ in range(5))
        self.head = nn.Linear(128, 1500, bias=False)

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, all_keys, all_values = self.words(ids), [], []
        for layer, (attention, inner) in enumerate(zip(self.attentions, self.inner, strict=True)):
            y, new_keys, new_values = attention(self.norms[2 * layer](x), keys[:, layer], values[:, layer])
            all_keys.append(new_keys)
            all_values.append(new_values)
            x = x + y
            x = x + inner(self.norms[2 * layer + 1](x))
        return self.head(self.norms[-1](x)), torch.stack(all_keys, 1), torch.stack(all_values, 1)


class Perceiver(nn.Module):
    """A few learned rows ask a long sequence, then each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(262, 96), nn.Parameter(0.3 * torch.randn(256, 96))
        self.latents = nn.Parameter(torch.randn(1, 16, 96))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(6))
        self.asking, self.attention = Attention(96, 4), Attention(96, 4)
        self.perceptrons = nn.ModuleList(perceptron(96, nn.GELU()) for _ in range(2))
        self.head = nn.Linear(96, 20)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.norms[0](self.words(ids) + self.places)
        x = self.latents.expand(ids.shape[0], -1, -1)
        x = x + self.asking(self.norms[1](x), memory)
        x = x + self.perceptrons[0](self.norms[2](x))
        y = self.norms[3](x)
        x = x + self.attention(y, y)
        x = x + self.perceptrons[1](self.norms[4](x))
        return self.head(self.norms[5](x).mean(1))


class Retention(nn.Module):
    """Products whose weights fade with distance, with no Softmax: RetNet's parallel form."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.gate, self.o = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.norm, self.scale = nn.LayerNorm(width), nn.GroupNorm(heads, width)
        self.register_buffer("fade", torch.log(1 - 2.0 ** (-2 - torch.arange(heads).float()))[:, None, None])

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, length = self.norm(x), x.shape[1]
        apart = (torch.arange(length)[:, None] - torch.arange(length)[None]).float()
        weights = torch.exp(torch.clamp(apart, min=0.0) * self.fade) * (apart >= 0)
        scores = self.split(self.q(y)) @ self.split(self.k(y)).transpose(-1, -2) * weights / math.sqrt(length)
        z = (scores @ self.split(self.v(y))).transpose(1, 2).reshape(-1, x.shape[2])
        return x + self.o(self.scale(z).view(x.shape) * functional.silu(self.gate(y)))


class RetNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(1000, 128), nn.Sequential(Retention(128, 4), Retention(128, 4))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 1000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(ids))))


class NBeats(nn.Module):
    """Perceptrons that each explain a part of a series and hand on the rest, the series scaled to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()) for _ in range(3)
        )
        self.back, self.ahead = (nn.ModuleList(nn.Linear(256, wide) for _ in range(3)) for wide in (96, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        mean = x.mean(-1, keepdim=True)
        deviation = torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        rest, forecast = (x - mean) / deviation, 0.0
        for stem, back, ahead in zip(self.stems, self.back, self.ahead, strict=True):
            y = stem(rest)
            rest, forecast = rest - back(y), forecast + ahead(y)
        return (forecast * deviation + mean).transpose(1, 2)


def conformer() -> nn.Module:
    return settled(seeded(Conformer, 41), spectrogram(80, 160))


def looped_cells() -> nn.Module:
    return seeded(LoopedCells, 42)


def wavenet() -> nn.Module:
    return seeded(WaveNet, 43)


def mamba() -> nn.Module:
    return seeded(Mamba, 44)


def keywords() -> nn.Module:
    return settled(seeded(Keywords, 45), sound(8192))


def informer() -> nn.Module:
    return seeded(Informer, 46)


def soft_capped() -> nn.Module:
    return seeded(SoftCapped, 47)


def cached_decoder() -> nn.Module:
    return seeded(lambda: CachedDecoder(Gated, 384), 48)


def gathered_experts() -> nn.Module:
    return seeded(lambda: CachedDecoder(GatheredExperts, 256, 8), 49)


def routed_experts() -> nn.Module:
    return seeded(lambda: CachedDecoder(RoutedExperts, 256, 4), 50)


def perceiver() -> nn.Module:
    return seeded(Perceiver, 51)


def retnet() -> nn.Module:
    return seeded(RetNet, 52)


def nbeats() -> nn.Module:
    return seeded(NBeats, 53)
