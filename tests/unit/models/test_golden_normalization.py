"""State and action normalisation against LeRobot's own processors, on the statistics of its checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from joynexus.models.normalizer import PolicyNormalizer
from joynexus.types import NormalizationStats, PolicyStats

GOLDEN = Path(__file__).parents[2] / "golden"
MODES = {"MEAN_STD": "mean_std", "QUANTILES": "quantile", "MIN_MAX": "min_max", "IDENTITY": "identity"}
RELATIVE = 1e-6
"""Of the largest number: float32 rounding of another order of the same operations."""


def processor(family):
    """The modes and the statistics that a checkpoint's preprocessor holds."""
    steps = json.loads((GOLDEN / family / "policy_preprocessor.json").read_text())["steps"]
    step = next(each for each in steps if each["registry_name"] == "normalizer_processor")
    tensors = load_file(GOLDEN / family / step["state_file"])

    def stats(feature):
        names = {"mean": "mean", "std": "std", "minimum": "min", "maximum": "max", "q01": "q01", "q99": "q99"}
        vectors = {ours: tensors[f"{feature}.{theirs}"] for ours, theirs in names.items()}
        return NormalizationStats(**vectors, count=int(tensors[f"{feature}.count"][0]))

    modes = step["config"]["norm_map"]
    policy_stats = PolicyStats(state=stats("observation.state"), action=stats("action"), source=family)
    return PolicyNormalizer(policy_stats, MODES[modes["ACTION"]], state_mode=MODES[modes["STATE"]])


def close(found, expected):
    return np.abs(found.numpy() - expected).max() <= RELATIVE * np.abs(expected).max()


@pytest.mark.parametrize("family", ["smolvla", "smolvla_b", "pi0", "pi05"])
def test_golden_states_and_actions_are_normalised_and_back_as_lerobot_does(family):
    normalizer = processor(family)
    inputs = load_file(GOLDEN / family / "inputs.safetensors")
    expected = load_file(GOLDEN / family / "expected.safetensors")
    assert (normalizer.mode, normalizer.state_mode) == (("quantile",) * 2 if family == "pi05" else ("mean_std",) * 2)
    assert close(normalizer.state(torch.tensor(inputs["raw.observation.state"])), inputs["batch.observation.state"])
    assert close(normalizer.actions(torch.tensor(inputs["raw.action"])), inputs["batch.action"])
    sampled = normalizer.raw_actions(torch.tensor(expected["sample.actions"]))
    assert close(sampled, expected["sample.actions_unnormalised"])


def test_golden_values_tell_the_modes_apart():
    inputs = load_file(GOLDEN / "pi05" / "inputs.safetensors")
    wrong = PolicyNormalizer(processor("pi05").stats, "min_max")
    assert not close(wrong.actions(torch.tensor(inputs["raw.action"])), inputs["batch.action"])
