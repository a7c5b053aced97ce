"""New weights in a model that is in place: the bits of a fresh load, or the old ones."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ALL_NVFP4,
    EXPERTS_ONLY,
    LAYERS,
    Tensors,
    assert_bitwise,
    expert_tensor,
    make_case,
    other_weights,
    read_tensors,
)
from harness import engine_config, loaded_model, outputs_of, parameters_of, snapshot

from vllm_nvfp4_pertoken.errors import CheckpointError

# Resident bytes that 20 reloads may add. The model is 2 MB, so even one whole copy kept by each
# reload would be 40 MB; what remains is the allocator's noise.
_RELOADS = 20
_GROWTH_ALLOWED = 8 << 20


class Running:
    """A model in place, and what it is to be compared with."""

    def __init__(self, config: Any, model: Any) -> None:
        self.config, self.model = config, model

    def reload(self, path: Path | None = None, tensors: Any = None) -> None:
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        iterator = None if tensors is None else iter(tensors)
        reload_weights(self.config, self.model, iterator, path and str(path), True)

    def snapshot(self) -> Tensors:
        return snapshot(self.config, self.model)

    def assert_is(self, expected: Tensors) -> None:
        assert_bitwise(self.snapshot(), expected)


@contextmanager
def running(path: Path) -> Iterator[Running]:
    with loaded_model(path) as (config, model):
        yield Running(config, model)


def fresh(path: Path) -> Tensors:
    with running(path) as server:
        return server.snapshot()


def shuffled(path: Path, edit: Callable[[Tensors], None] | None = None) -> list[Any]:
    """A checkpoint's tensors in no order, with input scales that are nobody's."""
    tensors = read_tensors(path)
    for name in list(tensors):
        if ".experts." in name and name.endswith("input_scale"):
            tensors[name] = torch.tensor(float("nan"))
    if edit is not None:
        edit(tensors)
    items = list(tensors.items())
    random.Random(5).shuffle(items)
    return items


@pytest.fixture(scope="module", params=[EXPERTS_ONLY, ALL_NVFP4], ids=["experts", "all"])
def a_and_b(request, tmp_path_factory) -> tuple[Path, Path, Tensors, Tensors]:
    """Two checkpoints, and what fresh loads of them give."""
    a = request.param
    b = make_case(a, tmp_path_factory.mktemp("reload") / "b", edit=other_weights)
    of_a, of_b = fresh(a), fresh(b)
    # Every weight and output is another one, so that nothing stale can pass for new.
    same = [name for name in of_a if of_a[name].numel() and torch.equal(of_a[name], of_b[name])]
    assert all(name.endswith("input_scale") for name in same), same
    return a, b, of_a, of_b


@pytest.fixture(scope="module")
def experts_a_and_b(tmp_path_factory) -> tuple[Path, Path, Tensors, Tensors]:
    a = EXPERTS_ONLY
    b = make_case(a, tmp_path_factory.mktemp("reload") / "b", edit=other_weights)
    return a, b, fresh(a), fresh(b)


def test_reload_from_path_is_a_fresh_load(a_and_b):
    a, b, of_a, of_b = a_and_b
    with running(a) as server:
        addresses = {name: p.data_ptr() for name, p in server.model.named_parameters()}
        server.reload(b)
        server.assert_is(of_b)
        server.reload(a)
        server.assert_is(of_a)
        server.reload()  # from where the last weights came
        server.assert_is(of_a)
        assert addresses == {name: p.data_ptr() for name, p in server.model.named_parameters()}
        assert sum(map(bool, addresses.values())) > 6 * LAYERS


def test_reload_from_tensors_in_any_order_is_a_fresh_load(a_and_b):
    a, b, of_a, of_b = a_and_b
    with running(a) as server:
        addresses = {name: p.data_ptr() for name, p in server.model.named_parameters()}
        server.reload(tensors=shuffled(b))
        server.assert_is(of_b)
        server.reload(tensors=shuffled(a))
        server.assert_is(of_a)
        assert addresses == {name: p.data_ptr() for name, p in server.model.named_parameters()}


def test_tensors_need_no_input_scales(experts_a_and_b):
    a, b, _, of_b = experts_a_and_b
    with running(a) as server:
        server.reload(
            tensors=[(name, t) for name, t in shuffled(b) if not name.endswith("input_scale")]
        )
        server.assert_is(of_b)


def test_memory_stays_flat(experts_a_and_b):
    a, b, of_a, _ = experts_a_and_b
    curve = []
    with running(a) as server:
        for _ in range(2):  # buffers that are made once
            server.reload(b)
            server.reload(a)
        for index in range(_RELOADS):
            curve.append(_resident())
            server.reload(a if index % 2 else b)
        curve.append(_resident())
        server.assert_is(of_a)
    print("resident MB after each reload:", *(f"{size / 2**20:.1f}" for size in curve))
    assert curve[-1] - curve[0] < _GROWTH_ALLOWED


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# Failures that change nothing


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


_MISSING = expert_tensor(1, 6, "up", "weight_scale")


@pytest.mark.parametrize(
    ("edit", "damage", "text"),
    [
        pytest.param(
            None, _truncate, r"model\.safetensors \(\d+ bytes\) cannot be", id="truncated"
        ),
        pytest.param(
            lambda tensors: tensors.pop(_MISSING),
            None,
            rf"{re.escape(_MISSING)} is missing",
            id="incomplete",
        ),
        pytest.param(
            lambda ts: ts.update({_MISSING: ts[_MISSING][:, :4]}),
            None,
            rf"{re.escape(_MISSING)} in .* is F8_E4M3 \[128, 4\], expected F8_E4M3 \[128, 16\]",
            id="wrong shape",
        ),
        pytest.param(
            None,
            lambda path: path.rename(path.with_name("elsewhere")),
            r"bad is not a directory\. Expected: a checkpoint directory",
            id="no such path",
        ),
        pytest.param(
            None,
            lambda path: (path / "model.safetensors").unlink(),
            r"holds no \*\.safetensors files",
            id="empty",
        ),
    ],
)
def test_bad_files_change_nothing(edit, damage, text, experts_a_and_b, tmp_path):
    a, b, of_a, of_b = experts_a_and_b
    bad = make_case(b, tmp_path / "bad", edit=edit)
    if damage:
        damage(bad)
    with running(a) as server:
        with pytest.raises(CheckpointError, match=text) as caught:
            server.reload(bad)
        assert "Nothing was changed: the server keeps its old weights." in str(caught.value)
        server.assert_is(of_a)
        server.reload()  # the path that failed is forgotten
        server.assert_is(of_a)
        server.reload(b)
        server.assert_is(of_b)


# Failures half way


def _without_tensor(tensors: Tensors) -> None:
    del tensors[expert_tensor(1, 6, "down", "weight")]


def _without_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1.mlp.experts.6." in name]:
        del tensors[name]


def _wrong_shape(tensors: Tensors) -> None:
    name = expert_tensor(1, 6, "gate", "weight")
    tensors[name] = tensors[name][:100]


def _negative_scale(tensors: Tensors) -> None:
    tensors[expert_tensor(1, 6, "up", "weight_scale_2")].fill_(-1.0)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_without_tensor, r"layers\.1\..*1 expert tensors were not .*6\.down_proj\.weight"),
        (_without_expert, r"layers\.1\..*9 expert tensors were not .*6\.gate_proj\.weight"),
        (_wrong_shape, r"layers\.1\..*6\.gate_proj\.weight is torch\.uint8 \[100, 128\]"),
        (_negative_scale, r"layers\.1\..*6\.up_proj\.weight_scale_2 is -1\.0"),
    ],
)
def test_bad_tensors_are_named_and_layers_stay_usable(edit, text, order, experts_a_and_b):
    a, b, of_a, of_b = experts_a_and_b
    tensors = shuffled(b, edit)
    if order == "sorted":
        tensors.sort(key=lambda item: item[0])
    with running(a) as server:
        with pytest.raises(CheckpointError, match=text) as caught:
            server.reload(tensors=tensors)
        told = re.search(
            r"(\d+) modules have their old weights again, (\d+) already have the new ones"
            r"|(Nothing was changed)",
            str(caught.value),
        )
        assert told, str(caught.value)
        # Each layer has the one or the other, whole; the bad one has its old weights.
        now = server.snapshot()
        assert_bitwise({"bad layer": now["moe 1"]}, {"bad layer": of_a["moe 1"]})
        unlike_a = [n for n in now if not _same(now[n], of_a[n])]
        neither = [n for n in unlike_a if not _same(now[n], of_b[n])]
        assert not neither, neither
        if told[3]:
            assert not unlike_a
        else:
            assert unlike_a
        server.reload(tensors=shuffled(b))
        server.assert_is(of_b)


def test_layer_that_no_tensor_came_for_keeps_its_weights(experts_a_and_b):
    """vLLM's rule for partial updates: a layer is updated whole, or not at all."""
    a, b, of_a, of_b = experts_a_and_b
    others = [(name, t) for name, t in shuffled(b) if ".layers.1.mlp.experts." not in name]
    with running(a) as server:
        server.reload(tensors=others)
        kept = [n for n in of_a if n == "moe 1" or "layers.1.mlp.experts" in n]
        assert len(kept) == 7
        server.assert_is({**of_b, **{name: of_a[name] for name in kept}})


def test_other_models_in_the_process_are_not_counted(experts_a_and_b):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    a, _, of_a, _ = experts_a_and_b
    with running(a) as server:
        config = engine_config(a)
        with set_current_vllm_config(config), torch.no_grad():
            draft = Running(config, get_model(vllm_config=config))
        with pytest.raises(CheckpointError, match="Nothing was changed"):
            server.reload(Path("/nowhere"))
        server.assert_is(of_a)
        draft.assert_is(of_a)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach(), other)


def test_parameters_and_outputs_are_both_compared(experts_a_and_b):
    """The comparisons above see what they should: experts by parameter, BF16 layers by output."""
    a, _, of_a, _ = experts_a_and_b
    with running(a) as server:
        assert parameters_of(server.model).keys() < of_a.keys()
        outputs = outputs_of(server.config, server.model)
        assert len(outputs) > 2 * LAYERS
        layer = server.model.model.layers[1].mlp.experts.routed_experts
        layer.w2_weight_scale_2.data.mul_(2)
        with pytest.raises(AssertionError, match=r"2 of \d+ differ: .*w2_weight_scale_2.*moe 1"):
            server.assert_is(of_a)
