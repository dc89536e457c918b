"""Read image files as samples: decode, resize and normalise them as the options say."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import origin_of
from onnxq.data.inputs import Input, SampleSource, is_floating, required
from onnxq.data.stores import Location
from onnxq.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})
_MODES = {"RGB": "RGB", "BGR": "RGB", "GRAY": "L"}


@dataclass(frozen=True)
class ImageOptions:
    """How the pixels of an image become a model input: ``(pixel * scale - mean) / std`` for float inputs.

    An integer input takes the pixels 0..255 unchanged and needs the default `scale`, `mean` and `std`. Images are
    turned upright by their EXIF orientation. Errors name options as the command line does: ``--image-size`` is `size`.

    Args:
        size: Height and width in pixels; None takes them from the model's fixed dims.
        mean: One value, or one per channel, in units after `scale`.
        std: One value, or one per channel, in units after `scale`.
        layout: None finds the axis of 1 or 3 channels in the model's shape.
        channels: Order of the channels that the model was trained with. An input of one channel takes ``RGB`` as gray.
        scale: Factor from pixel values 0..255.
        fit: ``stretch`` resizes both sides; ``crop`` keeps the aspect ratio and cuts the centre out.
        resize: Pixels of the shorter side before ``crop`` cuts `size` out, as in the validation of most classifiers. A
            fraction such as ``256 / 224`` resizes to so many times the smallest image that covers `size`, and None to
            that image.

    Raises:
        DataError: An option has none of the values above.

    >>> ImageOptions(size=(224, 224), mean=(0.5,), std=(0.5,)).fit
    'stretch'
    """

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: Literal["NCHW", "NHWC"] | None = None
    channels: Literal["RGB", "BGR", "GRAY"] = "RGB"
    scale: float = 1 / 255
    fit: Literal["stretch", "crop"] = "stretch"
    resize: int | float | None = None

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("layout", self.layout, (None, "NCHW", "NHWC")),
            ("channels", self.channels, tuple(_MODES)),
            ("fit", self.fit, ("stretch", "crop")),
        ):
            if value not in choices:
                named = ", ".join(choice for choice in choices if choice)
                raise DataError(f"--image-{option} is {value!r}, expected one of {named}")
        depth = 1 if self.channels == "GRAY" else 3
        for option, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, depth) or not np.isfinite(numbers).all():
                expected = "1 finite number" if depth == 1 else f"1 or {depth} finite numbers"
                raise DataError(f"--image-{option} is {_listed(numbers)}, expected {expected}")
        if min(self.std) <= 0:
            raise DataError(f"--image-std is {_listed(self.std)}, expected positive numbers")
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise DataError(f"--image-scale is {self.scale}, expected a positive number such as 1/255")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise DataError(f"--image-size is {_listed(self.size)}, expected height and width in pixels")
        if self.resize is not None and (not 1 <= self.resize < np.inf or self.fit != "crop"):
            raise DataError(
                f"--image-resize is {self.resize} with --image-fit {self.fit}, expected at least 1 pixel and crop; "
                "set --image-fit crop or leave --image-resize out"
            )


# From torchvision's ImageClassification transform of most ImageNet weights, from OpenAI's CLIP, and from Inception's
# preprocessing in TensorFlow's models, which crops 87.5 %. Networks of other sizes see as much of an image.
IMAGE_PRESETS: Mapping[str, ImageOptions] = MappingProxyType(
    {
        "imagenet": ImageOptions(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), fit="crop", resize=256 / 224),
        "clip": ImageOptions(
            mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711), fit="crop"
        ),
        "inception": ImageOptions(mean=(0.5,), std=(0.5,), fit="crop", resize=342 / 299),
    }
)
"""Image options of common training recipes, by name."""


def find_image_preset(name: str) -> ImageOptions:
    """Return the options of a preset.

    Raises:
        DataError: There is no preset of this name.
    """
    if name not in IMAGE_PRESETS:
        names = ", ".join(IMAGE_PRESETS)
        raise DataError(
            f"images is {name!r}, expected one of {names}, or ImageOptions{did_you_mean(name, IMAGE_PRESETS)}"
        )
    return IMAGE_PRESETS[name]


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:g}" for number in numbers) or "empty"


def read_image(path: Location, entry: Input, options: ImageOptions) -> NDArray[Any]:
    """Decode one image into an array for `entry`, with a batch axis of 1.

    Raises:
        DataError: Pillow is missing, the input does not take images, or a dim is unknown. Or the file is damaged, is a
            decompression bomb, or has more than 8 bits a channel.
    """
    layout, size = _geometry(entry, options)
    options = _for_channels(options, entry, layout)
    pixels = _decode(path, size, options)
    if options.channels == "GRAY":
        pixels = pixels[..., None]
    if options.channels == "BGR":
        pixels = pixels[..., ::-1]
    array = _normalise(pixels, entry, options)[None]
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2) if layout == "NCHW" else array)


def describe_images(entry: Input, options: ImageOptions) -> str:
    """Return in words what an input receives of image files.

    >>> describe_images(Input("x", np.dtype(np.float32), (1, 3, 224, 224)), ImageOptions())
    'RGB, 0..1, 224x224 stretched'
    >>> describe_images(Input("x", np.dtype(np.float32), (1, 3, 384, 384)), IMAGE_PRESETS["imagenet"])
    'RGB, -2.12..2.64, shorter side resized to 439, 384x384 cropped'
    """
    layout, (height, width) = _geometry(entry, options)
    options = _for_channels(options, entry, layout)
    low, high = 0.0, 255.0
    if is_floating(entry.dtype):
        ends = (np.array([[0.0], [255.0]]) * options.scale - np.array(options.mean)) / np.array(options.std)
        low, high = ends.min(), ends.max()
    fit = "stretched" if options.fit == "stretch" else "cropped"
    resized = f"shorter side resized to {_resized(options, height, width)}, " if options.resize else ""
    return f"{options.channels}, {low:.3g}..{high:.3g}, {resized}{height}x{width} {fit}"


def describe_image_samples(samples: SampleSource, inputs: Sequence[Input], options: ImageOptions) -> str:
    """Return how many samples are image files and what the input receives of them; empty for other samples."""
    if Path(origin_of(samples, 0).file).suffix.lower() not in IMAGE_SUFFIXES:
        return ""
    (entry,) = required(inputs)
    count = "1 image" if len(samples) == 1 else f"{len(samples)} images"
    return f"{count}, {describe_images(entry, options)}"


def _resized(options: ImageOptions, height: int, width: int) -> int:
    """Return the shorter side in pixels of a resized square image."""
    resize = options.resize or 1.0
    return resize if isinstance(resize, int) else round(resize * max(height, width))


def warn_narrow_crop(entry: Input, options: ImageOptions) -> Iterator[str]:
    """Warn if the model sees less than half of the shorter side of images."""
    _, (height, width) = _geometry(entry, options)
    shorter = _resized(options, height, width)
    if options.resize and 2 * max(height, width) < shorter:
        yield (
            f"images are resized to {shorter} pixels and cropped to {height}x{width}, so the model sees "
            f"{height * width / shorter**2:.0%} of a square image; lower --image-resize or leave it out"
        )


def _for_channels(options: ImageOptions, entry: Input, layout: str) -> ImageOptions:
    """Return the options; colours become gray for an input of one channel."""
    is_gray = entry.shape is not None and entry.shape[layout.index("C")] == 1
    return replace(options, channels="GRAY") if is_gray and options.channels == "RGB" else options


def _geometry(entry: Input, options: ImageOptions) -> tuple[str, tuple[int, int]]:
    shape = entry.shape
    if shape is None or len(shape) != 4:
        raise DataError(f"Input {entry} takes no images, expected rank 4; provide .npz samples instead")
    layouts = [layout for layout, axis in (("NCHW", 1), ("NHWC", 3)) if shape[axis] in (1, 3)]
    if options.layout is None and len(layouts) != 1:
        raise DataError(f"Input {entry} shows no clear channel axis, expected 1 or 3 channels; give --image-layout")
    layout = options.layout or layouts[0]
    height, width = options.size or (shape[2:] if layout == "NCHW" else shape[1:3])
    if not isinstance(height, int) or not isinstance(width, int):
        raise DataError(f"Input {entry} has no fixed height and width; give --image-size")
    return layout, (height, width)


def _decode(path: Location, size: tuple[int, int], options: ImageOptions) -> NDArray[np.uint8]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(
            f"{path} is an image, expected Pillow to read it; install it with pip install 'onnxq[images]'"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with path.open("rb") as stream, Image.open(stream) as image:
                _check_depth(path, image)
                pixels = ImageOps.exif_transpose(image).convert(_MODES[options.channels])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path} has more pixels than Pillow's limit {Image.MAX_IMAGE_PIXELS}; resize it") from error
    except (ArithmeticError, OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, struct.error) as error:
        raise DataError(f"{path} cannot be read as an image: {str(error)[:200]}; save it again") from error
    height, width = size
    if options.resize:
        covering = min(pixels.size) * max(width / pixels.width, height / pixels.height)
        shorter = options.resize if isinstance(options.resize, int) else round(options.resize * covering)
        box = _centre(path, pixels.size, (width, height), shorter)
        return np.asarray(pixels.resize((width, height), Image.Resampling.BILINEAR, box))
    if options.fit == "crop":
        return np.asarray(ImageOps.fit(pixels, (width, height), Image.Resampling.BILINEAR))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BILINEAR))


def _centre(
    path: Location, pixels: tuple[int, int], size: tuple[int, int], shorter: int
) -> tuple[float, float, float, float]:
    # Resizing this box of the file gives the same pixels as resizing the whole image and cropping it.
    # Both sizes are (width, height).
    width, height = (int(shorter * side / min(pixels)) for side in pixels)
    if width < size[0] or height < size[1]:
        raise DataError(
            f"{path} is {height}x{width} once resized, expected at least {size[1]}x{size[0]}; "
            f"raise --image-resize, which is {shorter}, to {max(size)} or leave it out"
        )
    left, right = _middle(width, size[0], pixels[0])
    top, bottom = _middle(height, size[1], pixels[1])
    return left, top, right, bottom


def _middle(resized: int, wanted: int, pixels: int) -> tuple[float, float]:
    start, factor = round((resized - wanted) / 2), pixels / resized
    return start * factor, min((start + wanted) * factor, pixels)


def _check_depth(path: Location, image: Image.Image) -> None:
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"{path} has more than 8 bits a channel (mode {image.mode}); save it with 8 or use .npz samples"
        )


def _normalise(pixels: NDArray[np.uint8], entry: Input, options: ImageOptions) -> NDArray[Any]:
    if is_floating(entry.dtype):
        values = pixels.astype(np.float32) * np.float32(options.scale)
        normalised = (values - np.asarray(options.mean, np.float32)) / np.asarray(options.std, np.float32)
        return normalised.astype(entry.dtype)
    plain = ImageOptions()
    if (options.mean, options.std, options.scale) != (plain.mean, plain.std, plain.scale):
        raise DataError(
            f"Input {entry} takes the pixels unchanged; leave out --image-mean, --image-std and --image-scale"
        )
    return pixels.astype(entry.dtype)
