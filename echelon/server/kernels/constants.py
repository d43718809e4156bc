"""The numbers by which rules, layouts and first values are told to the loops."""

from __future__ import annotations

#: Kinds of rules.
SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, LAMB = range(6)
#: Kinds of first values.
ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)
#: How weights lie in a row: as the arithmetic's float, or narrower.
NATIVE, F4, F2, I2, I1 = range(5)
#: Places in a layout: see store.sparse_table.SparseRowLayout.
WORDS, STORED, DIM, WEIGHT_OFFSET, SCALE_OFFSET, STATE_OFFSET, STATE_SIZE = range(7)
#: Places in a rule's scalars.
LR, DECAY, DECAY_FACTOR, MU, GRAD_WEIGHT, B1, ONE_MINUS_B1, B2, ONE_MINUS_B2, EPS, STATE_INIT, WIDTH = range(12)
#: Places in a rule's switches; STEP: 0 where each row counts its own.
KIND, NESTEROV, SPARSE, COUNT_OFFSET, STEP = range(5)
