"""Cases for the gradient checks of what ``autocast`` is made of."""

import numpy as np

from rtxarr.ops._half import _lowered

CASES = {"_lowered": [(_lowered, (np.asarray([[0.3, -1.2], [0.7, 2.1]]),))]}
