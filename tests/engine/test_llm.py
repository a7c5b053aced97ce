"""The real engine: what it says, answers, and does when its weights are swapped.

Whether a prompt's logprobs depend on its batch is not asked here: vLLM's BF16 GEMMs and attention
on CPU sum in an order that depends on it. The experts do not, which `test_load.py` shows on the
layers (`test_rows_do_not_depend_on_their_batch`).
"""

import re

import pytest
from cases import ALL_NVFP4, expert_tensor, make_case, other_weights
from harness import answers, engine, reload, reload_tensors

# An engine may start in any of these tests: whichever comes first.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("engine") / "log"


@pytest.fixture(scope="module")
def llm(log):
    with engine(ALL_NVFP4, log) as started:
        yield started


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_case(ALL_NVFP4, tmp_path_factory.mktemp("llm") / "other", edit=other_weights)


@pytest.fixture(scope="module")
def first_answers(llm):
    return answers(llm)


def test_start_is_announced_in_one_line(llm, log):
    lines = [line for line in log.read_text().splitlines() if "nvfp4_per_token: " in line]
    assert len(lines) == 1, lines
    assert re.search(r"\bINFO\b", lines[0])
    assert lines[0].endswith(
        "nvfp4_per_token: 2 MoE layers with per-token activation scales on the cpu experts "
        "(compiled kernel for this CPU), activation scales of the checkpoint ignored; "
        "4 dense NVFP4 layers per-token as well."
    )


def test_answers_repeat_to_the_bit(llm, first_answers):
    assert answers(llm) == first_answers
    assert len({tuple(tokens) for tokens, _ in first_answers}) > 1


def test_swaps_give_the_bits_of_fresh_starts(llm, first_answers, other, tmp_path):
    """The second start runs on the torch reference, which is defined to compute the same bits."""
    reload(llm, other)
    swapped = answers(llm)
    assert all(new != old for (_, new), (_, old) in zip(swapped, first_answers, strict=True))
    reload(llm, ALL_NVFP4)
    assert answers(llm) == first_answers
    reload_tensors(llm, other)
    assert answers(llm) == swapped
    reload(llm, ALL_NVFP4)
    assert answers(llm) == first_answers

    log = tmp_path / "log"
    with engine(other, log, moe_backend="emulation") as fresh:
        assert answers(fresh) == swapped
        reload(fresh, ALL_NVFP4)
        assert answers(fresh) == first_answers
    assert "on the reference experts (asked for with --moe-backend emulation)" in log.read_text()


def test_failed_swaps_leave_an_engine_that_answers(llm, first_answers, other, tmp_path):
    name = expert_tensor(1, 3, "down", "weight_scale")
    bad = make_case(other, tmp_path / "bad", edit=lambda tensors: tensors.pop(name))
    with pytest.raises(Exception, match=rf"{re.escape(name)} is missing.*Nothing was changed"):
        reload(llm, bad)
    assert answers(llm) == first_answers
    with pytest.raises(Exception, match=r"/nowhere is not a directory.*Nothing was changed"):
        reload(llm, "/nowhere")
    assert answers(llm) == first_answers
    # Tensors by hand are seen one by one, so that a failure leaves some of each.
    text = r"layers\.1\..*3\.down_proj\.weight_scale\. .*stopped in the middle"
    with pytest.raises(Exception, match=text):
        reload_tensors(llm, bad)
    mixture = answers(llm)
    assert [len(tokens) for tokens, _ in mixture] == [10] * len(first_answers)
    assert mixture != first_answers
    reload(llm, ALL_NVFP4)
    assert answers(llm) == first_answers
