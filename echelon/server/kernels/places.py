"""The numbers by which rules, layouts and first values are told to the loops."""

from __future__ import annotations

#: Kinds of rules.
SGD, MOMENTUM, ADAGRAD, ROWWISE, ADAM, LAMB = range(6)
#: Kinds of first values.
ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)
#: How weights lie in a row: as the arithmetic's float, or narrower.
NATIVE, F4, F2, I2, I1 = range(5)
#: Places in a layout: see rows.Layout.
WORDS, STORED, DIM, W_AT, SCALE_AT, S_AT, STATE = range(7)
#: Places in a rule's scalars.
LR, DECAY, KEEP, MU, UNDAMPED, B1, B1C, B2, B2C, EPS, FIRST, WIDTH = range(12)
#: Places in a rule's switches; STEP: 0 where each row counts its own.
KIND, NESTEROV, SPARSE, COUNT_AT, STEP = range(5)
