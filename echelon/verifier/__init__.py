"""Proves that a plan computes what one device computes. `verify.py` chooses the reference, runs both and certifies.

Reference (imports nothing of engine/)   reference, job_reader, reference_data, choose_reference, single_device (context: of another plan),
                                         nondeterminism_scan
Candidate                                side_by_side, candidate_run, tensor_checksum (ranks start equal and replicas stay equal),
                                         reduced_job and frozen_data (other samples), staleness of parameter servers,
                                         regrouping_check and loss_state_check (may the loss be split?)
Comparison                               compare, compare_outputs, tolerances
After a failure                          self_check, diagnose_failure, first_divergence, known_bugs, explain_failure
During training                          spot_check: spot_check_pass on the ranks, spot_check_device on rank 0, spot_check_batch (samples),
                                         forward_state (what is put back)
Certificates                             build_certificate, fingerprints (what one is valid for)
"""
