"""echelon: one file of plain PyTorch in; a plan, a proof and a trained model out.

     Job ──profile──> Profile ─┐
                               ├─search──> Plan ──verify──> Certificate
     machines ─measure─> Cluster┘           │ └─simulate──> Forecast
                                            └──train──> events, checkpoints, TrainResult

    import echelon

    def job():
        return echelon.Job(model=Net, loss=..., optimizer=..., data=..., batch_size=256, epochs=3)

    if __name__ == "__main__":
        result = echelon.train(job)

Names are loaded on first use: importing echelon imports neither torch nor any other module, and changes no environment variable.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.errors import EchelonError
    from echelon.flow.train import parallelize, train
    from echelon.flow.train_result import TrainResult
    from echelon.flow.verify import verify
    from echelon.hardware import measure
    from echelon.job import Job
    from echelon.plan.certificate import Certificate
    from echelon.plan.cluster import Cluster
    from echelon.plan.forecast import Forecast
    from echelon.plan.plan import Plan
    from echelon.plan.profile import Profile
    from echelon.planner import search
    from echelon.profiler import profile
    from echelon.simulator import simulate

_MODULES = {
    "Job": "job", "Cluster": "plan.cluster", "Profile": "plan.profile", "Plan": "plan.plan", "Forecast": "plan.forecast",
    "Certificate": "plan.certificate", "profile": "profiler", "measure": "hardware", "search": "planner",
    "simulate": "simulator", "verify": "flow", "train": "flow", "parallelize": "flow", "TrainResult": "flow",
    "EchelonError": "errors",
}  # fmt: skip

__all__ = [
    "Job", "Cluster", "Profile", "Plan", "Forecast", "Certificate", "profile", "measure", "search", "simulate", "verify",
    "train", "parallelize", "TrainResult", "EchelonError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"echelon.{_MODULES[name]}"), name)
    if name in ("data", "nn", "server"):
        return import_module(f"echelon.{name}")
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
