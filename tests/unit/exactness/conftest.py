"""The tests of exactness share the tiny world of the training tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))
