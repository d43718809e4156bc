"""The settings of `echelon train`, which `echelon.train` shares."""

from __future__ import annotations

from echelon.flow.settings import FILE, KINDS, Setting, resolve

__all__ = ["FILE", "KINDS", "Setting", "resolve"]
