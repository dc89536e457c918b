"""Networks of points, graphs, tables and coordinates, each as it is commonly written."""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import math
from itertools import pairwise

import torch
from seeded import seeded, settled
from structured import surface
from torch import Tensor, nn
from torch.nn import functional


class EdgeConvolution(nn.Module):
    """Each point and what its nearest neighbours are away from it, by features: DGCNN."""

    def __init__(self, inner: int, outer: int, near: int) -> None:
        super().__init__()
        self.near = near
        self.filter = nn.Sequential(
            nn.Conv2d(2 * inner, outer, 1, bias=False), nn.BatchNorm2d(outer), nn.LeakyReLU(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, width, points = x.shape
        squares = x.pow(2).sum(1, keepdim=True)
        closeness = 2 * x.transpose(1, 2) @ x - squares - squares.transpose(1, 2)
        nearest = torch.topk(closeness, self.near)[1].view(batch, 1, -1).expand(-1, width, -1)
        around = x.gather(2, nearest).view(batch, width, points, self.near)
        centre = x[..., None].expand(-1, -1, -1, self.near)
        return self.filter(torch.cat([around - centre, centre], 1)).amax(-1)


class DGCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [EdgeConvolution(3, 32, 12), EdgeConvolution(32, 48, 12), EdgeConvolution(48, 64, 12)]
        )
        self.last = nn.Sequential(nn.Conv1d(144, 192, 1, bias=False), nn.BatchNorm1d(192), nn.LeakyReLU(0.2))
        self.head = nn.Linear(384, 40)

    def forward(self, points: Tensor) -> Tensor:
        x, seen = points.transpose(1, 2), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        x = self.last(torch.cat(seen, 1))
        return self.head(torch.cat([x.amax(-1), x.mean(-1)], 1))


def _layers(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        parts += [nn.Conv2d(inner, outer, 1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*parts)


class PointNet2(nn.Module):
    """Points far from each other are chosen one after the other, and each sees those around it."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.wide, self.head = _layers(3, 48, 64, 96), _layers(99, 128, 256), nn.Linear(256, 40)

    def forward(self, points: Tensor) -> Tensor:
        batch, count, _ = points.shape
        apart, farthest, chosen = torch.full((batch, count), 1e10), torch.zeros(batch, 1, dtype=torch.long), []
        for _ in range(32):
            chosen.append(farthest)
            centre = points.gather(1, farthest[..., None].expand(-1, -1, 3))
            apart = torch.minimum(apart, (points - centre).pow(2).sum(-1))
            farthest = apart.argmax(-1, keepdim=True)
        centres = points.gather(1, torch.cat(chosen, 1)[..., None].expand(-1, -1, 3))
        distance = (centres[:, :, None] - points[:, None]).pow(2).sum(-1)
        nearest = torch.topk(distance, 16, largest=False)[1]
        around = points.gather(1, nearest.view(batch, -1, 1).expand(-1, -1, 3)).view(batch, 32, 16, 3)
        x = self.local((around - centres[:, :, None]).permute(0, 3, 1, 2)).amax(-1)
        x = self.wide(torch.cat([centres.transpose(1, 2), x], 1)[..., None]).amax((2, 3))
        return self.head(x)


class GraphAttention(nn.Module):
    def __init__(self, inner: int, outer: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Linear(inner, heads * outer, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(1, heads, 1, outer) / math.sqrt(outer)) for _ in range(2))

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        y = self.enter(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
        source, target = (y * self.source).sum(-1), (y * self.target).sum(-1)
        scores = functional.leaky_relu(source[..., None] + target[:, :, None], 0.2)
        scores = torch.where(graph[:, None] > 0, scores, torch.tensor(-9e15))
        return (torch.softmax(scores, -1) @ y).transpose(1, 2).flatten(2)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphAttention(64, 32, 6), GraphAttention(192, 16, 6)
        self.head = nn.Linear(96, 16)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        x = functional.elu(self.first(x, graph))
        return torch.log_softmax(self.head(functional.elu(self.second(x, graph))), -1)


class MessagePassing(nn.Module):
    """Messages along edges, added up and the largest taken at the node they reach."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(32, 96)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(192, 128), nn.ReLU(), nn.Linear(128, 96)) for _ in range(2)
        )
        self.updates = nn.ModuleList(nn.Linear(288, 96) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(2))
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edges[0], edges[1]
        x = torch.relu(self.enter(x))
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = torch.relu(message(torch.cat([x[source], x[target]], -1)))
            places = target[:, None].expand(-1, 96)
            total = torch.zeros_like(x).scatter_add(0, places, sent)
            count = torch.zeros_like(x).scatter_add(0, places, torch.ones_like(sent))
            mean = total / torch.clamp(count, min=1.0)
            x = norm(x + update(torch.cat([x, mean, torch.sqrt(mean + 1e-3)], -1)))
        return self.head(x), self.head(x.mean(0, keepdim=True))


class Recommender(nn.Module):
    """DLRM: tables of what is bought by whom, compared pair by pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 16) for size in (30000, 8000, 500, 24))
        self.dense = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(26, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))
        rows, columns = torch.tril_indices(5, 5, -1)
        self.register_buffer("pairs", rows * 5 + columns)

    def forward(self, dense: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        x = self.dense(dense)
        rows = torch.stack([x, *(table(ids) for table, ids in zip(self.tables, (a, b, c, d), strict=True))], 1)
        compared = (rows @ rows.transpose(1, 2)).flatten(1)[:, self.pairs]
        return torch.sigmoid(self.head(torch.cat([x, compared], 1)) / 4)


class DeepInterest(nn.Module):
    """What was bought before is weighed by what is offered; single weights of items are a table of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.single, self.shops = nn.Embedding(20000, 24), nn.Embedding(20000, 1), nn.Embedding(40, 8)
        self.weigh = nn.Sequential(nn.Linear(96, 48), nn.PReLU(), nn.Linear(48, 1))
        self.head = nn.Sequential(nn.Linear(56, 128), nn.PReLU(), nn.Linear(128, 1))

    def forward(self, history: Tensor, offered: Tensor, shop: Tensor) -> Tensor:
        past, now = self.items(history), self.items(offered)
        both = now[:, None].expand_as(past)
        weights = torch.sigmoid(self.weigh(torch.cat([past, both, past - both, past * both], -1)))
        seen = (weights * past * (history > 0)[..., None]).sum(1)
        x = self.head(torch.cat([seen, now, self.shops(shop)], -1))
        return torch.sigmoid(x + self.single(offered) + self.single(history).mean(1))


class Siren(nn.Module):
    """An image as a function of places, made of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 if not layer else 192, 192) for layer in range(4))
        self.head = nn.Linear(192, 3)

    def forward(self, places: Tensor) -> Tensor:
        x = places
        for layer in self.layers:
            x = torch.sin(30.0 * layer(x))
        return self.head(x)


class NeRF(nn.Module):
    """Density and colour of points seen from a direction, both as sines of many frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", math.pi * 2.0 ** torch.arange(6))
        self.first = nn.Sequential(nn.Linear(39, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(167, 128), nn.ReLU(), nn.Linear(128, 129))
        self.colour = nn.Sequential(nn.Linear(128 + 39, 64), nn.ReLU(), nn.Linear(64, 3), nn.Sigmoid())

    def waves(self, x: Tensor) -> Tensor:
        angles = (x[..., None] * self.rates).flatten(-2)
        return torch.cat([x, torch.sin(angles), torch.cos(angles)], -1)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        place, direction = self.waves(rows[:, :3]), self.waves(rows[:, 3:])
        x = self.second(torch.cat([self.first(place), place], -1))
        return self.colour(torch.cat([x[:, 1:], direction], -1)), functional.softplus(x[:, :1])


class HashGrid(nn.Module):
    """Features at the corners of grids of several sizes, found by a hash and mixed by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16384, 2) for _ in range(4))
        self.sizes = [16, 32, 64, 128]
        self.head = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, places: Tensor) -> Tensor:
        unit, found = (places + 1) / 2, []
        for table, size in zip(self.tables, self.sizes, strict=True):
            scaled = unit * size
            cell = torch.floor(scaled)
            rest, whole = scaled - cell, cell.long()
            mixed = torch.zeros_like(scaled)
            for row in (0, 1):
                for column in (0, 1):
                    hashed = ((whole[:, 0] + row) * 7919 + (whole[:, 1] + column) * 104729) % 16384
                    share = (rest[:, 0] if row else 1 - rest[:, 0]) * (rest[:, 1] if column else 1 - rest[:, 1])
                    mixed = mixed + share[:, None] * table(hashed)
            found.append(mixed)
        return torch.sigmoid(self.head(torch.cat(found, -1)))


def dgcnn() -> nn.Module:
    return settled(seeded(DGCNN, 61), surface(128))


def pointnet2() -> nn.Module:
    return settled(seeded(PointNet2, 62), surface(256))


def gat() -> nn.Module:
    return seeded(GAT, 63)


def message_passing() -> nn.Module:
    return seeded(MessagePassing, 64)


def recommender() -> nn.Module:
    return seeded(Recommender, 65)


def deep_interest() -> nn.Module:
    return seeded(DeepInterest, 66)


def siren() -> nn.Module:
    """Make the network with the weights that its authors give it."""
    module = seeded(Siren, 67)
    with torch.no_grad():
        for number, layer in enumerate(module.layers):
            nn.init.uniform_(
                layer.weight, *((-1, 1) if not number else (-math.sqrt(6 / 192) / 30, math.sqrt(6 / 192) / 30))
            )
        module.layers[0].weight /= 2
    return module


def nerf() -> nn.Module:
    return seeded(NeRF, 68)


def hash_grid() -> nn.Module:
    return seeded(HashGrid, 69)
