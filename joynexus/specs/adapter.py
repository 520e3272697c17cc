"""Adapters: low-rank changes of the shared backbone that are one tenant's own."""

from pydantic import Field, model_validator

from joynexus.specs.base import Spec


class AdapterSpec(Spec):
    """LoRA on linear layers of the backbone's language model: W x + (alpha / rank) B A x, with W shared and frozen.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685. The prefix of a tenant that has one is its own and changes with
    every update: its features are neither kept nor shipped.
    """

    rank: int = Field(default=8, ge=1, le=256)
    """Rows of A and columns of B."""
    alpha: float = Field(default=16.0, gt=0.0)
    """The change is scaled by ``alpha / rank``."""
    targets: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1)
    """Linear layers that get one, by their names in each language layer, such as ``q_proj`` and ``v_proj``."""

    @model_validator(mode="after")
    def _named_once(self) -> "AdapterSpec":
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets {list(self.targets)} name one layer twice")
        return self

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / self.rank
