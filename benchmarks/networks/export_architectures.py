"""Export fifty-three small architectures by both of torch's exporters, with made-up samples beside them.

    python benchmarks/networks/export_architectures.py DEST [NAME ...]

Writes DEST/NAME/torchscript.onnx, DEST/NAME/dynamo.onnx and DEST/NAME/calib and eval, a file a sample. Weights and
samples are seeded; the samples have structure (`structured.py`). It runs where export.py runs; architectures.py then
quantizes what it wrote.
"""

# mypy: disable-error-code="import-not-found,no-any-return"
from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import images
import numpy as np
import onnx
import rows
import sequences
import unusual
from export import TEXT, dynamo, torchscript
from seeded import Network, padding_mask, uniform
from structured import (
    edges,
    film,
    frequent,
    neighbours,
    orbits,
    pair_of_frames,
    photograph,
    raster,
    rays,
    seasons,
    series,
    sound,
    spectrogram,
    surface,
    words,
)

CALIBRATED, EVALUATED = 32, 12
EXPORTS = {"torchscript": torchscript, "dynamo": dynamo}
_BATCH = {0: "batch"}
_SIZE = {2: "height", 3: "width"}
_CACHE = {
    "input_ids": {0: "batch"},
    "past_keys": {0: "batch", 3: "past"},
    "past_values": {0: "batch", 3: "past"},
}
_CACHED = {"input_ids": words(1500, 4), "past_keys": series(1, 2, 2, 28, 32), "past_values": series(1, 2, 2, 28, 32)}
_DECODED = ("logits", "keys", "values")

ARCHITECTURES = (
    Network("repvgg", images.repvgg, {"image": photograph(3, 64)}, ("scores",), {"image": _BATCH}),
    Network("efficientnet-v2", images.efficientnet_v2, {"image": photograph(3, 64)}, ("scores",)),
    Network("segmentation", images.segmentation, {"image": photograph(3, 64)}, ("mask",), {"image": _BATCH}),
    Network(
        "detector", images.detector, {"image": photograph(3, 96)}, ("boxes", "scores"), finish=images.with_suppression
    ),
    Network("centernet", images.centernet, {"image": photograph(3, 96)}, ("scores", "classes", "boxes")),
    Network("deformable", images.deformable, {"image": photograph(3, 48)}, ("scores",)),
    Network("stylegan2", images.stylegan2, {"z": uniform(-1.7, 1.7, 1, 96)}, ("image",)),
    Network("video", images.video, {"film": film(3, 8, 48)}, ("scores",), {"film": _BATCH}),
    Network("register-vit", images.register_vit, {"image": photograph(3, 48)}, ("class_token", "patch_tokens")),
    Network("convnext", images.convnext, {"image": photograph(3, 64)}, ("scores",), {"image": _BATCH}),
    Network("super-resolution", images.super_resolution, {"image": photograph(3, 32, 0.0)}, ("larger",)),
    Network("vqvae", images.vqvae, {"image": photograph(3, 48)}, ("image_again", "latents", "places")),
    Network("flow", images.flow, {"frames": pair_of_frames(3, 48)}, ("flow",)),
    Network("conformer", sequences.conformer, {"mel": spectrogram(80, 160)}, ("log_probabilities",), {"mel": _BATCH}),
    Network("looped-cells", sequences.looped_cells, {"frames": series(24, 1, 40)}, ("said",), scripted=True),
    Network("wavenet", sequences.wavenet, {"sound": sound(1024)}, ("logits",)),
    Network("mamba", sequences.mamba, {"input_ids": words(1000, 24)}, ("logits",)),
    Network("keywords", sequences.keywords, {"sound": sound(8192)}, ("scores",)),
    Network("informer", sequences.informer, {"series": seasons(48, 4)}, ("forecast",)),
    Network(
        "soft-capped",
        sequences.soft_capped,
        {"input_ids": words(1500, 32)},
        ("logits",),
        {"input_ids": {0: "batch", 1: "sequence"}},
    ),
    Network("cached-decoder", sequences.cached_decoder, _CACHED, _DECODED, _CACHE),
    Network("gathered-experts", sequences.gathered_experts, _CACHED, _DECODED, _CACHE),
    Network("routed-experts", sequences.routed_experts, _CACHED, _DECODED),
    Network("perceiver", sequences.perceiver, {"input_ids": words(262, 256)}, ("scores",), {"input_ids": _BATCH}),
    Network("retnet", sequences.retnet, {"input_ids": words(1000, 32)}, ("logits",)),
    Network("nbeats", sequences.nbeats, {"series": seasons(96, 8)}, ("forecast",), {"series": _BATCH}),
    Network("dgcnn", rows.dgcnn, {"points": surface(128)}, ("scores",)),
    Network("pointnet2", rows.pointnet2, {"points": surface(256)}, ("scores",)),
    Network("gat", rows.gat, {"features": series(1, 64, 64), "graph": neighbours(64, 6)}, ("log_probabilities",)),
    Network(
        "message-passing",
        rows.message_passing,
        {"features": series(96, 32), "edges": edges(96, 400)},
        ("nodes", "graph"),
    ),
    Network(
        "recommender",
        rows.recommender,
        {
            "dense": series(128, 13),
            **{name: frequent(size, 128) for name, size in zip("abcd", (30000, 8000, 500, 24), strict=True)},
        },
        ("click",),
        dict.fromkeys(("dense", *"abcd"), _BATCH),
        longest=4096,
    ),
    Network(
        "deep-interest",
        rows.deep_interest,
        {"history": frequent(20000, 64, 20), "offered": frequent(20000, 64), "shop": frequent(40, 64)},
        ("click",),
        dict.fromkeys(("history", "offered", "shop"), _BATCH),
        longest=4096,
    ),
    Network("siren", rows.siren, {"places": raster(32)}, ("colours",), {"places": _BATCH}, longest=65536),
    Network("nerf", rows.nerf, {"rays": rays(32, 16)}, ("colours", "densities"), {"rays": _BATCH}, longest=65536),
    Network("hash-grid", rows.hash_grid, {"places": raster(32)}, ("colours",), {"places": _BATCH}, longest=65536),
    Network("early-exit", unusual.early_exit, {"image": photograph(3, 64)}, ("scores",), scripted=True, branches=True),
    Network(
        "greedy-decoder",
        unusual.greedy_decoder,
        {"input_ids": words(400, 16)},
        ("scores", "words"),
        scripted=True,
        branches=True,
    ),
    Network("tabnet", unusual.tabnet, {"rows": series(256, 40)}, ("scores",), {"rows": _BATCH}, longest=65536),
    Network("evoformer", unusual.evoformer, {"input_ids": words(21, 20)}, ("pairs",)),
    Network("neural-ode", unusual.neural_ode, {"state": series(64, 16)}, ("later",), {"state": _BATCH}, longest=65536),
    Network(
        "style-transfer", unusual.style_transfer, {"image": photograph(3, 64, 0.0)}, ("image_again",), {"image": _SIZE}
    ),
    Network("pyramid", unusual.pyramid, {"image": photograph(3, 64)}, ("classes",), {"image": _SIZE}),
    Network("shufflenet", unusual.shufflenet, {"image": photograph(3, 64)}, ("scores",), {"image": _BATCH}),
    Network("binary", unusual.binary, {"image": photograph(3, 48)}, ("scores",)),
    Network("capsules", unusual.capsules, {"image": photograph(3, 32)}, ("lengths", "capsules")),
    Network("transformer-xl", unusual.transformer_xl, {"input_ids": words(1200, 32)}, ("logits",)),
    Network("slot-attention", unusual.slot_attention, {"image": photograph(3, 48)}, ("found_slots", "masks")),
    Network("matcher", unusual.matcher, {"first": series(1, 48, 34), "second": series(1, 40, 34)}, ("matches",)),
    Network("text-cnn", unusual.text_cnn, {"input_ids": words(3000, 40)}, ("classes",), {"input_ids": _BATCH}),
    Network(
        "autoencoder",
        unusual.autoencoder,
        {"rows": series(128, 256)},
        ("again", "code"),
        {"rows": _BATCH},
        longest=4096,
    ),
    Network("half-precision", unusual.half_precision, {"image": photograph(3, 64)}, ("scores",)),
    Network("orbit", unusual.orbit, {"state": orbits(64)}, ("force",), {"state": _BATCH}, longest=4096),
    Network(
        "windowed-pooling",
        unusual.windowed_pooling,
        {"input_ids": words(1000, 32), "mask": padding_mask(32)},
        ("classes",),
        {"input_ids": TEXT, "mask": TEXT},
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    failed = []
    for network in ARCHITECTURES:
        if options.names and network.name not in options.names:
            continue
        folder = options.dest / network.name
        write_samples(folder / "calib", network, range(100, 100 + CALIBRATED))
        write_samples(folder / "eval", network, range(1000, 1000 + EVALUATED))
        for name, export in EXPORTS.items():
            if network.branches and export is dynamo:
                continue
            try:
                model = network.finish(export(network))
            # Exporters fail in any way; the others are still worth having.
            except Exception as error:  # noqa: BLE001
                failed.append(f"{network.name}/{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            onnx.save(model, folder / f"{name}.onnx")
            print(f"{network.name}/{name}: {len(model.graph.node)} nodes, {model.ByteSize() / 1e6:.1f} MB", flush=True)
    if failed:
        sys.exit("\n".join(failed))


def write_samples(folder: Path, network: Network, seeds: range) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        np.savez(folder / f"{number:02}.npz", **network.sample(seed))


if __name__ == "__main__":
    main()
