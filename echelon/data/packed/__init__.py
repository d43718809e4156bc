"""Data sets in files: `pack` writes them once, `Packed` reads them at the speed of memory. docs/data-internals.md describes the format."""
