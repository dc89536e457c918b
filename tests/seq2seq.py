"""An encoder and a decoder with a past, of a few lines of PyTorch, exported as transformers.js wants them."""

from __future__ import annotations

import json
from pathlib import Path

WORDS, WIDTH, HEADS = 128, 32, 2
CONFIG = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "num_heads": HEADS,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def export_pair(folder: Path) -> None:
    """Write ``config.json``, ``onnx/encoder_model.onnx`` and ``onnx/decoder_model_merged.onnx`` into a folder."""
    import torch
    from torch import Tensor, nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.words(input_ids) * attention_mask[..., None]
            return x + self.narrow(torch.relu(self.wide(x)))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.query, self.key, self.value, self.cross = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.logits = nn.Linear(WIDTH, WORDS)

        def heads(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)

        def forward(
            self, encoder_attention_mask: Tensor, input_ids: Tensor, context: Tensor, key: Tensor, value: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            x = self.words(input_ids)
            keys = torch.cat([key, self.heads(self.key(x))], 2)
            values = torch.cat([value, self.heads(self.value(x))], 2)
            scores = self.heads(self.query(x)) @ keys.transpose(2, 3)
            places = torch.arange(keys.shape[2])
            later = places[None, :] > places[key.shape[2] :][:, None]
            seen = torch.softmax(scores.masked_fill(later, -1e4), -1) @ values
            x = x + seen.transpose(1, 2).reshape(x.shape)
            scores = self.cross(x) @ context.transpose(1, 2)
            scores = scores.masked_fill(encoder_attention_mask[:, None, :] == 0, -1e4)
            return self.logits(x + torch.softmax(scores, -1) @ context), keys, values

    torch.manual_seed(0)
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    ids, mask = torch.ones((1, 4), dtype=torch.int64), torch.ones((1, 4), dtype=torch.int64)
    past, context = torch.zeros((1, HEADS, 3, WIDTH // HEADS)), torch.zeros((1, 4, WIDTH))
    torch.onnx.export(
        Encoder().eval(),
        (ids, mask),
        folder / "onnx" / "encoder_model.onnx",
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch_size", 1: "length"} for name in ("input_ids", "attention_mask")},
        dynamo=False,
    )
    pasts = ["0.decoder.key", "0.decoder.value"]
    axes = {f"past_key_values.{name}": {0: "batch_size", 2: "past_length"} for name in pasts}
    axes |= {f"present.{name}": {0: "batch_size", 2: "all_length"} for name in pasts}
    axes |= {name: {0: "batch_size", 1: "length"} for name in ("encoder_attention_mask", "encoder_hidden_states")}
    axes |= {name: {0: "batch_size", 1: "steps"} for name in ("input_ids", "logits")}
    torch.onnx.export(
        Decoder().eval(),
        (mask, ids[:, :2], context, past, past),
        folder / "onnx" / "decoder_model_merged.onnx",
        input_names=["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
        + [f"past_key_values.{name}" for name in pasts],
        output_names=["logits", *(f"present.{name}" for name in pasts)],
        dynamic_axes=axes,
        dynamo=False,
    )
