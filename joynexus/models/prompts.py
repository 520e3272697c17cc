"""Prompts: a policy's template, filled with the task's instruction and, where it asks for it, with the state.

π0.5 (Physical Intelligence 2025, https://arxiv.org/abs/2504.16054) writes the robot's state into the prompt: each
normalised number becomes the index of one of 256 bins over [-1, 1]. The statistics behind it are the tenant's own, so
what two tenants share are rows with equal tokens, never rows with equal frames alone.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

from joynexus.specs.tenant import ObservationSpec
from joynexus.types import Array

FIELDS = re.compile(r"\{(instruction|state)\}")
BELOW = -1
"""Bin of a number below -1; one above 1 is in the last bin."""


def render_prompts(
    spec: ObservationSpec, instructions: Sequence[str], states: Float32[Array, "b s"] | None
) -> list[str]:
    """Write the prompt of each row.

    Args:
        spec: Gives template, bins and clean-up.
        instructions: One per row.
        states: Normalised; read only where the template has ``{state}``. None stands for the state with the longest
            text, to learn whether a prompt always fits its token bucket.

    Returns:
        One prompt per row; braces in an instruction stay as they are.
    """
    texts = [clean_instruction(each, spec.instruction_cleanup) for each in instructions]
    numbers = [""] * len(texts)
    if spec.state_in_prompt:
        rows = _widest(spec, len(texts)) if states is None else discretise(states, spec.state_bins)
        numbers = [" ".join(str(each) for each in row) for row in rows.tolist()]
    return [
        FIELDS.sub(lambda found, own=(text, state): own[found[1] == "state"], spec.prompt_template)
        for text, state in zip(texts, numbers, strict=True)
    ]


def discretise(states: Float32[Array, "b s"], num_bins: int) -> Int64[Array, "b s"]:
    """Return the bin of each normalised number: 0 to ``num_bins - 1`` over [-1, 1], -1 below, the last one above."""
    edges = np.linspace(-1.0, 1.0, num_bins + 1)[:-1]
    return np.digitize(states, edges).astype(np.int64) - 1


def clean_instruction(text: str, how: str) -> str:
    """Bring an instruction to the form that a family was trained with; see :class:`ObservationSpec`."""
    if how == "one_line":
        return text.strip().replace("_", " ").replace("\n", " ")
    return text.removesuffix("\n") if how == "final_newline" else text


def _widest(spec: ObservationSpec, rows: int) -> Int64[Array, "b s"]:
    widest = max(BELOW, spec.state_bins - 1, key=lambda each: len(str(each)))
    return np.full((rows, spec.state_dim), widest, dtype=np.int64)
