"""(Profile, Cluster, Plan) -> Forecast, as pure functions. This package alone decides what fits.

1. summarize_profile.py  the work of a step by part of the model: before the repeated blocks, one block, after them
2. plan_layout.py        what each rank computes and holds under a plan
3. cost/                 what operators and messages cost: measured curves, or data sheets
4. compute.py exchange.py pipeline_schedule.py -> step.py    the step time by cause
5. memory.py             the memory by component
6. simulator.py          the forecast, and the bounds that searches use
"""

from echelon.simulator.simulator import simulate
from echelon.simulator.training_stack import TrainingStack

__all__ = ["TrainingStack", "simulate"]
