"""The tests of exactness share the tiny world of the training tests, and one budget."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

sys.path.append(str(Path(__file__).parents[1] / "training"))

# The same examples in every run. A failing one is shown as it was drawn: each costs too much to look for a smaller one.
settings.register_profile(
    "exactness",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
