"""Texts, as the tokens of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input
from onnxq.data.sources.source import has_suffix, library
from onnxq.errors import DataError

# What Hugging Face's models call their inputs, and where an encoding has it.
_FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class Text:
    """``.txt`` files, where the tokenizer is given, each line a text.

    It is fed to inputs called ``input_ids``, ``attention_mask`` and ``token_type_ids``.

    Attributes:
        tokenizer: the ``tokenizer.json`` of the model, which is read by the library tokenizers.
        length: tokens that texts are cut or filled up to; 0 takes what the model says, or each text's own.
    """

    tokenizer: str = ""
    length: int = 0

    def __post_init__(self) -> None:
        if self.length < 0:
            raise DataError(f"texts have length {self.length}, expected 0 or more tokens")

    def takes(self, given: object) -> bool:
        """Return whether it is such a file, and its tokens are known."""
        return bool(self.tokenizer) and has_suffix(given, ".txt")

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the tokens of each line that is not empty."""
        fixed = (entry.shape[-1] for entry in inputs if entry.name in _FIELDS and entry.shape)
        length = self.length or next((extent for extent in fixed if isinstance(extent, int)), 0)
        wanted = [entry for entry in inputs if entry.name in _FIELDS]
        for line in _lines(given):
            encoding = self._tokenizer.encode(line)
            if length:
                encoding.truncate(length)
                encoding.pad(length, **self._padding)
            yield {entry.name: _tokens(getattr(encoding, _FIELDS[entry.name]), entry) for entry in wanted}

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = library("tokenizers", "onnxq[text]", self.tokenizer)
        try:
            found = tokenizers.Tokenizer.from_file(self.tokenizer)
        # The library raises plain exceptions.
        except Exception as error:
            raise DataError(f"{self.tokenizer} cannot be read as a tokenizer: {str(error)[:200]}") from error
        return found

    @cached_property
    def _padding(self) -> dict[str, Any]:
        said = self._tokenizer.padding or {}
        return {name: said[name] for name in ("pad_id", "pad_type_id", "pad_token") if name in said}


def _tokens(values: Sequence[int], entry: Input) -> NDArray[Any]:
    return np.array(values, entry.dtype)[None]


def _lines(given: Any) -> Iterator[str]:
    try:
        with given.open("rb") as stream:
            for line in stream:
                if text := line.decode("utf-8").strip():
                    yield text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{given} cannot be read as text: {error}; save it as UTF-8") from error
