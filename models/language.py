"""Train a small decoder on the pages of docs/, and write it with its samples: ``python models/language.py DIR``.

Writes DIR/language.onnx, and windows of text as DIR/data/language/calib and eval. Tokens are bytes. Needs torch. Two
runs on one machine give the same weights; training takes a few minutes on one core.
"""

# torch is not installed where the types are checked, so its Module is Any there
# mypy: allow-subclassing-any

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import torch  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn  # type: ignore[import-not-found,unused-ignore]

PAGES = Path(__file__).parents[1] / "docs"
TOKENS, WIDTH, HEADS, BLOCKS, LENGTH = 128, 128, 4, 2, 64
STEPS, BATCH, RATE = 600, 16, 4e-3
SAMPLES = 100
OPSET = 17
SEED = 2017

Tokens = npt.NDArray[np.int64]


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a normalization and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = state.shape
        heads = self.heads(self.first(state)).reshape(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
        state = state + self.joined((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        return state + self.narrow(torch.nn.functional.gelu(self.wide(self.second(state))))


class Decoder(nn.Module):
    """Gives logits of the next token at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        state = self.tokens(ids) + self.places.weight[:length]
        for block in self.blocks:
            state = block(state, self.mask[:length, :length])
        return self.head(self.last(state))


def windows(text: Tokens, count: int, generator: np.random.Generator) -> Tokens:
    """Return [count, LENGTH] tokens from random places of a text."""
    starts = generator.integers(0, len(text) - LENGTH, count)
    return np.stack([text[start : start + LENGTH] for start in starts])


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(SEED)
    generator = np.random.default_rng(SEED)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.rglob("*.md")))
    text = np.frombuffer(pages.encode("ascii", "ignore"), np.uint8).astype(np.int64)
    parts = {"train": text[: len(text) * 8 // 10]}
    parts["calib"], parts["eval"] = np.array_split(text[len(parts["train"]) :], 2)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for step in range(STEPS):
        ids = torch.from_numpy(windows(parts["train"], BATCH, generator))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: {loss.item():.2f} nats a byte", flush=True)
    for part in ("calib", "eval"):
        place = folder / "data" / "language" / part
        place.mkdir(parents=True, exist_ok=True)
        for index, ids in enumerate(windows(parts[part], SAMPLES, generator)):
            np.savez(place / f"{index:03}.npz", input_ids=ids[None])
    path = folder / "language.onnx"
    torch.onnx.export(
        model.eval(),
        (torch.zeros(1, LENGTH, dtype=torch.int64),),
        path,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_axes={"input_ids": {0: "batch"}, "logits": {0: "batch"}},
        opset_version=OPSET,
        dynamo=False,
    )
    onnx.checker.check_model(path, full_check=True)


if __name__ == "__main__":
    main()
