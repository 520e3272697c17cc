import numpy as np
import pytest
import torch
from pydantic import ValidationError

from joynexus.errors import InvalidBatchError
from joynexus.models.normalizer import PolicyNormalizer
from joynexus.models.policy import prefix_keys, prepare_prefix, tokenize
from joynexus.models.prompts import discretise, render_prompts
from joynexus.specs.signature import prefix_layout
from joynexus.specs.tenant import ObservationSpec
from joynexus.testing.model_inputs import UNCHANGED, fake_observation
from joynexus.testing.tiny import TINY_SMOLVLM
from joynexus.types import NormalizationStats, PolicyStats

PI05 = "Task: {instruction}, State: {state};\nAction: "


def seen(**changes):
    return ObservationSpec(**({"state_dim": 3, "max_prompt_tokens": 80, "prompt_template": PI05} | changes))


def stats(high):
    low, top = np.full(3, -1.0, np.float32), np.full(3, high, np.float32)
    each = NormalizationStats(mean=low * 0, std=top, minimum=low, maximum=top, q01=low, q99=top, count=9)
    return PolicyStats(state=each, action=None, source="demos.h5")


def states(*rows):
    return np.array(rows, dtype=np.float32)


def test_the_state_is_written_as_bins_with_what_is_outside_told_apart():
    found = discretise(states([-1.01, -1.0, -0.9922, 0.0, 0.9999, 1.0, 7.0, -0.0]), 256)
    assert found.tolist() == [[-1, 0, 0, 128, 255, 255, 255, 128]]
    assert discretise(states([-1.0, -0.01, 0.0, 0.99]), 2).tolist() == [[0, 0, 1, 1]]
    prompts = render_prompts(seen(), ["push it", "{state}"], states([-2, 0, 2], [0.5, 0.5, 0.5]))
    assert prompts == [
        "Task: push it, State: -1 128 255;\nAction: ",
        "Task: {state}, State: 192 192 192;\nAction: ",
    ]


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        ("none", " pick_up\nit\n", " pick_up\nit\n\n"),
        ("final_newline", "pick_up it\n", "pick_up it\n"),
        ("final_newline", "pick_up it", "pick_up it\n"),
        ("one_line", " pick_up\nit\n", "pick up it\n"),
    ],
)
def test_instructions_are_cleaned_as_a_family_was_trained(how, text, expected):
    spec = seen(prompt_template="{instruction}\n", instruction_cleanup=how)
    assert render_prompts(spec, [text], None) == [expected]


def test_a_template_without_the_state_reads_none():
    assert render_prompts(seen(prompt_template="do {instruction}"), ["it"], None) == ["do it"]
    with pytest.raises(ValidationError, match=r"has '\{state\}', state_dim is 0"):
        seen(state_dim=0)


def test_a_prompt_fits_whatever_the_state_or_is_refused(tiny):
    longest = len(render_prompts(seen(), ["push"], None)[0])
    assert longest == len("Task: push, State: 255 255 255;\nAction: ")
    assert "State: -1 -1 -1;" in render_prompts(seen(state_bins=4), ["push"], None)[0]
    bucket = longest + 1  # the byte-level tokenizer begins with an id of its own
    tokenize(tiny, seen(max_prompt_tokens=bucket), ["push"], None)
    with pytest.raises(InvalidBatchError, match="max_prompt_tokens"):
        tokenize(tiny, seen(max_prompt_tokens=bucket - 1), ["push"], None)


def test_two_tenants_share_a_row_by_its_tokens_and_never_by_its_frames(tiny, policy):
    spec = policy.model_copy(update={"observation": seen(cameras=("base",), image_size=(32, 48))})
    signature = prefix_layout(TINY_SMOLVLM, spec.observation).signature
    one = fake_observation(spec.observation, 3)

    def keys(normalizer, observation=one):
        return prefix_keys(prepare_prefix(tiny, spec, observation, normalizer), signature)

    narrow, wide = (PolicyNormalizer(stats(high), "min_max") for high in (1.0, 3.0))
    assert not {*keys(narrow)} & {*keys(wide)}
    assert keys(narrow) == keys(PolicyNormalizer(stats(1.0), "min_max"))
    clipped = prepare_prefix(tiny, spec, one, narrow)
    plain = prepare_prefix(tiny, spec, one, UNCHANGED)
    assert torch.equal(clipped.tokens, plain.tokens), "statistics of -1 and 1 leave a state as it is"


def test_what_the_prompt_holds_is_in_the_signature():
    def signature(**changes):
        return prefix_layout(TINY_SMOLVLM, seen(**changes)).signature

    different = [{}, {"state_dim": 4}, {"state_bins": 128}, {"instruction_cleanup": "one_line"}]
    assert len({signature(**each) for each in different}) == 4
    without = {"prompt_template": "{instruction}"}
    assert signature(**without) == signature(**without, state_dim=4) == signature(**without, state_bins=9)
