"""Layers that torch lacks or keeps to one kind of device."""

from echelon.nn.batchnorm import SynchronisedBatchNorm, synchronise

__all__ = ["SynchronisedBatchNorm", "synchronise"]
