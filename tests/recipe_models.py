"""Small models and samples under the names that the recipes give to what people bring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import soundfile
from conftest import Build
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

DETECTOR = """(float[1,3,32,32] image) => (int64[n,3] detections) {
    most = Constant <value = int64 {4}> ()
    overlap = Constant <value = float {0.5}> ()
    [stem] a = Conv <strides = [4,4], pads = [1,1,1,1]> (image, kernel)
    [relu] b = Relu(a)
    [boxes_conv] c = Conv(b, for_boxes)
    [scores_conv] d = Conv(b, for_scores)
    [boxes_row] boxes_t = Reshape(c, boxes_shape)
    [boxes_last] boxes = Transpose <perm = [0,2,1]> (boxes_t)
    [scores_row] e = Reshape(d, scores_shape)
    [scores_share] scores = Sigmoid(e)
    [suppress] detections = NonMaxSuppression(boxes, scores, most, overlap)
}"""
READER = """(float[1,3,16,width] crop) => (float[1,steps,12] letters) {
    [stem] a = Conv <strides = [2,2], pads = [1,1,1,1]> (crop, kernel)
    [relu] b = Relu(a)
    [rows] c = ReduceMean <axes = [2], keepdims = 0> (b)
    [turn] d = Transpose <perm = [0,2,1]> (c)
    [head] e = MatMul(d, weight)
    [share] letters = Softmax(e)
}"""
ENCODER = """(int64[1,length] input_ids, int64[1,length] attention_mask) => (float[1,32] sentence) {
    last = Constant <value_ints = [2]> ()
    [words] a = Gather(table, input_ids)
    [first] b = MatMul(a, w0)
    [gelu] c = Tanh(b)
    [second] d = MatMul(c, w1)
    [mask] e = Cast <to = 1> (attention_mask)
    [column] f = Unsqueeze(e, last)
    [kept] g = Mul(d, f)
    [mean] sentence = ReduceMean <axes = [1], keepdims = 0> (g)
}"""
SPEECH = """(float[1,256] input, float[1,64] state) => (float[1,1] speech, float[1,64] new_state) {
    [frame] a = MatMul(input, w0)
    [remember] b = MatMul(state, w1)
    [sum] c = Add(a, b)
    [squash] new_state = Tanh(c)
    [head] d = Gemm(new_state, w2)
    [share] speech = Sigmoid(d)
}"""
LANGUAGE = """(int64[1,length] input_ids) => (float[1,length,32] logits) {
    [words] a = Gather(table, input_ids)
    [up] b = MatMul(a, w0)
    [relu] c = Relu(b)
    [down] d = MatMul(c, w1)
    [add] e = Add(a, d)
    [head] logits = MatMul(e, w2)
}"""
TEXT = "the model reads a short line of text and says what it means when noise is small enough to trust"


def put_recipes(folder: Path, build: Build) -> None:
    """Write what the recipes name into a folder."""
    shapes = {"boxes_shape": np.int64([1, 4, -1]), "scores_shape": np.int64([1, 2, -1])}
    convolutions = {"kernel": (128, 3, 3, 3), "for_boxes": (4, 128, 1, 1), "for_scores": (2, 128, 1, 1)}
    models = {
        "detector": build(DETECTOR, **convolutions, **shapes),
        "reader": build(READER, kernel=(128, 3, 3, 3), weight=(128, 12)),
        "encoder": build(ENCODER, table=(32, 64), w0=(64, 64), w1=(64, 32)),
        "speech": build(SPEECH, w0=(256, 64), w1=(64, 64), w2=(64, 1)),
        "language": build(LANGUAGE, table=(32, 64), w0=(64, 128), w1=(128, 64), w2=(64, 32)),
    }
    for name, model in models.items():
        onnx.save(model, folder / f"{name}.onnx")
    random = np.random.default_rng(0)
    for place in ("photos", "recordings", "texts"):
        (folder / place).mkdir()
    for index in range(8):
        Image.fromarray(random.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / "photos" / f"{index}.png")
        sound = random.standard_normal(2048) * np.hanning(2048) / 4
        soundfile.write(folder / "recordings" / f"{index}.wav", sound, 16_000)
    words = TEXT.split()
    lines = [" ".join(random.choice(words, 6)) for _ in range(16)]
    (folder / "texts" / "lines.txt").write_text("\n".join(lines) + "\n")
    known = {word: number for number, word in enumerate(["[UNK]", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
