from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onnxq.data.images import IMAGE_PRESETS, warn_narrow_crop
from onnxq.data.samples import ImageOptions, Input, open_samples
from onnxq.errors import DataError

FLOAT = np.dtype(np.float32)
NCHW = Input("x", FLOAT, ("N", 3, 2, 4))
NHWC = Input("x", FLOAT, (1, 2, 4, 3))
RED = (255, 0, 51)


@pytest.fixture
def red(tmp_path: Path) -> Path:
    Image.new("RGB", (4, 2), RED).save(tmp_path / "red.png")
    return tmp_path / "red.png"


def pixel(path: Path, entry: Input, options: ImageOptions) -> tuple[tuple[int, ...], list[float]]:
    """Return the shape of the only sample and the channels of its first pixel."""
    ((array,),) = (sample.values() for sample in open_samples(path, (entry,), images=options))
    first = array[0, :, 0, 0] if options.layout == "NCHW" or entry.shape == NCHW.shape else array[0, 0, 0]
    return array.shape, np.round(first.astype(np.float64), 4).tolist()


def test_layout_and_size_come_from_the_model(red: Path) -> None:
    assert pixel(red, NCHW, ImageOptions()) == ((1, 3, 2, 4), [1, 0, 0.2])
    assert pixel(red, NHWC, ImageOptions()) == ((1, 2, 4, 3), [1, 0, 0.2])


def test_channels_mean_std_and_scale_are_applied(red: Path) -> None:
    options = ImageOptions(mean=(0.5, 0, 0.1), std=(0.5, 1, 0.1), channels="BGR")
    assert pixel(red, NCHW, options)[1] == [-0.6, 0, 9]
    assert pixel(red, NCHW, ImageOptions(scale=1.0))[1] == [255, 0, 51]


def test_gray_images_have_one_channel(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2), (100, 100, 100)).save(tmp_path / "gray.bmp")
    entry = Input("x", FLOAT, (1, 1, 2, 4))
    options = ImageOptions(channels="GRAY", layout="NCHW", scale=1.0)
    assert pixel(tmp_path / "gray.bmp", entry, options) == ((1, 1, 2, 4), [100])
    assert pixel(tmp_path / "gray.bmp", entry, ImageOptions(layout="NCHW", scale=1.0)) == ((1, 1, 2, 4), [100])


def test_integer_inputs_take_the_pixels_unchanged(red: Path) -> None:
    entry = Input("x", np.dtype(np.uint8), NCHW.shape)
    assert pixel(red, entry, ImageOptions())[1] == list(RED)
    with pytest.raises(DataError, match="takes the pixels unchanged"):
        pixel(red, entry, ImageOptions(mean=(0.5,)))


def test_stretch_keeps_the_border_and_crop_keeps_the_centre(tmp_path: Path) -> None:
    wide = Image.new("RGB", (12, 4), (0, 0, 0))
    wide.paste((255, 255, 255), (0, 0, 4, 4))
    wide.save(tmp_path / "wide.png")
    entry = Input("x", FLOAT, (1, 3, 4, 4))
    values = {
        fit: next(iter(open_samples(tmp_path, (entry,), images=ImageOptions(fit=fit))))["x"].max()
        for fit in ("stretch", "crop")
    }
    assert values == {"stretch": 1.0, "crop": 0.0}


def test_a_set_size_fills_dynamic_dims(red: Path) -> None:
    entry = Input("x", FLOAT, (None, 3, None, None))
    array = next(iter(open_samples(red, (entry,), images=ImageOptions(size=(5, 7)))))["x"]
    assert array.shape == (1, 3, 5, 7)


def test_grayscale_and_transparent_files_become_rgb(tmp_path: Path) -> None:
    Image.new("L", (4, 2), 51).save(tmp_path / "a.png")
    Image.new("RGBA", (4, 2), (255, 0, 51, 255)).save(tmp_path / "b.png")
    first, second = open_samples(tmp_path, (NCHW,), images=ImageOptions())
    assert np.allclose(first["x"][0, :, 0, 0], 0.2)
    assert np.allclose(second["x"][0, :, 0, 0], (1, 0, 0.2))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, None, None), "has no fixed height and width; give --image-size"),
        ((1, 8, 8, 8), "shows no clear channel axis, expected 1 or 3 channels; give --image-layout"),
        ((1, 3, 8, 3), "shows no clear channel axis"),
        ((1, 10), "takes no images, expected rank 4"),
        (None, "takes no images, expected rank 4"),
    ],
)
def test_an_input_that_images_do_not_fit_is_told_why(shape: Any, message: str, red: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(open_samples(red, (Input("x", FLOAT, shape),), images=ImageOptions()))


def test_without_options_the_defaults_hold(red: Path) -> None:
    (sample,) = open_samples(red, (NCHW,))
    assert np.allclose(sample["x"][0, :, 0, 0], (1, 0, 0.2))


def test_pictures_are_turned_upright(tmp_path: Path) -> None:
    picture = Image.new("RGB", (2, 4), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 2, 1))
    turned = Image.Exif()
    # 6: what is the left side of the stored pixels is the top of the picture.
    turned[0x0112] = 6
    picture.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=turned)
    (sample,) = open_samples(tmp_path, (Input("x", FLOAT, (1, 3, 4, 2)),))
    assert sample["x"][0, 0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize(("width", "height"), [(40, 25), (25, 40), (31, 31)])
@pytest.mark.parametrize("resize", [12, 20, 64])
def test_the_centre_is_cut_out_of_the_resized_picture(width: int, height: int, resize: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    options = ImageOptions(size=(8, 12), scale=1.0, fit="crop", resize=resize)
    (sample,) = open_samples(tmp_path, (Input("x", FLOAT, (1, None, None, 3)),), images=options)
    sides = int(resize * width / min(width, height)), int(resize * height / min(width, height))
    whole = np.asarray(Image.fromarray(pixels).resize(sides, Image.Resampling.BILINEAR), np.float32)
    left, top = round((sides[0] - 12) / 2), round((sides[1] - 8) / 2)
    assert np.abs(sample["x"][0] - whole[top : top + 8, left : left + 12]).max() <= 1


def test_a_resized_picture_that_does_not_cover_the_size_is_told(red: Path) -> None:
    options = ImageOptions(size=(8, 8), fit="crop", resize=4)
    with pytest.raises(DataError, match=r"red.png is 4x8 once resized, expected at least 8x8; raise --image-resize"):
        list(open_samples(red, (NCHW,), images=options))


def test_a_ribbon_of_a_picture_is_resized_in_little_memory(tmp_path: Path) -> None:
    Image.new("RGB", (30_000, 1), RED).save(tmp_path / "a.png")
    options = ImageOptions(size=(224, 224), fit="crop", resize=256)
    (sample,) = open_samples(tmp_path, (Input("x", FLOAT, (1, 3, 224, 224)),), images=options)
    assert np.allclose(sample["x"][0, :, 7, 7], (1, 0, 0.2))


def test_missing_pillow_names_the_extra(red: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'onnxq\[images\]'"):
        list(open_samples(red, (NCHW,), images=ImageOptions()))


def test_sixteen_bit_images_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((2, 4), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="more than 8 bits a channel"):
        list(open_samples(tmp_path, (NCHW,), images=ImageOptions()))


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "CHW"},
        {"channels": "HSV"},
        {"fit": "pad"},
        {"mean": (0.0, 1.0)},
        {"std": (0.0,)},
        {"std": (1.0, 1.0, np.nan)},
        {"scale": 0.0},
        {"size": (0, 4)},
        {"resize": 0, "fit": "crop"},
        {"resize": 256},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"^--image-{next(iter(options))} is"):
        ImageOptions(**options)


@pytest.mark.parametrize("suffix", [".webp", ".tiff", ".tif", ".bmp"])
def test_other_formats_are_read(suffix: str, tmp_path: Path) -> None:
    Image.new("RGB", (4, 2), RED).save(tmp_path / f"red{suffix}", **({"lossless": True} if suffix == ".webp" else {}))
    assert pixel(tmp_path / f"red{suffix}", NCHW, ImageOptions())[1] == [1, 0, 0.2]


@pytest.mark.parametrize(
    ("preset", "height", "width", "seen"),
    [
        ("imagenet", 224, 224, 0.875),
        ("imagenet", 384, 384, 0.875),
        ("imagenet", 64, 64, 0.877),
        ("imagenet", 224, 448, 0.875),
        ("inception", 299, 299, 0.874),
        ("clip", 64, 64, 1),
    ],
)
def test_presets_see_as_much_of_an_image_at_any_size(
    preset: str, height: int, width: int, seen: float, tmp_path: Path
) -> None:
    # The brightness of a pixel is its column, so the ends of a row tell what part of the width is seen.
    ramp = np.tile(np.linspace(0, 255, 1024), (1024 * height // width, 1))
    Image.fromarray(ramp.astype(np.uint8)).convert("RGB").save(tmp_path / "ramp.png")
    options = dataclasses.replace(IMAGE_PRESETS[preset], mean=(0.0,), std=(1.0,))
    (sample,) = open_samples(tmp_path, [Input("x", FLOAT, (1, 3, height, width))], images=options)
    assert np.ptp(sample["x"]) == pytest.approx(seen, abs=0.02)
    assert not list(warn_narrow_crop(Input("x", FLOAT, (1, 3, height, width)), options))


def test_a_crop_that_leaves_little_is_warned_of() -> None:
    options = ImageOptions(fit="crop", resize=256)
    (sentence,) = warn_narrow_crop(Input("x", FLOAT, (1, 3, 64, 64)), options)
    assert sentence.startswith(
        "images are resized to 256 pixels and cropped to 64x64, so the model sees 6% of a square"
    )


def test_presets_see_the_centre_as_validation_did(tmp_path: Path) -> None:
    wide = Image.new("RGB", (400, 300), RED)
    wide.paste((0, 0, 0), (0, 0, 40, 300))
    wide.save(tmp_path / "wide.png")
    entry = Input("x", FLOAT, (1, 3, 224, 224))
    ((sample,),) = ([*open_samples(tmp_path, [entry], images=IMAGE_PRESETS["imagenet"])],)
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    assert np.allclose(sample["x"][0, :, 0, 0], expected, atol=1e-5)
    assert np.ptp(sample["x"], axis=(2, 3)).max() < 1e-5
