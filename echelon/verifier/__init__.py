"""Proves that a plan computes what one device computes.

verify.py                  choose the reference, run both, certify
side_by_side.py            run the plan beside its reference on every rank; build_certificate.py: what came of it

Reference (imports nothing of engine/)
    reference.py           one device, plain PyTorch, float64
    job_reader.py          how it reads a job's optimizers and schedules; reference_data.py, batch_collation.py: its data
    choose_reference.py    one device, the host, or another plan
    context.py             one proof as rank 0 sees it; single_device.py: against one device
    nondeterminism_scan.py what still draws or rounds with dropout off and casts lifted (trials/determinism.py)

Candidate
    candidate_run.py       the plan's run as every rank sees it
    tensor_checksum.py     two numbers per tensor: do ranks start equal, do replicas stay equal
    reduced_job.py         a smaller job, if time is short; frozen_data.py: samples read once for all ranks
    regrouping_check.py    may the loss be split; loss_state_check.py: does it read state that splitting changes
    staleness.py           how far ahead of the slowest a rank reads from a parameter server

Comparison
    compare.py, compare_outputs.py   how far two sets of tensors are apart
    tolerances.py          what rounding alone may do: parameters under Adam, parts that stay in float32
    precision_drift.py     the plan's own precision: what rounding may do there, and what it may not
    first_divergence.py    the first divergent tensor in forward order

After a failure
    self_check.py          does the reference agree with itself?
    diagnose_failure.py    rerun the failing step with every module watched
    known_bugs.py          what common mistakes would have computed; explain_failure.py: the sentence for each

Before and during training
    fingerprints.py        what a certificate is valid for
    spot_check.py          recompute random steps of a training on one device: spot_check_pass.py on the ranks,
                           spot_check_device.py on rank 0, spot_check_batch.py its samples, forward_state.py what is put back
"""
