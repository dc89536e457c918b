"""Sums, differences, products and quotients with constants."""

from __future__ import annotations

import numpy as np
from model_texts import values
from rule_cases import Case, Rule, table

from onnxq.passes import MergeScalars, UseAddAndMul

one_form = Rule(UseAddAndMul(), "float[N, 8] x, float[8] z", c=values(8) + np.float32(3), four=4,
                nil=np.zeros(8, np.float32))  # fmt: skip
FORMS = [
    one_form("y = Sub(x, c)", "Add"),
    one_form("y = Div(x, c)", "Mul"),
    one_form("d = Div(x, four) y = Floor(d)", "Mul Floor"),
    one_form("y = Sum(z, x)", "Add"),
    one_form("s = Sum(x) e = Exp(s) y = Max(e)", "Exp"),
    one_form("y = Sub(c, x)", stays=""),
    one_form("y = Div(x, z)", stays=""),
    one_form("y = Sum(x, z, c)", stays=""),
    one_form("y = Div(x, nil)", runs=False, stays="its reciprocal is not a number of its type"),
    one_form("d = Div(x, c) y = Floor(d)", stays="its last bit may decide what reads it"),
    one_form("d = Div(x, c) y = Erf(d)", stays="it is a part of Gelu"),
    one_form("y = Div(x, k)", inputs="int64[8] x", k=np.array(2), stays="its constant is not floating point"),
]

merge = Rule(MergeScalars(), one=1, near=1 + 1e-6, nil=0, half=0.5, third=1 / 3, down=-0.25, huge=1e30, small=1e-30)
MERGED = [
    merge("a = Mul(x, half) y = Mul(third, a)", "Mul"),
    merge("a = Mul(x, half) b = Mul(a, third) y = Mul(b, down)", "Mul"),
    merge("a = Add(x, half) y = Add(a, third)", "Add"),
    merge("a = Mul(x, half) y = Mul(a, one)", "Mul"),
    merge("e = Exp(x) a = Mul(e, one) b = Add(a, nil) y = Neg(b)", "Exp Neg"),
    merge("a = Add(x, half) y = Add(a, down)", stays="they cancel"),
    merge("a = Add(x, half) y = Add(a, small)", stays="the smaller one would lose digits"),
    merge("e = Erf(x) p = Add(e, one) q = Mul(x, p) r = Mul(q, half) y = Mul(r, third)", stays="it is a part of Gelu"),
    merge("a = Mul(x, huge) b = Mul(a, huge) y = Tanh(b)", stays="the merged number is not one of its type"),
    merge("a = Mul(x, small) y = Mul(a, small)", stays="the merged number is not one of its type"),
    merge("a = Mul(x, small) y = Mul(a, huge)", stays="a factor is too far from 1"),
    merge("y = Mul(x, near)", stays=""),
    merge("y = Mul(x, k)", inputs="float[8] x", k=np.ones((1, 1), np.float32), stays="it may raise the rank"),
    merge("a = Mul(x, half) b = Mul(a, third) y = Add(a, b)", stays=""),
    # Whole numbers stay unless they do nothing.
    merge("a = Add(x, i) b = Add(a, i) c = Mul(b, k) y = Neg(c)", "Add Add Neg", inputs="int64[8] x", i=np.array(2),
          k=np.array(1)),
]  # fmt: skip


@table(FORMS, MERGED)
def test_rules(case: Case) -> None:
    case.check()
