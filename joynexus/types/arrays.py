"""Arrays that cross modules and processes."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:  # jaxtyping checks shapes and types on the bare class
    Array = np.ndarray

Arrays = dict[str, Array]
"""Named arrays of any type; first axis is the row."""
