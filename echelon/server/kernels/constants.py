"""The numbers that encode rules, layouts and initial values for the kernels."""

from __future__ import annotations

#: Kinds of rules.
SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, LAMB = range(6)
#: Kinds of initial values.
ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)
#: How a row stores its weights: in the dtype of the arithmetic, or narrower.
NATIVE, F4, F2, I2, I1 = range(5)
#: Indices into a row layout (`store.row_layout`).
WORDS, STORED, DIM, WEIGHT_OFFSET, SCALE_OFFSET, STATE_OFFSET, STATE_SIZE = range(7)
#: Indices into a rule's scalars.
LR, DECAY, DECAY_FACTOR, MU, GRAD_WEIGHT, B1, ONE_MINUS_B1, B2, ONE_MINUS_B2, EPS, STATE_INIT, WIDTH = range(12)
#: Indices into a rule's switches; STEP: 0 where each row counts its own.
KIND, NESTEROV, SPARSE, COUNT_OFFSET, STEP = range(5)
