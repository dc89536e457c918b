"""Schemes in TOML files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, InputsOutputs, Method, Mode, QuantSpec, Rounding, Rule, Scheme, Storage
from onnxq.errors import SchemeError, check_path, did_you_mean
from onnxq.lowering import allowed_ops_named
from onnxq.numerics.formats import format_named


def load_scheme(path: str | Path) -> Scheme:
    """Read a scheme from a TOML file.

    The file holds ``[[rule]]`` tables with the fields of Rule; ``weight`` and ``activation`` are tables with the
    fields of Spec. ``base = "int8"`` adds the rules of a preset behind the file's own, ``ranges = "mse"`` names the
    calibration method for activations, by default that of the base, ``correct_biases = false`` leaves biases as they
    are, ``emit`` is one of the values of AllowedOps, and ``io`` one of InputsOutputs.

    Args:
        path: the file.

    Returns:
        The scheme, named after the file.

    Raises:
        SchemeError: the file cannot be read, is not TOML, or has a key or value that does not exist.

    >>> load_scheme("scheme.toml").name  # doctest: +SKIP
    'scheme'
    """
    import tomllib

    check_path(path, "the file of a scheme")
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as reason:
        raise SchemeError(f"scheme {path} cannot be read: {reason}") from reason
    try:
        return replace(_parse_scheme(document), name=path.stem)
    except SchemeError as reason:
        raise SchemeError(f"scheme {path}: {reason}") from reason


def scheme_named(text: str) -> Scheme:
    """Return the scheme of a preset's name, or of a file that ends in ``.toml``.

    Raises:
        SchemeError: there is no such preset, or the file is wrong.
    """
    return load_scheme(text) if text.endswith(".toml") else preset_named(text)


def _parse_scheme(document: Mapping[str, object]) -> Scheme:
    _check_keys("scheme", document, {"base", "correct_biases", "emit", "io", "ranges", "rule"})
    entries = document.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SchemeError("rules are written as [[rule]] tables")
    rules = tuple(_parse_rule(entry) for entry in entries)
    base = Scheme(())
    if "base" in document:
        base = preset_named(str(document["base"]))
        rules += base.rules
    if not rules:
        raise SchemeError('it has no rules; add [[rule]] tables or base = "int8"')
    return Scheme(
        rules,
        ranges=str(document.get("ranges", base.ranges)),
        correct_biases=_switch("correct_biases", document.get("correct_biases", base.correct_biases)),
        emit=allowed_ops_named(str(document.get("emit", base.emit))),
        io=InputsOutputs(_choice("io", document.get("io", base.io), InputsOutputs)),
    )


def _parse_rule(entry: Mapping[str, object]) -> Rule:
    _check_keys("rule", entry, {field.name for field in fields(Rule)})
    if "mode" not in entry:
        raise SchemeError(f"a rule has no mode; expected one of {', '.join(Mode)}")
    return Rule(
        mode=Mode(_choice("mode", entry["mode"], Mode)),
        op_types=_names("op_types", entry),
        nodes=_names("nodes", entry),
        tensors=_names("tensors", entry),
        weight=_parse_spec("weight", entry.get("weight")),
        activation=_parse_spec("activation", entry.get("activation")),
    )


def _parse_spec(key: str, entry: object) -> QuantSpec | None:
    if entry is None:
        return None
    if not isinstance(entry, dict) or "format" not in entry:
        raise SchemeError(f'{key} is a table such as {{ format = "int8" }}, found {entry!r}')
    _check_keys(key, entry, {field.name for field in fields(QuantSpec)})
    format = format_named(str(entry["format"]))
    return QuantSpec(
        format.name,
        _parse_granularity(entry.get("granularity", Granularity.TENSOR)),
        # Weights and floating-point values seldom have a zero point, activations mostly do.
        symmetric=_switch("symmetric", entry.get("symmetric", key == "weight" or format.is_float)),
        scale=str(entry.get("scale", "float32")),
        scale_rounding=Rounding(_choice("scale_rounding", entry.get("scale_rounding", Rounding.UP), Rounding)),
        two_level=_switch("two_level", entry.get("two_level", False)),
        method=entry.get("method", Method.MINMAX),
        storage=Storage(_choice("storage", entry.get("storage", Storage.NATIVE), Storage)),
    )


def _parse_granularity(value: object) -> Granularity | tuple[int, ...]:
    if not isinstance(value, list):
        return Granularity(_choice("granularity", value, Granularity))
    if not all(type(extent) is int for extent in value):
        raise SchemeError(f"granularity is a list of whole numbers such as [32], found {value!r}")
    return tuple(value)


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SchemeError(f"{key} is true or false, found {value!r}")
    return value


def _names(key: str, entry: Mapping[str, object]) -> tuple[str, ...]:
    names = entry.get(key, [])
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SchemeError(f"{key} is a string or a list of strings, found {names!r}")
    return tuple(names)


def _choice(key: str, value: object, choices: Iterable[str]) -> str:
    names = [str(choice) for choice in choices]
    if str(value) not in names:
        raise SchemeError(f"{key} is one of {', '.join(names)}, found {value!r}{did_you_mean(str(value), names)}")
    return str(value)


def _check_keys(what: str, entry: Mapping[str, object], keys: set[str]) -> None:
    for key in entry:
        if key not in keys:
            raise SchemeError(f"a {what} has no key {key!r}{did_you_mean(key, keys)}")
