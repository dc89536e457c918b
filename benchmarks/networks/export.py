"""Export twelve small networks, each two or three ways, with made-up samples beside them.

    python benchmarks/networks/export.py DEST [NAME ...]

Writes DEST/NAME/EXPORT.onnx and DEST/NAME/calib.npz; the pair of one network is two folders. ``torchscript`` is
torch's older exporter, ``dynamo`` its newer one, which puts pads inside convolutions, and the third form is either the
older one at an older opset or what the newer one writes before it optimises. The network with channels last is written
by hand. Weights and samples are seeded. It runs in an environment of its own:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 onnxscript onnx numpy
"""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import argparse
import io
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convolutional
import numpy as np
import onnx
import torch
import transformers
from handwritten import FORMS, SIZE, handwritten
from seeded import Array, Network, image, normal, padding_mask, tokens, uniform

SAMPLES = 12
TEXT = {0: "batch", 1: "sequence"}

NETWORKS = (
    Network("resnet", convolutional.resnet, {"image": image(3, 64)}, ("scores",), {"image": {0: "batch"}}, 11),
    Network("mobilenetv3", convolutional.mobilenet, {"image": image(3, 64)}, ("scores",), older_opset=11),
    Network("efficientnet", convolutional.efficientnet, {"image": image(3, 64)}, ("scores",), older_opset=None),
    Network("vit", transformers.vit, {"image": image(3, 64)}, ("scores",), {"image": {0: "batch"}}),
    Network("swin", transformers.swin, {"image": image(3, 64)}, ("scores",)),
    Network(
        "bert",
        transformers.bert,
        {"input_ids": tokens(1000, 64), "attention_mask": padding_mask(64), "token_type_ids": tokens(2, 64)},
        ("last_hidden_state", "scores"),
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), TEXT),
    ),
    Network("gpt2", transformers.gpt2, {"input_ids": tokens(3000, 48)}, ("logits",), {"input_ids": TEXT}),
    Network("llama", transformers.llama, {"input_ids": tokens(2000, 48)}, ("logits",), {"input_ids": TEXT}, None),
    Network("whisper-encoder", transformers.whisper_encoder, {"mel": normal(1, 80, 200)}, ("memory",)),
    Network(
        "whisper-decoder",
        transformers.whisper_decoder,
        {"input_ids": tokens(2000, 32), "memory": normal(1, 100, 192)},
        ("logits",),
        {"input_ids": TEXT, "memory": {0: "batch"}},
    ),
    Network(
        "unet",
        convolutional.unet,
        {"image": image(3, 32), "time": uniform(0, 1000, 1)},
        ("noise",),
        older_opset=None,
    ),
    Network("lstm", transformers.tagger, {"input_ids": tokens(2000, 40)}, ("tags",), older_opset=None),
)
CHANNELS_LAST = "channels-last"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    failed = []
    for network in NETWORKS:
        if options.names and network.name not in options.names:
            continue
        folder = options.dest / network.name
        folder.mkdir(parents=True, exist_ok=True)
        _write_samples(folder, [network.sample(seed) for seed in range(100, 100 + SAMPLES)])
        for name, export in _exports(network).items():
            try:
                model = export(network)
            # Exporters fail in any way; the others are still worth having.
            except Exception as error:  # noqa: BLE001
                failed.append(f"{network.name}/{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            onnx.save(model, folder / f"{name}.onnx")
            print(f"{network.name}/{name}: {len(model.graph.node)} nodes, {model.ByteSize() / 1e6:.1f} MB", flush=True)
    if not options.names or CHANNELS_LAST in options.names:
        _write_channels_last(options.dest / CHANNELS_LAST)
    if failed:
        sys.exit("\n".join(failed))


def torchscript(network: Network, opset: int = 17) -> onnx.ModelProto:
    """Trace the module and write it with torch's older exporter."""
    buffer = io.BytesIO()
    axes = {name: dict(axes) for name, axes in network.dynamic.items()}
    with torch.no_grad():
        torch.onnx.export(
            torch.jit.script(network.make()) if network.scripted else network.make(),
            _arguments(network),
            buffer,
            input_names=list(network.inputs),
            output_names=list(network.outputs),
            dynamic_axes=axes | {name: {0: "batch"} for name in network.outputs if axes},
            opset_version=opset,
            dynamo=False,
        )
    return onnx.load_from_string(buffer.getvalue())


def dynamo(network: Network, *, optimize: bool = True) -> onnx.ModelProto:
    """Write the module with torch's newer exporter, which optimises it with onnxscript unless told not to."""
    # A dimension that two inputs share must be one object.
    dims = {
        name: torch.export.Dim(name, min=1, max=network.longest)
        for axes in network.dynamic.values()
        for name in axes.values()
    }
    shapes = tuple(
        {axis: dims[dim] for axis, dim in network.dynamic.get(name, {}).items()} or None for name in network.inputs
    )
    # A batch or a sequence of one would be taken for a constant.
    arguments = tuple(
        torch.cat([value, value]) if 0 in network.dynamic.get(name, {}) else value
        for name, value in zip(network.inputs, _arguments(network), strict=True)
    )
    program = torch.onnx.export(
        network.make(),
        arguments,
        input_names=list(network.inputs),
        output_names=list(network.outputs),
        dynamic_shapes=shapes if network.dynamic else None,
        dynamo=True,
        optimize=optimize,
        verbose=False,
    )
    return program.model_proto


def _exports(network: Network) -> dict[str, Callable[[Network], onnx.ModelProto]]:
    found: dict[str, Callable[[Network], onnx.ModelProto]] = {"torchscript": torchscript, "dynamo": dynamo}
    older = network.older_opset
    if older is None:
        return found | {"dynamo-raw": lambda network: dynamo(network, optimize=False)}
    return found | {f"torchscript-{older}": lambda network: torchscript(network, older)}


def _arguments(network: Network) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(value) for value in network.sample(0).values())


def _write_samples(folder: Path, samples: list[dict[str, Array]]) -> None:
    stacked: dict[str, Any] = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    np.savez(folder / "calib.npz", **stacked)


def _write_channels_last(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = image(3, SIZE)
    drawn = [draw(np.random.default_rng(seed)).transpose(0, 2, 3, 1) for seed in range(100, 100 + SAMPLES)]
    _write_samples(folder, [{"image": np.ascontiguousarray(sample)} for sample in drawn])
    for form in FORMS:
        model = handwritten(form)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, folder / f"{form}.onnx")
        print(f"{CHANNELS_LAST}/{form}: {len(model.graph.node)} nodes, {model.ByteSize() / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
