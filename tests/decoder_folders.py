"""A folder as onnxruntime-genai's builder makes it, with a decoder of one layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from conftest import Build
from onnx import ModelProto

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
    write_folder(place, model)


def put_attention(place: Path, build: Build) -> None:
    """Make the folder of a decoder that remembers by GroupQueryAttention; the last channel of its keys is large."""
    keys = np.random.default_rng(0).standard_normal((128, 16)).astype(np.float32) / 11
    keys[:, -1] *= 20
    past, present = "float[batch,2,past,8]", "float[batch,2,total,8]"
    model = build(
        f"(int64[batch,sequence] input_ids, int64[batch,total] attention_mask, {past} past_0_key, "
        f"{past} past_0_value) => (float[batch,sequence,64] logits, {present} present_0_key, "
        f"""{present} present_0_value) {{
            embedded = Gather(table, input_ids)
            queries = MatMul(embedded, query)
            keys = MatMul(embedded, key)
            values = MatMul(embedded, value)
            count = ReduceSum<keepdims = 0>(attention_mask, one)
            last = Sub(count, one)
            lengths = Cast<to = 6>(last)
            extents = Shape(attention_mask)
            extent = Gather(extents, one)
            total = Cast<to = 6>(extent)
            [attention] mixed, present_0_key, present_0_value =
                com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
                (queries, keys, values, past_0_key, past_0_value, lengths, total)
            wide = MatMul(mixed, output)
            logits = MatMul(wide, head)
        }}""",
        table=(VOCABULARY, 128),
        query=(128, 32),
        key=keys,
        value=(128, 16),
        output=(32, 128),
        head=(128, VOCABULARY),
        one=np.array([1]),
    )
    model.opset_import.add(domain="com.microsoft", version=1)
    write_folder(place, model, head=8)


def write_folder(place: Path, model: ModelProto, head: int = HEAD) -> None:
    """Write a decoder with external data, its configuration and a tokenizer."""
    place.mkdir()
    save(read_model(model), place / "model.onnx", external_data=True)
    decoder = {
        "filename": "model.onnx",
        "head_size": head,
        "num_hidden_layers": 1,
        "inputs": {"past_key_names": "past_%d_key", "past_value_names": "past_%d_value"},
        "outputs": {"present_key_names": "present_%d_key", "present_value_names": "present_%d_value"},
    }
    (place / GENAI_CONFIG).write_text(json.dumps({"model": {"decoder": decoder, "vocab_size": VOCABULARY}}))
    (place / "tokenizer.json").write_text("{}")
