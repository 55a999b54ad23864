"""Cases for the recurrences over time, with and without absent steps."""

import numpy as np

from rtxarr.nn._scan import gru_scan, lstm_scan

rng = np.random.default_rng(11)
KEPT = np.array([[True, True, True], [True, False, False]])
H, C = rng.standard_normal((2, 2, 2))
LSTM_ARGS = (rng.standard_normal((2, 3, 8)), H, C, rng.standard_normal((8, 2)))
GRU_ARGS = (rng.standard_normal((2, 3, 6)), H, rng.standard_normal((6, 2)))
BIAS = rng.standard_normal(6)

CASES = {
    "lstm_scan": [
        (lstm_scan, LSTM_ARGS),
        (lambda *args: lstm_scan(*args, reverse=True), (*LSTM_ARGS, KEPT)),
        (lambda *args: lstm_scan(*args)[0], (*LSTM_ARGS, KEPT)),
    ],
    "gru_scan": [
        (gru_scan, (*GRU_ARGS, BIAS)),
        (lambda *args: gru_scan(*args, reverse=True), (*GRU_ARGS, BIAS, KEPT)),
        (lambda *args: gru_scan(*args)[0], (*GRU_ARGS, None, KEPT)),
    ],
}
