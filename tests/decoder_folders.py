"""A folder as onnxruntime-genai's builder makes it, with a decoder of one layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from conftest import Build

from onnxq import save
from onnxq.ir import read_model
from onnxq.pipeline.folders import GENAI_CONFIG

VOCABULARY, HEAD = 64, 4


def put_decoder(place: Path, build: Build, head: int | str = HEAD) -> None:
    """Make the folder, with configuration, model, external data and tokenizer; `head` is a size or a name."""
    past, present = f"float[batch,2,past,{head}]", f"float[batch,2,total,{head}]"
    model = build(
        f"(int64[batch,sequence] input_ids, int64[batch,total] attention_mask, {past} past_0_key, "
        f"{past} past_0_value) => (float[batch,sequence,64] logits, {present} present_0_key, "
        f"""{present} present_0_value) {{
            embedded = Gather(table, input_ids)
            heads = MatMul(embedded, keys)
            split = Reshape(heads, shape)
            turned = Transpose<perm = [0, 2, 1, 3]>(split)
            present_0_key = Concat<axis = 2>(past_0_key, turned)
            present_0_value = Concat<axis = 2>(past_0_value, turned)
            floats = Cast<to = 1>(attention_mask)
            share = ReduceMean(floats)
            seen = Mul(embedded, share)
            logits = MatMul(seen, head)
        }}""",
        table=(VOCABULARY, 128),
        keys=(128, 8),
        head=(128, VOCABULARY),
        shape=np.array([0, 0, 2, 4]),
    )
    place.mkdir()
    save(read_model(model), place / "model.onnx", external_data=True)
    decoder = {
        "filename": "model.onnx",
        "head_size": HEAD,
        "num_hidden_layers": 1,
        "inputs": {"past_key_names": "past_%d_key", "past_value_names": "past_%d_value"},
        "outputs": {"present_key_names": "present_%d_key", "present_value_names": "present_%d_value"},
    }
    (place / GENAI_CONFIG).write_text(json.dumps({"model": {"decoder": decoder, "vocab_size": VOCABULARY}}))
    (place / "tokenizer.json").write_text("{}")
