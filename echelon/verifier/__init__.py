"""The proof that a plan computes what one device computes.

reference.py   one device, plain PyTorch, float64: the truth; recipe.py and feed.py: how it reads a job and its data
survey.py      what still draws or rounds with dropout off and casts lifted (trials/determinism.py, the same way in both runs)
compare.py     how far two sets of tensors are apart
noise.py       what rounding alone may do: the parameters under Adam, parts that stay in float32
drift.py       the plan's own precision: what rounding may do there, and what it does not
mark.py        what ranks hold, in two numbers a tensor: did they start from the same, do copies stay copies
diagnose.py    the first divergent tensor in forward order
self_check.py  before a no: whether the reference agrees with itself
footing.py     where the truth can be computed: one device, the host, or another plan where the model fits neither
basis.py       one proof as rank 0 sees it; case.py: on one device; peer.py: against another plan
trial.py       the plan's run as every rank sees it
look.py        a second look when it failed: outputs, samples; suspects.py: what known mistakes would give; causes.py: the words
verify.py      both runs beside each other on every rank, and the certificate
identity.py    what a certificate is for; gate.py: one that a run may rely on
"""
