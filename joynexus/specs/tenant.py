"""A tenant: one policy, and the workloads that train and evaluate it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from joynexus.specs.action_module import AnyActionModule
from joynexus.specs.adapter import AdapterSpec
from joynexus.specs.algorithm import AnyAlgorithm, OptimizerSpec
from joynexus.specs.base import Name, Resources, Spec
from joynexus.specs.contract import GripperSign, NormalizationMode, PolicyInterface
from joynexus.specs.data import AnyDataset
from joynexus.specs.environment import AnyEnvironment

ImageSide = Annotated[int, Field(ge=16, le=2048)]


class ObservationSpec(Spec):
    """What the policy looks at."""

    cameras: tuple[Name, ...] = ()
    """Cameras in the order in which they enter the prefix; empty for a policy without vision."""
    image_size: tuple[ImageSide, ImageSide] = (128, 128)
    """Height and width of every camera, in pixels."""
    state_dim: int = Field(ge=0, le=4096)
    """Width of the state vector."""
    max_prompt_tokens: int = Field(default=32, ge=1, le=4096)
    """Token bucket: prompts are padded to it, longer ones are refused, so that neighbours can't change a length."""
    prompt_template: str = "{instruction}"
    """The prompt; ``{instruction}`` stands for the task's own, ``{state}`` for the normalised state as bin numbers."""
    state_bins: int = Field(default=256, ge=2, le=65536)
    """Bins over [-1, 1] of each number of ``{state}``; -1 stands for what is below, the last one for what is above."""
    instruction_cleanup: Literal["none", "final_newline", "one_line"] = "none"
    """What is done to an instruction first. ``final_newline``: one line break at its end is dropped, as the template
    gives its own (SmolVLA, π0). ``one_line``: blanks around it are dropped, underscores and line breaks become blanks
    (π0.5)."""

    normalization: NormalizationMode | None = None
    """Of the state; None takes the mode of the actions."""

    @property
    def state_in_prompt(self) -> bool:
        """Whether the prompt, and with it the prefix, holds the state."""
        return "{state}" in self.prompt_template

    @model_validator(mode="after")
    def _check(self) -> "ObservationSpec":
        if len(set(self.cameras)) != len(self.cameras):
            raise ValueError(f"cameras {list(self.cameras)} name one camera twice")
        if "{instruction}" not in self.prompt_template:
            raise ValueError(f"prompt_template {self.prompt_template!r} lacks '{{instruction}}'")
        if self.state_in_prompt and self.state_dim == 0:
            raise ValueError(f"prompt_template {self.prompt_template!r} has '{{state}}', state_dim is 0")
        return self


class ActionSpec(Spec):
    """What the policy does."""

    dim: int = Field(ge=1, le=512)
    """Width of one action."""
    horizon: int = Field(ge=1, le=512)
    """Actions in a chunk; all of them are supervised."""
    num_action_steps: int = Field(ge=1, le=512)
    """Actions of a chunk that are executed, from its first on, before the policy looks again."""
    normalization: NormalizationMode
    """Of the actions, and of the state unless that names its own; stored with the policy, with the statistics."""
    control_mode: str | None = None
    """If given, dataset and environment have to declare the same."""
    gripper: GripperSign | None = None
    """If given, dataset and environment have to declare the same."""

    @model_validator(mode="after")
    def _executed_fit(self) -> "ActionSpec":
        if self.num_action_steps > self.horizon:
            raise ValueError(f"num_action_steps {self.num_action_steps} is more than horizon {self.horizon}")
        return self


class PolicySpec(Spec):
    """A tenant's policy: what it sees, what it does, and what it trains."""

    backbone: Name
    """Name of a backbone in the service."""
    observation: ObservationSpec
    action: ActionSpec
    action_module: AnyActionModule
    adapter: AdapterSpec | None = None
    """Low-rank changes of the backbone, trained with the action module; without, the backbone stays as it is."""
    init_from: str | None = None
    """Folder that ``joynexus import`` or ``joynexus export`` has written: version 0 has its tensors and its statistics,
    whatever the dataset's are. A relative one is taken from the folder of the YAML. None: drawn from the seed."""
    reuse_prefixes: bool = True
    """Whether features are kept, found again and shipped, as the service's stores and ``ship_features`` have room for.

    Without, each call and each request encodes its prefixes, and nothing of the tenant's takes room in a store. For
    comparison with frameworks that do so, and for data that is read only once.
    """

    @model_validator(mode="after")
    def _module_fits(self) -> "PolicySpec":
        module, state_dim, action_dim = self.action_module, self.observation.state_dim, self.action.dim
        if module.needs_state and state_dim == 0:
            raise ValueError(f"action_module {module.type!r} reads the state, observation.state_dim is 0")
        for name, width, widest in (
            ("observation.state_dim", state_dim, module.widest_state()),
            ("action.dim", action_dim, module.widest_action()),
        ):
            if widest is not None and width > widest:
                raise ValueError(f"{name} is {width}, action_module {module.type!r} takes at most {widest}")
        return self

    @property
    def state_normalization(self) -> NormalizationMode:
        """How the state is normalised."""
        return self.observation.normalization or self.action.normalization

    @property
    def shares_prefixes(self) -> bool:
        """Whether its features may be kept, found again and shipped: an adapter makes them those of one version."""
        return self.reuse_prefixes and self.adapter is None

    @property
    def interface(self) -> PolicyInterface:
        """What has to agree with datasets and environments."""
        seen, done = self.observation, self.action
        return PolicyInterface(
            cameras=seen.cameras,
            image_size=seen.image_size,
            state_dim=seen.state_dim,
            action_dim=done.dim,
            control_mode=done.control_mode,
            gripper=done.gripper,
            action_normalization=done.normalization,
            state_normalization=self.state_normalization if seen.state_dim else None,
        )


class SftSpec(Spec):
    """Supervised fine-tuning on demonstrations."""

    type: Literal["sft"] = "sft"
    dataset: AnyDataset
    num_steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(ge=1, le=65536)
    """Samples per micro-batch."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Of the whole action module."""
    resources: Resources = Resources(num_cpus=0.2)
    """Of the DataProducer."""


class RolloutSpec(Spec):
    """How an RL workload collects experience."""

    min_workers: int = Field(default=1, ge=1, le=10_000)
    """EnvironmentActors that are always kept."""
    max_workers: int = Field(default=1, ge=1, le=10_000)
    """EnvironmentActors at most."""
    max_staleness: int = Field(default=1, ge=0)
    """Versions by which a trajectory may be older than the trainer's; older ones are dropped."""
    episodes_per_iteration: int = Field(default=8, ge=1)
    """Trajectories (whole episodes) that one update learns from."""
    ship_features: Literal["auto", "always", "never"] = "auto"
    """Whether trajectories bring their prefix features to the trainer, in place of frames: ``auto`` where that takes
    less time than encoding again, by measured rates."""

    @model_validator(mode="after")
    def _ordered(self) -> "RolloutSpec":
        if self.max_workers < self.min_workers:
            raise ValueError(f"max_workers {self.max_workers} is less than min_workers {self.min_workers}")
        return self


class RlSpec(Spec):
    """Reinforcement learning in an environment."""

    type: Literal["rl"] = "rl"
    algorithm: AnyAlgorithm
    environment: AnyEnvironment
    rollout: RolloutSpec = RolloutSpec()
    num_iterations: int = Field(ge=1)
    """Updates, each from ``episodes_per_iteration`` episodes and each one policy version."""


class EvaluationSpec(Spec):
    """Episodes with the newest policy version, acting without exploration; nothing is learnt from them."""

    type: Literal["evaluation"] = "evaluation"
    environment: AnyEnvironment
    num_episodes: int = Field(default=20, ge=1)
    """Episodes to run; episode i is the same one in every run."""
    num_workers: int = Field(default=1, ge=1)
    """EnvironmentActors; the same episodes are run whatever their number."""
    video: int = Field(default=0, ge=0)
    """Record the first N episodes."""
    seed: int = Field(default=10_000, ge=0)
    """Seed of the first episode; episode i has ``seed + i``."""
    baseline: bool = False
    """Also evaluate version 0, the untrained module, on the same episodes."""


Workload = Annotated[SftSpec | RlSpec | EvaluationSpec, Field(discriminator="type")]


class TenantSpec(Spec):
    """What a tenant submits."""

    tenant: Name
    """The tenant's name; unique in a service."""
    weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """Fair share of the trainer and the replicas against other tenants."""
    priority: Literal["low", "normal", "high"] = "normal"
    """Served before lower classes; waiting lifts a sample to the next class."""
    seed: int = Field(default=0, ge=0)
    """Of initial parameters, sampling and data order."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Optimizer steps between two checkpoints of an SFT workload; RL writes one per iteration."""
    policy: PolicySpec
    workloads: tuple[Workload, ...] = Field(default=())
    """Run one after the other; none is a tenant driven through the Python API."""

    @model_validator(mode="after")
    def _module_can_learn(self) -> "TenantSpec":
        for index, workload in enumerate(self.workloads):
            if not isinstance(workload, RlSpec) or not workload.algorithm.needs_log_prob:
                continue
            if not self.policy.action_module.gives_log_prob:
                module = self.policy.action_module.type
                raise ValueError(
                    f"workloads[{index}]: {workload.algorithm.type} needs log-probability and value, which "
                    f"action_module {module!r} does not give. Take 'gaussian' or 'discrete_tokens'"
                )
        return self

    @model_validator(mode="after")
    def _normalizes_alike(self) -> "TenantSpec":
        mode = self.policy.action.normalization
        for index, workload in enumerate(self.workloads):
            asked = None if isinstance(workload, SftSpec) else workload.environment.normalization
            if asked not in (None, mode):
                raise ValueError(
                    f"workloads[{index}]: environment.normalization is {asked!r}, the policy's is {mode!r}. Take a "
                    "policy that was trained with it, or correct the environment"
                )
        return self

    def resolve_paths(self, folder: Path) -> "TenantSpec":
        """Return the same spec with every path of a dataset or an initial policy made absolute against ``folder``."""
        resolved = tuple(
            each.model_copy(update={"dataset": each.dataset.resolve(folder)}) if isinstance(each, SftSpec) else each
            for each in self.workloads
        )
        policy = self.policy
        if policy.init_from is not None:
            policy = policy.model_copy(update={"init_from": str((folder / policy.init_from).resolve())})
        return self.model_copy(update={"workloads": resolved, "policy": policy})
