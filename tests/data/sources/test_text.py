"""Texts become tokens of a tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.errors import DataError

WHOLE = np.dtype(np.int64)
FREE = tuple(Input(name, WHOLE, ("N", "length")) for name in ("input_ids", "attention_mask"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    made = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.txt").write_text("a cat sat\n\na dog\n", encoding="utf-8")
    return tmp_path


def test_each_line_is_a_sample_of_its_own_length(texts: Path) -> None:
    samples = open_samples(texts, FREE, source=f"text:tokenizer={texts / 'tokenizer.json'}")
    assert [sample["input_ids"].tolist() for sample in samples] == [[[1, 2, 3]], [[1, 0]]]
    assert all(sample["attention_mask"].all() for sample in samples)


@pytest.mark.parametrize(("shape", "option"), [((1, 4), ""), (("N", "length"), ":length=4")])
def test_texts_are_cut_or_filled_up(shape: tuple[int | str, ...], option: str, texts: Path) -> None:
    inputs = [Input(entry.name, WHOLE, shape) for entry in FREE]
    (texts / "texts.txt").write_text("a cat sat a cat\na\n", encoding="utf-8")
    first, second = open_samples(texts, inputs, source=f"text:tokenizer={texts / 'tokenizer.json'}{option}")
    assert first["input_ids"].tolist() == [[1, 2, 3, 1]]
    assert second["attention_mask"].tolist() == [[1, 0, 0, 0]]


def test_without_a_tokenizer_texts_are_no_samples(texts: Path) -> None:
    with pytest.raises(DataError, match=r"has suffix '.txt', expected"):
        open_samples(texts / "texts.txt", FREE)
    with pytest.raises(DataError, match=r"missing.json cannot be read as a tokenizer"):
        open_samples(texts, FREE, source="text:tokenizer=missing.json")
