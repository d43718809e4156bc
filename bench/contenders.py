"""The same training by echelon, by a plain loop, by DDP, Accelerate, Lightning Fabric and the Lightning Trainer.

Each has its own model and optimizer, all start from the same values, and each makes steps when it is its turn. Peers get
ready-cut batches from memory and no logging, progress or checkpoints: the least that each of them can do.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.workloads import ENDLESS, Workload
from echelon.plan.plan import Plan
from echelon.world import World


class Echelon:
    """`for batch in run.batches(): run.step(batch)`."""

    name = "echelon"

    def __init__(self, workload: Workload, world: World, plan: Plan, *, device: str = "cpu") -> None:
        from echelon.engine.run import Run

        threads = torch.get_num_threads() if device == "cpu" else None
        self.run = Run(workload.job(), replace(plan, threads=threads), world, device=torch.device(device))
        self.batches = iter(self.run.batches())

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step(next(self.batches))

    def close(self) -> None:
        self.run.close()


class Plain:
    """A loop that anybody would write by hand, on one device."""

    name = "plain"

    def __init__(
        self, workload: Workload, *, fused: bool, device: str = "cpu", bf16: bool = False, compile: bool = False
    ) -> None:
        self.device, self.bf16, self.loss = torch.device(device), bf16, workload.loss
        self.model: Any = workload.build().to(self.device)
        self.optimizer = workload.optimizer(self.model.parameters(), fused or None)
        if compile:
            self.model = torch.compile(self.model)
        self.batches = workload.batches()

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = (self._move(part) for part in next(self.batches))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def close(self) -> None:
        pass


class Ddp:
    """torch's DistributedDataParallel in the plain loop."""

    name = "DDP"

    def __init__(self, workload: Workload, world: World, *, fused: bool) -> None:
        self.model = nn.parallel.DistributedDataParallel(workload.build())
        self.optimizer = workload.optimizer(self.model.parameters(), fused or None)
        self.batches, self.loss = workload.batches(world.rank, world.size), workload.loss

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(self.batches)
            self.loss(self.model(inputs), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class Accelerate:
    """Hugging Face Accelerate, as its quick tour has it."""

    name = "Accelerate"

    def __init__(self, workload: Workload, world: World, *, fused: bool) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        assert self.accelerator.num_processes == world.size
        model = workload.build()
        self.model, self.optimizer = self.accelerator.prepare(
            model, workload.optimizer(model.parameters(), fused or None)
        )
        self.batches, self.loss = workload.batches(world.rank, world.size), workload.loss

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(self.batches)
            self.accelerator.backward(self.loss(self.model(inputs), targets))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class Fabric:
    """Lightning Fabric, as its quick tour has it."""

    name = "Fabric"

    def __init__(self, workload: Workload, world: World, *, fused: bool) -> None:
        from lightning.fabric import Fabric as LightningFabric

        self.fabric = LightningFabric(accelerator="cpu", devices=world.size, strategy="ddp")
        self.fabric.launch()
        assert self.fabric.world_size == world.size
        model = workload.build()
        self.model, self.optimizer = self.fabric.setup(model, workload.optimizer(model.parameters(), fused or None))
        self.batches, self.loss = workload.batches(world.rank, world.size), workload.loss

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(self.batches)
            self.fabric.backward(self.loss(self.model(inputs), targets))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class _Driven(ABC):
    """A training that drives its own loop: it lives in a thread that runs only while it is its turn."""

    def __init__(self) -> None:
        self._left = 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()
        self._wait()  # until it asks for its first step: everything is set up

    def advance(self, steps: int) -> None:
        self._left = steps
        self._go.release()
        self._wait()

    def close(self) -> None:
        self._left = -1
        self._go.release()
        self._thread.join(30)

    @abstractmethod
    def loop(self) -> None:
        """Train for as long as `more` says so, asking it before every step."""

    def more(self) -> bool:
        """Wait for a turn; False when there will be none."""
        if self._left == 0:
            self._done.release()
            self._go.acquire()
        if self._left < 0:
            return False
        self._left -= 1
        return True

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _live(self, threads: int) -> None:
        try:
            torch.set_num_threads(threads)  # counted per thread
            self.loop()
        except BaseException as error:
            self._error = error
            self._done.release()


class _NoTurnError(Exception):
    """No more turns: `echelon.train` ends as it does for any error, its files closed."""


class Train(_Driven):
    """`echelon.train` with what it keeps besides: event log and TensorBoard. No progress: it would draw over the table."""

    name = "echelon train"

    def __init__(self, workload: Workload, world: World, *, fused: bool) -> None:
        self._workload, self._fused = workload, fused
        super().__init__()

    def loop(self) -> None:
        from echelon.events import Event
        from echelon.flow.train import train

        def listen(event: Event) -> None:
            if event.kind in ("start", "step") and not self.more():
                raise _NoTurnError

        plan = Plan(fused=self._fused, threads=torch.get_num_threads())
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_NoTurnError):
            train(self._workload.job(), plan, out=folder, every=ENDLESS, listeners=[listen], quiet=True)


class Trainer(_Driven):
    """The Lightning Trainer with everything switched off that can be (`barebones`)."""

    name = "Lightning"

    def __init__(self, workload: Workload, world: World, *, fused: bool) -> None:
        self._workload, self._world, self._fused = workload, world, fused
        super().__init__()

    def loop(self) -> None:
        import lightning

        workload, fused = self._workload, self._fused

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = workload.build()

            def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
                return workload.loss(self.model(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return workload.optimizer(self.parameters(), fused or None)

        trainer = lightning.Trainer(
            accelerator="cpu", devices=self._world.size, strategy="ddp", max_epochs=1, barebones=True
        )
        trainer.fit(Module(), _Sized(self._batches()))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        source = self._workload.batches(self._world.rank, self._world.size)
        while self.more():
            yield next(source)


class _Sized:
    """An iterable with a length, because the Trainer fetches one batch ahead from one without: the turn would not end."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        return 1 << 40


PEERS: dict[str, Callable[..., Any]] = {
    "DDP": Ddp,
    "Accelerate": Accelerate,
    "Fabric": Fabric,
    "Lightning": Trainer,
}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Peers greet; a table does not need it."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
