"""What every action module has to keep, whoever wrote it; see :mod:`joynexus.testing.model_contracts`."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from joynexus.models.action_module import ActionModule, Decision, ModuleDims, build_action_module
from joynexus.models.pauses import visited
from joynexus.models.prefix import PrefixFeatures
from joynexus.specs.action_module import ActionModuleSpec
from joynexus.testing.model_contracts import no_global_randomness, require
from joynexus.testing.model_inputs import FakeFrozenLayers, fake_prefix

DIMS = ModuleDims(prefix_dim=32, state_dim=5, action_dim=3, horizon=4, kv_shape=(2, 2, 8), num_heads=4)
ROWS = 6
CLOSE = 1e-5
"""Rounding of a row may change with the number of rows; its draws may not."""


def check_action_module(spec: ActionModuleSpec) -> None:
    """Check all promises of an action module; see :class:`joynexus.models.action_module.ActionModule`.

    Args:
        spec: A small instance.

    Raises:
        AssertionError: Saying which promise is broken.
    """
    for dims in (DIMS,) if spec.needs_state else (DIMS, replace(DIMS, state_dim=0)):
        with no_global_randomness("building or resetting the module"):
            module = _build(spec, dims, seed=3)
        check_parameters(module)
        shake(module)
        check_loss(module)
        check_padded_steps_ignored(module)
        check_padded_prefix_ignored(module)
        check_act(module)
        check_pauses(module)
        check_evaluate(module)
        check_gradient_reaches_all(module)
        check_round_trip(module)


def shake(module: ActionModule) -> None:
    """Move every parameter off its initial value: gates that start at 0 would hide what is behind them."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for each in module.parameters():
            each.add_(torch.randn(each.shape, generator=generator), alpha=0.1)


def check_parameters(module: ActionModule) -> None:
    """Check that the seed alone decides every parameter, and that their number is estimated within 30 %."""
    spec, dims = module.spec, module.dims
    twin, other = _build(spec, dims, seed=3), _build(spec, dims, seed=4)
    require(_is_equal_state(module, twin), "one seed gives two initialisations")
    require(not _is_equal_state(module, other), "the initialisation does not depend on the seed")
    with torch.no_grad():
        for each in twin.parameters():
            each.fill_(torch.nan)
    twin.reset_parameters(torch.Generator().manual_seed(3))
    require(_is_equal_state(module, twin), "reset_parameters leaves a parameter as it was")
    found = sum(each.numel() for each in module.parameters())
    estimate = spec.num_parameters(
        prefix_dim=dims.prefix_dim, state_dim=dims.state_dim, action_dim=dims.action_dim, horizon=dims.horizon
    )
    require(abs(estimate - found) <= 0.3 * found, f"num_parameters says {estimate}, the module has {found}")


def check_loss(module: ActionModule) -> None:
    """Check shape and randomness of the loss, and that ``train()`` changes nothing (no dropout)."""
    with no_global_randomness("loss"):
        loss = _loss(module)
    require(loss.shape == (ROWS,), f"loss is {tuple(loss.shape)}, one number per row is needed")
    require(bool(loss.isfinite().all()), "the loss is not finite")
    require(torch.equal(loss, _loss(module)), "one generator state gives two losses")
    module.eval()
    evaluated = _loss(module)
    module.train()
    require(torch.equal(loss, evaluated), "train() and eval() differ; dropout would draw global random numbers")
    halves = _prefix(module).map(lambda each: each.to(torch.bfloat16) if each.is_floating_point() else each)
    require(bool(_loss(module, prefix=halves).isfinite().all()), "bfloat16 features give no finite loss")


def check_padded_steps_ignored(module: ActionModule) -> None:
    """Check that padded steps reach neither loss nor gradient, whatever they hold; a row without a valid step is 0."""
    valid = _all_valid(module)
    valid[1, 2:] = False
    valid[2] = False
    clean, dirty = _actions(module), _actions(module)
    dirty[~valid] = torch.nan
    gradients: list[list[Tensor]] = []
    losses: list[Tensor] = []
    for actions in (clean, dirty):
        module.zero_grad()
        loss = _loss(module, actions=actions, valid=valid)
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append([each.grad.clone() for each in module.parameters() if each.grad is not None])
    require(bool(losses[1].isfinite().all()), "a NaN at a padded step leaks into the loss")
    require(torch.equal(*losses), "the content of padded steps changes the loss")
    same = all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    require(same, "the content of padded steps changes a gradient")
    require(losses[0][2].item() == 0, "a row without a valid step has a loss")


def check_padded_prefix_ignored(module: ActionModule) -> None:
    """Check that padded positions of the prefix change neither loss nor actions."""
    prefix = _prefix(module)

    def spoil(states: Tensor) -> Tensor:
        return torch.where(prefix.pad[:, None, :, None], torch.full_like(states, 7.0), states)

    dirty = replace(
        prefix,
        hidden=spoil(prefix.hidden[:, None])[:, 0],
        keys=tuple(spoil(each) for each in prefix.keys),
        values=tuple(spoil(each) for each in prefix.values),
    )
    require(torch.equal(_loss(module), _loss(module, prefix=dirty)), "padded prefix positions change the loss")
    require(
        torch.equal(_act(module).actions, _act(module, prefix=dirty).actions), "padded prefix positions change actions"
    )


def check_act(module: ActionModule) -> None:
    """Check shapes, and that a row draws from its own generator alone."""
    dims = module.dims
    with no_global_randomness("act"):
        together = _act(module)
    require(together.actions.shape == (ROWS, dims.horizon, dims.action_dim), "act gives another shape than the chunk's")
    require(not together.actions.requires_grad, "act leaves a gradient graph")
    require(torch.equal(together.actions, _act(module).actions), "one set of generators gives two answers")
    for row in (0, ROWS - 1):
        alone = module.act(
            _prefix(module).slice(row, row + 1),
            _state(module)[row : row + 1],
            _generators()[row : row + 1],
            deterministic=False,
        )
        same = torch.allclose(alone.actions[0], together.actions[row], atol=CLOSE)
        require(same, "the actions of a row depend on the rows beside it")


def check_pauses(module: ActionModule) -> None:
    """Check that acting is the same to the last bit with other rows acted for at each of its pauses."""
    wanted, wanted_other = _act(module), _act(module, deterministic=True)
    between: list[Decision] = []

    def interrupt() -> None:
        with visited(None):
            between.append(_act(module, deterministic=True))

    with visited(interrupt):
        found = _act(module)
    require(torch.equal(found.actions, wanted.actions), "act changes where another one is in the middle of it")
    same = all(torch.equal(each.actions, wanted_other.actions) for each in between)
    require(same, "act changes where it is in the middle of another one")


def check_evaluate(module: ActionModule) -> None:
    """Check that ``evaluate`` gives the log-probability and value that ``act`` gave, or refuses."""
    for deterministic in (False, True):
        decision = _act(module, deterministic=deterministic)
        if not module.spec.gives_log_prob:
            require(decision.log_prob is None and decision.value is None, "act scores, gives_log_prob is false")
            continue
        with no_global_randomness("evaluate"):
            scored = module.evaluate(_prefix(module), _state(module), decision.trace)
        log_prob, value = decision.log_prob, decision.value
        require(log_prob is not None and value is not None, "gives_log_prob is true, act gives none")
        same = torch.allclose(scored.log_prob, cast("Tensor", log_prob), atol=CLOSE)
        require(same, "evaluate gives another log-probability than act")
        require(
            torch.allclose(scored.value, cast("Tensor", value), atol=CLOSE), "evaluate gives another value than act"
        )
        require(scored.entropy.shape == (ROWS,), "entropy is not one number per row")
    if not module.spec.gives_log_prob:
        try:
            module.evaluate(_prefix(module), _state(module), {})
        except NotImplementedError:
            return
        raise AssertionError("gives_log_prob is false, evaluate does not raise NotImplementedError")


def check_gradient_reaches_all(module: ActionModule) -> None:
    """Check that loss and evaluation together train every parameter."""
    module.zero_grad()
    total = _loss(module).sum()
    if module.spec.gives_log_prob:
        scored = module.evaluate(_prefix(module), _state(module), _act(module).trace)
        total = total + (scored.log_prob + scored.entropy + scored.value).sum()
    total.backward()
    still = [name for name, each in module.named_parameters() if each.grad is None or not bool((each.grad != 0).any())]
    require(not still, f"no gradient reaches {still[:5]}")


def check_round_trip(module: ActionModule) -> None:
    """Check that the state dict holds all that a module is."""
    copy = _build(module.spec, module.dims, seed=99)
    copy.load_state_dict(module.state_dict(), strict=True)
    require(torch.equal(_act(module).actions, _act(copy).actions), "a module loaded from a state dict acts differently")


def _build(spec: ActionModuleSpec, dims: ModuleDims, *, seed: int) -> ActionModule:
    module = build_action_module(spec, dims, seed=seed)
    if module.extends_prefix:
        module.attach(FakeFrozenLayers(dims))
    return module


def _is_equal_state(first: ActionModule, second: ActionModule) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _prefix(module: ActionModule) -> PrefixFeatures:
    return fake_prefix(module.dims, ROWS)


def _state(module: ActionModule) -> Tensor:
    return torch.randn(ROWS, module.dims.state_dim, generator=torch.Generator().manual_seed(1))


def _actions(module: ActionModule) -> Tensor:
    shape = (ROWS, module.dims.horizon, module.dims.action_dim)
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 1.6 - 0.8


def _all_valid(module: ActionModule) -> Tensor:
    return torch.ones(ROWS, module.dims.horizon, dtype=torch.bool)


def _generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 + row) for row in range(ROWS)]


def _loss(
    module: ActionModule,
    *,
    prefix: PrefixFeatures | None = None,
    actions: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    return module.loss(
        _prefix(module) if prefix is None else prefix,
        _state(module),
        _actions(module) if actions is None else actions,
        _all_valid(module) if valid is None else valid,
        torch.Generator().manual_seed(5),
    )


def _act(module: ActionModule, *, prefix: PrefixFeatures | None = None, deterministic: bool = False) -> Decision:
    seen = _prefix(module) if prefix is None else prefix
    return module.act(seen, _state(module), _generators(), deterministic=deterministic)
