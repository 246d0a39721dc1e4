"""The type of a gossip matrix."""

from typing import TypeAlias

import numpy as np
from scipy.sparse import csr_array

# In quotes, since older versions of SciPy do not take the element type at run time.
Matrix: TypeAlias = "csr_array[np.float64]"
