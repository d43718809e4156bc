"""Hostile but legitimate training jobs under many plans, each judged by a plain one-process PyTorch loop.

    python -m bench.adversary                                  every job under every plan, through the command line
    python -m bench.adversary --sample 40 --seed 3 --fast      40 cells in rank processes that are reused

1. `jobs/` holds the jobs. They import torch, never echelon.
2. `judge` trains a job in a plain loop on whole batches, in a process that cannot import echelon.
3. `candidate` trains the same job with `echelon train` (or, with --fast, in reused ranks).
4. `verdict` compares the two and names the outcome.
"""
