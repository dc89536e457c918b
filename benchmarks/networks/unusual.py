"""Networks that branch, loop, sort, round, share weights or compute in other types."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import math

import torch
from images import convolution
from seeded import seeded, settled
from structured import photograph
from torch import Tensor, nn
from torch.nn import functional
from transformers import Attention, perceptron


class EarlyExit(nn.Module):
    """A second part runs only where the first one is not sure."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(convolution(3, 32, 3, 2), convolution(32, 64, 3, 2))
        self.second = nn.Sequential(convolution(64, 96, 3, 2), convolution(96, 96))
        self.early, self.late = nn.Linear(64, 20), nn.Linear(96, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores = self.early(x.mean((2, 3)))
        if bool(torch.softmax(scores, -1).max() < 0.35):
            scores = self.late(self.second(x).mean((2, 3)))
        return scores


class GreedyDecoder(nn.Module):
    """Words are chosen one by one in a loop that ends at the word that ends a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(400, 96), nn.Embedding(400, 96)
        self.read, self.gates, self.new = nn.Linear(96, 96), nn.Linear(288, 192), nn.Linear(288, 96)
        self.head = nn.Linear(96, 400)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        memory = torch.tanh(self.read(self.source(ids)))
        hidden, word = memory.mean(1), ids[:, -1]
        words, scores = word[:, None], torch.zeros(1, 0, 400)
        step, going = 0, True
        while going:
            weights = torch.softmax((memory @ hidden[:, :, None])[:, :, 0], -1)
            seen = (weights[:, :, None] * memory).sum(1)
            message = torch.cat([self.target(word), seen], -1)
            update, reset = torch.sigmoid(self.gates(torch.cat([message, hidden], -1))).chunk(2, -1)
            new = torch.tanh(self.new(torch.cat([message, reset * hidden], -1)))
            hidden = update * hidden + (1 - update) * new
            now = self.head(hidden)
            word = now.argmax(-1)
            words, scores = torch.cat([words, word[:, None]], 1), torch.cat([scores, now[:, None]], 1)
            step += 1
            going = bool(step < 12) and bool(word.max() > 20)
        return scores, words


class Sparsemax(nn.Module):
    """Weights that are zero from some place on, by sorting and adding up."""

    def forward(self, x: Tensor) -> Tensor:
        ordered = torch.sort(x, dim=-1, descending=True)[0]
        sums = torch.cumsum(ordered, -1) - 1
        count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        inside = (count * ordered > sums).to(x.dtype)
        size = inside.sum(-1, keepdim=True)
        threshold = sums.gather(-1, size.long() - 1) / size
        return torch.clamp(x - threshold, min=0)


class TabNet(nn.Module):
    """Features of a row are chosen by sparse weights, step by step, and split by gated products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.sparsemax = nn.BatchNorm1d(40), Sparsemax()
        self.shared = nn.Linear(40, 128)
        self.steps = nn.ModuleList(nn.Linear(64, 128) for _ in range(3))
        self.choose = nn.ModuleList(nn.Linear(32, 40) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        chosen, prior, total = torch.zeros_like(x[:, :32]), torch.ones_like(x), 0.0
        for step, choose in zip(self.steps, self.choose, strict=True):
            mask = self.sparsemax(choose(chosen) * prior)
            prior = prior * (1.3 - mask)
            y = functional.glu(step(functional.glu(self.shared(mask * x))))
            total, chosen = total + torch.relu(y[:, :32]), y[:, 32:]
        return self.head(total)


class TriangleBlock(nn.Module):
    """AlphaFold's update of pairs: outgoing edges multiplied, then attention along rows with the pairs as bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.left, self.right, self.gates, self.out = (nn.Linear(width, width) for _ in range(4))
        self.qkv, self.bias, self.o = nn.Linear(width, 3 * width), nn.Linear(width, 4), nn.Linear(width, width)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.norms[0](pairs)
        left, right = torch.sigmoid(self.left(x)) * x, torch.sigmoid(self.right(x)) * x
        y = torch.einsum("bikc,bjkc->bijc", left, right)
        pairs = pairs + torch.sigmoid(self.gates(x)) * self.out(self.norms[1](y))
        x = self.norms[2](pairs)
        batch, rows, columns, width = x.shape
        q, k, v = self.qkv(x).view(batch, rows, columns, 3, 4, width // 4).unbind(3)
        scores = torch.einsum("bihc,bjhc->bhij", q[:, 0], k[:, 0]) * 0.0
        scores = torch.einsum("brihc,brjhc->brhij", q, k) / math.sqrt(width // 4) + scores[:, None]
        scores = scores + self.bias(x).permute(0, 3, 1, 2)[:, None]
        y = torch.einsum("brhij,brjhc->brihc", torch.softmax(scores, -1), v)
        return pairs + self.o(y.reshape(batch, rows, columns, width))


class Evoformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.apart = nn.Embedding(21, 64), nn.Embedding(33, 64)
        self.blocks, self.head = nn.Sequential(TriangleBlock(64), TriangleBlock(64)), nn.Linear(64, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.words(ids), torch.arange(ids.shape[1])
        apart = torch.clamp(places[:, None] - places[None], -16, 16) + 16
        pairs = x[:, :, None] + x[:, None] + self.apart(apart)
        y = self.head(self.blocks(pairs))
        return (y + y.transpose(1, 2)) / 2


class NeuralODE(nn.Module):
    """A field of velocities, followed by Runge-Kutta steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(17, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))

    def velocity(self, x: Tensor, time: float) -> Tensor:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], time)], -1))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for step in range(4):
            t = step * h
            a = self.velocity(x, t)
            b = self.velocity(x + h / 2 * a, t + h / 2)
            c = self.velocity(x + h / 2 * b, t + h / 2)
            d = self.velocity(x + h * c, t + h)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x


class StyleTransfer(nn.Module):
    """Reflected borders and instance norms, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*self.layer(3, 24, 9, 1), *self.layer(24, 48, 3, 2), *self.layer(48, 64, 3, 2))
        self.blocks = nn.ModuleList(
            nn.Sequential(*self.layer(64, 64, 3, 1), *self.layer(64, 64, 3, 1)[:-1]) for _ in range(2)
        )
        self.up = nn.ModuleList([nn.Sequential(*self.layer(64, 48, 3, 1)), nn.Sequential(*self.layer(48, 24, 3, 1))])
        self.head = nn.Sequential(nn.ReflectionPad2d(4), nn.Conv2d(24, 3, 9))

    @staticmethod
    def layer(inner: int, outer: int, kernel: int, stride: int) -> list[nn.Module]:
        filtered = nn.Conv2d(inner, outer, kernel, stride)
        return [nn.ReflectionPad2d(kernel // 2), filtered, nn.InstanceNorm2d(outer, affine=True), nn.ReLU()]

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for block in self.blocks:
            x = x + block(x)
        for layer in self.up:
            x = layer(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return torch.sigmoid(self.head(x))


class Pyramid(nn.Module):
    """DeepLab's head: the same features filtered at several distances, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(convolution(3, 32, 3, 2), convolution(32, 64, 3, 2))
        self.branches = nn.ModuleList(
            nn.Conv2d(64, 32, 3, padding=apart, dilation=apart, groups=groups)
            for apart, groups in ((1, 1), (3, 1), (6, 32))
        )
        self.whole, self.mix, self.head = nn.Conv2d(64, 32, 1), convolution(128, 64, 1), nn.Conv2d(64, 8, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.trunk(image)
        whole = self.whole(functional.adaptive_avg_pool2d(x, 1))
        whole = functional.interpolate(whole, size=x.shape[2:], mode="bilinear", align_corners=False)
        x = self.head(self.mix(torch.cat([*(branch(x) for branch in self.branches), whole], 1)))
        return functional.interpolate(x, size=image.shape[2:], mode="bilinear", align_corners=False)


class ShuffleUnit(nn.Module):
    """Half the channels pass by, then both halves are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.parts = nn.Sequential(
            convolution(half, half, 1),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            convolution(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        x = torch.cat([first, self.parts(second)], 1)
        batch, width, height, across = x.shape
        return x.view(batch, 2, width // 2, height, across).transpose(1, 2).reshape(batch, width, height, across)


class ShuffleNet(nn.Module):
    """Units that shuffle, behind a response norm and pools that overlap, before Sigmoid answers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True)
        )
        self.units = nn.Sequential(ShuffleUnit(64), ShuffleUnit(64), nn.AvgPool2d(2, ceil_mode=True), ShuffleUnit(64))
        self.head = nn.Linear(64, 30)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.head(self.units(self.stem(x)).mean((2, 3))))


class Binary(nn.Module):
    """Activations that are -1 or 1 between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = (
            convolution(3, 48, 3, 2),
            nn.ModuleList(nn.Conv2d(48, 48, 3, padding=1) for _ in range(3)),
        )
        self.norms, self.head = nn.ModuleList(nn.BatchNorm2d(48) for _ in range(3)), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(torch.where(x > 0.3, 1.0, -1.0)))
        return self.head(x.mean((2, 3)))


class Capsules(nn.Module):
    """Vectors that vote for vectors, by agreement in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 64, 9, 2), nn.ReLU(), nn.Conv2d(64, 64, 5, 3))
        self.votes = nn.Parameter(torch.randn(1, 72, 10, 12, 8) / 3)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = x.pow(2).sum(-1, keepdim=True)
        return square / (1 + square) * x / torch.sqrt(square + 1e-8)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.squash(self.trunk(image).view(image.shape[0], -1, 8))
        votes = (self.votes @ x[:, :, None, :, None])[..., 0]
        agreed = torch.zeros_like(votes[..., :1])
        for _ in range(3):
            found = self.squash((torch.softmax(agreed, 2) * votes).sum(1, keepdim=True))
            agreed = agreed + (votes * found).sum(-1, keepdim=True)
        return found[:, 0].norm(dim=-1), found[:, 0]


class RelativeAttention(nn.Module):
    """Transformer-XL: scores by distance are shifted into place by a pad and a new shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.places, self.o = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.content, self.position = (nn.Parameter(0.2 * torch.randn(heads, 1, width // heads)) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v, r = (
            self.split(self.q(x)),
            self.split(self.k(x)),
            self.split(self.v(x)),
            self.split(self.places(distances)),
        )
        by_place = (q + self.position) @ r.transpose(-1, -2)
        by_place = functional.pad(by_place, (1, 0)).view(1, self.heads, length + 1, length)[:, :, 1:]
        scores = (
            (q + self.content) @ k.transpose(-1, -2) + by_place.reshape(1, self.heads, length, length)
        ) / math.sqrt(k.shape[-1])
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        y = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape))


class TransformerXL(nn.Module):
    """Both layers share all weights, and the words are read and written by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(1200, 128), RelativeAttention(128, 4)
        self.inner, self.first, self.second = perceptron(128, nn.ReLU()), nn.LayerNorm(128), nn.LayerNorm(128)
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, 128, 2) / 128))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        angles = torch.arange(ids.shape[1] - 1, -1, -1).float()[:, None] * self.rates
        distances = torch.cat([angles.sin(), angles.cos()], -1)[None]
        for _ in range(2):
            x = self.first(x + self.attention(x, distances))
            x = self.second(x + self.inner(x))
        return functional.linear(x, self.words.weight)


class SlotAttention(nn.Module):
    """Slots compete for places and are updated by a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(convolution(3, 32, 5, 2), convolution(32, 64, 5, 2))
        self.slots, self.places = nn.Parameter(torch.randn(1, 5, 64)), nn.Parameter(0.3 * torch.randn(1, 144, 64))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.cell, self.inner = nn.GRUCell(64, 64), perceptron(64, nn.ReLU())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norms[0](self.trunk(image).flatten(2).transpose(1, 2) + self.places)
        k, v, slots = self.k(x), self.v(x), self.slots
        for _ in range(3):
            weights = torch.softmax(self.q(self.norms[1](slots)) @ k.transpose(1, 2) / 8, 1) + 1e-8
            seen = weights / weights.sum(-1, keepdim=True) @ v
            slots = self.cell(seen.reshape(-1, 64), slots.reshape(-1, 64)).view(1, 5, 64)
            slots = slots + self.inner(self.norms[2](slots))
        return slots, weights


class Matcher(nn.Module):
    """Points of two sets find each other: attention within and across, then Sinkhorn's rounds of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(34, 64), nn.ReLU(), nn.Linear(64, 96))
        self.attentions, self.inner = nn.ModuleList(Attention(96, 4) for _ in range(2)), nn.Linear(192, 96)
        self.bin = nn.Parameter(torch.tensor(1.0))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.enter(first), self.enter(second)
        a, b = a + self.attentions[0](a, a), b + self.attentions[0](b, b)
        a, b = (
            a + self.inner(torch.cat([a, self.attentions[1](a, b)], -1)),
            b + self.inner(torch.cat([b, self.attentions[1](b, a)], -1)),
        )
        scores = a @ b.transpose(1, 2) / math.sqrt(96)
        scores = (
            functional.pad(scores, (0, 1, 0, 1))
            + functional.pad(torch.zeros_like(scores), (0, 1, 0, 1), value=1.0) * self.bin
        )
        rows, columns = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[:, :1])
        for _ in range(8):
            rows = -torch.logsumexp(scores + columns, 2, keepdim=True)
            columns = -torch.logsumexp(scores + rows, 1, keepdim=True)
        return scores + rows + columns


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3000, 64, padding_idx=0)
        self.filters = nn.ModuleList(nn.Conv1d(64, 64, wide) for wide in (2, 3, 4, 5))
        self.head = nn.Linear(256, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        seen = [torch.relu(filtered(x)).max(-1)[0] for filtered in self.filters]
        return torch.softmax(self.head(torch.cat(seen, 1)), -1)


class Autoencoder(nn.Module):
    """What comes in is written by the transposed weights that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 128), nn.Linear(128, 24)
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(128)), nn.Parameter(torch.zeros(256))])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.second(functional.selu(self.first(x)))
        y = functional.selu(functional.linear(code, self.second.weight.t(), self.biases[0]))
        return functional.linear(y, self.first.weight.t(), self.biases[1]), code


class HalfPrecision(nn.Module):
    """Computes in float16 between float32 images and float32 scores, norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.GELU(), nn.Conv2d(64, 96, 3, padding=1))
        self.norm, self.attention, self.inner = nn.LayerNorm(96), Attention(96, 4), perceptron(96, nn.GELU())
        self.head = nn.Linear(96, 20)

    def forward(self, image: Tensor) -> Tensor:
        x = self.trunk(image.half()).flatten(2).transpose(1, 2)
        y = self.norm(x.float()).half()
        x = x + self.attention(y, y)
        x = x + self.inner(self.norm(x.float()).half())
        return self.head(x.mean(1)).float()


class Orbit(nn.Module):
    """Computes in float64 throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 128), nn.Softplus(), nn.Linear(128, 128), nn.Softplus(), nn.Linear(128, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        radius = torch.sqrt((x[:, :3] ** 2).sum(-1, keepdim=True) + 1e-6)
        return self.layers(torch.cat([x[:, :3] / radius, x[:, 3:]], -1)) / radius**2


class WindowedPooling(nn.Module):
    """Text of different lengths in a batch: what lies behind the end is neither seen nor counted."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(1000, 64), nn.GRU(64, 64, batch_first=True, bidirectional=True)
        self.weigh, self.head = nn.Linear(128, 1), nn.Linear(128, 12)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.cells(self.words(ids))[0]
        weights = self.weigh(x)[..., 0].masked_fill(mask == 0, torch.finfo(torch.float32).min)
        return self.head((torch.softmax(weights, 1)[..., None] * x).sum(1))


def early_exit() -> nn.Module:
    return settled(seeded(EarlyExit, 81), photograph(3, 64), runs=32, batch=1)


def greedy_decoder() -> nn.Module:
    return seeded(GreedyDecoder, 82)


def tabnet() -> nn.Module:
    return seeded(TabNet, 83)


def evoformer() -> nn.Module:
    return seeded(Evoformer, 84)


def neural_ode() -> nn.Module:
    return seeded(NeuralODE, 85)


def style_transfer() -> nn.Module:
    return seeded(StyleTransfer, 86)


def pyramid() -> nn.Module:
    return settled(seeded(Pyramid, 87), photograph(3, 64))


def shufflenet() -> nn.Module:
    return settled(seeded(ShuffleNet, 88), photograph(3, 64))


def binary() -> nn.Module:
    return settled(seeded(Binary, 89), photograph(3, 48))


def capsules() -> nn.Module:
    return seeded(Capsules, 90)


def transformer_xl() -> nn.Module:
    return seeded(TransformerXL, 91)


def slot_attention() -> nn.Module:
    return settled(seeded(SlotAttention, 92), photograph(3, 48), runs=16, batch=1)


def matcher() -> nn.Module:
    return seeded(Matcher, 93)


def text_cnn() -> nn.Module:
    return seeded(TextCNN, 94)


def autoencoder() -> nn.Module:
    return seeded(Autoencoder, 95)


def half_precision() -> nn.Module:
    module = seeded(HalfPrecision, 96).half()
    module.norm.float()
    return module


def orbit() -> nn.Module:
    return seeded(Orbit, 97).double()


def windowed_pooling() -> nn.Module:
    return seeded(WindowedPooling, 98)
