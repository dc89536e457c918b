"""The training loop, for the whole model and block by block, with its losses and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.data.dataset import Subset
from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.sqnr import nsr_by_sample
from onnxq.system.resources import silent
from onnxq.training import learning
from onnxq.training.activations import Activations
from onnxq.training.blocks import BlockActivations, train_blocks
from onnxq.training.learning import parameter_groups, take_step, train_module
from onnxq.training.losses import CrossEntropy, Distillation, Task, load_loss
from onnxq.training.module import FakeQuantizedModel, blocks_of
from onnxq.training.settings import Training
from onnxq.training.training_set import Batch, TrainingSet, can_stack, run_float_model
from training.modules import NETWORK, WEIGHTS, images, module_of, task_of

SHORT = Training(epochs=3, batch=8, rate=1e-3)


@pytest.fixture
def module(build: Build) -> FakeQuantizedModel:
    return module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")


@pytest.fixture
def task(build: Build, tmp_path: Path) -> Task:
    return task_of(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")


def state_of(module: FakeQuantizedModel) -> list[bytes]:
    return [one.numpy().tobytes() for one in module.state_dict().values()]


def test_it_learns(module: FakeQuantizedModel, task: Task) -> None:
    found = train_module(module, task, Training(epochs=6, batch=8, rate=5e-3), silent)
    assert found.after < 0.7 * found.before
    assert found.best > 0
    assert task.evaluate(module)[1] == pytest.approx(found.after)


def test_a_seed_gives_the_same_weights(build: Build, task: Task) -> None:
    states = []
    for seed in (0, 0, 1):
        one = module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")
        train_module(one, task, Training(epochs=2, batch=8, seed=seed), silent)
        states.append(state_of(one))
    assert states[0] == states[1] != states[2]


def test_what_is_no_better_is_not_kept(module: FakeQuantizedModel, task: Task) -> None:
    before = state_of(module)
    found = train_module(module, task, Training(epochs=9, batch=8, rate=10.0, patience=2), silent)
    assert (found.best, found.epochs, found.after) == (0, 2, found.before)
    assert state_of(module) == before


def test_an_epoch_that_goes_too_far_is_undone_and_steps_are_shorter(module: FakeQuantizedModel, task: Task) -> None:
    nsr = list[float]()
    training = Training(epochs=9, batch=8, rate=1.0, on_progress=lambda standing: nsr.append(standing.nsr_by_output))
    found = train_module(module, task, training, silent)
    assert nsr[0] > 10 * found.before
    assert found.after < found.before


@pytest.mark.parametrize(
    ("learned", "kinds"),
    [
        (("weights",), {"weights values"}),
        (("scales", "zero-points"), {"weights log_scale"}),
        (("biases",), {"biases values"}),
    ],
)
def test_only_what_is_named_learns(learned: tuple[str, ...], kinds: set[str], module: FakeQuantizedModel) -> None:
    names = {id(one): name for name, one in module.named_parameters()}
    found = [names[id(group["params"][0])] for group in parameter_groups(module, Training(learn=learned))]
    assert {f"{name.split('.')[0]} {name.split('.')[-1]}" for name in found} == kinds


@pytest.mark.parametrize(("scheme", "coarse"), [("int8", False), ("int4-block32", True), ("int2-block16", True)])
def test_steps_are_relative_to_the_size_of_a_tensor_or_of_its_codes(scheme: str, coarse: bool, build: Build) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4), scheme)
    scales = {id(one.values): float(one.scale.detach().abs().mean()) for one in module.weights}
    for group in parameter_groups(module, Training(learn=("weights",))):
        (values,) = group["params"]
        size = 4 * scales[id(values)] if coarse else float(values.detach().square().mean().sqrt())
        assert group["largest"] == pytest.approx(1e-3 * size, rel=1e-5)


class NoNumber:
    """A loss that is NaN at some steps."""

    def __init__(self, nsr: Distillation, at: set[int]) -> None:
        self.nsr, self.at, self.step = nsr, at, 0

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        self.step += 1
        found = self.nsr(outputs, batch)
        return found * float("nan") if self.step in self.at else found


def test_a_step_without_a_number_is_undone_and_named(module: FakeQuantizedModel, task: Task) -> None:
    # Before the first step, held samples take one call.
    loss = NoNumber(task.distillation, {4})
    found = train_module(module, Task(loss, task.training_set, task.holdout, task.distillation), SHORT, silent)
    assert found.undone == ("step 3 of epoch 1 had a loss or gradient of nan and was undone",)
    assert (found.epochs, found.best > 0) == (3, True)
    assert all(one.isfinite().all() for name, one in module.state_dict().items() if "range" not in name)


def test_a_loss_that_is_never_a_number_ends_training(module: FakeQuantizedModel, task: Task) -> None:
    before = state_of(module)
    loss = NoNumber(task.distillation, set(range(2, 100)))
    found = train_module(module, Task(loss, task.training_set, task.holdout, task.distillation), SHORT, silent)
    assert (found.epochs, len(found.undone)) == (0, 4)
    assert state_of(module) == before


def test_time_that_is_over_ends_it_with_the_smallest_steps(
    module: FakeQuantizedModel, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(learning.time, "monotonic", monotonic)
    rates = []
    step = learning.take_step
    monkeypatch.setattr(learning, "take_step", lambda *arguments: (rates.append(arguments[-1]), step(*arguments))[1])
    found = train_module(module, task, Training(epochs=1000, batch=8, minutes=0.5, rate=1e-3), silent)
    assert 1 < found.epochs < 30
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.9
    assert rates[-1] < 0.1


def test_batches_of_a_step_share_the_codes_of_weights_and_their_gradients_add_up(
    module: FakeQuantizedModel, task: Task
) -> None:
    single = next(TrainingSet(task.training_set.samples).batches(range(4), 4))
    (stacked,) = next(task.training_set.batches(range(4), 4))
    found = []
    for some in (single, [stacked]):
        optimizer = torch.optim.SGD([{"params": list(module.parameters()), "largest": 0.0}], lr=0.0)
        take_step(module, optimizer, task.loss, some, 1.0)
        found.append([one.grad.clone() for one in module.parameters() if one.grad is not None])
    assert len(single) == 4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


DEEP = """(float[N,16] x) => (float[N,16] y) {
    a = MatMul(x, s)  b = Relu(a)  c = MatMul(b, t)  d = MatMul(c, u)  e = MatMul(d, v)  f = Relu(e)
    g = MatMul(f, w)  h = Add(f, g)  y = MatMul(h, z)
}"""


DEEP_WEIGHTS = dict.fromkeys("stuvwz", (16, 16))


DEEP_SHORT = Training(epochs=3, batch=8, rate=5e-3)


@pytest.fixture
def deep(build: Build) -> FakeQuantizedModel:
    return module_of(build(DEEP, **DEEP_WEIGHTS), images(8, (1, 16)), "int4-block32")


@pytest.fixture(params=[True, False], ids=["stacked", "single"])
def deep_task(request: pytest.FixtureRequest, build: Build, tmp_path: Path) -> Task:
    onnx.save(build(DEEP, **DEEP_WEIGHTS), tmp_path / "m.onnx")
    lessons = run_float_model(tmp_path / "m.onnx", images(32, (1, 16)))
    nsr = Distillation.of(lessons)
    return Task(nsr, TrainingSet(lessons[:24], request.param), TrainingSet(lessons[24:], request.param), nsr)


def test_all_together_they_are_better(deep: FakeQuantizedModel, deep_task: Task) -> None:
    before = deep_task.evaluate(deep)[1]
    found = train_blocks(deep, deep_task, DEEP_SHORT, silent)
    assert (found.done, found.better) == (2, 2)
    assert deep_task.evaluate(deep)[1] < 0.9 * before


def test_what_is_no_better_stays(deep: FakeQuantizedModel, deep_task: Task) -> None:
    before = state_of(deep)
    found = train_blocks(deep, deep_task, Training(epochs=2, rate=10.0), silent)
    assert (found.done, found.better) == (2, 0)
    assert state_of(deep) == before


def test_blocks_that_give_no_floats_are_passed(build: Build, tmp_path: Path) -> None:
    text = "(float[N,16] x) => (int64[N,1] y) { h = MatMul(x, s)  y = ArgMax<axis = 1>(h) }"
    model = build(text, s=(16, 16))
    deep = module_of(model, images(8, (1, 16)), "int4-block32")
    onnx.save(model, tmp_path / "m.onnx")
    lessons = TrainingSet(run_float_model(tmp_path / "m.onnx", images(8, (1, 16))))
    nsr = Distillation({"y": 1.0})
    found = train_blocks(deep, Task(nsr, lessons, lessons, nsr), DEEP_SHORT, silent)
    assert (found.done, found.better) == (1, 0)


def test_blocks_that_learn_nothing_are_passed(deep: FakeQuantizedModel, deep_task: Task) -> None:
    found = train_blocks(deep.requires_grad_(requires_grad=False), deep_task, DEEP_SHORT, silent)
    assert (found.done, found.better) == (2, 0)


def test_a_loss_that_is_no_number_is_named_with_its_block(deep: FakeQuantizedModel, deep_task: Task) -> None:
    with torch.no_grad():
        next(iter(deep.biases.parameters()), next(iter(deep.weights.parameters()))).fill_(torch.nan)
    found = train_blocks(deep, deep_task, DEEP_SHORT, silent)
    assert found.undone[0] == "block 1: step 1 of epoch 1 had a loss or gradient of nan and was undone"


def test_what_flows_on_disk_gives_the_same_weights(build: Build, deep_task: Task) -> None:
    states = []
    for memory in (0, 1 << 22):
        deep = module_of(build(DEEP, **DEEP_WEIGHTS), images(8, (1, 16)), "int4-block32")
        train_blocks(deep, deep_task, replace(DEEP_SHORT, memory=memory), silent)
        states.append(state_of(deep))
    assert states[0] == states[1]


def test_what_learns_does_so_in_one_block(deep: FakeQuantizedModel) -> None:
    names = {id(one): name for name, one in deep.named_parameters()}
    found = [{names[id(one)] for one in block.parameters()} for block in blocks_of(deep)]
    assert len(found) == 2
    assert set.union(*found) == set(names.values())
    assert sum(map(len, found)) == len(names)
    # Both blocks read this tensor with one scale, which the first one learns.
    assert all(found)


def test_samples_flow_through_blocks_as_through_the_whole(deep: FakeQuantizedModel) -> None:
    batches = [Batch({"x": torch.from_numpy(one["x"])}, {}, count=1) for one in images(3, (1, 16))]
    with Activations(0) as quantized, Activations(0) as exact:
        flow = BlockActivations(deep, quantized, exact)
        places = flow.add_samples(batches)
        found = blocks_of(deep)
        for number, block in enumerate(found):
            flow.run_float(block)
            if number + 1 == len(found):
                (lesson,) = flow.training_set(block, places[1:2]).samples
            flow.run_quantized(block, {name for later in found[number + 1 :] for name in later.inputs} | {"y"})
        outputs = [torch.from_numpy(quantized.of(place)["y"]) for place in places]
    with torch.no_grad():
        for batch, output in zip(batches, outputs, strict=True):
            assert deep.outputs(batch.inputs)["y"].equal(output)
    for quantizer in deep.quantizers:
        quantizer.fake_quant_enabled = False
    np.testing.assert_allclose(lesson.expected["y"], deep.outputs(batches[1].inputs)["y"].detach(), atol=1e-6)


def test_entries_are_read_when_they_are_asked_for(deep: FakeQuantizedModel) -> None:
    batches = [Batch({"x": torch.from_numpy(one["x"])}, {}, count=2) for one in images(3, (2, 16))]
    with Activations(0) as quantized, Activations(0) as exact:
        flow = BlockActivations(deep, quantized, exact)
        first, second = flow.add_samples(batches[:2]), flow.add_samples(batches[2:])
        block = blocks_of(deep)[0]
        flow.run_float(block)
        learned, holdout = (flow.training_set(block, places).samples for places in (first, second))
        assert (len(learned), len(holdout), holdout[0].count) == (2, 1, 2)
        assert holdout[0].inputs["x"].equal(batches[2].inputs["x"])
        assert learned[0].expected.keys() == set(block.output_names)
        assert [one.inputs["x"].tolist() for one in learned[1:]] == [batches[1].inputs["x"].tolist()]


OUTPUTS = [torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def lessons(outputs: list[torch.Tensor], labels: list[int] | None = None) -> list[Batch]:
    given = [None] * len(outputs) if labels is None else [torch.tensor([label]) for label in labels]
    return [Batch({}, {"y": one}, label) for one, label in zip(outputs, given, strict=True)]


@pytest.mark.parametrize("probabilities", [False, True])
def test_distillation_is_the_noise_that_judges_count(probabilities: bool) -> None:
    expected = [one.softmax(-1) for one in OUTPUTS] if probabilities else OUTPUTS
    found = [
        (one.log() + 0.1 * OUTPUTS[0]).softmax(-1) if probabilities else one + 0.1 * OUTPUTS[0] for one in expected
    ]
    loss = Distillation.of(lessons(expected))
    total = sum(float(loss({"y": one}, batch)) for one, batch in zip(found, lessons(expected), strict=True)) / 4
    pairs = [((one.numpy(),), (other.numpy(),)) for one, other in zip(expected, found, strict=True)]
    assert total == pytest.approx(nsr_by_sample(pairs).sum(), rel=1e-3)


def test_outputs_that_are_no_floats_are_no_lesson() -> None:
    with pytest.raises(DataError, match="no output of the model is a float"):
        Distillation.of(lessons([torch.tensor([1])]))


@pytest.mark.parametrize("probabilities", [False, True])
def test_cross_entropy_takes_scores_and_probabilities(probabilities: bool) -> None:
    scores = [one.softmax(-1) for one in OUTPUTS] if probabilities else OUTPUTS
    some = lessons(scores, [0, 1, 2, 3])
    loss = CrossEntropy.of(some)
    expected = torch.nn.functional.cross_entropy(torch.cat(OUTPUTS), torch.arange(4))
    batch = Batch({}, {}, torch.arange(4), 4)
    assert float(loss({"y": torch.cat(scores)}, batch)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("outputs", "labels", "reported"),
    [
        (OUTPUTS, [0, 1, 2, 5], "labels lie in 0..5, expected 0..4"),
        (OUTPUTS, [-1, 0, 0, 0], "lie in -1..0"),
        ([torch.zeros(1, 3, 4)], [0], "expected one row of scores of classes"),
    ],
)
def test_labels_of_no_class_are_refused(outputs: list[torch.Tensor], labels: list[int], reported: str) -> None:
    with pytest.raises(DataError, match=reported):
        CrossEntropy.of(lessons(outputs, labels))


def test_a_users_loss_is_given_outputs_expected_and_inputs(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def loss(outputs, expected, inputs):\n    return (outputs['y'] - expected['y'] + inputs['x']).sum()\n"
    )
    batch = Batch({"x": torch.ones(2)}, {"y": torch.zeros(2)})
    assert float(load_loss(f"{path}:loss")({"y": torch.ones(2)}, batch)) == 4


@pytest.mark.parametrize(
    ("code", "reported"),
    [("return 3", "returned int, expected a scalar tensor"), ("raise KeyError(1)", "failed: KeyError: 1")],
)
def test_a_loss_that_fails_is_reported_when_it_is_called(code: str, reported: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def loss(outputs, expected, inputs):\n    {code}\n")
    loss = load_loss(f"{path}:loss")
    with pytest.raises(DataError, match=reported):
        loss({}, Batch({}, {}))


@pytest.mark.parametrize(("name", "reported"), [("mine", "is not written as"), ("{}:los", "did you mean 'loss'")])
def test_a_loss_that_is_not_found_is_reported_when_it_is_loaded(name: str, reported: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(outputs, expected, inputs):\n    return 0\n")
    with pytest.raises(SchemeError, match=reported):
        load_loss(name.format(path))


@pytest.fixture
def reference(build: Build, tmp_path: Path) -> Path:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_lessons_hold_what_the_float_model_gives(reference: Path) -> None:
    lessons = run_float_model(reference, images(3))
    assert [tuple(one.expected["y"].shape) for one in lessons] == [(1, 16)] * 3
    assert lessons[0].labels is None


def test_labels_are_those_of_the_samples_that_were_selected(reference: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.arange(10))
    some = Subset(Subset(images(10), [1, 3, 5, 7, 9]), [0, 2, 4])
    lessons = run_float_model(reference, some, tmp_path / "l.npy")
    assert [int(one.labels) for one in lessons if one.labels is not None] == [1, 5, 9]


@pytest.mark.parametrize("labels", [np.arange(9), np.ones(10), np.ones((10, 1), np.int64)])
def test_labels_that_do_not_fit_are_refused(labels: np.ndarray, reference: Path, tmp_path: Path) -> None:  # type: ignore[type-arg]
    np.save(tmp_path / "l.npy", labels)
    with pytest.raises(DataError, match="expected one whole number for each of 10 samples"):
        run_float_model(reference, images(10), tmp_path / "l.npy")


def test_samples_are_stacked_where_that_gives_the_same(reference: Path, build: Build) -> None:
    model = build(NETWORK, **WEIGHTS)
    lessons = run_float_model(reference, images(3))
    assert can_stack(module_of(model, images(4)), lessons)
    (batch,), (alone,) = TrainingSet(lessons, True).batches([2, 0, 1], 2)
    assert (batch.count, tuple(batch.inputs["x"].shape), alone.count) == (2, (2, 3, 8, 8), 1)
    assert batch.expected["y"][0].equal(lessons[2].expected["y"][0])


def test_samples_that_mix_when_stacked_are_run_one_by_one(build: Build, tmp_path: Path) -> None:
    text = "(float[N,8] x) => (float[N,4] y) { m = ReduceMean<axes = [0]>(x)  d = Sub(x, m)  y = MatMul(d, w) }"
    model, samples = build(text, w=(8, 4)), images(4, (2, 8))
    onnx.save(model, tmp_path / "m.onnx")
    lessons = run_float_model(tmp_path / "m.onnx", samples)
    assert not can_stack(module_of(model, samples), lessons)
    assert [len(some) for some in TrainingSet(lessons).batches(range(4), 3)] == [3, 1]


def test_where_no_two_samples_have_the_same_shape_each_is_run_by_itself(reference: Path, build: Build) -> None:
    lessons = [*run_float_model(reference, images(1)), *run_float_model(reference, images(1, (2, 3, 8, 8)))]
    assert not can_stack(module_of(build(NETWORK, **WEIGHTS), images(4)), lessons)


def test_samples_of_equal_shapes_are_stacked_and_what_is_left_makes_steps_of_several_shapes(
    reference: Path, build: Build
) -> None:
    single = [*run_float_model(reference, images(3)), *run_float_model(reference, images(4, (2, 3, 8, 8)))]
    assert can_stack(module_of(build(NETWORK, **WEIGHTS), images(4)), single)
    steps = list(TrainingSet(single, True).batches([6, 0, 3, 1, 4, 2, 5], 2))
    shapes = [[len(one.inputs["x"]) for one in step] for step in steps]
    assert shapes == [[4], [2], [4], [1]]
    assert [[one.count for one in step] for step in steps] == [[2], [2], [2], [1]]
    mixed = list(TrainingSet(single, True).batches([0, 1, 2, 3, 4], 4))
    assert [[one.count for one in step] for step in mixed] == [[3, 1], [1]]


@pytest.mark.parametrize("memory", [0, 2000, 1 << 20])
def test_samples_beyond_the_memory_are_on_disk_and_the_same(memory: int, reference: Path) -> None:
    held, samples = run_float_model(reference, images(3), memory=memory), images(3)
    assert [one.inputs["x"].numpy().tobytes() for one in held] == [one["x"].tobytes() for one in samples]
    held.close()
    assert not any(part.of(0) for part in held.held)


def test_batches_are_on_the_device_that_is_asked_for(reference: Path) -> None:
    lessons = TrainingSet(run_float_model(reference, images(2)), stacked=True, device=torch.device("meta"))
    ((batch,),) = lessons.batches([0, 1], 2)
    assert {one.device.type for one in (*batch.inputs.values(), *batch.expected.values())} == {"meta"}
