"""Decoders in onnxruntime-genai beside the int4 of its own builder: size, same tokens, KL divergence, tokens a second.

    python benchmarks/decoders.py --into DIR [--threads N] [--rounds N] [NAME ...]

Needs an environment with ``pip install . onnxruntime-genai torch transformers``. The models have random weights, made
from local configurations without a download; the head is scaled so that a few tokens are likely. The builder of
onnxruntime-genai makes the float folder (``-p fp32``) and its int4 folder (``-p int4``), and ``onnxq quantize`` makes
the others from the float folder, without samples. The last one has as many bytes as the builder's, where
that is larger. DIR keeps all folders for the next run; take another one after a change of onnxq.

Tokens are those that 20 prompts are continued with, greedily. The KL divergence is that of the next token's
probabilities from the float model's, in nats, as a mean over all positions of the prompts with the float model's
continuations. Decoding is timed one token at a time, models in turns: medians over all rounds. The last column is the
median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime_genai as genai
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 24, 40
# A few tokens have most of the probability, as after training: the standard deviation of logits.
LOGITS_DEVIATION = 4.0
COMMON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CONFIGS: Mapping[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, **COMMON,
    ),
    "qwen-tied": transformers.Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, tie_word_embeddings=True,
        **HEADS, **COMMON,
    ),
    "lfm2-moe": transformers.Lfm2MoeConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, moe_intermediate_size=256, num_hidden_layers=3,
        num_dense_layers=1, num_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["full_attention"] * 3, **COMMON,
    ),
}  # fmt: skip
FLOAT, BUILDER, MIXED = "float", "builder's int4", "int4-block32 --max-size"
PRESET = "int4-block32"
OURS = ("int4-block32-rtn", PRESET, MIXED)
# The builder leaves an embedding in float that is not tied to the head; else its folder is as large as the preset's.
LARGER = 1.05
OPTIONS = ("--search", "off", "--latency-seconds", "0", "-q", "--preset")


@dataclass(frozen=True)
class Row:
    """A folder and what it generates."""

    way: str
    megabytes: float
    same_tokens: float
    divergence: float
    tokens_a_second: float
    beside_builder: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGS)}; all by default")
    parser.add_argument("--into", type=Path, required=True, help="keeps what is built")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"onnxruntime-genai {genai.__version__}, {options.threads} threads, {options.rounds} rounds\n")
    print("| model | folder | MB | of float | same tokens | KL, nats | tokens a second | beside builder's int4 |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for name in options.names or CONFIGS:
        place = options.into / name
        folders = built(name, place)
        rows = list(measured(folders, options.threads, options.rounds))
        for row in rows:
            figures = f"{row.megabytes:.1f} | {row.megabytes / rows[0].megabytes:.3f} | {row.same_tokens:.3f}"
            speed = f"{row.tokens_a_second:.1f} | {row.beside_builder:.2f}"
            print(f"| {name} | {row.way} | {figures} | {row.divergence:.2e} | {speed} |", flush=True)


def built(name: str, place: Path) -> Mapping[str, Path]:
    """Make the folders of a model that are not there yet."""
    source, folders = place / "source", {FLOAT: place / "float", BUILDER: place / "builder-int4"}
    if not source.exists():
        write_source(CONFIGS[name], source)
    for folder, precision in ((folders[FLOAT], "fp32"), (folders[BUILDER], "int4")):
        command = ("-m", "onnxruntime_genai.models.builder", "-m", name, "-i", source, "-o", folder)
        make(folder, *command, "-p", precision, "-e", "cpu", "-c", place / "cache")
    limit = f"{megabytes(folders[BUILDER])}MB"
    for way in OURS:
        if way == MIXED and megabytes(folders[BUILDER]) < LARGER * megabytes(folders[PRESET]):
            continue
        folders[way] = place / way.replace(" ", "")
        given: tuple[object, ...] = (*way.split(), limit) if way == MIXED else (*way.split(),)
        make(folders[way], "-m", "onnxq", "quantize", folders[FLOAT], *OPTIONS, *given, "-o", folders[way])
    return folders


def make(folder: Path, *arguments: object) -> None:
    if not (folder / "genai_config.json").exists():
        done = subprocess.run([sys.executable, *map(str, arguments)], check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{folder} was not made: {done.stderr[-2000:]}")


def write_source(config: transformers.PreTrainedConfig, place: Path) -> None:
    """Write a transformers model with random weights, and a tokenizer of one word a token."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # What enters a layer keeps its size, so that every layer matters.
            if weight.ndim > 1:
                weight.normal_(0, weight.shape[1 if "experts" in name else -1] ** -0.5)
        # A normed hidden state has values of size 1.
        head = model.get_output_embeddings().weight
        head.normal_(0, LOGITS_DEVIATION * head.shape[1] ** -0.5)
    model.save_pretrained(place)
    words = {f"w{token}": token for token in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(place)


def measured(folders: Mapping[str, Path], threads: int, rounds: int) -> Iterator[Row]:
    loaded = {way: opened(folder, threads) for way, folder in folders.items()}
    size = json.loads((folders[FLOAT] / "genai_config.json").read_text())["model"]["vocab_size"]
    prompts = np.random.default_rng(0).integers(3, size, (PROMPTS, PROMPT_TOKENS), dtype=np.int32)
    texts = {way: [generated(model, prompt) for prompt in prompts] for way, model in loaded.items()}
    logits = {way: [log_softmax(logits_of(model, text)) for text in texts[FLOAT]] for way, model in loaded.items()}
    seconds: dict[str, list[float]] = {way: [] for way in folders}
    for place in range(rounds):
        # Each goes first in turn.
        for way in np.roll([*loaded], place):
            seconds[way].append(seconds_a_token(loaded[way], prompts[0]))
    for way, folder in folders.items():
        same = np.mean([one == other for one, other in zip(texts[FLOAT], texts[way], strict=True)])
        pairs = zip(logits[FLOAT], logits[way], strict=True)
        yield Row(
            way,
            megabytes(folder),
            float(same),
            float(np.mean([(np.exp(one) * (one - two)).sum(-1).mean() for one, two in pairs])),
            1 / statistics.median(seconds[way]),
            statistics.median(other / own for own, other in zip(seconds[way], seconds[BUILDER], strict=True)),
        )


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("model.onnx*")) / 1e6


def opened(folder: Path, threads: int) -> genai.Model:
    config = genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    return genai.Model(config)


def generator_of(model: genai.Model) -> genai.Generator:
    parameters = genai.GeneratorParams(model)
    # No text ends before its length.
    length = PROMPT_TOKENS + NEW_TOKENS
    parameters.set_search_options(do_sample=False, max_length=length, min_length=length)
    return genai.Generator(model, parameters)


def generated(model: genai.Model, prompt: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a prompt with the tokens that follow it."""
    generator = generator_of(model)
    generator.append_tokens(prompt[None])
    while not generator.is_done():
        generator.generate_next_token()
    return np.array(generator.get_sequence(0), np.int32)


def logits_of(model: genai.Model, text: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return the logits behind each token of a text."""
    generator = generator_of(model)
    generator.append_tokens(text[None])
    [logits] = np.asarray(generator.get_output("logits"), np.float32)
    return np.asarray(logits)


def seconds_a_token(model: genai.Model, prompt: npt.NDArray[np.int32]) -> float:
    """Return the median over the tokens that follow a prompt."""
    generator = generator_of(model)
    generator.append_tokens(prompt[None])
    generator.generate_next_token()
    seconds = []
    while not generator.is_done():
        start = time.perf_counter()
        generator.generate_next_token()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


if __name__ == "__main__":
    main()
