import numpy as np
import pytest
import torch

from joynexus.errors import SpecError
from joynexus.models.normalizer import DimensionNormalizer, PolicyNormalizer
from joynexus.types import NormalizationStats, PolicyStats

MODES = ("mean_std", "min_max", "quantile", "identity")


def stats(low=-2.0, high=6.0, q01=-1.0, q99=3.0, mean=1.0, std=2.0, width=2):
    def full(value):
        return np.full(width, value, dtype=np.float32)

    return NormalizationStats(
        mean=full(mean), std=full(std), minimum=full(low), maximum=full(high), q01=full(q01), q99=full(q99), count=10
    )


def policy_stats():
    return PolicyStats(state=stats(), action=stats(), source="test")


def test_c56_each_mode_un_normalises_with_its_own_statistics():
    top = torch.ones(1, 1, 2)
    bottom = -top
    for mode, low, high in (("min_max", -2.0, 6.0), ("quantile", -1.0, 3.0)):
        normalizer = PolicyNormalizer(policy_stats(), mode)
        assert normalizer.mode == mode
        assert torch.equal(normalizer.raw_actions(top), torch.full((1, 1, 2), high))
        assert torch.equal(normalizer.raw_actions(bottom), torch.full((1, 1, 2), low))


@pytest.mark.parametrize("mode", MODES)
def test_back_and_forth_is_the_identity(mode):
    normalizer = PolicyNormalizer(policy_stats(), mode)
    raw = torch.tensor([[[-2.5, 0.0], [1.7, 9.0]]])
    assert torch.allclose(normalizer.raw_actions(normalizer.actions(raw)), raw, atol=1e-5)


def test_formulas():
    raw = torch.tensor([[5.0, -3.0]])
    expected = {"mean_std": [2.0, -2.0], "min_max": [0.75, -1.25], "quantile": [2.0, -2.0], "identity": [5.0, -3.0]}
    for mode, values in expected.items():
        assert torch.allclose(PolicyNormalizer(policy_stats(), mode).state(raw), torch.tensor([values]), atol=1e-6)


@pytest.mark.parametrize(("mode", "at_rest"), [("mean_std", 0.0), ("min_max", -1.0), ("quantile", -1.0)])
def test_a_constant_dimension_maps_to_one_number_and_back_to_its_value(mode, at_rest):
    constant = DimensionNormalizer(stats(low=0.6, high=0.6, q01=0.6, q99=0.6, mean=0.6, std=0.0), mode)
    assert torch.equal(constant.normalize(torch.tensor([[0.6, 0.6001]])), torch.full((1, 2), at_rest))
    assert torch.equal(constant.unnormalize(torch.tensor([[0.9, -5.0]])), torch.full((1, 2), 0.6))


def test_a_small_range_is_stretched_whole():
    narrow = DimensionNormalizer(stats(low=0.0, high=1e-5, q01=0.0, q99=1e-5), "min_max")
    assert torch.equal(narrow.normalize(torch.tensor([[0.0, 1e-5]])), torch.tensor([[-1.0, 1.0]]))


def test_c56_state_and_action_have_modes_of_their_own():
    normalizer = PolicyNormalizer(policy_stats(), "quantile", state_mode="mean_std")
    raw = torch.tensor([[3.0, 3.0]])
    assert torch.allclose(normalizer.state(raw), torch.ones(1, 2))
    assert torch.equal(normalizer.actions(raw[None]), torch.ones(1, 1, 2))
    assert (normalizer.mode, normalizer.state_mode) == ("quantile", "mean_std")
    with pytest.raises(SpecError, match="normalization 'mean_std': the policy has no statistics"):
        PolicyNormalizer(None, "identity", state_mode="mean_std")


def test_nan_stays_where_it_is():
    normalized = PolicyNormalizer(policy_stats(), "quantile").actions(torch.tensor([[[torch.nan, 0.0], [1.0, 1.0]]]))
    assert torch.equal(normalized.isnan(), torch.tensor([[[True, False], [False, False]]]))


def test_a_mode_that_needs_statistics_is_refused_without():
    with pytest.raises(SpecError, match="normalization 'quantile': the policy has no statistics"):
        PolicyNormalizer(None, "quantile")
    raw = torch.ones(1, 1, 2)
    assert torch.equal(PolicyNormalizer(None, "identity").raw_actions(raw), raw)


def test_a_part_without_statistics_is_left_as_it_is():
    normalizer = PolicyNormalizer(PolicyStats(state=None, action=stats(), source="test"), "min_max")
    raw = torch.full((1, 2), 6.0)
    assert torch.equal(normalizer.state(raw), raw)
    assert torch.allclose(normalizer.actions(raw[None]), torch.ones(1, 1, 2))
