"""Model, FSDP2, inner step, outer step, copies, checkpoints, throughput."""
